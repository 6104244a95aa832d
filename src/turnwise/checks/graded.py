"""Synthetic groups in which every other trajectory succeeded and the others failed, and a policy that sampled them, exactly or
nearly: what the sign of a gradient is checked on. Knows no method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.checks.synthetic import Leaves, random_groups, with_policy
from turnwise.core.batch import Batch, pack
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.records import Group, Origin, Status, Trajectory
from turnwise.core.signals import TOKEN_CRITIC, TURN_CRITIC, TURN_CRITIC_TARGET, WITH_GRADIENT, Signal, level_of

SHAPE = [[[2, 3], [3, 2], [2, 2], [3, 3]] * 2] * 3  # three groups of eight, as many as a published group has at least
SMALL = 0.05  # every other measured number: a bonus for entropy must not outweigh a failure
TEACHER_PREFERENCE = 0.3  # by how much a teacher finds successes more likely, and failures less
STATE_VALUES = frozenset({*TOKEN_CRITIC, Signal.V, Signal.SECOND_V, Signal.TARGET_V, Signal.TARGET_SECOND_V})
ACTION_VALUES = frozenset({*TURN_CRITIC, *TURN_CRITIC_TARGET}) - STATE_VALUES


@dataclass(frozen=True)
class GradedBatch:
    """A batch, which of its trajectories succeeded, and the leaves of the policy."""

    batch: Batch
    succeeded: Tensor  # [K] bool
    leaves: Leaves


def graded_batch(requirements: frozenset[str], distance: float, seed: int = 0, flipped: bool = False) -> GradedBatch:
    """``distance``: the standard deviation of the policy's log-probabilities around the sampler's. ``flipped``: the same
    trajectories, but those that succeeded failed and the other way round."""
    groups = [_graded(group, flipped) for group in random_groups(SHAPE, seed, requirements=requirements)]
    batch = pack(groups)
    succeeded = torch.tensor([bool(t.success) for group in groups for t in group.trajectories])
    noise = torch.randn(batch.behaviour.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    values = _signals(batch, succeeded)
    values[Signal.LOGP] = batch.behaviour.x.double() + distance * noise
    leaves = {s: x.clone().requires_grad_() for s, x in values.items() if s in WITH_GRADIENT}
    columns = {s: Field(batch.tree, level_of(s), x) for s, x in values.items()}
    return GradedBatch(with_policy(batch.put(columns), leaves), succeeded, leaves)


def _graded(group: Group, flipped: bool) -> Group:
    members = tuple(_grade(t, place, (place % 2 == 0) != flipped) for place, t in enumerate(group.trajectories))
    return replace(group, trajectories=members)


def _grade(one: Trajectory, place: int, good: bool) -> Trajectory:
    """Reward ±1 at the end, and everything else alike. A required demonstration is one of the successes."""
    reward = 1.0 if good else -1.0
    last = len(one.turns) - 1
    turns = tuple(
        replace(
            turn,
            reward=reward if k == last else 0.0,
            state="start" if k == 0 else f"{place} {k}",
            restart=False,
            tool_calls=1,
            facts=dict.fromkeys(turn.facts, 1),
        )
        for k, turn in enumerate(one.turns)
    )
    facts = {name: value if name == "revises" else 1 for name, value in one.facts.items()}
    return replace(
        one,
        turns=turns,
        success=good,
        status=Status.FINISHED,
        facts=facts | ({"chosen": int(good)} if "chosen" in facts else {}),
        rewards=dict.fromkeys(one.rewards, reward),
        origin=Origin.EXPERT if one.origin == Origin.EXPERT and good else Origin.POLICY,
        fork=None,
        end="won" if good else "lost",
    )


def _signals(batch: Batch, succeeded: Tensor) -> dict[Signal, Tensor]:
    """What a learner would measure if the policy had sampled the batch: critics that know the outcome of an action and nothing
    of a state, and a teacher that prefers successes."""
    sampled = batch.behaviour.x.double()
    sign = Field(batch.tree, TRAJECTORY, torch.where(succeeded, 1.0, -1.0).double())
    known: Mapping[Signal, Tensor] = {
        **dict.fromkeys((Signal.REFERENCE, Signal.PROXIMAL, Signal.PREVIOUS, Signal.LOGP_WITHOUT_FEEDBACK), sampled),
        Signal.TEACHER: sampled + TEACHER_PREFERENCE * sign.at(TOKEN).x,
        **dict.fromkeys(ACTION_VALUES, sign.at(TURN).x),
    }
    others = {s: torch.full((batch.tree.count(level_of(s)),), SMALL, dtype=torch.float64) for s in Signal}
    zeros = {s: torch.zeros_like(others[s]) for s in STATE_VALUES}
    return {**others, **zeros, **known}
