"""Rollouts of a frozen policy whose decoding values steer. Knows sessions; the generator reads the numbers."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group
from turnwise.errors import RecipeError
from turnwise.rollout.strategies.base import GroupRequest


@dataclass(frozen=True)
class ValueSteered:
    """Independent. logit(a) + ``weight`` · (Q(s, a) − mean of Q) for the ``candidates`` most likely tokens, others unchanged:
    evaluations sample so, and with ``rollouts`` the rollouts do too. What is recorded are the log-probabilities of that
    distribution, and steered trajectories are marked as guided."""

    weight: float = 3.0
    candidates: int = 20
    rollouts: bool = False

    shifts_logits = True  # only the generator of this process can sample so

    def __post_init__(self) -> None:
        if self.weight < 0 or self.candidates < 1:
            raise RecipeError(f"need weight >= 0 and candidates >= 1, got {self}")

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self._grow(request, request.sessions())

    async def _grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        if not self.rollouts:
            return request.grown(await request.play_all(sessions))
        for session in sessions:
            self.steer(session)
        played = await request.play_all(sessions)
        return request.grown([replace(t, guidance="steered by values") for t in played])

    def steer(self, session: Session) -> Session:
        """Sample this session's tokens by steered logits. Only the local generator can."""
        if not hasattr(session, "shift"):
            raise RecipeError(f"{type(session).__name__} cannot read values while it samples; leave --generator out")
        session.shift = self
        return session
