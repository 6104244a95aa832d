"""Which positions of packed sequences have read the same ids so far: a causal model need compute them only once.

The trajectories of a group begin with the same prompt, so a fifth to a half of what a learner reads it would read again.
Exact: ids are compared, not hashed. Knows ids and boundaries; neither models nor what the states are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shared:
    """L packed positions, of which U are read. Every other one is a copy of one of those."""

    first: Tensor  # [U] the packed positions that are read, ascending
    row: Tensor  # [L] which of the U each position is

    @classmethod
    def of(cls, ids: Tensor, start: Tensor) -> Shared:
        source = _sources(ids.cpu(), start.cpu()).to(ids.device)
        here = torch.arange(source.numel(), device=ids.device)
        first = (source == here).nonzero().squeeze(1)
        return cls(first, torch.searchsorted(first, source))

    def spread(self, x: Tensor) -> Tensor:
        """[U, ...] -> [L, ...]."""
        return x if self.first.numel() == self.row.numel() else Copy(self, torch.arange(len(self.row))).spread(x)


def _sources(ids: Tensor, start: Tensor) -> Tensor:
    """For each position the first one with the same past, column by column until no two sequences agree."""
    source = torch.arange(ids.numel())
    begin, lengths = start[:-1], start[1:] - start[:-1]
    alive, past = torch.arange(begin.numel()), torch.zeros_like(begin)
    column, span = 0, int(ids.max()) + 1 if ids.numel() else 1
    while alive.numel() > 1:
        longer = lengths[alive] > column
        alive, past = alive[longer], past[longer]
        at = begin[alive] + column
        seen, past, count = torch.unique(past * span + ids[at], return_inverse=True, return_counts=True)
        leader = torch.full_like(seen, begin.numel()).scatter_reduce(0, past, alive, "amin")
        source[at] = begin[leader[past]] + column
        twins = count[past] > 1
        alive, past = alive[twins], past[twins]
        column += 1
    return source


class Copy:
    """Rows [U, ...] to places [P, ...]: position i of L goes to ``slot[i]``, what is between repeats the first row."""

    def __init__(self, shared: Shared, slot: Tensor, total: int | None = None) -> None:
        place = slot.to(shared.row.device)
        self.source = torch.zeros(total or len(slot), dtype=torch.int64, device=place.device)
        self.source[place] = shared.row
        self.home = place[shared.first]  # [U] where each row's first copy lies
        again = torch.ones_like(shared.row, dtype=torch.bool).index_fill_(0, shared.first, False)
        self.others, self.rows = place[again], shared.row[again]

    def spread(self, x: Tensor) -> Tensor:
        return _Spread.apply(x, self)

    def take(self, x: Tensor) -> Tensor:
        """[P, ...] -> [U, ...]: copies are alike, the first one speaks for all."""
        return _Take.apply(x, self)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copy: Copy) -> Tensor:
        ctx.copy = copy
        return x.index_select(0, copy.source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.index_select(0, ctx.copy.home)
        if ctx.copy.others.numel():
            own.index_add_(0, ctx.copy.rows, grad.index_select(0, ctx.copy.others))
        return own, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copy: Copy) -> Tensor:
        ctx.copy, ctx.total = copy, x.shape[0]
        return x.index_select(0, copy.home)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.total, *grad.shape[1:]).index_copy_(0, ctx.copy.home, grad), None
