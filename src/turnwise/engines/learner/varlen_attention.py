"""Ragged sequences in one call of attention, in half precision on a GPU: nothing is padded.

Legend: L positions, S sequences, H heads, D width, U rows that are read, M keys.

A beginning that several sequences share is read once. Our kernels look its keys and values up for all of them; torch's flash
attention, which serves windows and heads that those do not know, gets copies. What flows back from each is summed.
Knows boundaries and copies; neither models nor what the states are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turnwise.core.levels import send
from turnwise.engines.kernels.dispatch import attention_for, ops_for
from turnwise.engines.learner.shared_prefix import Shared


@dataclass(frozen=True, eq=False)
class Copies:
    """M keys that are copies of U rows: which row each is of, and the copies of each row, ``members[first[u]:first[u + 1]]``."""

    source: Tensor  # [M] int64
    first: Tensor  # [U + 1] int32
    members: Tensor  # [M] int32

    @classmethod
    def of(cls, source: Tensor, rows: int, end: Tensor | None = None) -> Copies:
        """``end``: from this key on they are nobody's."""
        here = torch.arange(max(rows + 1, len(source)), device=source.device)
        owner = source if end is None else source.where(here[: len(source)] < end, rows)
        ordered, members = owner.sort(stable=True)
        first = torch.searchsorted(ordered, here[: rows + 1])
        return cls(source, first.int(), members.int())


@dataclass(frozen=True, eq=False)
class Ragged:
    """Where ragged sequences begin among queries and keys, [S + 1], and which of U ``rows`` each key is a copy of, [M] (None:
    each is its own). It is made on the host; kernels want it on their device, with boundaries in int32."""

    queries: Tensor
    keys: Tensor
    longest: tuple[int, int]
    source: Tensor | None = None
    rows: int = 0

    @classmethod
    def of(cls, start: Tensor, shared: Shared) -> Ragged:
        """The layout of sequences that begin at ``start``. The queries of a shared beginning are asked once, by the first
        sequence that has it."""
        lengths = start[1:] - start[:-1]
        queries = torch.searchsorted(shared.first, start).diff()  # how many of each sequence's positions are read
        asks = queries > 0  # a sequence that is all copy asks nothing
        copied = len(shared.first) < len(shared.row)
        source = shared.row[asks.repeat_interleave(lengths)] if copied else None
        queries, lengths = queries[asks], lengths[asks]
        begin, keys = (torch.cat([n.new_zeros(1), n.cumsum(0)]) for n in (queries, lengths))
        return cls(begin, keys, (int(queries.max()), int(lengths.max())), source, len(shared.first))

    def to(self, device: torch.device | str) -> Ragged:
        queries, keys = (send(x.to(torch.int32), device) for x in (self.queries, self.keys))
        source = None if self.source is None else send(self.source, device)
        return Ragged(queries, keys, self.longest, source, self.rows)

    @cached_property
    def copies(self) -> Copies | None:
        """Whose copies the keys are; those behind the last sequence are nobody's."""
        return None if self.source is None else Copies.of(self.source, self.rows, self.keys[-1])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [1, H, L, D], k and v [1, Hkv, L, D] -> [1, L, H, D]: as stock layers ask."""
        q, k, v = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))
        return self.attend_rows(q, k, v, scale, window)[None]

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
        """q [L, H, D], k and v [L, Hkv, D] -> [L, H, D]. The last query of a sequence stands over its last key."""
        kernels = attention_for(q, q.shape[2]) if window is None else None
        if kernels is not None:
            return _Attended.apply(q, k, v, self, kernels, scale)
        if self.copies is not None:
            k, v = _Copied.apply(k, v, self.copies)
        sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        flash = torch.ops.aten._flash_attention_forward
        starts = (self.queries, self.keys)
        return flash(q, k, v, *starts, *self.longest, 0.0, True, False, scale=scale, **sides)[0]

    @staticmethod
    def turns(x: Tensor, size: int) -> bool:
        """Whether there is ``attend_product`` for heads of this size, where x lies."""
        return attention_for(x, size) is not None

    def attend_product(self, qkv: Tensor, keys: int, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
        """qkv [L, H + 2 Hkv, D] as a product leaves them -> [L, H, D]: q and k are turned by the angles [L, D/2] on the way, in
        place. Kernels leave the gradient as that product wants it: not in parts, and not turned."""
        return _Turned.apply(qkv, cos, sin, self, keys, scale)

    def where(self, scale: float) -> tuple[Any, ...]:
        """What kernels must know."""
        return self.queries, self.keys, self.source, self.longest, scale


class _Copied(torch.autograd.Function):
    """k and v [U, ...] to every key that is a copy of one; gradients of copies add up in float32, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, copies: Copies) -> tuple[Tensor, Tensor]:
        ctx.copies, ctx.ops = copies, ops_for(k)
        return ctx.ops.copies(k, v, copies.source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.ops.collect(dk, dv, ctx.copies.first, ctx.copies.members), None


class _Attended(torch.autograd.Function):
    """The kernels' attention: keys and values are looked up where they lie."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Ragged, kernels: ModuleType, scale: float) -> Tensor:
        ctx.kernels, ctx.where, ctx.copies = kernels, layout.where(scale), layout.copies
        out, stats = kernels.forward(q, k, v, *ctx.where)
        ctx.save_for_backward(q, k, v, out, stats)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        dq, dk, dv = ctx.kernels.backward(d_out, *ctx.saved_tensors, *ctx.where)
        if ctx.copies is not None:
            dk, dv = ops_for(dk).collect(dk, dv, ctx.copies.first, ctx.copies.members)
        return dq, dk, dv, None, None, None


class _Turned(torch.autograd.Function):
    """The same of a whole product, whose q and k are turned first."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, layout: Ragged, keys: int, scale: float) -> Tensor:
        ctx.ops, ctx.kernels = ops_for(qkv), attention_for(qkv, qkv.shape[2])
        ctx.parts, ctx.where, ctx.copies = [qkv.shape[1] - 2 * keys, keys, keys], layout.where(scale), layout.copies
        ctx.ops.rotate_(qkv.flatten(1), cos, sin, qkv.shape[1] - keys, qkv.shape[2])  # nobody else reads it
        out, stats = ctx.kernels.forward(*qkv.split(ctx.parts, 1), *ctx.where)
        ctx.save_for_backward(qkv, cos, sin, out, stats)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        qkv, cos, sin, out, stats = ctx.saved_tensors
        d, d_out = torch.empty_like(qkv), d_out.contiguous()
        (q, k, v), (dq, dk, dv) = qkv.split(ctx.parts, 1), d.split(ctx.parts, 1)
        ctx.kernels.d_queries(d_out, q, k, v, out, stats, *ctx.where, dq, (cos, sin))
        given = (d_out, q, k, v, stats, *ctx.where)
        if ctx.copies is None:
            ctx.kernels.d_keys(*given, dk, dv, (cos, sin))
        else:  # a row's copies are summed first
            each = d.new_empty(2, len(ctx.copies.source), *dk.shape[1:])
            ctx.kernels.d_keys(*given, *each)
            ctx.ops.collect(*each, ctx.copies.first, ctx.copies.members, (dk, dv), (cos, sin))
        return d, None, None, None, None, None
