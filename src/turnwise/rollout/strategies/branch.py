"""Forks of finished trajectories, before one of their turns."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group, Status, Trajectory
from turnwise.errors import RecipeError
from turnwise.rollout.strategies.base import GroupRequest, park

FORK_RULES = ("surprise", "even", "every")


@dataclass(frozen=True)
class Branch:
    """Samples ``trunks`` independent trajectories, then forks the other trajectories of the group from their turns.

    ``where`` selects the turns: ``surprise`` takes those whose first tokens had the lowest log-probability (a sampled estimate
    of the entropy there), ``even`` spreads the forks over the turns, ``every`` assigns them to all turns in order, from the
    first on. A fork at a trunk's first turn would be another trunk, so that turn is excluded."""

    trunks: int = 2
    where: str = "surprise"
    looks: int = 4  # tokens at the start of a turn whose log-probability counts

    requirements = frozenset({"forks"})

    def __post_init__(self) -> None:
        if self.trunks < 1 or self.where not in FORK_RULES:
            raise RecipeError(f"need trunks >= 1 and where one of {', '.join(FORK_RULES)}; got {self}")

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self._grow(request, request.sessions())

    async def _grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        trunk_sessions, fork_sessions = sessions[: self.trunks], sessions[self.trunks :]
        park(fork_sessions)  # they generate nothing before the trunks have ended
        play, task, points = request.play, request.task, [list[Any]() for _ in trunk_sessions]
        trunks = await asyncio.gather(
            *(play(request.key(i), task, s, fork_points=points[i]) for i, s in enumerate(trunk_sessions))
        )
        count = len(fork_sessions)
        origins = self._select(trunks, points, count) or [None] * count  # None: more trunks
        numbered = zip(range(len(trunk_sessions), len(sessions)), fork_sessions, origins)
        plays = [play(request.key(i), task, s, fork_from=f) for i, s, f in numbered]
        return request.grown([*trunks, *await asyncio.gather(*plays)])

    def _select(self, trunks: Sequence[Trajectory], fork_points: list[list[Any]], count: int) -> list[Any]:
        """``count`` fork points, with repetition; none if no trajectory got beyond its first turn."""
        surprise = lambda turn: -sum(turn.logp[: self.looks]) / max(1, len(turn.logp[: self.looks]))  # noqa: E731
        candidates = [
            (surprise(turn), point)
            for trunk, points in zip(trunks, fork_points)
            if trunk.status != Status.FAILED
            for turn, point in list(zip(trunk.turns, points))[1:]
        ]
        if not candidates or not count:
            return []
        if self.where == "surprise":
            candidates.sort(key=lambda pair: -pair[0])
        elif self.where == "even":
            step = len(candidates) / min(count, len(candidates))
            candidates = [candidates[int(i * step)] for i in range(min(count, len(candidates)))]
        return [candidates[i % len(candidates)][1] for i in range(count)]
