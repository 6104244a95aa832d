"""Rollouts in waves, each sampled by a behaviour policy that corrects what the waves before it drew too often."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group, Status, Trajectory
from turnwise.errors import RecipeError
from turnwise.rollout.sampling_correction import PrefixShifts, SamplingCorrection
from turnwise.rollout.strategies.base import GroupRequest, park


@dataclass(frozen=True)
class CorrectedSampling:
    """Independent rollouts in waves of ``wave``. After each wave a behaviour policy is fitted to all rollouts of the group so far
    (``rollout/sampling_correction.py``), and the next wave is sampled by it: what is recorded are its log-probabilities, and
    trajectories that it sampled are marked as guided."""

    wave: int = 2
    correction: SamplingCorrection = field(default_factory=SamplingCorrection)

    shifts_logits = True  # only the generator of this process can sample so

    def __post_init__(self) -> None:
        if self.wave < 1:
            raise RecipeError(f"waves of {self.wave} rollouts; write at least 1")

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self._grow(request, request.sessions())

    async def _grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        park(sessions)
        shifts, grown = PrefixShifts(self.correction), list[Trajectory]()
        for first in range(0, len(sessions), self.wave):
            wave = sessions[first : first + self.wave]
            for session in wave if first else ():
                shift_logits(session, shifts)
            made = await request.play_all(wave, first)
            shifts.observe(t for t in made if t.status != Status.FAILED)
            grown += [replace(t, guidance="corrected sampling") if first else t for t in made]
        return request.grown(grown)


def shift_logits(session: Session, shifts: PrefixShifts) -> None:
    """Sample by shifted log-probabilities. Only the local generator can."""
    if not hasattr(session, "shift"):
        raise RecipeError(
            f"{type(session).__name__} cannot sample by other log-probabilities than its model's; leave --generator out"
        )
    session.shift = shifts
