"""Strategies whose episodes do not depend on each other. They know only sessions and temperatures."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group
from turnwise.errors import RecipeError
from turnwise.rollout.strategies.base import GroupRequest


@dataclass(frozen=True)
class Independent:
    """Samples all trajectories independently and concurrently."""

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return _play_scaled(request, request.sessions(), [1.0] * request.size)


@dataclass(frozen=True)
class OneTurn:
    """Independent, with episodes of one turn from the states of an expert: nothing is played after it."""

    requirements = frozenset({"expert turns"})

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self._grow(request, request.sessions())

    async def _grow(self, request: GroupRequest, sessions: Sequence[Session]) -> Group:
        return request.grown(await request.play_all(sessions, max_turns=1))


@dataclass(frozen=True)
class EntropyControl:
    """Independent, with ``share`` of each group sampled at a temperature scaled by ``hot`` while the policy's entropy is at most
    ``target``, by ``cold`` above it.

    Training on samples of a higher temperature raises the entropy, on those of a lower one reduces it."""

    target: float = 0.5
    hot: float = 1.2
    cold: float = 0.8
    share: float = 0.25

    def __post_init__(self) -> None:
        if not (0 < self.cold <= 1 <= self.hot and 0 <= self.share < 1):
            raise RecipeError(f"need 0 < cold <= 1 <= hot and 0 <= share < 1, got {self}")

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        scale = self.hot if request.last_metrics.get("entropy", 0.0) <= self.target else self.cold
        scaled = int(request.size * self.share)
        scales = [1.0] * (request.size - scaled) + [scale] * scaled
        return _play_scaled(request, request.sessions(), scales)


@dataclass(frozen=True)
class Reworded:
    """Independent; trajectory i reads wording i mod ``wordings`` of its task, so that one group compares wordings of one task."""

    wordings: int = 4

    requirements = frozenset({"wordings"})

    def __post_init__(self) -> None:
        if self.wordings < 1:
            raise RecipeError(f"{self.wordings} wordings; write at least 1")

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self._grow(request, request.sessions())

    async def _grow(self, request: GroupRequest, sessions: Sequence[Session]) -> Group:
        one = lambda i, s, w: request.play(request.key(i), request.task, s, **({"wording": w} if w else {}))  # noqa: E731
        plays = (one(i, s, i % self.wordings) for i, s in enumerate(sessions))
        return request.grown(await asyncio.gather(*plays))


async def _play_scaled(request: GroupRequest, sessions: Sequence[Session], scales: Sequence[float]) -> Group:
    plays = (
        request.play(request.key(i), request.task, s, *(() if x == 1 else (x,)))
        for i, (s, x) in enumerate(zip(sessions, scales))
    )
    return request.grown(await asyncio.gather(*plays))
