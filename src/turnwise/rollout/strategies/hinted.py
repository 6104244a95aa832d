"""Plain episodes first; where none succeeds, more of them with the environment's hint."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group
from turnwise.errors import RecipeError
from turnwise.rollout.strategies.base import GroupRequest, all_failed, close, park


@dataclass(frozen=True)
class Hinted:
    """Independent; a group without a success gets ``more`` further trajectories (0: as many as the group), sampled with the
    environment's hint in the prompt. Their records do not contain the hint; only their log-probabilities depend on it."""

    more: int = 0

    requirements = frozenset({"hints"})
    reads_rewards = True

    def __post_init__(self) -> None:
        if self.more < 0:
            raise RecipeError(f"{self.more} hinted trajectories; write 0 (as many as plain ones) or a positive number")

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self._grow(request, request.sessions(request.size + (self.more or request.size)))

    async def _grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        plain_sessions, spare = sessions[: request.size], sessions[request.size :]
        park(spare)
        plain = await request.play_all(plain_sessions)
        if all_failed(plain):
            return request.grown([*plain, *await request.play_all(spare, request.size, with_hint=True)])
        close(spare)
        return request.grown(plain)
