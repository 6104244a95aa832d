"""Down-sampling of a step: the trajectories, turns and tokens that carry most of its gradient. Each mask names the reason for
which it drops tokens, and the metrics of a step count them by it. Knows advantages and entropies; no reward and no loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnwise.algebra.mask import Mask
from turnwise.algebra.piece import MicroBatchView, Piece, StepView
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.credit.selectors import HasTokens, Selector
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

DECIMALS = 6  # scores that differ by rounding are equal: then hashes decide, which do not depend on the packing


@dataclass(frozen=True)
class ShareSchedule(Piece):
    """A share that moves linearly from ``start`` to ``end`` over ``steps`` batches, then stays."""

    start: float = number(above=0, most=1, why="which part is trained on")
    end: float = number(above=0, most=1, why="which part is trained on")
    steps: int = number(100, least=1, why="the batches until the last share is reached")

    def share(self, batch: Batch) -> float:
        """The share of this batch."""
        progress = min(1.0, float(batch[Column.BATCH_INDEX].item) / self.steps)
        return (1 - progress) * self.start + progress * self.end


@dataclass(frozen=True)
class LargestVariance(Selector):
    """The share of the trajectories whose advantages have the largest variance: some of the largest and some of the smallest,
    over the whole step, or inside each group. Trajectories without tokens do not count."""

    kept: ShareSchedule
    by_group: bool = False

    reason = "another subset has advantages of larger variance"

    def select(self, batch: Batch) -> Field:
        adv = batch[Column.ADVANTAGE]
        a = adv.mean(TRAJECTORY) if adv.level < TRAJECTORY else adv.at(TRAJECTORY)
        rows = HasTokens().select(batch).x.nonzero().squeeze(1)
        group = batch.tree.parents[2][rows] if self.by_group else torch.zeros_like(rows)
        selected = torch.zeros_like(a.x, dtype=torch.bool)
        for one in group.unique().tolist():
            peers = rows[group == one]
            count = max(1, round(self.kept.share(batch) * len(peers)))
            selected[peers[max_variance_subset(a.x[peers], batch.seed.x[peers], count)]] = True
        return Field(batch.tree, TRAJECTORY, selected)


def max_variance_subset(values: Tensor, ties: Tensor, count: int) -> Tensor:
    """The ``count`` items with the largest variance of ``values``: the k largest and the others smallest, for the best k; of
    equally good k the largest. ``ties`` orders equal values."""
    first = torch.argsort(ties, stable=True)
    ordered = values.double()[first].round(decimals=DECIMALS)
    order = torch.argsort(ordered, stable=True)
    x, n = ordered[order], len(order)
    sums, squares = (torch.nn.functional.pad(y.cumsum(0), (1, 0)) for y in (x, x * x))
    k = torch.arange(count + 1, device=x.device)
    total = sums[count - k] + sums[n] - sums[n - k]
    variance = (squares[count - k] + squares[n] - squares[n - k]) / count - (total / count) ** 2
    best = int((variance.round(decimals=DECIMALS) == variance.round(decimals=DECIMALS).max()).nonzero().max())
    places = torch.cat([torch.arange(count - best), torch.arange(n - best, n)]).to(order.device)
    return first[order[places]]


@dataclass(frozen=True)
class LargestAdvantageEntropy(Mask):
    """The share of the tokens with the largest |A|·H, H the entropy at the start of the batch, among the tokens of ``within``;
    True outside of it, where ``within`` decides."""

    reads = frozenset({Signal.OLD_ENTROPY})

    kept: ShareSchedule
    within: Selector = field(default_factory=HasTokens)

    reason = "small |A| times entropy"

    def plan(self, view: StepView) -> dict[object, Field]:
        batch = view.batch
        inside = self.within.select(batch).at(TOKEN).x
        score = batch[Column.ADVANTAGE].at(TOKEN).x.double().abs() * batch[Signal.OLD_ENTROPY].x.double()
        rows = inside.nonzero().squeeze(1)
        chosen = ~inside
        ranked = _descending(score[rows], batch.uniform_draws().x[rows])
        chosen[rows[ranked[: ceiling(self.kept.share(batch) * len(rows))]]] = True
        return {self: Field(batch.tree, TOKEN, chosen)}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view[self]


@dataclass(frozen=True)
class HighestEntropyTurns(Mask):
    """The turns of each group whose mean token entropy, at the start of the batch, is among the highest ``share``."""

    reads = frozenset({Signal.OLD_ENTROPY})

    share: float = number(0.8, above=0, most=1, why="which part of a group's turns is trained on")

    reason = "a turn of low entropy"

    def plan(self, view: StepView) -> dict[object, Field]:
        batch, tree = view.batch, view.batch.tree
        entropy = batch[Signal.OLD_ENTROPY].mean(TURN).x
        rows = (tree.size(TOKEN, TURN).x > 0).nonzero().squeeze(1)
        group = tree.ancestor(TURN, GROUP)[rows]
        order = _descending(entropy[rows], batch.uniform_draws(TURN).x[rows])
        order = order[torch.argsort(group[order], stable=True)]  # by group, highest entropy first
        size = torch.bincount(group, minlength=tree.count(GROUP))
        begin = torch.nn.functional.pad(size.cumsum(0), (1, 0))[:-1]
        rank = torch.arange(len(order), device=order.device) - begin[group[order]]
        quota = torch.tensor([ceiling(self.share * n) for n in size.tolist()], device=rank.device)
        chosen = torch.zeros_like(entropy, dtype=torch.bool)
        chosen[rows[order[rank < quota[group[order]]]]] = True
        return {self: Field(tree, TURN, chosen)}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view[self]


def _descending(score: Tensor, ties: Tensor) -> Tensor:
    """Items from the largest score to the smallest; ``ties`` orders equal ones."""
    first = torch.argsort(ties, stable=True)
    return first[torch.argsort(score[first].double().round(decimals=DECIMALS), descending=True, stable=True)]


def ceiling(x: float) -> int:
    """The smallest integer that is not below x, but for rounding: 0.2 · 15 is 3."""
    return math.ceil(x - 1e-9)


__all__ = [
    "HighestEntropyTurns", "LargestAdvantageEntropy", "LargestVariance", "ShareSchedule", "ceiling", "max_variance_subset",
]  # fmt: skip
