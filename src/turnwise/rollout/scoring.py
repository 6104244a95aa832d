"""Scoring a finished group: named rewards, their weighted total and a verdict are added to trajectories that were played.

A ``GroupScorer`` sees all trajectories of one task, so it may score each alone or compare them. The collector calls it before a
group is stored and admitted, the evaluator on the samples of one task. Knows neither how a score is computed nor who played.

A scorer leaves failed trajectories as they are. It never raises for an answer it cannot score: that trajectory fails with the
reason, and its siblings are unaffected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.core.protocols import GroupScorer, Session
from turnwise.core.records import Group, Status, Task, Trajectory
from turnwise.rollout.strategies import EpisodeRunner

MAX_REWARD = 3.4e38  # rewards are float32 on a batch

__all__ = ["GroupScorer", "RewardScore", "ScorerChain", "apply_scores", "scorable", "scored_play"]


@dataclass(frozen=True, slots=True)
class RewardScore:
    """What a scorer adds to one trajectory. ``RewardScore({"exact": 1.0}, total=0.5, success=True)``"""

    rewards: Mapping[str, float] = field(default_factory=dict)  # by name, without weights
    total: float = 0.0  # weighted sum, added to the reward of the last turn
    success: bool | None = None  # None: this scorer gives no verdict
    failure: str = ""  # why it could not be scored: the trajectory fails


@dataclass(frozen=True)
class ScorerChain:
    """Several scorers, one after the other; a later one sees the rewards that earlier ones gave."""

    scorers: tuple[GroupScorer, ...]

    async def score(self, group: Group) -> Group:
        for scorer in self.scorers:
            group = await scorer.score(group)
        return group

    def close(self) -> None:
        for scorer in self.scorers:
            scorer.close()


def scorable(group: Group) -> list[int]:
    """Indices of the trajectories that a scorer scores: those that did not fail and took a turn."""
    return [i for i, t in enumerate(group.trajectories) if t.status != Status.FAILED and t.turns]


def apply_scores(group: Group, scores: Mapping[int, RewardScore]) -> Group:
    """The group with ``scores`` added, by index; trajectories without a score stay as they are."""
    scored = [_apply(t, scores[i]) if i in scores else t for i, t in enumerate(group.trajectories)]
    return replace(group, trajectories=tuple(scored))


def _apply(trajectory: Trajectory, score: RewardScore) -> Trajectory:
    """Add a score. An episode succeeds if everything that gives a verdict says so: environment and rewards alike."""
    failure = score.failure or _out_of_range(score)
    if failure:
        return trajectory.failed(failure)
    last = trajectory.turns[-1]
    verdicts = [v for v in (trajectory.success, score.success) if v is not None]
    return replace(
        trajectory,
        turns=(*trajectory.turns[:-1], replace(last, reward=last.reward + score.total)),
        rewards={**trajectory.rewards, **score.rewards},
        success=all(verdicts) if verdicts else None,
    )


def _out_of_range(score: RewardScore) -> str:
    """Why a score cannot be trained on; empty if it can."""
    for name, value in {**score.rewards, "the weighted sum of rewards": score.total}.items():
        if not math.isfinite(value) or abs(value) > MAX_REWARD:
            return f"{name} is {value:g}; a reward must be finite and at most {MAX_REWARD:g}"
    return ""


def scored_play(play: EpisodeRunner, scorer: GroupScorer) -> EpisodeRunner:
    """``play`` with every trajectory scored alone, as soon as it ends: for strategies that read rewards while a group grows
    (``reads_rewards``)."""

    async def run(key: str, task: Task, session: Session, temperature_scale: float = 1.0, **more: Any) -> Trajectory:
        scale = () if temperature_scale == 1 else (temperature_scale,)
        played = await play(key, task, session, *scale, **more)
        alone = replace(played, fork=None)  # a group holds a fork only together with its parent
        scored = await scorer.score(Group(key, task, (alone,)))
        return replace(scored.trajectories[0], fork=played.fork)

    return run
