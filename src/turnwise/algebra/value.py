"""Values: the numbers that credit compares. What a trajectory earned, what is still to come, what a critic makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turnwise.algebra.piece import check
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Level, where
from turnwise.core.signals import Signal
from turnwise.maths import returns


@dataclass(frozen=True)
class Outcome(Term):
    """R = Σ of the rewards of a trajectory. At TRAJECTORY."""

    def __call__(self, batch: Batch) -> Field:
        return batch.reward.sum(TRAJECTORY)


@dataclass(frozen=True)
class Total(Term):
    """Σ of a term over each trajectory."""

    term: Term

    def __call__(self, batch: Batch) -> Field:
        return self.term(batch).sum(TRAJECTORY)


@dataclass(frozen=True)
class Constant(Term):
    """The same number for every trajectory."""

    value: float

    def __call__(self, batch: Batch) -> Field:
        return batch.tree.full(TRAJECTORY, self.value, batch.reward.x.dtype)


@dataclass(frozen=True)
class ReturnToGo(Term):
    """Gₖ = rₖ + γ Gₖ₊₁ over the turns of a trajectory, or over its sampled tokens (a turn pays its last one)."""

    gamma: float = 1.0
    level: Level = TURN

    def __post_init__(self) -> None:
        check(0 <= self.gamma <= 1, f"gamma is {self.gamma}; write a number in [0, 1]")
        check(self.level in (TOKEN, TURN), f"returns run over TOKEN or TURN, not {self.level!r}")

    def __call__(self, batch: Batch) -> Field:
        r = batch.reward.sum(TURN) if self.level == TURN else token_reward(batch)  # rewards of tokens pay their turn
        return r.map(lambda x: returns.discounted(x, self.gamma, ends(batch, self.level)))


@dataclass(frozen=True)
class Each(Term):
    """A coarser value repeated for every item of a finer level: statistics then weigh long trajectories more."""

    level: Level
    value: Term

    def __call__(self, batch: Batch) -> Field:
        return self.value(batch).at(self.level)


@dataclass(frozen=True)
class FromMedian(Term):
    """(R − median)/(std + ε) among the group: positive only above the median."""

    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        r = batch.reward.sum(TRAJECTORY)
        return (r - r.median(GROUP)) / (r.std(GROUP) + self.eps)


@dataclass(frozen=True)
class GAE(Term):
    """δₜ = rₜ + γ vₜ₊₁ − vₜ,  Aₜ = δₜ + γλ Aₜ₊₁, over the *sampled* tokens of a trajectory: context is skipped.

    A turn's reward is paid on its last token. ``bootstrap``: an episode that a limit cut off is valued, after its last
    token, as before it (extended GAE); without it, an unfinished episode is worth nothing more. At TOKEN."""

    gamma: float = 1.0
    lam: float = 0.95
    bootstrap: bool = False

    def __post_init__(self) -> None:
        check(0 <= self.gamma <= 1, f"gamma is {self.gamma}; write a number in [0, 1]")
        check(0 <= self.lam <= 1, f"lambda is {self.lam}; write a number in [0, 1]")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.OLD_VALUE})

    def __call__(self, batch: Batch) -> Field:
        v, last = batch[Signal.OLD_VALUE], ends(batch, TOKEN)
        r = token_reward(batch).to(v.x.dtype)
        if self.bootstrap:
            r = r + where(batch.truncated.at(TOKEN) & Field(batch.tree, TOKEN, last), self.gamma * v, 0.0)
        return v.map(lambda x: returns.gae(r.x, x, self.gamma, self.lam, last))


@dataclass(frozen=True)
class LambdaReturn(Term):
    """What the critic should have said: A + v, with A from GAE. At TOKEN."""

    gamma: float = 1.0
    lam: float = 0.95

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.OLD_VALUE})

    def __call__(self, batch: Batch) -> Field:
        return GAE(self.gamma, self.lam)(batch) + batch[Signal.OLD_VALUE]


@dataclass(frozen=True)
class SecondHead(Term):
    """What the second value head said when the batch was collected. At TOKEN."""

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.OLD_TWIN})

    def __call__(self, batch: Batch) -> Field:
        return batch[Signal.OLD_TWIN]


@dataclass(frozen=True)
class SoftMin(Term):
    """V = −a (logsumexp(−v/a) − log 2) of two value heads, before the first token of a trajectory: between min and mean."""

    temperature: float = 0.5

    def __post_init__(self) -> None:
        check(self.temperature > 0, f"the soft minimum's temperature is {self.temperature}; write a positive number")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.OLD_VALUE, Signal.OLD_TWIN})

    def __call__(self, batch: Batch) -> Field:
        first = where(batch.tree.index(TOKEN, TRAJECTORY) < 1, 1.0, 0.0)
        heads = [(batch[s] * first.to(batch[s].x.dtype)).sum(TRAJECTORY) for s in (Signal.OLD_VALUE, Signal.OLD_TWIN)]
        a = self.temperature
        stacked = torch.stack([-h.x / a for h in heads])
        return heads[0].map(lambda _: -a * (torch.logsumexp(stacked, 0) - torch.log(stacked.new_tensor(2.0))))


def ends(batch: Batch, level: Level) -> torch.Tensor:
    """Which items of a level are the last of their trajectory."""
    tree = batch.tree
    return (tree.size(level, TRAJECTORY) - tree.index(level, TRAJECTORY) <= 1).x


def token_reward(batch: Batch) -> Field:
    """Each turn's reward on its last token. A turn without tokens pays the token before it in its trajectory, or, where
    there is none, the last token of the first turn that has one; a trajectory without tokens earns nothing."""
    tree = batch.tree
    if batch.reward.level == TOKEN:
        return batch.reward
    end = tree.size(TOKEN, TURN).x.cumsum(0)  # one past the last token of each turn
    begin = (tree.size(TOKEN, TRAJECTORY).x.cumsum(0) - tree.size(TOKEN, TRAJECTORY).x)[tree.parents[1]]
    stop = begin + tree.size(TOKEN, TRAJECTORY).x[tree.parents[1]]
    paid = tree.full(TOKEN, 0.0, batch.reward.x.dtype).x
    if not paid.numel():
        return tree.field(TOKEN, paid)
    first_turn = tree.parents[0][begin.clamp(max=paid.numel() - 1)]
    target = torch.where(end > begin, end - 1, end[first_turn] - 1)
    some = stop > begin
    return tree.field(TOKEN, paid.index_add(0, target[some], batch.reward.x[some]))


__all__ = [
    "GAE", "Constant", "Each", "FromMedian", "LambdaReturn", "Outcome", "ReturnToGo", "SecondHead", "SoftMin", "Total", "ends",
    "token_reward",
]  # fmt: skip
