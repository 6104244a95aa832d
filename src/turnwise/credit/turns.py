"""Turns: values that run over the turns of an episode, and what a turn is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from turnwise.algebra.aggregate import items
from turnwise.algebra.mask import Mask
from turnwise.algebra.peers import Peers, among
from turnwise.algebra.piece import Now, check
from turnwise.algebra.term import Term
from turnwise.algebra.value import ends, token_reward
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact
from turnwise.credit.voters import neighbour
from turnwise.maths import returns

# ---------------------------------------------------------------------- values


@dataclass(frozen=True)
class ToGo(Term):
    """Sₖ = xₖ + γ Sₖ₊₁ over the turns (or tokens) of a trajectory, of any term x at that level."""

    term: Term
    gamma: float = 1.0

    def __post_init__(self) -> None:
        check(0 <= self.gamma <= 1, f"gamma is {self.gamma}; write a number in [0, 1]")

    def __call__(self, batch: Batch) -> Field:
        value = self.term(batch)
        return value.map(lambda x: returns.discounted(x, self.gamma, ends(batch, value.level)))


@dataclass(frozen=True)
class OwnReturn(Term):
    """Gₖ = Σ rⱼ over this turn and the later ones of the same agent. At TURN."""

    def __call__(self, batch: Batch) -> Field:
        own = Partition.by(batch.tree, TURN, batch.tree.ancestor(TURN, TRAJECTORY), batch.agent)
        return batch.reward.sum(TURN).running_sum(own, reverse=True)


@dataclass(frozen=True)
class UnbrokenReturn(Term):
    """Gₖ = rₖ + γ eₖ eₖ₊₁ Gₖ₊₁: what comes later counts only as long as no turn fails ``unbroken`` (e = 0). At TURN."""

    unbroken: Term
    gamma: float = 0.5

    def __post_init__(self) -> None:
        check(0 <= self.gamma <= 1, f"gamma is {self.gamma}; write a number in [0, 1]")

    def __call__(self, batch: Batch) -> Field:
        e = (self.unbroken(batch) > 0.5).to(torch.float64)
        carry = self.gamma * e * neighbour(e, 1, 0.0)
        return batch.reward.sum(TURN).map(lambda r: returns.backward_recurrence(r, carry.x))


@dataclass(frozen=True)
class ValueHead(Term):
    """What the critic said when the batch was collected. At TOKEN."""

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.OLD_VALUE})

    def __call__(self, batch: Batch) -> Field:
        return batch[Signal.OLD_VALUE]


@dataclass(frozen=True)
class TwoLevelGAE(Term):
    """GAE with ``turn_gamma`` from turn to turn, at their last tokens; then with ``gamma`` inside each turn, whose last token
    is paid the turn's return A + v. Turns without tokens are skipped. At TOKEN."""

    gamma: float = 1.0
    lam: float = 0.95
    turn_gamma: float = 0.95

    def __post_init__(self) -> None:
        for name in ("gamma", "lam", "turn_gamma"):
            check(0 <= getattr(self, name) <= 1, f"{name} is {getattr(self, name)}; write a number in [0, 1]")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.OLD_VALUE})

    def __call__(self, batch: Batch) -> Field:
        tree, v = batch.tree, batch[Signal.OLD_VALUE]
        final = (tree.size(TOKEN, TURN).at(TOKEN) - tree.index(TOKEN, TURN) <= 1).x
        at = final.nonzero().squeeze(1)
        r = token_reward(batch).x.to(v.x.dtype)
        outer = returns.gae(r[at], v.x[at], self.turn_gamma, self.lam, ends(batch, TOKEN)[at])
        paid = r.index_copy(0, at, outer + v.x[at])
        return v.map(lambda x: returns.gae(paid, x, self.gamma, self.lam, final))


# ------------------------------------------------------------------ comparisons

ABSENT = ("out", "outcome", "nothing")


@dataclass(frozen=True)
class AtSameTurn(Term):
    """Aₖ = vₖ − mean of the vₖ of the *other* trajectories of the task at the same turn index; alone it is compared with 0.

    Turns that do not ``count`` get 0 and are nobody's peers. An episode that is over before turn k is ``absent``:

        out       late turns are compared with the long episodes only, the last one running with nothing
        outcome   it stands in with all it earned: a late turn is still compared with the whole task
        nothing   it stands in with 0, as nothing more came: for rewards that are paid turn by turn

    In each case the baseline knows nothing of the trajectory it is for, so the gradient stays unbiased."""

    value: Term
    absent: str = "out"
    count: Term = field(default_factory=lambda: Fact("valid", TURN, missing=1.0))

    def __post_init__(self) -> None:
        check(self.absent in ABSENT, f"absent is {self.absent!r}; write {', '.join(ABSENT)}")

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        v, tree = self.value(batch), batch.tree
        peers = batch.same("index")
        counts = (self.count(batch) > 0.5).to(v.x.dtype)
        others, n = (counts * v).sum(peers) - counts * v, counts.sum(peers) - counts
        if self.absent != "out":
            outcome = batch.reward.sum(TRAJECTORY)
            over = tree.size(TRAJECTORY, GROUP) - outcome.peers(peers)
            earned = outcome.sum(GROUP) - outcome.sum(peers)
            others, n = others + (earned if self.absent == "outcome" else 0.0), n + over
        return counts * (v - where(n > 0, others / n.clamp(low=1.0), 0.0))


@dataclass(frozen=True)
class Only(Term):
    """``term`` for the turns that are ``marked``, 0 for the others."""

    marked: Term
    term: Term

    def __call__(self, batch: Batch) -> Field:
        return where(self.marked(batch) > 0.5, self.term(batch), 0.0)


@dataclass(frozen=True)
class UnlessAlone(Term):
    """``term``, but ``alone`` for one that has no peers."""

    term: Term
    alone: Term
    peers: Peers = GROUP

    def __call__(self, batch: Batch) -> Field:
        a, alone = self.term(batch), self.alone(batch)
        return where(alone.peers(among(self.peers, batch)) > 1, a, alone)


# ------------------------------------------------------------- masks, averages


@dataclass(frozen=True)
class Marked(Mask):
    """The tokens of turns that are marked."""

    mark: Term

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return self.mark(now.batch) > 0.5


@dataclass(frozen=True)
class Varied(Mask):
    """Groups whose outcomes have a std above ``least``."""

    least: float = 0.3

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return now.batch.reward.sum(TRAJECTORY).std(GROUP) > self.least


@dataclass(frozen=True)
class MeanOfTurns:
    """Mean over the tokens of each turn, then over the turns of each trajectory, then over the trajectories."""

    def __call__(self, kept: Field) -> Field:
        tokens = kept.sum(TURN)
        turns = where(tokens > 0, 1.0, 0.0).sum(TRAJECTORY)
        return kept / (items(kept.sum(TRAJECTORY)) * turns.clamp(low=1) * tokens.clamp(low=1))


__all__ = [
    "AtSameTurn", "Marked", "MeanOfTurns", "Only", "OwnReturn", "ToGo", "TwoLevelGAE", "UnbrokenReturn", "UnlessAlone",
    "ValueHead", "Varied",
]  # fmt: skip
