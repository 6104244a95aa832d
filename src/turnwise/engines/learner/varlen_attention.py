"""Variable-length attention in half precision on a GPU: sequences of different lengths in one call, without padding.

Legend: L positions, S sequences, H heads, D head size, U computed rows, M keys.

A prefix that several sequences share is computed once. Our kernels index its keys and values from every sequence; PyTorch's
flash attention, the fallback for sliding windows and unsupported head sizes, gets copies. The backward pass sums the gradients
of all copies. Knows boundaries and copies; knows neither models nor what the states are for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turnwise.core.transfer import to_device
from turnwise.engines import compat
from turnwise.engines.kernels.dispatch import attention_for, ops_for
from turnwise.engines.learner.shared_prefix import SharedPrefixes


@dataclass(frozen=True, eq=False)
class KeyCopies:
    """M keys that are copies of U rows: the row of each key, and the keys of row u, ``members[first[u]:first[u + 1]]``."""

    source: Tensor  # [M] int64
    first: Tensor  # [U + 1] int32
    members: Tensor  # [M] int32

    @classmethod
    def of(cls, source: Tensor, rows: int, end: Tensor | None = None) -> KeyCopies:
        """``end``: keys from this index on belong to no row."""
        here = torch.arange(max(rows + 1, len(source)), device=source.device)
        owner = source if end is None else source.where(here[: len(source)] < end, rows)
        ordered, members = owner.sort(stable=True)
        first = torch.searchsorted(ordered, here[: rows + 1])
        return cls(source, first.int(), members.int())


@dataclass(frozen=True, eq=False)
class VarlenAttention:
    """Sequence boundaries among queries and keys. Built on the host; kernels need ``to(device)``, with int32 boundaries."""

    cu_seqlens_q: Tensor  # [S + 1] cumulative lengths
    cu_seqlens_k: Tensor  # [S + 1]
    max_seqlen: tuple[int, int]  # of queries, of keys
    key_source: Tensor | None = None  # [M] the row that each key copies; None: key i is row i
    rows: int = 0  # U

    @classmethod
    def of(cls, start: Tensor, prefixes: SharedPrefixes) -> VarlenAttention:
        """The layout of sequences that start at ``start``. Queries of a shared prefix belong to the first sequence that has
        it."""
        lengths = start[1:] - start[:-1]
        queries = torch.searchsorted(prefixes.computed, start).diff()  # computed positions of each sequence
        active = queries > 0  # a sequence made of copies only has no queries
        shared = len(prefixes.computed) < len(prefixes.row_of)
        source = prefixes.row_of[active.repeat_interleave(lengths)] if shared else None
        queries, lengths = queries[active], lengths[active]
        cu_seqlens_q, cu_seqlens_k = (torch.cat([n.new_zeros(1), n.cumsum(0)]) for n in (queries, lengths))
        max_seqlen = (int(queries.max()), int(lengths.max()))
        return cls(cu_seqlens_q, cu_seqlens_k, max_seqlen, source, len(prefixes.computed))

    def to(self, device: torch.device | str) -> VarlenAttention:
        cu_seqlens_q, cu_seqlens_k = (
            to_device(x.to(torch.int32), device) for x in (self.cu_seqlens_q, self.cu_seqlens_k)
        )
        source = None if self.key_source is None else to_device(self.key_source, device)
        return VarlenAttention(cu_seqlens_q, cu_seqlens_k, self.max_seqlen, source, self.rows)

    @cached_property
    def copies(self) -> KeyCopies | None:
        """Keys grouped by the row they copy; keys after the last sequence belong to no row."""
        return None if self.key_source is None else KeyCopies.of(self.key_source, self.rows, self.cu_seqlens_k[-1])

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [1, H, L, D], k and v [1, Hkv, L, D] -> [1, L, H, D]: the call of stock layers."""
        q, k, v = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))
        return self.attend_rows(q, k, v, scale, window)[None]

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
        """q [L, H, D], k and v [L, Hkv, D] -> [L, H, D]. The last query of a sequence aligns with its last key."""
        kernels = attention_for(q, q.shape[2]) if window is None else None
        if kernels is not None:
            return _KernelAttention.apply(q, k, v, self, kernels, scale)
        if self.copies is not None:
            k, v = _ExpandKeys.apply(k, v, self.copies)
        boundaries = (self.cu_seqlens_q, self.cu_seqlens_k)
        return compat.flash_attention_varlen(q, k, v, *boundaries, self.max_seqlen, scale, window)

    @staticmethod
    def fuses_rotary(x: Tensor, size: int) -> bool:
        """Whether ``attend_fused_qkv`` supports heads of this size on the device of x."""
        return attention_for(x, size) is not None

    def attend_fused_qkv(
        self,
        qkv: Tensor,
        keys: int,
        cos: Tensor,
        sin: Tensor,
        scale: float,
        again: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Fused qkv [L, H + 2 Hkv, D] -> [L, H, D]. Applies rotary angles [L, D/2] to q and k in place. The gradient comes back
        fused and already rotated back, as the qkv projection needs it. ``again``: a function and a residual stream, which with
        the angles give the rotated qkv in the backward pass; it is then not kept."""
        function, stream = (None, None) if again is None else again
        return _RotaryKernelAttention.apply(qkv, cos, sin, self, keys, scale, function, stream)

    def kernel_args(self, scale: float) -> tuple[Any, ...]:
        """The layout arguments of a kernel."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.key_source, self.max_seqlen, scale


class _ExpandKeys(torch.autograd.Function):
    """Copy k and v [U, ...] to every key; the backward pass sums the copies' gradients in float32, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, copies: KeyCopies) -> tuple[Tensor, Tensor]:
        ctx.copies, ctx.ops = copies, ops_for(k)
        return ctx.ops.gather_copies(k, v, copies.source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.ops.sum_copies(dk, dv, ctx.copies.first, ctx.copies.members), None


class _KernelAttention(torch.autograd.Function):
    """Attention by our kernels, which index keys and values in place."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: VarlenAttention, kernels: ModuleType, scale: float
    ) -> Tensor:
        ctx.kernels, ctx.kernel_args, ctx.copies = kernels, layout.kernel_args(scale), layout.copies
        out, stats = kernels.forward(q, k, v, *ctx.kernel_args)
        ctx.save_for_backward(q, k, v, out, stats)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        dq, dk, dv = ctx.kernels.backward(d_out, *ctx.saved_tensors, *ctx.kernel_args)
        if ctx.copies is not None:
            dk, dv = ops_for(dk).sum_copies(dk, dv, ctx.copies.first, ctx.copies.members)
        return dq, dk, dv, None, None, None


class _RotaryKernelAttention(torch.autograd.Function):
    """The same for fused qkv, with rotary embedding of q and k first."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, layout: VarlenAttention, keys: int, scale: float,
        again: Callable[[Tensor, Tensor, Tensor], Tensor] | None, stream: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.ops, ctx.kernels = ops_for(qkv), attention_for(qkv, qkv.shape[2])
        ctx.parts = [qkv.shape[1] - 2 * keys, keys, keys]
        ctx.kernel_args, ctx.copies = layout.kernel_args(scale), layout.copies
        # In place: qkv has no other reader.
        ctx.ops.rotate_(qkv.flatten(1), cos, sin, qkv.shape[1] - keys, qkv.shape[2])
        out, stats = ctx.kernels.forward(*qkv.split(ctx.parts, 1), *ctx.kernel_args)
        ctx.again = again
        ctx.save_for_backward(qkv if again is None else stream, cos, sin, out, stats)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        kept, cos, sin, out, stats = ctx.saved_tensors
        qkv = kept if ctx.again is None else ctx.again(kept, cos, sin)
        d, d_out = torch.empty_like(qkv), d_out.contiguous()
        (q, k, v), (dq, dk, dv) = qkv.split(ctx.parts, 1), d.split(ctx.parts, 1)
        ctx.kernels.d_queries(d_out, q, k, v, out, stats, *ctx.kernel_args, dq, (cos, sin))
        args = (d_out, q, k, v, stats, *ctx.kernel_args)
        if ctx.copies is None:
            ctx.kernels.d_keys(*args, dk, dv, (cos, sin))
        else:  # sum the copies of each row, then rotate back
            per_key = d.new_empty(2, len(ctx.copies.source), *dk.shape[1:])
            ctx.kernels.d_keys(*args, *per_key)
            ctx.ops.sum_copies(*per_key, ctx.copies.first, ctx.copies.members, (dk, dv), (cos, sin))
        return d, None, None, None, None, None, None, None
