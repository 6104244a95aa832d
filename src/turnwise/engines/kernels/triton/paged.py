"""Triton kernels over a KV cache in pages: attention of one new token per lane, and of prefilled chunks.

Legend: B lanes, H query heads, K key heads, G = H/K, D head size, P columns of a page. A block of columns lies in one page, so it
costs one look at the block table. A long row is split among programs, whose parts a second kernel combines: the longest
dialogue of a batch would hold all others up, and few rows would leave most of the GPU idle. A cache of rows is split by the same
kernel: its pages are as wide as a row and need no table. ``kernels.decode_reference`` computes the same in PyTorch. Knows no
model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.engines.kernels.triton.attention import EXACT, LOG2E, PLANS
from turnwise.engines.kernels.triton.decode_heads import DECODE_TILES, rotated_head

LOWEST = tl.constexpr(-1e30)  # not −inf: the difference of two infinities is NaN
PART = 1024  # columns of a part at least ...
MAX_PARTS = 16  # ... and parts of a row at most


@triton.jit
def _decode_attention(
    qkv, keys, values, table, cos, sin, qk_norm, position, out, partial, stats, scale, eps, context, pages, part_columns,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, G: tl.constexpr, PAD: tl.constexpr, P: tl.constexpr,
    NORM: tl.constexpr, SPLIT: tl.constexpr, TABLE: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    lane, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    column = tl.load(position + lane).to(tl.int32)
    if (column < 0) | (column >= context):
        return
    begin = part * part_columns
    if (part > 0) & (begin >= column):
        return
    end = tl.minimum(column, begin + part_columns)
    dtype = keys.dtype.element_ty
    g, d = tl.arange(0, PAD), tl.arange(0, D)[None, :]
    active = (g < G)[:, None]
    base = qkv + lane * (H + 2 * K) * D + g[:, None] * 0
    row = table + lane * pages
    c = tl.load(cos + column * D + d)
    s = tl.load(sin + column * D + d)
    query = (head * G + g % G)[:, None] * D
    q = rotated_head(base, query, active, c, s, qk_norm, eps, D, NORM).to(dtype)
    k = rotated_head(base, (H + head) * D, active, c, s, qk_norm, eps, D, NORM).to(dtype)
    v = tl.load(base + (H + K + head) * D + d, mask=active, other=0.0)
    first = part == 0  # this part writes the new key and value, and counts them
    new_page = tl.load(row + column // P).to(tl.int64) if TABLE else lane
    place = ((new_page * K + head) * P + column % P + g * 0)[:, None] * D + d
    one = first & (g == 0)[:, None]
    tl.store(keys + place, k, mask=one)
    tl.store(values + place, v, mask=one)
    best = tl.where(first, tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale, LOWEST)
    total = tl.where(first, tl.full((PAD,), 1.0, tl.float32), 0.0)
    weighted = tl.where(first, tl.zeros((PAD, D), tl.float32) + v.to(tl.float32), 0.0)
    for start in range(begin, end, BLOCK):
        n = tl.arange(0, BLOCK)
        cached = start + n < end
        page = tl.load(row + start // P).to(tl.int64) if TABLE else lane
        at = ((page * K + head) * P + start % P + n)[:, None] * D + d
        kk = tl.load(keys + at, mask=cached[:, None], other=0.0)
        score = tl.dot(q, tl.trans(kk), input_precision="ieee" if EXACT else "tf32") * scale  # [PAD, BLOCK]
        score = tl.where(cached[None, :], score, float("-inf"))
        top = tl.maximum(best, tl.max(score, axis=1))
        decay = tl.exp(best - top)
        p = tl.exp(score - top[:, None])
        vv = tl.load(values + at, mask=cached[:, None], other=0.0)
        weighted = weighted * decay[:, None] + tl.dot(p.to(dtype), vv, input_precision="ieee" if EXACT else "tf32")
        total = total * decay + tl.sum(p, axis=1)
        best = top
    if SPLIT:
        slot = (lane * tl.num_programs(2) + part) * H + head * G + g
        tl.store(partial + slot[:, None] * D + d, weighted, mask=active)
        tl.store(stats + slot * 2, best, mask=g < G)
        tl.store(stats + slot * 2 + 1, total, mask=g < G)
    else:
        tl.store(out + lane * H * D + query + d, (weighted / total[:, None]).to(out.dtype.element_ty), mask=active)


@triton.jit
def _combine(partial, stats, position, out, context, parts, part_columns, H: tl.constexpr, D: tl.constexpr):
    lane, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.load(position + lane).to(tl.int32)
    if (column < 0) | (column >= context):
        return
    d = tl.arange(0, D)
    best = LOWEST
    total = 0.0
    weighted = tl.zeros((D,), tl.float32)
    for part in range(tl.maximum(1, tl.cdiv(column, part_columns))):
        slot = (lane * parts + part) * H + head
        high = tl.load(stats + slot * 2)
        top = tl.maximum(best, high)
        old, new = tl.exp(best - top), tl.exp(high - top)
        total = total * old + tl.load(stats + slot * 2 + 1) * new
        weighted = weighted * old + tl.load(partial + slot * D + d) * new
        best = top
    tl.store(out + (lane * H + head) * D + d, (weighted / total).to(out.dtype.element_ty))


def part_size(context: int, block: int) -> int:
    """Columns of a part, whole blocks."""
    return triton.cdiv(max(PART, triton.cdiv(context, MAX_PARTS)), block) * block


def paged_decode_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, table: Tensor | None, context: int, cos: Tensor, sin: Tensor,
    qk_norm: Tensor | None, position: Tensor, out: Tensor, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """Rotate q and k of one new token per lane, write k and v into column ``position`` of its row, attend to all columns up to
    it. qkv [B, (H + 2K) D], keys and values [pages, K, P, D], out [B, H D]; ``table`` [rows, pages of a row] int32: the pages of
    every lane's row; None where page b is the whole row of lane b. Lanes with a position outside the context are inactive."""
    lanes, heads, page, size = out.shape[0], keys.shape[1], keys.shape[2], keys.shape[3]
    tile = next(tile for most, tile in DECODE_TILES.items() if lanes * heads <= most)
    block = min(tile.columns, page)
    queries, part = out.shape[1] // size, part_size(context, block)
    group, parts = queries // heads, triton.cdiv(context, part)
    partial, stats = out, out
    if parts > 1:
        partial = torch.empty(lanes, parts, queries, size, dtype=torch.float32, device=out.device)
        stats = torch.empty(lanes, parts, queries, 2, dtype=torch.float32, device=out.device)
    _decode_attention[(lanes, heads, parts)](
        qkv, keys, values, position if table is None else table, cos, sin, cos if qk_norm is None else qk_norm, position, out,
        partial, stats, scale, eps, context, 1 if table is None else table.shape[1], part,
        queries, heads, size, group, max(16, triton.next_power_of_2(group)), page, qk_norm is not None, parts > 1,
        table is not None, block, keys.dtype == torch.float32, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts > 1:
        _combine[(lanes, queries)](partial, stats, position, out, context, parts, part, queries, size, num_warps=1)
    return out


@triton.jit
def _prefill_attention(
    q, keys, values, table, out, boundaries, starts, rows, scale, pages,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, EXACT: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    chunk, query_head = tl.program_id(0) // H, tl.program_id(0) % H
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    q0 = tl.load(boundaries + chunk)
    count = (tl.load(boundaries + chunk + 1) - q0).to(tl.int32)
    if block * M >= count:
        return
    before = tl.load(starts + chunk).to(tl.int32)
    row = table + tl.load(rows + chunk).to(tl.int64) * pages
    head = query_head // (H // K)
    i, d = block * M + tl.arange(0, M), tl.arange(0, D)[None, :]
    here = (q0.to(tl.int64) + i)[:, None] * (H * D) + query_head * D + d
    qq = tl.load(q + here, mask=(i < count)[:, None], other=0.0)
    last = i + before
    end = tl.minimum(before + count, before + (block + 1) * M)
    best = tl.full((M,), LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    weighted = tl.zeros((M, D), tl.float32)
    for start in range(0, end, N):
        n = tl.arange(0, N)
        inside = (start + n < end)[:, None]
        page = tl.load(row + start // P).to(tl.int64)
        at = ((page * K + head) * P + start % P + n)[:, None] * D + d
        kk = tl.load(keys + at, mask=inside, other=0.0)
        s = tl.dot(qq, tl.trans(kk), input_precision="ieee" if EXACT else "tf32") * scale
        s = tl.where((start + n)[None, :] <= last[:, None], s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        decay = tl.exp2(best - top)
        p = tl.exp2(s - top[:, None])
        total = total * decay + tl.sum(p, 1)
        vv = tl.load(values + at, mask=inside, other=0.0)
        product = tl.dot(p.to(vv.dtype), vv, input_precision="ieee" if EXACT else "tf32")
        weighted = weighted * decay[:, None] + product
        best = top
    tl.store(out + here, (weighted / total[:, None]).to(out.dtype.element_ty), mask=(i < count)[:, None])


def paged_prefill_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, boundaries: Tensor, start: Tensor, rows: Tensor, longest: int,
    out: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """``attention.prefill_attention`` over pages: the columns of row r are those of the pages ``table[r]``."""
    heads, page, size = keys.shape[1:]
    queries, exact = q.shape[1] // size, q.dtype == torch.float32
    m, n, warps, stages = (EXACT if exact or size not in PLANS else PLANS[size]).forward
    _prefill_attention[(len(rows) * queries, triton.cdiv(longest, m))](
        q, keys, values, table, out, boundaries, start, rows, scale * LOG2E, table.shape[1],
        queries, heads, size, page, exact, m, min(n, page), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
