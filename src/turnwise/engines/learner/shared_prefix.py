"""Prefix sharing: find packed positions with identical prefixes, so that a causal model computes each distinct prefix once.

The trajectories of a group start with the same prompt, so a fifth to a half of a learner's positions would be recomputed.
Exact: ids are compared, not hashed. Knows ids and boundaries; knows neither models nor what the states are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """L packed positions, of which U are computed. Every other position is a copy of one of those."""

    computed: Tensor  # [U] the packed positions that are computed, ascending
    row_of: Tensor  # [L] the index of each position among the U

    @classmethod
    def of(cls, ids: Tensor, start: Tensor) -> SharedPrefixes:
        source = _sources(ids, start)
        distinct = source == torch.arange(source.numel(), device=ids.device)
        return cls(distinct.nonzero().squeeze(1), (distinct.cumsum(0) - 1)[source])

    @classmethod
    def unshared(cls, ids: Tensor) -> SharedPrefixes:
        """Compute every position."""
        here = torch.arange(ids.numel(), device=ids.device)
        return cls(here, here)


def _sources(ids: Tensor, start: Tensor) -> Tensor:
    """For each position, the position that is computed in its place.

    In lexicographic order the longest prefix that a sequence shares with any earlier one is shared with its predecessor."""
    numbers, ends = ids.cpu().numpy(), start.tolist()
    text, size = numbers.astype(">i4").tobytes(), 4  # big-endian, so that bytes sort as numbers do
    source = np.arange(len(numbers))
    previous: tuple[int, int] | None = None
    for a, b in sorted(pairwise(ends), key=lambda ab: text[size * ab[0] : size * ab[1]]):
        if previous is not None:
            span = min(b - a, previous[1] - previous[0])
            different = np.flatnonzero(numbers[a : a + span] != numbers[previous[0] : previous[0] + span])
            common = int(different[0]) if len(different) else span
            source[a : a + common] = source[previous[0] : previous[0] + common]
        previous = (a, b)
    return torch.from_numpy(source).to(ids.device)


class PaddingMap:
    """Maps rows [U, ...] to padded slots [P, ...]: position i of L goes to ``slot[i]``; padding slots repeat the first row."""

    def __init__(self, prefixes: SharedPrefixes, slot: Tensor, total: int | None = None) -> None:
        slot = slot.to(prefixes.row_of.device)
        self.source = torch.zeros(total or len(slot), dtype=torch.int64, device=slot.device)
        self.source[slot] = prefixes.row_of
        self.first_slot = slot[prefixes.computed]  # [U] the slot of each row's first copy
        is_copy = torch.ones_like(prefixes.row_of, dtype=torch.bool).index_fill_(0, prefixes.computed, False)
        self.copy_slots, self.copy_rows = slot[is_copy], prefixes.row_of[is_copy]

    def scatter(self, x: Tensor) -> Tensor:
        return _Scatter.apply(x, self)

    def gather(self, x: Tensor) -> Tensor:
        """[P, ...] -> [U, ...]. All copies of a row are equal, so the first one suffices."""
        return _Gather.apply(x, self)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, padding_map: PaddingMap) -> Tensor:
        ctx.padding_map = padding_map
        return x.index_select(0, padding_map.source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        m = ctx.padding_map
        total = grad.index_select(0, m.first_slot)
        if m.copy_slots.numel():
            total.index_add_(0, m.copy_rows, grad.index_select(0, m.copy_slots))
        return total, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, padding_map: PaddingMap) -> Tensor:
        ctx.padding_map, ctx.total = padding_map, x.shape[0]
        return x.index_select(0, padding_map.first_slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.total, *grad.shape[1:]).index_copy_(0, ctx.padding_map.first_slot, grad), None
