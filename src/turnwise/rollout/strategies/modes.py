"""Rollouts that are forced into each of several modes, and others that choose theirs. A mode is how a first turn begins.

Knows sessions, trajectories and their messages; no engine, no environment, no loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group, Trajectory
from turnwise.errors import RecipeError
from turnwise.rollout.strategies.base import GroupRequest, Strategy
from turnwise.rollout.support import Support

MODE = "mode"  # fact: the number of the opening that a trajectory begins with, from 0, the cheapest; −1: none of them
FORCED = "forced"  # fact: 1 where the opening was given


class ForcedModes(Strategy):
    """Of each group ``forced`` rollouts begin with each of the ``openings``, texts separated by |, the cheapest mode first. Their
    ids are context and are not trained on. The other rollouts choose for themselves. Facts: ``mode`` and ``forced``."""

    openings: str = "answer:|<tool_call>"
    forced: int = 2

    def __post_init__(self) -> None:
        if self.forced < 0 or not all(self.texts) or len(set(self.texts)) < 2:
            raise RecipeError(f"need forced >= 0 and two or more different openings, separated by |; got {self}")

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(self.openings.split("|"))

    def check_group_size(self, size: int) -> None:
        """Raise if a group has no place for every forced rollout."""
        if self.forced * len(self.texts) > size:
            raise RecipeError(
                f"{self.forced} rollouts in each of {len(self.texts)} modes are more than a group of {size}; write --group-size "
                f"{self.forced * len(self.texts)} or more"
            )

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        self.check_group_size(request.size)
        return super().begin(request)

    async def grow(self, request: GroupRequest, sessions: Sequence[Session]) -> Group:
        given = [text for text in self.texts for _ in range(self.forced)]
        openings = [*given, *[""] * (len(sessions) - len(given))]
        supports: list[dict[str, Any]] = [{"support": Support(opening=text)} if text else {} for text in openings]
        plays = [
            request.play(request.key(i), request.task, s, **support)
            for i, (s, support) in enumerate(zip(sessions, supports))
        ]
        played = await asyncio.gather(*plays)
        return request.grown([self._marked(t, bool(text)) for t, text in zip(played, openings)])

    def _marked(self, trajectory: Trajectory, forced: bool) -> Trajectory:
        said = next((str(m.get("content") or "") for m in trajectory.messages if m.get("role") == "assistant"), "")
        mode = next((n for n, text in enumerate(self.texts) if said.lstrip().startswith(text.strip())), -1)
        return replace(trajectory, facts={**trajectory.facts, MODE: float(mode), FORCED: float(forced)})
