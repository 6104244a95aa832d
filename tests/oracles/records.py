"""Plain records for the oracles: nothing is packed or padded, every number is a float64 scalar."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Token:
    """One sampled token; tokens that were not sampled (context, observations) have no record at all."""

    logp: Tensor  # leaf: log-probability under the policy being trained
    behaviour: float  # log-probability under the policy the ratio is taken against
    reference: float  # log-probability under the frozen reference
    value: Tensor  # leaf: the critic's present estimate
    old_value: float  # the critic's estimate when the batch was collected
    entropy: Tensor  # leaf: full-vocabulary entropy
    proximal: (
        float  # log-probability in the training engine before the first update on this batch (lp_old beside lp_mu)
    )
    previous: float  # log-probability under the policy of the training step before
    old_entropy: float  # entropy before the first update on this batch
    twin: Tensor  # leaf: the present estimate of a second value head
    old_twin: float  # the second head's estimate when the batch was collected
    hellinger: float  # squared Hellinger distance of the present policy's and the reference's whole distributions
    curvature: tuple[
        float, float, float
    ]  # with v = onehot - pi and q = lr * P h^2: sum v^2 q, sum pi v^2 q^2, sum pi v q
    lot: float  # a number in [0, 1) drawn once for this token; "at random" means: in ascending order of the lot
    facts: dict[str, Any] = field(default_factory=dict)  # what single methods need besides


@dataclass
class Turn:
    tokens: list[Token]
    reward: float
    tool_calls: int = 0
    answer: float = 0.0  # score of the gold answer given the history after this turn
    facts: dict[str, Any] = field(default_factory=dict)  # what single methods need besides: state, agent ...


@dataclass
class Trajectory:
    turns: list[Turn]
    truncated: bool = False  # unfinished: a limit cut it
    success: bool = False
    before: float = 0.0  # score of the gold answer given the prompt alone
    norm: float = 1.0  # || grad of the sum of its log-probabilities ||
    domain: int = 0  # the same for all trajectories of a group
    lot: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)  # what single methods need besides: named rewards, lengths ...


Group = list[Trajectory]
Batch = list[Group]


def leaf(number: float) -> Tensor:
    return torch.tensor(float(number), dtype=torch.float64, requires_grad=True)


def token(
    logp: float,
    behaviour: float | None = None,
    reference: float | None = None,
    value: float = 0.0,
    old_value: float | None = None,
    entropy: float = 0.0,
    proximal: float | None = None,
    previous: float | None = None,
    old_entropy: float | None = None,
    twin: float = 0.0,
    old_twin: float | None = None,
    hellinger: float = 0.0,
    curvature: tuple[float, float, float] = (0.0, 0.0, 0.0),
    lot: float = 0.5,
) -> Token:
    """A token from floats; what is left out is on-policy (equal to `logp`) or equal to its present counterpart."""
    return Token(
        logp=leaf(logp),
        behaviour=float(logp if behaviour is None else behaviour),
        reference=float(logp if reference is None else reference),
        value=leaf(value),
        old_value=float(value if old_value is None else old_value),
        entropy=leaf(entropy),
        proximal=float((logp if behaviour is None else behaviour) if proximal is None else proximal),
        previous=float(logp if previous is None else previous),
        old_entropy=float(entropy if old_entropy is None else old_entropy),
        twin=leaf(twin),
        old_twin=float(twin if old_twin is None else old_twin),
        hellinger=float(hellinger),
        curvature=curvature,
        lot=float(lot),
    )


def trajectories(batch: Batch) -> Iterator[Trajectory]:
    for group in batch:
        yield from group


def sampled(trajectory: Trajectory) -> list[Token]:
    """The sampled tokens of a trajectory in order, across its turns."""
    return [one for turn in trajectory.turns for one in turn.tokens]


def tokens(batch: Batch) -> Iterator[Token]:
    """Every token in natural order: group, trajectory, turn, token."""
    for trajectory in trajectories(batch):
        yield from sampled(trajectory)


def total(trajectory: Trajectory) -> float:
    """Total reward of a trajectory; turns without tokens count as well."""
    return float(sum(turn.reward for turn in trajectory.turns))


def gradients(batch: Batch, loss: Tensor, field: str = "logp") -> list[float]:
    """Gradient of the loss by one leaf field of every token, in natural order; zero where the loss ignores it."""
    leaves = [getattr(one, field) for one in tokens(batch)]
    if not leaves or not loss.requires_grad:
        return [0.0] * len(leaves)
    found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    return [0.0 if one is None else one.item() for one in found]


KINDS = ("edges", "single", "flat", "large", "ragged")


def random_batch(
    seed: int,
    groups: int = 5,
    size: int = 4,
    turns: int = 3,
    length: int = 4,
    tokenless: bool = True,
    overflow: bool = False,
) -> Batch:
    """A seeded ragged batch. Group i is of kind KINDS[i % 5], so five groups show every edge case:

    edges   empty turns (with rewards) first, in the middle and last; a trajectory of a single token; a single turn;
            with `tokenless`, a trajectory without any token (all its turns are empty)
    single  a group of one trajectory
    flat    the same total reward in every trajectory
    large   log-ratios of several nats in both directions; with `overflow` also beyond +-20, and a reference far off
    ragged  ordinary: 2..`size` trajectories, 1..`turns` turns, 0..`length` tokens a turn, at least one token each

    Trajectories differ in how far they are off-policy (from exactly on-policy to 0.4 nats a token), so that narrow
    and wide clip ranges both see clipped and unclipped tokens. Log-probabilities are always below zero.
    """
    dice = random.Random(seed)

    def make_token(spread: float, kind: str, first: bool) -> Token:
        logp = -dice.uniform(1.5, 5.0)
        shift = spread * dice.gauss(0.0, 1.0)
        drift = max(-1.4, min(1.4, 0.5 * dice.gauss(0.0, 1.0)))
        if kind == "large" and (dice.random() < 0.5 or first):
            shift = dice.choice([-1.0, 1.0]) * dice.uniform(2.0, 7.0)
        if kind == "large" and overflow and dice.random() < 0.4:
            shift = dice.choice([-1.0, 1.0]) * dice.uniform(20.5, 30.0)
            drift = dice.choice([-1.0, 1.0]) * dice.uniform(3.0, 30.0)
        lowest = 0.05 + max(0.0, -shift) + max(0.0, drift)
        logp = min(logp, -lowest)  # keeps behaviour = logp - shift and reference = logp + drift below zero
        old_value = dice.gauss(0.0, 0.7)
        old_twin = old_value + dice.gauss(0.0, 0.3)
        mismatch = dice.choice([0.0, 0.02, 0.3]) * dice.gauss(0.0, 1.0)
        if dice.random() < 0.1:
            mismatch = dice.choice([-1.0, 1.0]) * dice.uniform(0.8, 2.5)
        entropy = dice.choice([dice.uniform(0.0, 0.1), dice.uniform(0.0, 2.0)])
        mass, width = dice.uniform(0.0, 0.02), dice.uniform(0.0, 1.0)
        return token(
            logp=logp,
            behaviour=logp - shift,
            reference=logp + drift,
            value=old_value + dice.gauss(0.0, 0.5),
            old_value=old_value,
            entropy=entropy,
            proximal=min(-0.01, logp - shift + mismatch),
            previous=min(-0.01, logp + dice.gauss(0.0, 0.1)),
            old_entropy=entropy * dice.uniform(0.8, 1.2),
            twin=old_twin + dice.gauss(0.0, 0.5),
            old_twin=old_twin,
            hellinger=dice.uniform(0.0, 0.4),
            curvature=(mass, mass * mass * width, mass * width * dice.uniform(-1.0, 1.0)),
            lot=dice.random(),
        )

    def make_trajectory(counts: list[int], kind: str) -> Trajectory:
        spread = dice.choice([0.0, 2e-4, 0.05, 0.4])
        made = []
        for count in counts:
            reward = dice.choice([0.0, round(dice.gauss(0.0, 0.5), 3)])
            made.append(Turn([make_token(spread, kind, at == 0) for at in range(count)], reward))
            made[-1].tool_calls = dice.choice([0, 0, 1, 2])
            made[-1].answer = -dice.uniform(0.1, 5.0)
        made[-1].reward += dice.choice([0.0, 1.0])
        return Trajectory(
            made,
            truncated=dice.random() < 0.3,
            success=dice.random() < 0.5,
            before=-dice.uniform(0.1, 5.0),
            norm=dice.uniform(0.2, 3.0),
            lot=dice.random(),
        )

    def shape() -> list[int]:
        counts = [dice.randint(0, length) for _ in range(dice.randint(1, turns))]
        if sum(counts) == 0:
            counts[dice.randrange(len(counts))] = 1
        return counts

    batch: Batch = []
    for index in range(groups):
        kind = KINDS[index % len(KINDS)]
        if kind == "edges":
            shapes = [[0, 2, 0, 0, 3, 0], [1], [length], [0, 0, 1], [2, 1]]
            if tokenless:
                shapes.insert(dice.randint(0, len(shapes)), [0, 0])
        elif kind == "single":
            shapes = [shape()]
        else:
            shapes = [shape() for _ in range(dice.randint(2, max(2, size)))]
        group = [make_trajectory(counts, kind) for counts in shapes]
        if kind == "edges":
            for trajectory in group:
                for turn in trajectory.turns:
                    if not turn.tokens:
                        turn.reward += dice.choice([-0.25, 0.25])
        if kind == "flat":
            common = dice.choice([0.0, 0.5, 1.0])
            for trajectory in group:
                for turn in trajectory.turns:
                    turn.reward = 0.0
                dice.choice(trajectory.turns).reward = common
        for trajectory in group:
            trajectory.domain = index % 2
        batch.append(group)
    return batch
