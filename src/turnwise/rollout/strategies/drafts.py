"""Cheap drafts decide which trajectories are sampled exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group, Status
from turnwise.errors import RecipeError
from turnwise.rollout.strategies.base import GroupRequest, park

DRAFT_TOKENS = "draft_tokens"


@dataclass(frozen=True)
class DraftSelection:
    """Samples ``drafts`` trajectories (0: four times the group) cheaply, selects the best and the worst by reward, half of the
    group each, and resamples those exactly with the same random numbers. Only these are kept; the fact ``draft`` holds the
    reward of the draft."""

    drafts: int = 0

    reads_rewards = True

    def __post_init__(self) -> None:
        if self.drafts < 0:
            raise RecipeError(f"{self.drafts} drafts; write 0 (four times the group) or a positive number")

    def check_group_size(self, size: int) -> None:
        """Raise if a group of ``size`` needs more trajectories than there are drafts."""
        if 0 < self.drafts < size:
            raise RecipeError(f"{self.drafts} drafts for groups of {size}; write at least as many, or 0")

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        self.check_group_size(request.size)
        count = self.drafts or 4 * request.size
        cheap, exact = ([request.open_session(i, draft) for i in range(count)] for draft in (True, False))
        return self._grow(request, cheap, exact)

    async def _grow(self, request: GroupRequest, cheap: list[Session], exact: list[Session]) -> Group:
        park(exact)  # they generate nothing before the drafts have ended
        group, task, play = request.group, request.task, request.play
        drafts = await asyncio.gather(*(play(f"{group}.draft{i}", task, s) for i, s in enumerate(cheap)))
        kept_of_valid = sorted(extremes([t.reward for t in drafts if t.status != Status.FAILED], request.size))
        valid = [i for i, t in enumerate(drafts) if t.status != Status.FAILED]
        failed = [i for i in range(len(drafts)) if i not in valid]
        kept = [valid[k] for k in kept_of_valid] + failed[: request.size - len(kept_of_valid)]
        for i, session in enumerate(exact):
            if i not in kept:
                session.close()
        played = await asyncio.gather(*(play(request.key(i), task, exact[i]) for i in kept))
        share = sum(t.sampled for t in drafts) / max(1, len(kept))  # the cost of the drafts, divided among the kept
        facts = lambda i: {"draft": float(drafts[i].reward), DRAFT_TOKENS: share}  # noqa: E731
        return request.grown([replace(t, facts={**t.facts, **facts(i)}) for i, t in zip(kept, played)])


def extremes(values: list[float], size: int) -> list[int]:
    """The indices of the best and the worst half of ``size`` values; ties go to the lower index."""
    order = sorted(range(len(values)), key=lambda i: -values[i])
    best = (size + 1) // 2
    return order if len(order) <= size else [*order[:best], *order[len(order) - (size - best) :]]
