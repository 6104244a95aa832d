"""Triton kernels of the generator: residual add and RMSNorm, SwiGLU, decode attention, sampling; rotary embedding and cache write
for prefill; fp8 quantisation.

Legend: B lanes, d width, H query heads, K key heads, D head size, W cache width, F MLP width, V vocabulary.

The residual stream stays float32 and products are rounded to the weights' dtype, like in a learner under autocast: generator and
learner then differ only in the order of sums. ``kernels.decode_reference`` computes the same in PyTorch. Knows no model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.engines import compat
from turnwise.engines.kernels import sampling
from turnwise.engines.kernels.decode_reference import LANES_PER_PROGRAM
from turnwise.engines.kernels.triton.attention import prefill_attention
from turnwise.engines.kernels.triton.decode_heads import DECODE_TILES, DecodeTile, norm_and_rotate, rotated_head
from turnwise.engines.kernels.triton.paged import PART, paged_decode_attention, paged_prefill_attention

__all__ = [
    "add_norm", "decode_attention", "fp8_matmul", "paged_decode_attention", "paged_prefill_attention", "prefill_attention",
    "quantise", "rope_and_cache", "sample", "swiglu",
]  # fmt: skip


@triton.jit
def _add_norm(x, delta, weight, total, out, d, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < d
    h = tl.load(x + row * d + at, mask=inside, other=0.0)
    if ADD:
        h += tl.load(delta + row * d + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * d + at, h, mask=inside)
    scale = tl.rsqrt(tl.sum(h * h) / d + eps)
    w = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row * d + at, (w * (h * scale)).to(out.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float, total: Tensor | None = None
) -> Tensor:
    """total = x + delta (written to x unless ``total`` is given); out = weight · total / rms(total)."""
    rows, d = x.shape
    block = triton.next_power_of_2(d)
    added, target = x if delta is None else delta, x if total is None else total
    if rows:
        _add_norm[(rows,)](
            x, added, weight, target, out, d, eps, delta is not None, block, num_warps=4 if block <= 2048 else 8
        )  # fmt: skip
    return out


@triton.jit
def _swiglu(gate_up, out, F, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    gate = tl.load(gate_up + row * 2 * F + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + at, mask=inside, other=0.0).to(tl.float32)
    act = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)  # rounded where the stock MLP rounds
    tl.store(out + row * F + at, (act * up).to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, out: Tensor) -> Tensor:
    """both [B, 2F] -> silu(first half) · second half."""
    rows, size = out.shape
    block = min(1024, triton.next_power_of_2(size))
    if rows:
        _swiglu[(rows, triton.cdiv(size, block))](gate_up, out, size, block)
    return out


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


SHARED_TILE = DecodeTile(64, 4, 3)
FULL = 256  # programs that fill a GPU: fewer long rows are split


def decode_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, position: Tensor,
    out: Tensor, scale: float, eps: float, shared: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rotate q and k of one new token per lane, write k and v into column ``position`` of its cache row, attend to all columns
    up to it. qkv [B, (H + 2K) D], keys and values [rows, K, W, D], out [B, H D]. Lanes with position −1 are inactive.

    ``shared`` [2, B / 4]: how many leading columns four neighbouring lanes have in common, and the row from which they are read,
    once for all four. Without it, long rows that are too few to fill a GPU are split among programs."""
    lanes, heads, width, size = out.shape[0], keys.shape[1], keys.shape[2], keys.shape[3]
    if shared is None and lanes * heads < FULL and width > 2 * PART:
        rest = (cos, sin, qk_norm, position, out, scale, eps)
        return paged_decode_attention(qkv, keys, values, None, width, *rest)
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


@triton.jit
def _rope_and_cache(
    qkv, keys, values, cos, sin, qk_norm, position, row, q_out, eps, width,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column, cache_row = tl.load(position + token), tl.load(row + token)
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
    offset = (cache_row.to(tl.int64) * K * width + column % width) * D
    tl.store(keys + offset + (h - H) * width * D + d, x, mask=rotated & (h >= H))
    is_value = (h >= H + K) & (h < H + 2 * K)
    v = tl.load(base + h * D + d, mask=is_value, other=0.0)
    tl.store(values + offset + (h - H - K) * width * D + d, v, mask=is_value)


def rope_and_cache(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, position: Tensor,
    row: Tensor, q: Tensor, eps: float,
) -> None:  # fmt: skip
    """Prefill: rotate q and k, write q to q [N, H D], k and v into column ``position`` of cache row ``row``, or where the cache
    has pages into that column of page ``row``, modulo their size. Tokens with position −1 are padding."""
    heads, size, width = keys.shape[1], keys.shape[3], keys.shape[2]
    queries = q.shape[1] // size
    pad = triton.next_power_of_2(queries + 2 * heads)
    norm = cos if qk_norm is None else qk_norm
    _rope_and_cache[(len(qkv),)](
        qkv, keys, values, cos, sin, norm, position, row, q, eps, width,
        queries, heads, size, pad, qk_norm is not None, num_warps=4,
    )  # fmt: skip


LOWEST = tl.constexpr(-1e30)  # not −inf: the difference of two infinities is NaN
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
    z = tl.maximum(z * inverse, LOWEST)  # a tiny temperature must not overflow to infinity
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
    last = tl.max(tl.where(weight > 0, at, 0))  # rounding must not push the goal beyond the last entry
    which = tl.minimum(tl.sum((end <= goal).to(tl.int32)), last)
    hit = at == which
    width = tl.sum(tl.where(hit, wide, 0.0))
    return which, (goal - tl.sum(tl.where(hit, end, 0.0)) + width) / width


VOCABULARY_PART = 1024  # entries of the vocabulary per program


def sample(
    logits: Tensor, inverse_temperature: Tensor, seed: Tensor, tokens: Tensor, position: Tensor, start: Tensor,
    sampled: Tensor, logp: Tensor,
) -> None:  # fmt: skip
    """Sample one token per lane and its log-probability by the rule of ``sampling``: the token is where u(seed, position) falls
    in the cumulative probabilities. Sums over parts of the vocabulary are computed in parallel; then a part and a token of it are
    sampled.

    logits [B, V] float32; ``inverse_temperature``: 0 for greedy. Writes the token to ``tokens``, where the next step reads it,
    and to row ``position − start`` of ``sampled``, and increments the position. Lanes with position −1 are inactive."""
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
    return compat.scaled_mm(data, weight.t(), unit, scale.t(), h.dtype)
