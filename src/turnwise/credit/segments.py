"""Segments of an episode: which are trained on, and how success is amplified. Knows no environment."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.advantage import SoftBaseline, Standardise
from turnwise.algebra.mask import Mask
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.ratio import behaviour
from turnwise.algebra.reward import on_last_turn
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import number
from turnwise.credit.fact import Fact
from turnwise.maths import segments
from turnwise.maths.lazy_torch import torch


@dataclass(frozen=True)
class PaidAtEnd(Term):
    """A trajectory's value, paid at its last turn."""

    value: Term

    def __call__(self, batch: Batch) -> Field:
        return on_last_turn(self.value(batch))


@dataclass(frozen=True)
class CentredOnGroup(Term):
    """A = v − mean of the group; with ``tau``, v − its soft maximum τ log mean exp(v/τ)."""

    compares_peers = True

    value: Term
    tau: float | None = number(None, above=0)

    def __call__(self, batch: Batch) -> Field:
        centred = Standardise(self.value, scale=False) if self.tau is None else SoftBaseline(self.tau, value=self.value)
        return centred(batch)


@dataclass(frozen=True)
class AmplifiedPositive(Term):
    """``perfect`` where ``value`` reaches ``best``; elsewhere αA where A ≥ 0, else A."""

    term: Term
    value: Term
    alpha: float = number(3.0, least=0)
    best: float = 1.0
    perfect: float = 1.0

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch)
        reached = self.value(batch) >= self.best - 1e-6  # returns are sums of float32
        return where(reached, self.perfect, where(a >= 0, self.alpha * a, a))


# ------------------------------------------------------------------------ masks


@dataclass(frozen=True)
class ProbabilityBelow(Mask):
    """Tokens with a probability below ``limit`` at sampling time."""

    limit: float = number(0.9, above=0, why="a probability, or more than 1 for every token")

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return behaviour(view.batch).exp() < self.limit


@dataclass(frozen=True)
class NonZeroAdvantage(Mask):
    """Tokens whose advantage is not 0."""

    tolerance: float = 1e-12

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view.batch[Column.ADVANTAGE].abs() >= self.tolerance


@dataclass(frozen=True)
class SampledSegments(Mask):
    """At most ``limit`` random segments of each trajectory; a turn with the fact ``memory`` ends a segment. None: all."""

    limit: int | None = number(None, least=1)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset() if self.limit is None else frozenset({"turn fact memory"})

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        tree = view.batch.tree
        if self.limit is None:
            return tree.full(TOKEN, True, torch.bool)
        segment = Partition.by(tree, TOKEN, tree.ancestor(TOKEN, TRAJECTORY), segment_index(view.batch))
        first = segments.rank_within(segment.label, segment.count) == 0
        key = torch.where(
            first, view.batch.uniform_draws().x, torch.inf
        )  # the first token's draw is the key of its segment
        rank = rank_by_value(key, tree.ancestor(TOKEN, TRAJECTORY), tree.count(TRAJECTORY))
        kept = Field(tree, TOKEN, (first & (rank < self.limit)).double())
        return kept.sum(segment) > 0


def segment_index(batch: Batch) -> Field:
    """Number of memory turns before each turn of its trajectory."""
    boundary = where(Fact("memory", TURN, missing=0.0)(batch) > 0, 1.0, 0.0)
    return boundary.running_sum(TRAJECTORY) - boundary


def rank_by_value(x: torch.Tensor, label: torch.Tensor, count: int) -> torch.Tensor:
    """0-based rank of each item in ascending order of x inside its segment, [n]; ties keep their order."""
    order = torch.argsort(x, stable=True)
    order = order[torch.argsort(label[order], stable=True)]
    return torch.empty_like(label).index_copy(0, order, segments.rank_within(label[order], count))


__all__ = [
    "AmplifiedPositive", "CentredOnGroup", "NonZeroAdvantage", "PaidAtEnd", "ProbabilityBelow", "SampledSegments",
    "rank_by_value", "segment_index",
]  # fmt: skip
