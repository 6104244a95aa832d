"""Values: the numbers that advantages compare: the outcome of a trajectory, its return to go, a critic's estimate, and
generalised advantage estimation. A value does not know what it is compared with.
"""

from __future__ import annotations

from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Level, where
from turnwise.core.limits import choice, number
from turnwise.core.signals import Signal
from turnwise.maths import returns
from turnwise.maths.lazy_torch import torch


class Outcome(Term):
    """R = Σ of the rewards of a trajectory. At TRAJECTORY."""

    def __call__(self, batch: Batch) -> Field:
        return batch.reward.sum(TRAJECTORY)


class SumOverTrajectory(Term):
    """Σ of a term over each trajectory."""

    term: Term

    def __call__(self, batch: Batch) -> Field:
        return self.term(batch).sum(TRAJECTORY)


class Constant(Term):
    """The same number for every trajectory."""

    value: float

    def __call__(self, batch: Batch) -> Field:
        return batch.tree.full(TRAJECTORY, self.value, batch.reward.x.dtype)


class Measured(Term):
    """A signal that was measured before the batch: ``Measured(Signal.OLD_VALUE)`` is the critic's estimate."""

    signal: Signal

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({self.signal})

    def __call__(self, batch: Batch) -> Field:
        return batch[self.signal]


class ReturnToGo(Term):
    """Gₖ = rₖ + γ Gₖ₊₁ over the turns of a trajectory, or over its sampled tokens (a turn's reward is on its last one)."""

    gamma: float = number(1.0, least=0, most=1)
    level: Level = choice(TOKEN, TURN, default=TURN)

    def __call__(self, batch: Batch) -> Field:
        r = batch.reward.sum(TURN) if self.level == TURN else token_reward(batch)  # token rewards summed by turn
        return r.map(lambda x: returns.discounted(x, self.gamma, is_last(batch, self.level)))


class SpreadTo(Term):
    """A coarser value repeated for every item of a finer level: statistics then weigh long trajectories more."""

    level: Level
    value: Term

    def __call__(self, batch: Batch) -> Field:
        return self.value(batch).at(self.level)


class MedianCentred(Term):
    """(R − median)/(std + ε) among the group: positive only above the median."""

    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        r = batch.reward.sum(TRAJECTORY)
        return (r - r.median(GROUP)) / (r.std(GROUP) + self.eps)


def is_last(batch: Batch, level: Level) -> torch.Tensor:
    """Which items of a level are the last of their trajectory."""
    tree = batch.tree
    return (tree.size(level, TRAJECTORY) - tree.index(level, TRAJECTORY) <= 1).x


def token_reward(batch: Batch) -> Field:
    """Each turn's reward on its last token. The reward of a turn without tokens goes to the token before it in its trajectory,
    or, where there is none, to the last token of the first turn that has one; a trajectory without tokens has no reward."""
    tree = batch.tree
    if batch.reward.level == TOKEN:
        return batch.reward
    end = tree.size(TOKEN, TURN).x.cumsum(0)  # one past the last token of each turn
    begin = (tree.size(TOKEN, TRAJECTORY).x.cumsum(0) - tree.size(TOKEN, TRAJECTORY).x)[tree.parents[1]]
    stop = begin + tree.size(TOKEN, TRAJECTORY).x[tree.parents[1]]
    zeros = tree.full(TOKEN, 0.0, batch.reward.x.dtype).x
    if not zeros.numel():
        return tree.field(TOKEN, zeros)
    first_turn = tree.parents[0][begin.clamp(max=zeros.numel() - 1)]
    target = torch.where(end > begin, end - 1, end[first_turn] - 1)
    has_tokens = stop > begin
    return tree.field(TOKEN, zeros.index_add(0, target[has_tokens], batch.reward.x[has_tokens]))


class GAE(Term):
    """δₜ = rₜ + γ vₜ₊₁ − vₜ,  Aₜ = δₜ + γλ Aₜ₊₁, over the *sampled* tokens of a trajectory; context is skipped.

    A turn's reward is on its last token. At TOKEN."""

    reads = frozenset({Signal.OLD_VALUE})
    gamma: float = number(1.0, least=0, most=1)
    lam: float = number(0.95, least=0, most=1)
    # the value after the last token of a truncated episode is the value before it (extended GAE); otherwise it is 0
    bootstrap: bool = False

    def __call__(self, batch: Batch) -> Field:
        v, last = batch[Signal.OLD_VALUE], is_last(batch, TOKEN)
        r = token_reward(batch).to(v.x.dtype)
        if self.bootstrap:
            r = r + where(batch.truncated.at(TOKEN) & Field(batch.tree, TOKEN, last), self.gamma * v, 0.0)
        return v.map(lambda x: returns.gae(r.x, x, self.gamma, self.lam, last))


class LambdaReturn(Term):
    """The critic's regression target: A + v, with A from GAE. At TOKEN."""

    reads = frozenset({Signal.OLD_VALUE})
    gamma: float = 1.0
    lam: float = 0.95

    def __call__(self, batch: Batch) -> Field:
        return GAE(self.gamma, self.lam)(batch) + batch[Signal.OLD_VALUE]


class SumToGo(Term):
    """Sₖ = xₖ + γ Sₖ₊₁ over the turns (or tokens) of a trajectory, for any term x at that level."""

    term: Term
    gamma: float = number(1.0, least=0, most=1)

    def __call__(self, batch: Batch) -> Field:
        value = self.term(batch)
        return value.map(lambda x: returns.discounted(x, self.gamma, is_last(batch, value.level)))


def shift_turns(value: Field, by: int, missing: float) -> Field:
    """For each turn, the value ``by`` turns later (earlier if negative) in its trajectory; ``missing`` where there is
    none."""
    tree = value.tree
    index = tree.index(TURN, TRAJECTORY).x + by
    exists = (index >= 0) & (index < tree.size(TURN, TRAJECTORY).at(TURN).x)
    return value.map(lambda x: torch.where(exists, torch.roll(x, -by), missing))  # turns of a trajectory are adjacent


def step_values(batch: Batch, value: Field, end: Field) -> tuple[Field, Field]:
    """The value before the first token of each turn, and that of the next turn with tokens, ``end`` after the last. A turn
    without tokens is no step: the turn before it continues with what follows. At TURN; 0 for turns without tokens."""
    tree = batch.tree
    first = where(tree.index(TOKEN, TURN) < 1, value, 0.0).sum(TURN)
    steps = (tree.size(TOKEN, TURN).x > 0).nonzero().squeeze(1)
    # turns of a trajectory are adjacent
    owner = tree.parents[1][steps]
    follows = torch.nn.functional.pad(owner[1:], (0, 1), value=-1) == owner
    after = torch.where(follows, torch.roll(first.x[steps], -1), end.at(TURN).x[steps])
    return first, Field(tree, TURN, torch.zeros_like(first.x).index_copy(0, steps, after))
