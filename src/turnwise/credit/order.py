"""Orders inside groups: places, pairs, lots and quantiles. Ties go by the trajectory's own number, whatever the packing."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TRAJECTORY, Field, Tree, where
from turnwise.maths import segments


def place(batch: Batch, value: Field) -> Field:
    """0-based place of each trajectory in ascending order of a value inside its group; equal values by its number."""
    tree = batch.tree
    by_number = torch.argsort(batch.seed.x, stable=True)
    order = by_number[torch.argsort(value.x[by_number], stable=True)]
    inside = segments.rank_within(tree.ancestor(TRAJECTORY, GROUP)[order], tree.count(GROUP))
    return Field(tree, TRAJECTORY, torch.empty_like(order).index_copy(0, order, inside))


def lower_median(batch: Batch, value: Field) -> Field:
    """The median of a group as one of its members: of an even number, the lower of the middle two. At GROUP."""
    middle = (batch.tree.size(TRAJECTORY, GROUP) - 1).map(lambda n: n // 2)
    here = (place(batch, value) - middle).map(lambda gap: gap == 0)
    return where(here, value, 0.0).sum(GROUP)


def group_lots(batch: Batch) -> Tensor:
    """The place of each group when the groups are drawn by lot, [G]: the numbers of its trajectories decide."""
    lots = batch.seed.sum(GROUP).x % 2**32
    order = torch.argsort(lots, stable=True)
    return torch.empty_like(order).index_copy(0, order, torch.arange(order.numel(), device=order.device))


def pairs(tree: Tree) -> tuple[Tensor, Tensor]:
    """All ordered pairs (i, j) of trajectories of the same group, i = j included."""
    group, size = tree.ancestor(TRAJECTORY, GROUP), tree.size(TRAJECTORY, GROUP).x
    members = torch.argsort(group, stable=True)
    begin = (torch.cumsum(size, 0) - size)[group]
    left = torch.repeat_interleave(torch.arange(group.numel(), device=group.device), size[group])
    return left, members[begin[left] + segments.rank_within(left, group.numel())]


def quantile(x: Tensor, label: Tensor, count: int, level: float) -> Tensor:
    """Empirical quantile of each segment, linear between neighbours, [count]. No segment is empty."""
    by_value = torch.argsort(x, stable=True)
    ordered = x[by_value[torch.argsort(label[by_value], stable=True)]]
    n = segments.size(label, count)
    at = level * (n - 1).to(x.dtype)
    below = at.floor().long()
    start = torch.cumsum(n, 0) - n
    low, high = ordered[start + below], ordered[start + torch.minimum(below + 1, n - 1)]
    return low + (at - below) * (high - low)


__all__ = ["group_lots", "lower_median", "pairs", "place", "quantile"]
