"""One more rollout of each task, greedy, whose return is the baseline of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group, Status, Trajectory
from turnwise.rollout.strategies.base import GroupRequest
from turnwise.rollout.strategies.drafts import DRAFT_TOKENS

GREEDY_REWARD = "greedy_reward"


@dataclass(frozen=True)
class GreedyBaseline:
    """Independent, and one rollout of the same task at temperature 0. Its return becomes the fact ``greedy_reward`` of each
    trajectory; it is not part of the group, so nothing is trained on it. Its tokens are counted as drafts.

    If the greedy rollout fails, there is no baseline, and the whole group counts as failed."""

    reads_rewards = True

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self._grow(request, request.sessions(request.size + 1))

    async def _grow(self, request: GroupRequest, sessions: Sequence[Session]) -> Group:
        alone = request.play(f"{request.group}.greedy", request.task, sessions[-1], temperature_scale=0.0)
        sampled, greedy = await asyncio.gather(request.play_all(sessions[:-1]), alone)
        if greedy.status == Status.FAILED:
            reason = f"the greedy rollout that gives the baseline failed: {greedy.reason}"
            return request.grown([t if t.status == Status.FAILED else t.failed(reason) for t in sampled])
        facts = {GREEDY_REWARD: float(greedy.reward), DRAFT_TOKENS: greedy.sampled / max(1, len(sampled))}
        return request.grown([_with_facts(t, facts) for t in sampled])


def _with_facts(trajectory: Trajectory, facts: dict[str, float]) -> Trajectory:
    return replace(trajectory, facts={**trajectory.facts, **facts})


__all__ = ["GREEDY_REWARD", "GreedyBaseline"]
