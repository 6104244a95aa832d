"""Which positions of packed sequences have read the same ids so far: a causal model need compute them only once.

The trajectories of a group begin with the same prompt, so a fifth to a half of what a learner reads it would read again.
Exact: ids are compared, not hashed. Knows ids and boundaries; neither models nor what the states are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shared:
    """L packed positions, of which U are read. Every other one is a copy of one of those."""

    first: Tensor  # [U] the packed positions that are read, ascending
    row: Tensor  # [L] which of the U each position is

    @classmethod
    def of(cls, ids: Tensor, start: Tensor) -> Shared:
        source = _sources(ids, start)
        own = source == torch.arange(source.numel(), device=ids.device)
        return cls(own.nonzero().squeeze(1), (own.cumsum(0) - 1)[source])

    @classmethod
    def none(cls, ids: Tensor) -> Shared:
        """Every position is read."""
        here = torch.arange(ids.numel(), device=ids.device)
        return cls(here, here)


def _sources(ids: Tensor, start: Tensor) -> Tensor:
    """For each position the one that is read in its stead.

    In alphabetical order, what a sequence shares with any earlier one it shares with the one right before it."""
    numbers, ends = ids.cpu().numpy(), start.tolist()
    text, size = numbers.astype(">i4").tobytes(), 4  # big-endian, so that bytes sort as numbers do
    source = np.arange(len(numbers))
    before: tuple[int, int] | None = None
    for a, b in sorted(pairwise(ends), key=lambda ab: text[size * ab[0] : size * ab[1]]):
        if before is not None:
            span = min(b - a, before[1] - before[0])
            apart = np.flatnonzero(numbers[a : a + span] != numbers[before[0] : before[0] + span])
            same = int(apart[0]) if len(apart) else span
            source[a : a + same] = source[before[0] : before[0] + same]
        before = (a, b)
    return torch.from_numpy(source).to(ids.device)


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
