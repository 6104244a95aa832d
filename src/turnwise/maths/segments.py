"""Reductions of a packed vector over labelled segments. Pure tensor functions, linear in the length.

Legend: ``x`` [n] values, ``label`` [n] the segment of each (int64, any order), ``count`` the number of segments.

The corner cases are decided here and nowhere else:

    an empty segment      sum, mean, min, max, median 0; std 0; count 0
    a single item         std 0; leave-one-out mean 0
    zero spread           std 0 (the caller adds an epsilon before it divides)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def size(label: Tensor, count: int) -> Tensor:
    """How many items each segment holds, [count] int64."""
    if label.is_cuda:  # bincount needs the largest label on the host, which would synchronise
        return label.new_zeros(count).index_add(0, label, torch.ones_like(label))
    return torch.bincount(label, minlength=count)


def total(x: Tensor, label: Tensor, count: int) -> Tensor:
    """Σ x over each segment. Differentiable."""
    return x.new_zeros(count).index_add(0, label, x)


def mean(x: Tensor, label: Tensor, count: int) -> Tensor:
    """Mean over each segment; 0 where it is empty. Differentiable."""
    return total(x, label, count) / size(label, count).clamp(min=1)


def extreme(x: Tensor, label: Tensor, count: int, *, largest: bool) -> Tensor:
    """Largest or smallest value of each segment; 0 where it is empty. Differentiable (ties share)."""
    return x.new_zeros(count).scatter_reduce(0, label, x, "amax" if largest else "amin", include_self=False)


def std(x: Tensor, label: Tensor, count: int, *, correction: int = 1) -> Tensor:
    """Standard deviation with n − correction in the denominator; 0 for a single item.

    Two passes: the one-pass E[x²] − E[x]² loses all digits when the mean is large."""
    deviation = x - mean(x, label, count)[label]
    degrees = (size(label, count) - correction).clamp(min=1)
    return (total(deviation * deviation, label, count) / degrees).sqrt()


def median(x: Tensor, label: Tensor, count: int) -> Tensor:
    """Median of each segment; the mean of the middle two when even; 0 where empty."""
    n = size(label, count)
    widest = int(n.max()) if count else 0
    if x.numel() == 0:
        return x.new_zeros(count)
    if widest * count <= 4 * x.numel():  # nearly equal sizes: sort short rows, several times faster than one long sort
        rows = x.new_full((count, widest), torch.inf)
        rows[label, rank_within(label, count)] = x
        ordered, start = rows.sort(1).values.view(-1), torch.arange(count, device=x.device) * widest
    else:
        by_value = torch.argsort(x, stable=True)
        ordered, start = x[by_value[torch.argsort(label[by_value], stable=True)]], torch.cumsum(n, 0) - n
    last = ordered.numel() - 1
    low = ordered[(start + (n - 1).clamp(min=0) // 2).clamp(max=last)]
    high = ordered[(start + n // 2).clamp(max=last)]
    return torch.where(n > 0, (low + high) / 2, 0)


def leave_one_out(x: Tensor, label: Tensor, count: int) -> Tensor:
    """For each item the mean of the *others* of its segment, [n]; 0 for a single item."""
    others = (size(label, count)[label] - 1).clamp(min=1)
    sum_of_others = total(x, label, count)[label] - x
    return torch.where(size(label, count)[label] > 1, sum_of_others / others, 0)


def _in_segment_order(label: Tensor) -> Tensor | None:
    """A stable order that makes segments contiguous; None where they already are (the usual packing)."""
    if not label.is_cuda and bool((label[1:] >= label[:-1]).all()):  # on a GPU sorting is cheaper than synchronising
        return None
    return torch.argsort(label, stable=True)


def rank_within(label: Tensor, count: int) -> Tensor:
    """0-based position of each item among the items of its segment, in packed order, [n]."""
    n = size(label, count)
    start = torch.cumsum(n, 0) - n
    index = torch.arange(label.numel(), device=label.device)
    order = _in_segment_order(label)
    if order is None:
        return index - start[label]
    return torch.empty_like(label).index_copy(0, order, index - start[label[order]])


def running_sum(x: Tensor, label: Tensor, count: int, *, reverse: bool = False) -> Tensor:
    """Inclusive cumulative sum inside each segment, in packed order, [n]. In float64: the sum runs over the whole batch."""
    order = _in_segment_order(label)
    values, owner = (x.double(), label) if order is None else (x[order].double(), label[order])
    sums = torch.cumsum(values, 0)
    n = size(label, count)
    before = torch.cat([sums.new_zeros(1), sums])[torch.cumsum(n, 0) - n]
    inside = sums - before[owner]
    if reverse:
        inside = total(values, owner, count)[owner] - inside + values
    if order is not None:
        inside = torch.empty_like(inside).index_copy(0, order, inside)
    return inside.to(x.dtype)


def rank_by_value(x: Tensor, label: Tensor, count: int) -> Tensor:
    """0-based rank of each item in ascending order of x inside its segment, [n]; ties keep their order."""
    order = torch.argsort(x, stable=True)
    order = order[torch.argsort(label[order], stable=True)]
    return torch.empty_like(label).index_copy(0, order, rank_within(label[order], count))
