"""Segments: which stretches of an episode are trained on, and how much a good one is worth."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turnwise.algebra.advantage import SoftBaseline, Standardise
from turnwise.algebra.mask import Mask
from turnwise.algebra.piece import Now, check
from turnwise.algebra.ratio import behaviour
from turnwise.algebra.reward import paid_at_end
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.credit.fact import Fact
from turnwise.maths import segments


@dataclass(frozen=True)
class AtEnd(Term):
    """A trajectory's value, all of it paid at its last turn."""

    value: Term

    def __call__(self, batch: Batch) -> Field:
        return paid_at_end(self.value(batch))


@dataclass(frozen=True)
class Above(Term):
    """A = v − mean of the group; with ``tau``, above its soft maximum τ log mean exp(v/τ) instead."""

    value: Term
    tau: float | None = None

    def __post_init__(self) -> None:
        check(self.tau is None or self.tau > 0, f"tau is {self.tau}; write a positive number, or None for the mean")

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        above = Standardise(self.value, scale=False) if self.tau is None else SoftBaseline(self.tau, value=self.value)
        return above(batch)


@dataclass(frozen=True)
class Amplified(Term):
    """``perfect`` where ``value`` reaches ``best``; elsewhere αA where A ≥ 0, else A."""

    term: Term
    value: Term
    alpha: float = 3.0
    best: float = 1.0
    perfect: float = 1.0

    def __post_init__(self) -> None:
        check(self.alpha >= 0, f"alpha is {self.alpha}; write a number >= 0")

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch)
        reached = self.value(batch) >= self.best - 1e-6  # sums of float32
        return where(reached, self.perfect, where(a >= 0, self.alpha * a, a))


# ------------------------------------------------------------------------ masks


@dataclass(frozen=True)
class Unsure(Mask):
    """Tokens that had a probability below ``limit`` when they were sampled."""

    limit: float = 0.9

    def __post_init__(self) -> None:
        check(self.limit > 0, f"the limit is {self.limit}; write a probability, or more than 1 for every token")

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return behaviour(now.batch).exp() < self.limit


@dataclass(frozen=True)
class Credited(Mask):
    """Tokens whose advantage is not 0."""

    least: float = 1e-12

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return now.batch["advantage"].abs() >= self.least


@dataclass(frozen=True)
class FewSegments(Mask):
    """At most ``most`` segments of each trajectory, by lot; a turn with the fact ``memory`` ends its segment. None: all."""

    most: int | None = None

    def __post_init__(self) -> None:
        check(self.most is None or self.most >= 1, f"segments are {self.most}; write at least 1, or None for all")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset() if self.most is None else frozenset({"turn fact memory"})

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        tree = now.batch.tree
        if self.most is None:
            return tree.full(TOKEN, True, torch.bool)
        segment = Partition.by(tree, TOKEN, tree.ancestor(TOKEN, TRAJECTORY), segment_of(now.batch))
        first = segments.rank_within(segment.label, segment.count) == 0
        lot = torch.where(first, now.batch.lots().x, torch.inf)  # a segment's lot is its first token's
        place = order_within(lot, tree.ancestor(TOKEN, TRAJECTORY), tree.count(TRAJECTORY))
        kept = Field(tree, TOKEN, (first & (place < self.most)).double())
        return kept.sum(segment) > 0


def segment_of(batch: Batch) -> Field:
    """How many memory turns came before each turn of its trajectory."""
    closes = where(Fact("memory", TURN, missing=0.0)(batch) > 0, 1.0, 0.0)
    return closes.running_sum(TRAJECTORY) - closes


def order_within(x: torch.Tensor, label: torch.Tensor, count: int) -> torch.Tensor:
    """0-based place of each item in ascending order of x inside its segment, [n]; equal ones as they come."""
    order = torch.argsort(x, stable=True)
    order = order[torch.argsort(label[order], stable=True)]
    return torch.empty_like(label).index_copy(0, order, segments.rank_within(label[order], count))


__all__ = ["Above", "Amplified", "AtEnd", "Credited", "FewSegments", "Unsure", "order_within", "segment_of"]
