"""Ranks, pairs, random orders and quantiles inside groups. The trajectory seed breaks ties, so packing does not
matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TRAJECTORY, Field, Tree, where
from turnwise.maths import segments
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def rank_in_group(batch: Batch, value: Field) -> Field:
    """0-based rank of each trajectory in ascending order of a value inside its group; the seed breaks ties."""
    tree = batch.tree
    by_seed = torch.argsort(batch.seed.x, stable=True)
    order = by_seed[torch.argsort(value.x[by_seed], stable=True)]
    rank = segments.rank_within(tree.ancestor(TRAJECTORY, GROUP)[order], tree.count(GROUP))
    return Field(tree, TRAJECTORY, torch.empty_like(order).index_copy(0, order, rank))


def lower_median(batch: Batch, value: Field) -> Field:
    """The median of a group as one of its members: of an even number, the lower of the middle two. At GROUP."""
    middle = (batch.tree.size(TRAJECTORY, GROUP) - 1).map(lambda n: n // 2)
    is_median = (rank_in_group(batch, value) - middle).map(lambda gap: gap == 0)
    return where(is_median, value, 0.0).sum(GROUP)


def random_group_order(batch: Batch) -> Tensor:
    """The rank of each group in a random order of the groups, [G]: derived from the seeds of its trajectories."""
    keys = batch.seed.sum(GROUP).x % 2**32
    order = torch.argsort(keys, stable=True)
    return torch.empty_like(order).index_copy(0, order, torch.arange(order.numel(), device=order.device))


def ordered_pairs(tree: Tree) -> tuple[Tensor, Tensor]:
    """All ordered pairs (i, j) of trajectories of the same group, i = j included."""
    group, size = tree.ancestor(TRAJECTORY, GROUP), tree.size(TRAJECTORY, GROUP).x
    members = torch.argsort(group, stable=True)
    begin = (torch.cumsum(size, 0) - size)[group]
    left = torch.repeat_interleave(torch.arange(group.numel(), device=group.device), size[group])
    return left, members[begin[left] + segments.rank_within(left, group.numel())]


def segment_quantile(x: Tensor, label: Tensor, count: int, level: float) -> Tensor:
    """Empirical quantile of each segment, linear between neighbours, [count]. No segment may be empty."""
    by_value = torch.argsort(x, stable=True)
    ordered = x[by_value[torch.argsort(label[by_value], stable=True)]]
    n = segments.size(label, count)
    at = level * (n - 1).to(x.dtype)
    below = at.floor().long()
    start = torch.cumsum(n, 0) - n
    low, high = ordered[start + below], ordered[start + torch.minimum(below + 1, n - 1)]
    return low + (at - below) * (high - low)


__all__ = ["lower_median", "ordered_pairs", "random_group_order", "rank_in_group", "segment_quantile"]
