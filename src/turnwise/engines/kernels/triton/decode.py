"""Triton kernels over the KV cache and on what follows it: decode and prefill attention, rotary embedding and cache write,
sampling; fp8 quantisation. ``kernels.reference`` says what each computes.

Legend: B lanes, H query heads, K key heads, G = H/K, D head size, W cache width, P columns of a page, V vocabulary.

A block of columns lies in one page, so it costs one look at the block table. A long row is split among programs, whose parts a
second kernel combines: the longest dialogue of a batch would hold all others up, and few rows would leave most of the GPU idle. A
cache of rows is split by the same kernel: its pages are as wide as a row and need no table.

The residual stream stays float32 and products are rounded to the weights' dtype, like in a learner under autocast: generator and
learner then differ only in the order of sums. Knows no model.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.engines import compat
from turnwise.engines.kernels import sampling
from turnwise.engines.kernels.reference import LANES_PER_PROGRAM
from turnwise.engines.kernels.triton import attention
from turnwise.engines.kernels.triton.layers import add_norm, swiglu  # noqa: F401 - a decoder's layers use them too

LOWEST = tl.constexpr(-1e30)  # not −inf: the difference of two infinities is NaN
PART = 1024  # columns of a part at least ...
MAX_PARTS = 16  # ... and parts of a row at most
FULL = 256  # programs that fill a GPU: fewer long rows are split


@triton.jit
def norm_and_rotate(x, other, cos, sin, norm, eps, D: tl.constexpr, NORM: tl.constexpr, norm_other):
    """RMSNorm over the head (optional), then rotate: x·cos + roll(x)·sin."""
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x, other = x * scale * norm, other * scale * norm_other
    return x * cos + other * sin


@triton.jit
def rotated_head(base, at, active, cos, sin, norm, eps, D: tl.constexpr, NORM: tl.constexpr):
    """One head of each row, normalised and rotated, [rows, D]."""
    d = tl.arange(0, D)[None, :]
    roll = (d + D // 2) % D
    x = tl.load(base + at + d, mask=active, other=0.0).to(tl.float32)
    other = tl.load(base + at + roll, mask=active, other=0.0).to(tl.float32)
    w = tl.load(norm + at + d) if NORM else x
    w2 = tl.load(norm + at + roll) if NORM else x
    return norm_and_rotate(x, other, cos, sin, w, eps, D, NORM, w2)


class DecodeTile(NamedTuple):
    """Columns of a row per block, warps per program, and pipeline stages."""

    columns: int
    warps: int
    stages: int


DECODE_TILES = {256: DecodeTile(64, 4, 3), 1024: DecodeTile(64, 2, 2), sys.maxsize: DecodeTile(32, 1, 2)}
"""By number of programs: few must each be fast, many must fit on the GPU at once. Measured on an H200."""
SHARED_TILE = DecodeTile(64, 4, 3)


# -------------------------------------------------------------------- one new token per lane


@triton.jit
def _decode_attention(
    qkv, keys, values, cos, sin, qk_norm, position, shared, out, scale, eps, width, lanes,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, G: tl.constexpr, L: tl.constexpr, PAD: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0) * L, tl.program_id(1)
    dtype = keys.dtype.element_ty
    # the query heads of this key head, of L lanes, padded to the smallest matrix product; each with its lane's new key and value
    g, d = tl.arange(0, PAD), tl.arange(0, D)[None, :]
    member = g // G
    lane = first + member
    column = tl.load(position + lane, mask=(member < L) & (lane < lanes), other=-1)
    active = ((column >= 0) & (column < width))[:, None]
    column = tl.where((column >= 0) & (column < width), column, 0)
    base = qkv + (lane.to(tl.int64) * (H + 2 * K) * D)[:, None]
    c = tl.load(cos + column[:, None] * D + d, mask=active, other=0.0)
    s = tl.load(sin + column[:, None] * D + d, mask=active, other=0.0)
    k = rotated_head(base, (H + head) * D, active, c, s, qk_norm, eps, D, NORM).to(dtype)
    v = tl.load(base + (H + K + head) * D + d, mask=active, other=0.0)
    target = ((lane.to(tl.int64) * K + head) * width + column)[:, None] * D + d
    # the query heads of a group share their key: one of them stores it
    first_of_group = active & (g % G == 0)[:, None]
    tl.store(keys + target, k, mask=first_of_group)
    tl.store(values + target, v, mask=first_of_group)
    query = (head * G + g % G)[:, None] * D
    q = rotated_head(base, query, active, c, s, qk_norm, eps, D, NORM).to(dtype)
    best = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale  # running maximum [PAD]
    total = tl.full((PAD,), 1.0, tl.float32)
    weighted = tl.zeros((PAD, D), tl.float32) + v.to(tl.float32)
    # blocks of columns in sequence: the shared prefix, then the other columns of each lane
    common = tl.load(shared + tl.program_id(0)).to(tl.int32) if L > 1 else 0
    leader = tl.load(shared + tl.num_programs(0) + tl.program_id(0)) if L > 1 else 0
    p0 = _columns(position, first, lanes, width, common)
    p1 = _columns(position, first + 1, lanes, width, common) if L > 1 else p0
    p2 = _columns(position, first + 2, lanes, width, common) if L > 1 else p0
    p3 = _columns(position, first + 3, lanes, width, common) if L > 1 else p0
    shared_blocks = tl.cdiv(common, BLOCK)
    e0 = shared_blocks + tl.cdiv(p0 - common, BLOCK)
    e1 = e0 + tl.cdiv(p1 - common, BLOCK) if L > 1 else e0
    e2 = e1 + tl.cdiv(p2 - common, BLOCK) if L > 1 else e0
    e3 = e2 + tl.cdiv(p3 - common, BLOCK) if L > 1 else e0
    for t in range(e3):
        row, start, end, attends = first, t * BLOCK, p0, member == 0
        if L > 1:
            owner = (t >= e0).to(tl.int32) + (t >= e1).to(tl.int32) + (t >= e2).to(tl.int32)
            since, end = _select(owner, shared_blocks, e0, e1, e2), _select(owner, p0, p1, p2, p3)
            row = tl.where(t < shared_blocks, leader, first + owner)
            start = tl.where(t < shared_blocks, start, common + (t - since) * BLOCK)
            end = tl.where(t < shared_blocks, common, end)
            attends = (member == owner) | (t < shared_blocks)
        n = start + tl.arange(0, BLOCK)
        cached = n < end
        at = ((row.to(tl.int64) * K + head) * width + n)[:, None] * D + d
        kk = tl.load(keys + at, mask=cached[:, None], other=0.0)
        score = tl.dot(q, tl.trans(kk), input_precision="ieee" if EXACT else "tf32") * scale  # [PAD, BLOCK]
        score = tl.where(cached[None, :] & attends[:, None], score, float("-inf"))
        top = tl.maximum(best, tl.max(score, axis=1))
        decay = tl.exp(best - top)
        p = tl.exp(score - top[:, None])
        vv = tl.load(values + at, mask=cached[:, None], other=0.0)
        weighted = weighted * decay[:, None] + tl.dot(p.to(dtype), vv, input_precision="ieee" if EXACT else "tf32")
        total = total * decay + tl.sum(p, axis=1)
        best = top
    result = (weighted / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + lane.to(tl.int64)[:, None] * H * D + query + d, result, mask=active)


@triton.jit
def _select(i, a, b, c, d):
    return tl.where(i == 0, a, tl.where(i == 1, b, tl.where(i == 2, c, d)))


@triton.jit
def _columns(position, lane, lanes, width, common):
    """Cached columns that a lane attends to; for an inactive lane only the shared ones."""
    column = tl.load(position + lane, mask=lane < lanes, other=-1)
    return tl.where((column >= 0) & (column < width), column, common).to(tl.int32)


@triton.jit
def _split_decode_attention(
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
    # the first part writes the new key and value, and counts them; the others begin with nothing
    first = part == 0
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


def decode_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, table: Tensor | None, context: int, cos: Tensor, sin: Tensor,
    qk_norm: Tensor | None, position: Tensor, out: Tensor, scale: float, eps: float, shared: Tensor | None = None,
) -> Tensor:  # fmt: skip
    lanes, heads, width, size = out.shape[0], keys.shape[1], keys.shape[2], keys.shape[3]
    if table is not None or (shared is None and lanes * heads < FULL and width > 2 * PART):
        rest = (cos, sin, qk_norm, position, out, scale, eps)
        return _in_parts(qkv, keys, values, table, width if table is None else context, *rest)
    queries = out.shape[1] // size
    group, members = queries // heads, 1 if shared is None else LANES_PER_PROGRAM
    pad = max(16, triton.next_power_of_2(group * members))
    norm = cos if qk_norm is None else qk_norm
    tile = next(tile for most, tile in DECODE_TILES.items() if lanes * heads <= most) if shared is None else SHARED_TILE
    _decode_attention[(triton.cdiv(lanes, members), heads)](
        qkv, keys, values, cos, sin, norm, position, position if shared is None else shared, out, scale, eps, width, lanes,
        queries, heads, size, group, members, pad, qk_norm is not None, tile.columns, keys.dtype == torch.float32,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _in_parts(
    qkv: Tensor, keys: Tensor, values: Tensor, table: Tensor | None, context: int, cos: Tensor, sin: Tensor,
    qk_norm: Tensor | None, position: Tensor, out: Tensor, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """``decode_attention`` over pages, or over rows that are too few to fill a GPU."""
    lanes, heads, page, size = out.shape[0], keys.shape[1], keys.shape[2], keys.shape[3]
    tile = next(tile for most, tile in DECODE_TILES.items() if lanes * heads <= most)
    block = min(tile.columns, page)
    part = triton.cdiv(max(PART, triton.cdiv(context, MAX_PARTS)), block) * block  # columns, in whole blocks
    queries, group, parts = out.shape[1] // size, out.shape[1] // size // heads, triton.cdiv(context, part)
    partial, stats = out, out
    if parts > 1:
        partial = torch.empty(lanes, parts, queries, size, dtype=torch.float32, device=out.device)
        stats = torch.empty(lanes, parts, queries, 2, dtype=torch.float32, device=out.device)
    _split_decode_attention[(lanes, heads, parts)](
        qkv, keys, values, position if table is None else table, cos, sin, cos if qk_norm is None else qk_norm, position, out,
        partial, stats, scale, eps, context, 1 if table is None else table.shape[1], part,
        queries, heads, size, group, max(16, triton.next_power_of_2(group)), page, qk_norm is not None, parts > 1,
        table is not None, block, keys.dtype == torch.float32, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts > 1:
        _combine[(lanes, queries)](partial, stats, position, out, context, parts, part, queries, size, num_warps=1)
    return out


# -------------------------------------------------------------------- prefill


@triton.jit
def _rope_and_cache(
    qkv, keys, values, cos, sin, qk_norm, position, block, q_out, eps, width,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column, cache_block = tl.load(position + token), tl.load(block + token)
    if column < 0:
        return
    dtype = keys.dtype.element_ty
    d, h = tl.arange(0, D)[None, :], tl.arange(0, PAD)[:, None]
    roll = (d + D // 2) % D
    base = qkv + token * (H + 2 * K) * D
    rotated = h < H + K
    x = tl.load(base + h * D + d, mask=rotated, other=0.0).to(tl.float32)
    other = tl.load(base + h * D + roll, mask=rotated, other=0.0).to(tl.float32)
    w = tl.load(qk_norm + h * D + d, mask=rotated, other=0.0) if NORM else x
    w2 = tl.load(qk_norm + h * D + roll, mask=rotated, other=0.0) if NORM else x
    c, s = tl.load(cos + column * D + d), tl.load(sin + column * D + d)
    x = norm_and_rotate(x, other, c, s, w, eps, D, NORM, w2).to(dtype)
    tl.store(q_out + token * H * D + h * D + d, x, mask=h < H)
    offset = (cache_block.to(tl.int64) * K * width + column % width) * D
    tl.store(keys + offset + (h - H) * width * D + d, x, mask=rotated & (h >= H))
    is_value = (h >= H + K) & (h < H + 2 * K)
    v = tl.load(base + h * D + d, mask=is_value, other=0.0)
    tl.store(values + offset + (h - H - K) * width * D + d, v, mask=is_value)


def rope_and_cache(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, position: Tensor,
    block: Tensor, q: Tensor, eps: float,
) -> None:  # fmt: skip
    heads, size, width = keys.shape[1], keys.shape[3], keys.shape[2]
    queries = q.shape[1] // size
    pad = triton.next_power_of_2(queries + 2 * heads)
    norm = cos if qk_norm is None else qk_norm
    _rope_and_cache[(len(qkv),)](
        qkv, keys, values, cos, sin, norm, position, block, q, eps, width,
        queries, heads, size, pad, qk_norm is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _paged_prefill_attention(
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


def prefill_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor | None, boundaries: Tensor, start: Tensor, rows: Tensor,
    longest: int, out: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    if table is None:
        return attention.prefill_attention(q, keys, values, boundaries, start, rows, longest, out, scale)
    heads, page, size = keys.shape[1:]
    queries, exact = q.shape[1] // size, q.dtype == torch.float32
    m, n, warps, stages = (attention.EXACT if exact or size not in attention.PLANS else attention.PLANS[size]).forward
    _paged_prefill_attention[(len(rows) * queries, triton.cdiv(longest, m))](
        q, keys, values, table, out, boundaries, start, rows, scale * attention.LOG2E, table.shape[1],
        queries, heads, size, page, exact, m, min(n, page), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


# -------------------------------------------------------------------- sampling


GOLDEN = tl.constexpr(sampling.GOLDEN)
FIRST, SECOND = tl.constexpr(sampling.MIX[0][1]), tl.constexpr(sampling.MIX[1][1])


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _uniform(seed, position):
    """``sampling.uniforms``, bit for bit."""
    x = _mix(_mix(seed + GOLDEN) + position * GOLDEN)
    return ((x >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _scaled_logits(logits, lane, first, inverse, V, PART: tl.constexpr):
    """(entries of the vocabulary, their logits / temperature); −inf beyond the last."""
    at = first + tl.arange(0, PART)
    z = tl.load(logits + lane.to(tl.int64) * V + at, mask=at < V, other=0.0)
    # a tiny temperature must not overflow to infinity
    z = tl.maximum(z * inverse, LOWEST)
    return at, tl.where(at < V, z, float("-inf"))


@triton.jit
def _partial_softmax(logits, inverse_temperature, tops, sums, ids, V, PARTS, PART: tl.constexpr):
    lane, part = tl.program_id(0), tl.program_id(1)
    inverse = tl.load(inverse_temperature + lane)  # 1/temperature; 0 for greedy
    at, z = _scaled_logits(logits, lane, part * PART, tl.where(inverse == 0.0, 1.0, inverse), V, PART)
    high = tl.max(z)
    slot = lane * PARTS + part
    tl.store(tops + slot, high)
    tl.store(sums + slot, tl.sum(tl.exp(z - high)))
    if inverse == 0.0:
        tl.store(ids + slot, tl.min(tl.where(z == high, at, V - 1)))  # V − 1: when high is NaN


@triton.jit
def _sample(
    logits, inverse_temperature, seed, tops, sums, ids, tokens, position, start, sampled, logp, V, PARTS, lanes,
    PAD: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0)
    place = tl.load(position + lane)
    if place >= 0:
        inverse = tl.load(inverse_temperature + lane)
        part = tl.arange(0, PAD)
        there = part < PARTS
        top = tl.load(tops + lane * PARTS + part, mask=there, other=float("-inf"))
        high = tl.max(top)
        weight = tl.load(sums + lane * PARTS + part, mask=there, other=0.0) * tl.exp(top - high)
        total = tl.sum(weight.to(tl.float64))
        if inverse == 0.0:
            which = tl.minimum(tl.min(tl.where(top == high, part, PAD)), PARTS - 1)
            token = tl.load(ids + lane * PARTS + which)
        else:
            goal = _uniform(tl.load(seed + lane), place + 1) * total
            which, left = _inverse_cdf(weight, goal)
            z = _scaled_logits(logits, lane, which * PART, inverse, V, PART)[1]
            e = tl.exp(z - tl.max(z))
            token = which * PART + _inverse_cdf(e, left * tl.sum(e.to(tl.float64)))[0]
        token = tl.minimum(token, V - 1)
        z = tl.load(logits + lane.to(tl.int64) * V + token) * tl.where(inverse == 0.0, 1.0, inverse)
        z = tl.maximum(z, LOWEST)
        step = place - tl.load(start + lane)
        tl.store(sampled + step * lanes + lane, token)
        tl.store(logp + step * lanes + lane, z - high - tl.log(total.to(tl.float32)))
        tl.store(tokens + lane, token)
        tl.store(position + lane, place + 1)


@triton.jit
def _inverse_cdf(weight, goal):
    """Inverse CDF: the entry in which ``goal`` of the cumulative weight falls, and the relative position in it, 0 to 1."""
    wide = weight.to(tl.float64)
    end = tl.cumsum(wide)
    at = tl.arange(0, weight.shape[0])
    # rounding must not push the goal beyond the last entry
    last = tl.max(tl.where(weight > 0, at, 0))
    which = tl.minimum(tl.sum((end <= goal).to(tl.int32)), last)
    hit = at == which
    width = tl.sum(tl.where(hit, wide, 0.0))
    return which, (goal - tl.sum(tl.where(hit, end, 0.0)) + width) / width


VOCABULARY_PART = 1024  # entries of the vocabulary per program


def sample(
    logits: Tensor, inverse_temperature: Tensor, seed: Tensor, tokens: Tensor, position: Tensor, start: Tensor,
    sampled: Tensor, logp: Tensor,
) -> None:  # fmt: skip
    # sums over parts of the vocabulary are computed in parallel; then a part and a token of it are sampled
    lanes, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, VOCABULARY_PART)
    tops, sums = logits.new_empty(2, lanes, parts)
    ids = torch.empty(lanes, parts, dtype=torch.int32, device=logits.device)
    _partial_softmax[(lanes, parts)](
        logits, inverse_temperature, tops, sums, ids, vocabulary, parts, VOCABULARY_PART, num_warps=4
    )
    _sample[(lanes,)](
        logits, inverse_temperature, seed, tops, sums, ids, tokens, position, start, sampled, logp, vocabulary, parts,
        sampled.shape[1], triton.next_power_of_2(parts), VOCABULARY_PART, num_warps=4,
    )  # fmt: skip


@triton.jit
def _quantise(x, out, scale, d, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < d
    h = tl.load(x + row * d + at, mask=inside, other=0.0).to(tl.float32)
    unit = tl.maximum(tl.max(tl.abs(h)), 1e-12) / 448.0
    tl.store(scale + row, unit)
    tl.store(out + row * d + at, (h / unit).to(out.dtype.element_ty), mask=inside)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, d] -> x / scale in e4m3, and scale [B, 1] = max|row| / 448: the largest entry of a row maps to 448."""
    out, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(len(x), 1, dtype=torch.float32)
    block = triton.next_power_of_2(x.shape[1])
    _quantise[(len(x),)](x, out, scale, x.shape[1], block, num_warps=4 if block <= 2048 else 8)
    return out, scale


def fp8_matmul(h: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """h [B, d] · weight [n, d]ᵀ, the weight in e4m3 with a scale per row; h is quantised row by row."""
    data, unit = quantise(h)
    return compat.scaled_mm(data, weight.t(), scale_a=unit, scale_b=scale.t(), out_dtype=h.dtype)
