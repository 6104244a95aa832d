"""Attention over packed sequences and over KV slots by C kernels: no padding, no copies of what siblings share.

Legend: L packed positions, U of them read, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turnwise.engines.kernels.cpu import layers
from turnwise.engines.kernels.cpu.build import library
from turnwise.engines.kernels.cpu.layers import at, one_buffer

LONGEST = 512  # beyond, products of whole blocks of keys are faster than one key after another
STEP = 8  # head sizes must be multiples of the widest vector a kernel may use


@dataclass(frozen=True, eq=False)
class Packing:
    """Which rows each sequence reads, and which of them it asks for."""

    row: Tensor  # [L] which of the U each position is
    start: Tensor  # [S + 1]
    owned: Tensor  # [L] bytes: 1 where the position is the one that is read
    longest: int

    @classmethod
    def of(cls, row: Tensor, first: Tensor, start: Tensor) -> Packing:
        owned = torch.zeros(len(row), dtype=torch.uint8)
        owned[first] = 1
        return cls(row.contiguous(), start.contiguous(), owned, int((start[1:] - start[:-1]).max()))


def fits(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> bool:
    """Whether such heads are for the kernel."""
    alike = q.shape[2] == v.shape[2] and q.shape[2] % STEP == 0 and q.shape[1] % k.shape[1] == 0
    return alike and packing.longest <= LONGEST and all(map(layers.fits, (q, k, v)))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, packing: Packing) -> Tensor:
    """q [U, H, D], k and v [U, K, D] -> [U, H, D]."""
    return _Attend.apply(q, k, v, scale, packing)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, packing: Packing) -> Tensor:
        if one_buffer(q, k, v) is None:
            q, k, v = torch.cat((q, k, v), 1).split([q.shape[1], k.shape[1], v.shape[1]], 1)
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2])
        rows = (at(packing.row), at(packing.start), at(packing.owned))
        sizes = (len(packing.start) - 1, packing.longest, q.shape[1], k.shape[1], q.shape[2], q.stride(0))
        _lib().attend(at(q), at(k), at(v), *rows, at(out), at(lse), *sizes, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.packing = scale, packing
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        packing: Packing = ctx.packing
        d_out = d_out.contiguous()
        heads = (q.shape[1], k.shape[1], v.shape[1])
        whole = q.new_zeros(len(q), sum(heads), q.shape[2])
        dq, dk, dv = whole.split(heads, 1)
        rows = (at(packing.row), at(packing.start), at(packing.owned))
        sizes = (len(packing.start) - 1, packing.longest, *heads[:2], q.shape[2], whole.stride(0), q.stride(0))
        grads = (at(out), at(lse), at(d_out), at(dq), at(dk), at(dv))
        _lib().attend_backward(at(q), at(k), at(v), *rows, *grads, *sizes, ctx.scale)
        return dq, dk, dv, None, None


def seat(qkv: Tensor, cos: Tensor, sin: Tensor, row: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> None:
    """Turn the queries and keys of qkv [n, (H + 2K) D] in place; keys and values to their columns of slots [rows, K, T, D].
    cos and sin [context, D/2]."""
    _, heads, width, size = keys.shape
    asks = qkv.shape[1] // size - 2 * heads
    places = (at(row), at(position), at(keys), at(values))
    _lib().seat(at(qkv), at(cos), at(sin), *places, qkv.shape[0], asks, heads, size, width)


def look(
    qkv: Tensor, row: Tensor, position: Tensor, keys: Tensor, values: Tensor, longest: int, scale: float
) -> Tensor:
    """Every token to all columns of its row up to its own, [n, H D]. ``longest``: at least the largest position + 1."""
    _, heads, width, size = keys.shape
    asks = qkv.shape[1] // size - 2 * heads
    out = qkv.new_empty(qkv.shape[0], asks * size)
    places = (at(qkv), at(row), at(position), at(keys), at(values))
    _lib().look(*places, at(out), qkv.shape[0], longest, asks, heads, size, width, scale)
    return out


def _lib() -> Any:
    return library()[0]
