"""How packed sequences attend: which positions are computed once for several sequences, and attention within the boundaries.

Legend: L packed positions, S sequences, H heads, D head size, U computed positions, M keys, P padded positions.

The trajectories of a group start with the same prompt, so a fifth to a half of a learner's positions would be recomputed:
``SharedPrefixes`` finds positions with identical prefixes, of which a causal model computes one. Ids are compared, not hashed.

``PackedLayout`` right-pads sequences of similar length into buckets. Under a causal mask no real position attends to the padding,
so plain causal attention is exact and needs no mask; the C kernels on a CPU need no padding either.
``VarlenAttention`` is for half precision on a GPU: sequences of different lengths in one call. Our kernels index the keys and
values of a shared prefix from every sequence; PyTorch's flash attention, the fallback for sliding windows and unsupported head
sizes, gets copies. The backward pass sums the gradients of all copies.

Knows ids, boundaries and copies; knows neither models nor what the states are for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from turnwise.core.transfer import to_device
from turnwise.engines import compat
from turnwise.engines.kernels import cpu
from turnwise.engines.kernels.dispatch import attention_for, ops_for

MIN_FILL = 0.75  # a bucket takes sequences down to this fraction of its longest ...
MAX_PADDING = 16  # ... or this many ids shorter, whichever admits more: another launch costs as much as some padding

# ------------------------------------------------------------- shared prefixes


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """L packed positions, of which U are computed. Every other position is a copy of one of those."""

    computed: Tensor  # [U] the packed positions that are computed, ascending
    row_of: Tensor  # [L] the index of each position among the U

    @classmethod
    def of(cls, ids: Tensor, start: Tensor) -> SharedPrefixes:
        """Compute what ids share at the beginning of sequences once."""
        numbers, ends = ids.cpu().numpy(), start.tolist()
        text, size = numbers.astype(">i4").tobytes(), 4  # big-endian, so that bytes sort as numbers do
        source = np.arange(len(numbers))  # of each position, the one that is computed in its place
        previous: tuple[int, int] | None = None
        # In lexicographic order the longest prefix that a sequence shares with any earlier one is shared with its predecessor.
        for a, b in sorted(pairwise(ends), key=lambda ab: text[size * ab[0] : size * ab[1]]):
            if previous is not None:
                span = min(b - a, previous[1] - previous[0])
                different = np.flatnonzero(numbers[a : a + span] != numbers[previous[0] : previous[0] + span])
                common = int(different[0]) if len(different) else span
                source[a : a + common] = source[previous[0] : previous[0] + common]
            previous = (a, b)
        distinct = torch.from_numpy(source == np.arange(len(source))).to(ids.device)
        return cls(distinct.nonzero().squeeze(1), (distinct.cumsum(0) - 1)[torch.from_numpy(source).to(ids.device)])

    @classmethod
    def unshared(cls, ids: Tensor) -> SharedPrefixes:
        """Compute every position."""
        here = torch.arange(ids.numel(), device=ids.device)
        return cls(here, here)


class PaddingMap:
    """Maps rows [U, ...] to padded slots [P, ...]: position i of L goes to ``slot[i]``; padding slots repeat the first row."""

    def __init__(self, prefixes: SharedPrefixes, slot: Tensor, total: int | None = None) -> None:
        slot = slot.to(prefixes.row_of.device)
        self.source = torch.zeros(total or len(slot), dtype=torch.int64, device=slot.device)
        self.source[slot] = prefixes.row_of
        self.first_slot = slot[prefixes.computed]  # [U] the slot of each row's first copy
        is_copy = torch.ones_like(prefixes.row_of, dtype=torch.bool).index_fill_(0, prefixes.computed, False)
        self.copy_slots, self.copy_rows = slot[is_copy], prefixes.row_of[is_copy]


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
    """[P, ...] -> [U, ...]. All copies of a row are equal, so the first one suffices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding_map: PaddingMap) -> Tensor:
        ctx.padding_map, ctx.total = padding_map, x.shape[0]
        return x.index_select(0, padding_map.first_slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.total, *grad.shape[1:]).index_copy_(0, ctx.padding_map.first_slot, grad), None


# -------------------------------------------------------------- padded buckets


class PackedLayout:
    """Causal attention within each packed sequence, by padded buckets. One layout serves all layers of a forward pass."""

    def __init__(self, start: Tensor, prefixes: SharedPrefixes | None = None) -> None:
        """``prefixes``: q, k and v hold the computed positions only, not their copies."""
        lengths = start[1:] - start[:-1]
        order = torch.argsort(lengths, stable=True)
        self.buckets = _buckets(lengths[order].tolist())
        padded = torch.tensor([t for rows, t in self.buckets for _ in range(rows)], dtype=torch.int64).to(start.device)
        offset = torch.empty_like(lengths)
        offset[order] = torch.cumsum(padded, 0) - padded
        total = int(padded.sum())
        here = torch.arange(int(start[-1]), device=start.device)
        slot = here + torch.repeat_interleave(offset - start[:-1], lengths)
        prefixes = prefixes or SharedPrefixes.unshared(here)
        self.slot = None if total == len(prefixes.computed) and torch.equal(slot, here) else slot
        self.padding_map = None if self.slot is None else PaddingMap(prefixes, slot, total)
        self._masks: dict[tuple[int, int], Tensor] = {}
        self.packing = cpu.Packing.of(prefixes.row_of, prefixes.computed, start) if start.device.type == "cpu" else None

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [1, H, L, D], k and v [1, Hkv, L, D] -> [1, L, H, D]."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self.attend_rows(q, k, v, scale, window)[None]

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
        """q [L, H, D], k and v [L, Hkv, D] -> [L, H, D]."""
        if self.packing is not None and window is None and cpu.attention_fits(q, k, v, self.packing):
            return cpu.varlen_attention(q, k, v, scale, self.packing)
        if self.padding_map is not None:
            q, k, v = (_Scatter.apply(x, self.padding_map) for x in (q, k, v))  # [P, H, D]
        parts, at = [], 0
        for rows, length in self.buckets:
            bucket = slice(at, at + rows * length)
            # [rows, H, length, D]
            a, b, c = (x[bucket].unflatten(0, (rows, length)).transpose(1, 2) for x in (q, k, v))
            mask = None
            if window is not None and length > window:  # the same for all layers of this window
                if (length, window) not in self._masks:
                    here = torch.arange(length, device=q.device)
                    distance = here[:, None] - here[None, :]
                    self._masks[length, window] = (distance >= 0) & (distance < window)
                mask = self._masks[length, window]
            plain = {"is_causal": mask is None, "scale": scale, "enable_gqa": a.shape[1] != b.shape[1]}
            parts.append(scaled_dot_product_attention(a, b, c, mask, **plain).transpose(1, 2).flatten(0, 1))
            at = bucket.stop
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self.padding_map is None else _Gather.apply(out, self.padding_map)


def _buckets(lengths: list[int]) -> list[tuple[int, int]]:
    """Ascending sequence lengths -> (sequences, padded length) of each bucket."""
    out: list[tuple[int, int]] = []
    rows, longest = 0, 0
    for length in reversed(lengths):
        if rows and length < longest * MIN_FILL and length < longest - MAX_PADDING:
            out.append((rows, longest))
            rows = 0
        longest = longest if rows else length
        rows += 1
    return [*([(rows, longest)] if rows else []), *reversed(out)]


# ------------------------------------------------------------- variable length


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
        """The layout of sequences that start at ``start``."""
        lengths = start[1:] - start[:-1]
        # computed positions of each sequence: queries of a shared prefix belong to the first sequence that has it
        queries = torch.searchsorted(prefixes.computed, start).diff()
        active = queries > 0  # a sequence made of copies only has no queries
        shared = len(prefixes.computed) < len(prefixes.row_of)
        source = prefixes.row_of[active.repeat_interleave(lengths)] if shared else None
        queries, lengths = queries[active], lengths[active]
        cu_seqlens_q, cu_seqlens_k = (torch.cat([n.new_zeros(1), n.cumsum(0)]) for n in (queries, lengths))
        max_seqlen = (int(queries.max()), int(lengths.max()))
        return cls(cu_seqlens_q, cu_seqlens_k, max_seqlen, source, len(prefixes.computed))

    def to(self, device: torch.device | str) -> VarlenAttention:
        cu_seqlens_q, cu_seqlens_k = (to_device(x.int(), device) for x in (self.cu_seqlens_q, self.cu_seqlens_k))
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

    def attend_fused_qkv(
        self, qkv: Tensor, keys: int, cos: Tensor, sin: Tensor, scale: float,
        again: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Fused qkv [L, H + 2 Hkv, D] -> [L, H, D], where ``attention_for`` has kernels. Applies rotary angles [L, D/2] to q and
        k in place. The gradient comes back fused and already rotated back, as the qkv projection needs it. ``again``: a function
        and a residual stream, which with the angles give the rotated qkv in the backward pass; it is then not kept."""
        function, stream = (None, None) if again is None else again
        return _RotaryKernelAttention.apply(qkv, cos, sin, self, keys, scale, function, stream)

    def kernel_args(self, scale: float) -> tuple[Any, ...]:
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
        saved, cos, sin, out, stats = ctx.saved_tensors
        qkv = saved if ctx.again is None else ctx.again(saved, cos, sin)
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
