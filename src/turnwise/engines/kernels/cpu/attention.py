"""Attention over packed sequences and over the KV cache with C kernels: no padding, no copies of shared prefixes.

Legend: L packed positions, U of them computed, H query heads, K key heads, D head size. Knows neither models nor requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turnwise.engines.kernels.cpu import layers
from turnwise.engines.kernels.cpu.build import library
from turnwise.engines.kernels.cpu.layers import one_buffer, pointer

MAX_KEYS = 512  # with more keys, matrix products over blocks are faster than one key after another
HEAD_MULTIPLE = 8  # head sizes must be multiples of the widest vector that a kernel uses


@dataclass(frozen=True, eq=False)
class Packing:
    """The rows that each sequence attends to, and those that it computes."""

    row: Tensor  # [L] which of the U rows each position is
    start: Tensor  # [S + 1]
    owned: Tensor  # [L] bytes: 1 where the position's output is computed
    longest: int

    @classmethod
    def of(cls, row: Tensor, first: Tensor, start: Tensor) -> Packing:
        owned = torch.zeros(len(row), dtype=torch.uint8)
        owned[first] = 1
        return cls(row.contiguous(), start.contiguous(), owned, int((start[1:] - start[:-1]).max()))


def fits(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> bool:
    """Whether the kernels support these tensors."""
    supported = q.shape[2] == v.shape[2] and q.shape[2] % HEAD_MULTIPLE == 0 and q.shape[1] % k.shape[1] == 0
    return supported and packing.longest <= MAX_KEYS and all(map(layers.fits, (q, k, v)))


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, packing: Packing) -> Tensor:
    """q [U, H, D], k and v [U, K, D] -> [U, H, D]."""
    return _VarlenAttention.apply(q, k, v, scale, packing)


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, packing: Packing) -> Tensor:
        if one_buffer(q, k, v) is None:
            q, k, v = torch.cat((q, k, v), 1).split([q.shape[1], k.shape[1], v.shape[1]], 1)
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2])
        rows = (pointer(packing.row), pointer(packing.start), pointer(packing.owned))
        sizes = (len(packing.start) - 1, packing.longest, q.shape[1], k.shape[1], q.shape[2], q.stride(0))
        _lib().varlen_attention(pointer(q), pointer(k), pointer(v), *rows, pointer(out), pointer(lse), *sizes, scale)
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
        rows = (pointer(packing.row), pointer(packing.start), pointer(packing.owned))
        sizes = (len(packing.start) - 1, packing.longest, *heads[:2], q.shape[2], whole.stride(0), q.stride(0))
        grads = (pointer(out), pointer(lse), pointer(d_out), pointer(dq), pointer(dk), pointer(dv))
        _lib().varlen_attention_backward(pointer(q), pointer(k), pointer(v), *rows, *grads, *sizes, ctx.scale)
        return dq, dk, dv, None, None


def rope_and_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, row: Tensor, position: Tensor, keys: Tensor, values: Tensor,
    table: Tensor | None = None,
) -> None:  # fmt: skip
    """Rotate the queries and keys of qkv [n, (H + 2K) D] in place; copy keys and values to their columns of the cache
    [rows, K, T, D]. cos and sin [context, D/2]. ``table``: int32 [rows, pages] the pages of T columns that a row has, where
    the cache is [pages, K, T, D]."""
    _, heads, width, size = keys.shape
    query_heads = qkv.shape[1] // size - 2 * heads
    pages, per_row = table_pointer(table)
    inputs = (pointer(row), pointer(position), pages, pointer(keys), pointer(values))
    sizes = (qkv.shape[0], query_heads, heads, size, width, per_row)
    _lib().rope_and_cache(pointer(qkv), pointer(cos), pointer(sin), *inputs, *sizes)


def table_pointer(table: Tensor | None) -> tuple[int | None, int]:
    """A block table's address and pages per row."""
    return (None, 0) if table is None else (pointer(table), table.shape[1])


def cached_attention(
    qkv: Tensor, row: Tensor, position: Tensor, keys: Tensor, values: Tensor, longest: int, scale: float,
    table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of every token over the columns of its row up to its own, [n, H D]. ``longest``: at least the largest
    position + 1. ``table``: as in ``rope_and_cache``."""
    _, heads, width, size = keys.shape
    query_heads = qkv.shape[1] // size - 2 * heads
    out = qkv.new_empty(qkv.shape[0], query_heads * size)
    pages, per_row = table_pointer(table)
    inputs = (pointer(qkv), pointer(row), pointer(position), pages, pointer(keys), pointer(values))
    sizes = (qkv.shape[0], longest, query_heads, heads, size, width, per_row)
    _lib().cached_attention(*inputs, pointer(out), *sizes, scale)
    return out


def _lib() -> Any:
    return library()[0]
