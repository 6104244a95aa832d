"""Synthetic trajectories of any shape with everything that a method may require, a policy that is near them, and the loss and
gradients of an objective on them.

The signals that a learner would measure are leaves or columns of random numbers in float64. A graded batch holds groups in which
every other trajectory succeeded and the others failed: the sign of a gradient is checked on it. Knows no method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from turnwise.algebra.objective import Objective
from turnwise.core.batch import Batch, pack
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.records import Fork, Group, Origin, Status, Task, Trajectory, Turn
from turnwise.core.signals import TOKEN_CRITIC, TURN_CRITIC, TURN_CRITIC_TARGET, WITH_GRADIENT, Signal, level_of

Counts = Sequence[Sequence[Sequence[int]]]
"""Token counts: groups of trajectories of turns."""
Leaves = dict[Signal, Tensor]
Draw = Callable[[int, int], int]
VOCABULARY = 16
GRADED_SHAPE = [
    [[2, 3], [3, 2], [2, 2], [3, 3]] * 2
] * 3  # three groups of eight, as many as a published group has at least
SMALL = 0.05  # every other measured number: a bonus for entropy must not outweigh a failure
TEACHER_PREFERENCE = 0.3  # by how much a teacher finds successes more likely, and failures less
STATE_VALUES = frozenset({*TOKEN_CRITIC, Signal.V, Signal.SECOND_V, Signal.TARGET_V, Signal.TARGET_SECOND_V})
ACTION_VALUES = frozenset({*TURN_CRITIC, *TURN_CRITIC_TARGET}) - STATE_VALUES
NEAR_POLICY = (Signal.REFERENCE, Signal.PROXIMAL, Signal.PREVIOUS)  # log-probabilities of policies near the sampler


def names_after(requirements: frozenset[str], kind: str) -> list[str]:
    """``names_after({"fact age"}, "fact")`` is ``["age"]``."""
    return sorted(word.removeprefix(f"{kind} ") for word in requirements if word.startswith(f"{kind} "))


def random_groups(
    counts: Counts, seed: int = 0, vocabulary: int = VOCABULARY, requirements: frozenset[str] = frozenset()
) -> list[Group]:
    """Groups with the given token counts, random everything else, and all that a method requires."""
    shape = tuple(tuple(tuple(turns) for turns in group) for group in counts)
    return list(_random_groups(shape, seed, vocabulary, requirements))


@lru_cache(maxsize=64)  # most methods require the same, and numbers are drawn one by one
def _random_groups(counts: Counts, seed: int, vocabulary: int, requirements: frozenset[str]) -> list[Group]:
    g = torch.Generator().manual_seed(seed)
    draw: Draw = lambda low, high: int(torch.randint(low, high, (1,), generator=g))  # noqa: E731
    groups = []
    for i, group in enumerate(counts):
        task = Task("test", seed=i, difficulty=1 + i % 2)
        members: list[Trajectory] = []
        paired = "pairs" in requirements and i % 2 == 0  # every other group is as a method for pairs wants it
        wanted = 6 if paired and "fact revises" in requirements else 2 if paired else len(group)
        for j, lengths in enumerate((list(group) * wanted)[:wanted]):
            turns = tuple(_random_turn(k, n, vocabulary, requirements, draw, g) for k, n in enumerate(lengths))
            answer = tuple(draw(0, vocabulary) for _ in range(draw(1, 3)))
            status = Status.TRUNCATED if draw(0, 4) == 0 else Status.FINISHED
            one = Trajectory(f"{i}.{j}", task, turns, status=status, success=draw(0, 2) == 1, answer=answer)
            if requirements:
                one = _with_requirements(one, requirements, j, draw)
            if members and "forks" in requirements and draw(0, 3):
                parent = members[draw(0, len(members))]
                turn = draw(0, len(parent.turns))
                one = replace(one, fork=Fork(parent.id, turn, draw(0, 1 + len(parent.turns[turn].tokens))))
            members.append(one)
        groups.append(Group(str(i), task, tuple(members)))
    return groups


def _random_turn(
    k: int, length: int, vocabulary: int, requirements: frozenset[str], draw: Draw, g: torch.Generator
) -> Turn:
    context = tuple(draw(0, vocabulary) for _ in range(draw(1, 4)))
    tokens = tuple(draw(0, vocabulary) for _ in range(length))
    logp = tuple(float(x) for x in -torch.rand(length, generator=g) * 3)
    reward = float(draw(0, 3)) / 2
    return Turn(
        context,
        tokens,
        logp,
        version=(0,) * length,
        reward=reward,
        state=str(draw(0, 3)),
        tool_calls=draw(0, 3),
        restart=k > 0 and draw(0, 4) == 0,
        facts={name: draw(0, 3) for name in names_after(requirements, "turn fact")},
        masked_context=tuple(draw(0, vocabulary) for _ in context) if "feedback" in requirements else (),
    )


def _with_requirements(one: Trajectory, requirements: frozenset[str], place: int, draw: Draw) -> Trajectory:
    """A trajectory with the facts, rewards and origins that a method requires."""
    facts: dict[str, float | str] = {name: draw(0, 3) for name in names_after(requirements, "fact")}
    origin = one.origin
    if place and "demonstrations" in requirements and draw(0, 3) == 0:
        origin = Origin.EXPERT
    elif place and "replay" in requirements and draw(0, 3) == 0:
        origin = Origin.REPLAY
    facts |= {"chosen": 1 - place % 2} if "pairs" in requirements else {}
    facts |= {"revises": place // 2} if "fact revises" in requirements else {}
    rewards = {name: draw(0, 3) / 2 for name in names_after(requirements, "reward")}
    return replace(one, facts=facts, rewards=rewards, origin=origin, end=str(draw(0, 3)))


# -------------------------------------------------------------------- policy


def random_policy(batch: Batch, seed: int) -> tuple[Batch, Leaves]:
    """A policy that has moved, as leaves in float64, and every signal that can be measured."""
    g = torch.Generator().manual_seed(seed)

    def noise(scale: float, signal: Signal) -> Tensor:
        count = batch.tree.count(level_of(signal))
        return scale * torch.randn(count, dtype=torch.float64, generator=g)

    columns = {s: Field(batch.tree, TOKEN, batch.behaviour.x.double() + noise(0.2, s)) for s in NEAR_POLICY}
    others = frozenset(Signal) - WITH_GRADIENT - set(NEAR_POLICY)
    columns |= {s: Field(batch.tree, level_of(s), noise(0.5, s).abs()) for s in sorted(others)}
    leaves = {s: noise(0.5, s).abs().requires_grad_() for s in sorted(WITH_GRADIENT - {Signal.LOGP})}
    leaves[Signal.LOGP] = (batch.behaviour.x.double() + noise(0.3, Signal.LOGP)).requires_grad_()
    return with_policy(batch.put(columns), leaves), leaves


def with_policy(batch: Batch, leaves: Mapping[Signal, Tensor]) -> Batch:
    """The batch with the present values of the signals, and the size of the vocabulary."""
    columns = {s: Field(batch.tree, level_of(s), x.detach()) for s, x in leaves.items()}
    return batch.put({**columns, "vocabulary_size": batch.tree.full(BATCH, float(VOCABULARY))})


def numbered(batch: Batch) -> Batch:
    """Each token and turn with its place in the whole batch."""
    places = {level: Field(batch.tree, level, torch.arange(batch.tree.count(level))) for level in (TOKEN, TURN)}
    return batch.put({("row", level): place for level, place in places.items()})


def policy_of(part: Batch, leaves: Mapping[Signal, Tensor]) -> dict[Signal, Field]:
    """The signals with gradient of a part of a numbered batch."""
    return {s: Field(part.tree, level_of(s), x[part["row", level_of(s)].x]) for s, x in leaves.items()}


# --------------------------------------------------------- loss and gradients


@dataclass(frozen=True)
class LossGradient:
    """A loss, its gradients by signal, and the statistics of its first micro-batch."""

    loss: Tensor
    of: dict[Signal, Tensor]
    stats: dict[str, Tensor]

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.loss)) and all(bool(torch.isfinite(g).all()) for g in self.of.values())


def planned(objective: Objective, batch: Batch) -> Batch:
    """The batch of one optimiser step, with what the learner measures for this objective and nothing else."""
    hidden = set(Signal) - (objective.signals - WITH_GRADIENT) - objective.signals_before_step
    columns = {key: column for key, column in batch.columns.items() if key not in hidden}
    return numbered(objective.plan(objective.credit(replace(batch, columns=columns))))


def gradient(
    objective: Objective,
    batch: Batch,
    leaves: Mapping[Signal, Tensor],
    cut: Callable[[Batch], Iterable[Batch]] = lambda batch: [batch],
) -> LossGradient:
    """Sum of the losses of all micro-batches, and its gradients with respect to the leaves, as a learner computes them: the batch
    is credited, planned, cut into micro-batches, and each sees only the signals that the pieces declare."""
    live = {s: x for s, x in leaves.items() if s in objective.signals_with_gradient}
    total, stats = torch.zeros((), dtype=torch.float64), dict[str, Tensor]()
    for part in cut(planned(objective, batch)):
        loss = objective(part, policy_of(part, live))
        total = total + loss.loss
        stats = stats or dict(loss.stats)
    # a step that only updates critics, or whose tokens are all masked
    if not total.requires_grad:
        return LossGradient(total.detach(), {}, stats)
    gradients = torch.autograd.grad(total, list(live.values()), allow_unused=True)
    return LossGradient(total.detach(), {s: g for s, g in zip(live, gradients) if g is not None}, stats)


def push(batch: Batch, taken: LossGradient) -> Tensor:
    """By how much a step raises the log-probability of each trajectory, [K], to first order in the log-probabilities."""
    slope = taken.of.get(Signal.LOGP)
    slope = torch.zeros_like(batch.behaviour.x, dtype=torch.float64) if slope is None else slope
    return Field(batch.tree, TOKEN, -slope).sum(TRAJECTORY).x


# --------------------------------------------------------------- graded batch


@dataclass(frozen=True)
class GradedBatch:
    """A batch, which of its trajectories succeeded, and the leaves of the policy."""

    batch: Batch
    succeeded: Tensor  # [K] bool
    leaves: Leaves


def graded_batch(requirements: frozenset[str], distance: float, seed: int = 0, flipped: bool = False) -> GradedBatch:
    """``distance``: the standard deviation of the policy's log-probabilities around the sampler's. ``flipped``: the same
    trajectories, but those that succeeded failed and the other way round."""
    groups = []
    for group in random_groups(GRADED_SHAPE, seed, requirements=requirements):
        members = (_grade(t, place, (place % 2 == 0) != flipped) for place, t in enumerate(group.trajectories))
        groups.append(replace(group, trajectories=tuple(members)))
    batch = pack(groups)
    succeeded = torch.tensor([bool(t.success) for group in groups for t in group.trajectories])
    # a generator of its own: the same noise for both outcomes of a trajectory
    noise = torch.randn(batch.behaviour.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    values = _signals(batch, succeeded)
    values[Signal.LOGP] = batch.behaviour.x.double() + distance * noise
    leaves = {s: x.clone().requires_grad_() for s, x in values.items() if s in WITH_GRADIENT}
    columns = {s: Field(batch.tree, level_of(s), x) for s, x in values.items()}
    return GradedBatch(with_policy(batch.put(columns), leaves), succeeded, leaves)


def _grade(one: Trajectory, place: int, good: bool) -> Trajectory:
    """Reward ±1 at the end, and everything else alike. A required demonstration is one of the successes."""
    reward = 1.0 if good else -1.0
    last = len(one.turns) - 1
    turns = []
    for k, turn in enumerate(one.turns):
        state, paid, facts = (
            "start" if k == 0 else f"{place} {k}",
            reward if k == last else 0.0,
            dict.fromkeys(turn.facts, 1),
        )
        turns.append(replace(turn, reward=paid, state=state, restart=False, tool_calls=1, facts=facts))
    marks = {name: value if name == "revises" else 1 for name, value in one.facts.items()}
    return replace(
        one,
        turns=tuple(turns),
        success=good,
        status=Status.FINISHED,
        facts=marks | ({"chosen": int(good)} if "chosen" in marks else {}),
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
    informed: Mapping[Signal, Tensor] = {
        **dict.fromkeys((Signal.REFERENCE, Signal.PROXIMAL, Signal.PREVIOUS, Signal.LOGP_WITHOUT_FEEDBACK), sampled),
        Signal.TEACHER: sampled + TEACHER_PREFERENCE * sign.at(TOKEN).x,
        **dict.fromkeys(ACTION_VALUES, sign.at(TURN).x),
    }
    others = {s: torch.full((batch.tree.count(level_of(s)),), SMALL, dtype=torch.float64) for s in Signal}
    zeros = {s: torch.zeros_like(others[s]) for s in STATE_VALUES}
    return {**others, **zeros, **informed}
