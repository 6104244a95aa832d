"""Advantages: who gets the credit. A value compared among peers, at the level where the value lives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from turnwise.algebra.term import Term, check
from turnwise.batch import Batch
from turnwise.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Level, Partition
from turnwise.maths import returns
from turnwise.signals import Signal


@dataclass(frozen=True)
class Same:
    """Peers that are turns of one group agreeing in ``state``, ``agent`` or turn ``index``: ``Same("state")``."""

    what: str

    def __call__(self, batch: Batch) -> Partition:
        return batch.same(*self.what.split("+"))


Peers = Level | Same


def among(peers: Peers, batch: Batch) -> Level | Partition:
    return peers(batch) if isinstance(peers, Same) else peers


# --------------------------------------------------------------------- values


@dataclass(frozen=True)
class Outcome(Term):
    """R = Σ of the rewards of a trajectory. At TRAJECTORY."""

    def __call__(self, batch: Batch) -> Field:
        return batch.reward.sum(TRAJECTORY)


@dataclass(frozen=True)
class Constant(Term):
    """The same number for every trajectory."""

    value: float

    def __call__(self, batch: Batch) -> Field:
        return batch.tree.full(TRAJECTORY, self.value)


@dataclass(frozen=True)
class ReturnToGo(Term):
    """Gₖ = rₖ + γ Gₖ₊₁ over the turns of a trajectory. At TURN."""

    gamma: float = 1.0

    def __post_init__(self) -> None:
        check(0 <= self.gamma <= 1, f"gamma is {self.gamma}; write a number in [0, 1]")

    def __call__(self, batch: Batch) -> Field:
        return batch.reward.map(lambda r: returns.discounted(r, self.gamma, _ends(batch, TURN)))


# ----------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Standardise(Term):
    """A = (v − mean) / (std + ε) among peers, std with n − 1; a lone peer gets 0. ``scale=False`` leaves the division out."""

    value: Term = field(default_factory=Outcome)
    peers: Peers = GROUP
    scale: bool = True
    eps: float = 1e-6

    @property
    def needs(self) -> frozenset[Signal]:
        return self.value.needs

    @property
    def compares(self) -> bool:
        return self.peers != BATCH

    def __call__(self, batch: Batch) -> Field:
        v, peers = self.value(batch), among(self.peers, batch)
        centred = v - v.mean(peers)
        return centred / (v.std(peers) + self.eps) if self.scale else centred


@dataclass(frozen=True)
class LeaveOneOut(Term):
    """A = v − mean of the *other* peers; a lone peer is compared with 0."""

    value: Term = field(default_factory=Outcome)
    peers: Peers = GROUP

    @property
    def needs(self) -> frozenset[Signal]:
        return self.value.needs

    @property
    def compares(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch)
        return v - v.leave_one_out(among(self.peers, batch))


@dataclass(frozen=True)
class Whiten(Term):
    """A ← (A − mean) / √(var + ε) over all sampled tokens of the batch; fewer than two tokens stay as they are."""

    term: Term
    eps: float = 1e-8

    @property
    def needs(self) -> frozenset[Signal]:
        return self.term.needs

    @property
    def compares(self) -> bool:
        return self.term.compares

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch).at(TOKEN)
        if a.x.numel() < 2:
            return a
        return (a - a.mean(BATCH)) / (a.std(BATCH) ** 2 + self.eps) ** 0.5


# --------------------------------------------------------------------- critic


@dataclass(frozen=True)
class GAE(Term):
    """δₜ = rₜ + γ vₜ₊₁ − vₜ,  Aₜ = δₜ + γλ Aₜ₊₁, over the *sampled* tokens of a trajectory: context is skipped.

    A turn's reward is paid on its last token. At TOKEN."""

    gamma: float = 1.0
    lam: float = 0.95

    def __post_init__(self) -> None:
        check(0 <= self.gamma <= 1, f"gamma is {self.gamma}; write a number in [0, 1]")
        check(0 <= self.lam <= 1, f"lambda is {self.lam}; write a number in [0, 1]")

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({Signal.OLD_VALUE})

    def __call__(self, batch: Batch) -> Field:
        r, v = token_reward(batch), batch[Signal.OLD_VALUE]
        return v.map(lambda x: returns.gae(r.x.to(x.dtype), x, self.gamma, self.lam, _ends(batch, TOKEN)))


@dataclass(frozen=True)
class LambdaReturn(Term):
    """What the critic should have said: A + v, with A from GAE. At TOKEN."""

    gamma: float = 1.0
    lam: float = 0.95

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({Signal.OLD_VALUE})

    def __call__(self, batch: Batch) -> Field:
        return GAE(self.gamma, self.lam)(batch) + batch[Signal.OLD_VALUE]


def _ends(batch: Batch, level: Level) -> torch.Tensor:
    """Which items of a level are the last of their trajectory."""
    tree = batch.tree
    return (tree.size(level, TRAJECTORY) - tree.index(level, TRAJECTORY) <= 1).x


def token_reward(batch: Batch) -> Field:
    """Each turn's reward on its last token. A turn without tokens pays the token before it in its trajectory, or, where
    there is none, the last token of the first turn that has one; a trajectory without tokens earns nothing."""
    tree = batch.tree
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
    "GAE", "Constant", "LambdaReturn", "LeaveOneOut", "Outcome", "Peers", "ReturnToGo", "Same", "Standardise", "Whiten",
    "among", "token_reward",
]  # fmt: skip
