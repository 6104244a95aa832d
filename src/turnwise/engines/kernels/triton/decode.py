"""The kernels of a decode step, in Triton: add-and-normalise, attend, SwiGLU, draw; settle and look back for reading, quantise
for fp8.

Legend: B lanes, d width, H query heads, K key heads, D head size, W slot width, F MLP width, V vocabulary.

The residual stream stays float32 and products are rounded to the weights' dtype, as in a learner under autocast: sampler and
learner then differ by the order of sums only. Each kernel has a plain twin in ``reference.py`` that says what it computes.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.engines.kernels import sampling
from turnwise.engines.kernels.decode_reference import SISTERS
from turnwise.engines.kernels.triton.attention import look_back

__all__ = ["add_norm", "attend", "draw", "look_back", "narrow_product", "quantise", "settle", "swiglu"]


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
    """total = x + delta (in place of x where none is given); out = weight · total / rms(total)."""
    rows, d = x.shape
    block = triton.next_power_of_2(d)
    given, into = x if delta is None else delta, x if total is None else total
    if rows:
        _add_norm[(rows,)](
            x, given, weight, into, out, d, eps, delta is not None, block, num_warps=4 if block <= 2048 else 8
        )  # fmt: skip
    return out


@triton.jit
def _swiglu(both, out, F, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    gate = tl.load(both + row * 2 * F + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * F + F + at, mask=inside, other=0.0).to(tl.float32)
    act = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)  # rounded where the stock MLP rounds
    tl.store(out + row * F + at, (act * up).to(out.dtype.element_ty), mask=inside)


def swiglu(both: Tensor, out: Tensor) -> Tensor:
    """both [B, 2F] -> silu(first half) · second half."""
    rows, size = out.shape
    block = min(1024, triton.next_power_of_2(size))
    if rows:
        _swiglu[(rows, triton.cdiv(size, block))](both, out, size, block)
    return out


@triton.jit
def _turned(x, other, cos, sin, norm, eps, D: tl.constexpr, NORM: tl.constexpr, norm_other):
    """Normalise over the head (optional), then rotate: x·cos + roll(x)·sin."""
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x, other = x * scale * norm, other * scale * norm_other
    return x * cos + other * sin


@triton.jit
def _attend(
    qkv, keys, values, cos, sin, qk_norm, position, shared, out, scale, eps, width, lanes,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, G: tl.constexpr, L: tl.constexpr, PAD: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0) * L, tl.program_id(1)
    kind = keys.dtype.element_ty
    # the queries of this key, of L lanes, padded to what a matrix product takes; each beside its lane's new key and value
    g, d = tl.arange(0, PAD), tl.arange(0, D)[None, :]
    sister = g // G
    lane = first + sister
    place = tl.load(position + lane, mask=(sister < L) & (lane < lanes), other=-1)
    mine = ((place >= 0) & (place < width))[:, None]
    place = tl.where((place >= 0) & (place < width), place, 0)
    base = qkv + (lane.to(tl.int64) * (H + 2 * K) * D)[:, None]
    c = tl.load(cos + place[:, None] * D + d, mask=mine, other=0.0)
    s = tl.load(sin + place[:, None] * D + d, mask=mine, other=0.0)
    k = _head(base, (H + head) * D, mine, c, s, qk_norm, eps, D, NORM).to(kind)
    v = tl.load(base + (H + K + head) * D + d, mask=mine, other=0.0)
    into = ((lane.to(tl.int64) * K + head) * width + place)[:, None] * D + d
    once = mine & (g % G == 0)[:, None]
    tl.store(keys + into, k, mask=once)
    tl.store(values + into, v, mask=once)
    query = (head * G + g % G)[:, None] * D
    q = _head(base, query, mine, c, s, qk_norm, eps, D, NORM).to(kind)
    best = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale  # [PAD]
    total = tl.full((PAD,), 1.0, tl.float32)
    mixed = tl.zeros((PAD, D), tl.float32) + v.to(tl.float32)
    # blocks of columns, one after another: those that the lanes share, then each lane's own
    common = tl.load(shared + tl.program_id(0)).to(tl.int32) if L > 1 else 0
    leader = tl.load(shared + tl.num_programs(0) + tl.program_id(0)) if L > 1 else 0
    p0 = _last(position, first, lanes, width, common)
    p1 = _last(position, first + 1, lanes, width, common) if L > 1 else p0
    p2 = _last(position, first + 2, lanes, width, common) if L > 1 else p0
    p3 = _last(position, first + 3, lanes, width, common) if L > 1 else p0
    ours = tl.cdiv(common, BLOCK)
    e0 = ours + tl.cdiv(p0 - common, BLOCK)
    e1 = e0 + tl.cdiv(p1 - common, BLOCK) if L > 1 else e0
    e2 = e1 + tl.cdiv(p2 - common, BLOCK) if L > 1 else e0
    e3 = e2 + tl.cdiv(p3 - common, BLOCK) if L > 1 else e0
    for t in range(e3):
        row, start, end, asks = first, t * BLOCK, p0, sister == 0
        if L > 1:
            who = (t >= e0).to(tl.int32) + (t >= e1).to(tl.int32) + (t >= e2).to(tl.int32)
            since, end = _which(who, ours, e0, e1, e2), _which(who, p0, p1, p2, p3)
            row = tl.where(t < ours, leader, first + who)
            start = tl.where(t < ours, start, common + (t - since) * BLOCK)
            end = tl.where(t < ours, common, end)
            asks = (sister == who) | (t < ours)
        n = start + tl.arange(0, BLOCK)
        known = n < end
        at = ((row.to(tl.int64) * K + head) * width + n)[:, None] * D + d
        kk = tl.load(keys + at, mask=known[:, None], other=0.0)
        score = tl.dot(q, tl.trans(kk), input_precision="ieee" if EXACT else "tf32") * scale  # [PAD, BLOCK]
        score = tl.where(known[None, :] & asks[:, None], score, float("-inf"))
        top = tl.maximum(best, tl.max(score, axis=1))
        fade = tl.exp(best - top)
        p = tl.exp(score - top[:, None])
        vv = tl.load(values + at, mask=known[:, None], other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(p.to(kind), vv, input_precision="ieee" if EXACT else "tf32")
        total = total * fade + tl.sum(p, axis=1)
        best = top
    done = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + lane.to(tl.int64)[:, None] * H * D + query + d, done, mask=mine)


@triton.jit
def _head(base, at, mine, cos, sin, norm, eps, D: tl.constexpr, NORM: tl.constexpr):
    """A head of each row, normalised and rotated, [rows, D]."""
    d = tl.arange(0, D)[None, :]
    roll = (d + D // 2) % D
    x = tl.load(base + at + d, mask=mine, other=0.0).to(tl.float32)
    other = tl.load(base + at + roll, mask=mine, other=0.0).to(tl.float32)
    w = tl.load(norm + at + d) if NORM else x
    w2 = tl.load(norm + at + roll) if NORM else x
    return _turned(x, other, cos, sin, w, eps, D, NORM, w2)


@triton.jit
def _which(i, a, b, c, d):
    return tl.where(i == 0, a, tl.where(i == 1, b, tl.where(i == 2, c, d)))


@triton.jit
def _last(position, lane, lanes, width, common):
    """Columns a lane looks at; of one at rest none but the common."""
    place = tl.load(position + lane, mask=lane < lanes, other=-1)
    return tl.where((place >= 0) & (place < width), place, common).to(tl.int32)


class Look(NamedTuple):
    """How many columns of a row are looked at at once, by how many warps, and how many such blocks are on their way."""

    columns: int
    warps: int
    stages: int


LOOKS = {256: Look(64, 4, 3), 1024: Look(64, 2, 2), sys.maxsize: Look(32, 1, 2)}
"""By programs: few must each be fast, many must all find a place at once. Measured on an H200."""
LOOK_TOGETHER = Look(64, 4, 3)


def attend(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, position: Tensor,
    out: Tensor, scale: float, eps: float, shared: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rotate q and k of one new token a lane, write k and v into column ``position`` of its slot row, attend to all columns
    up to it. qkv [B, (H + 2K) D], keys and values [rows, K, W, D], out [B, H D]. Lanes with position −1 rest.

    ``shared`` [2, B / 4]: how many first columns four neighbouring lanes have in common, and in which row those are read, once
    for all four."""
    lanes, heads, width, size = out.shape[0], keys.shape[1], keys.shape[2], keys.shape[3]
    queries = out.shape[1] // size
    group, sisters = queries // heads, 1 if shared is None else SISTERS
    pad = max(16, triton.next_power_of_2(group * sisters))
    norm = cos if qk_norm is None else qk_norm
    look = next(look for most, look in LOOKS.items() if lanes * heads <= most) if shared is None else LOOK_TOGETHER
    _attend[(triton.cdiv(lanes, sisters), heads)](
        qkv, keys, values, cos, sin, norm, position, position if shared is None else shared, out, scale, eps, width, lanes,
        queries, heads, size, group, sisters, pad, qk_norm is not None, look.columns, keys.dtype == torch.float32,
        num_warps=look.warps, num_stages=look.stages,
    )  # fmt: skip
    return out


@triton.jit
def _settle(
    qkv, keys, values, cos, sin, qk_norm, position, row, q_out, eps, width,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place, mine = tl.load(position + token), tl.load(row + token)
    if place < 0:
        return
    kind = keys.dtype.element_ty
    d, h = tl.arange(0, D)[None, :], tl.arange(0, PAD)[:, None]
    roll = (d + D // 2) % D
    base = qkv + token * (H + 2 * K) * D
    turned = h < H + K
    x = tl.load(base + h * D + d, mask=turned, other=0.0).to(tl.float32)
    other = tl.load(base + h * D + roll, mask=turned, other=0.0).to(tl.float32)
    w = tl.load(qk_norm + h * D + d, mask=turned, other=0.0) if NORM else x
    w2 = tl.load(qk_norm + h * D + roll, mask=turned, other=0.0) if NORM else x
    c, s = tl.load(cos + place * D + d), tl.load(sin + place * D + d)
    x = _turned(x, other, c, s, w, eps, D, NORM, w2).to(kind)
    tl.store(q_out + token * H * D + h * D + d, x, mask=h < H)
    column = (mine.to(tl.int64) * K * width + place) * D
    tl.store(keys + column + (h - H) * width * D + d, x, mask=turned & (h >= H))
    value = (h >= H + K) & (h < H + 2 * K)
    v = tl.load(base + h * D + d, mask=value, other=0.0)
    tl.store(values + column + (h - H - K) * width * D + d, v, mask=value)


def settle(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, position: Tensor,
    row: Tensor, q: Tensor, eps: float,
) -> None:  # fmt: skip
    """Many tokens at once: rotate q and k, write q to q [N, H D], k and v into column ``position`` of slot row ``row``. Tokens
    with position −1 are none."""
    heads, size, width = keys.shape[1], keys.shape[3], keys.shape[2]
    queries = q.shape[1] // size
    pad = triton.next_power_of_2(queries + 2 * heads)
    norm = cos if qk_norm is None else qk_norm
    _settle[(len(qkv),)](
        qkv, keys, values, cos, sin, norm, position, row, q, eps, width,
        queries, heads, size, pad, qk_norm is not None, num_warps=4,
    )  # fmt: skip


LOWEST = tl.constexpr(-1e30)  # not −inf: the difference of two of them is no number
GOLDEN = tl.constexpr(sampling.GOLDEN)
FIRST, SECOND = tl.constexpr(sampling.MIX[0][1]), tl.constexpr(sampling.MIX[1][1])


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _uniform(seed, position):
    """``sampling.uniforms``, bit by bit."""
    x = _mix(_mix(seed + GOLDEN) + position * GOLDEN)
    return ((x >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _tempered(logits, lane, first, heat, V, PART: tl.constexpr):
    """(entries of the vocabulary, their logits over the temperature); −inf beyond the last."""
    at = first + tl.arange(0, PART)
    z = tl.load(logits + lane.to(tl.int64) * V + at, mask=at < V, other=0.0)
    z = tl.maximum(z * heat, LOWEST)  # a tiny temperature must not make an infinity of it
    return at, tl.where(at < V, z, float("-inf"))


@triton.jit
def _weigh(logits, cold, tops, sums, ids, V, PARTS, PART: tl.constexpr):
    lane, part = tl.program_id(0), tl.program_id(1)
    heat = tl.load(cold + lane)  # 1/temperature; 0 for greedy
    at, z = _tempered(logits, lane, part * PART, tl.where(heat == 0.0, 1.0, heat), V, PART)
    high = tl.max(z)
    slot = lane * PARTS + part
    tl.store(tops + slot, high)
    tl.store(sums + slot, tl.sum(tl.exp(z - high)))
    if heat == 0.0:
        tl.store(ids + slot, tl.min(tl.where(z == high, at, V - 1)))  # V − 1: when high is no number


@triton.jit
def _choose(
    logits, cold, seed, tops, sums, ids, tokens, position, begin, drawn, logp, V, PARTS, lanes,
    PAD: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0)
    place = tl.load(position + lane)
    if place >= 0:
        heat = tl.load(cold + lane)
        part = tl.arange(0, PAD)
        there = part < PARTS
        top = tl.load(tops + lane * PARTS + part, mask=there, other=float("-inf"))
        high = tl.max(top)
        weight = tl.load(sums + lane * PARTS + part, mask=there, other=0.0) * tl.exp(top - high)
        total = tl.sum(weight.to(tl.float64))
        if heat == 0.0:
            which = tl.minimum(tl.min(tl.where(top == high, part, PAD)), PARTS - 1)
            token = tl.load(ids + lane * PARTS + which)
        else:
            goal = _uniform(tl.load(seed + lane), place + 1) * total
            which, left = _fall(weight, goal)
            z = _tempered(logits, lane, which * PART, heat, V, PART)[1]
            e = tl.exp(z - tl.max(z))
            token = which * PART + _fall(e, left * tl.sum(e.to(tl.float64)))[0]
        token = tl.minimum(token, V - 1)
        z = tl.load(logits + lane.to(tl.int64) * V + token) * tl.where(heat == 0.0, 1.0, heat)
        z = tl.maximum(z, LOWEST)
        step = place - tl.load(begin + lane)
        tl.store(drawn + step * lanes + lane, token)
        tl.store(logp + step * lanes + lane, z - high - tl.log(total.to(tl.float32)))
        tl.store(tokens + lane, token)
        tl.store(position + lane, place + 1)


@triton.jit
def _fall(weight, goal):
    """Into which entry the goal falls when the weights are laid end to end, and how far into it, from 0 to 1."""
    wide = weight.to(tl.float64)
    end = tl.cumsum(wide)
    at = tl.arange(0, weight.shape[0])
    last = tl.max(tl.where(weight > 0, at, 0))  # rounding must not push the goal beyond it
    which = tl.minimum(tl.sum((end <= goal).to(tl.int32)), last)
    mine = at == which
    width = tl.sum(tl.where(mine, wide, 0.0))
    return which, (goal - tl.sum(tl.where(mine, end, 0.0)) + width) / width


PART = 1024  # entries of the vocabulary one program weighs


def draw(
    logits: Tensor, cold: Tensor, seed: Tensor, tokens: Tensor, position: Tensor, begin: Tensor, drawn: Tensor,
    logp: Tensor,
) -> None:  # fmt: skip
    """One token a lane and its log-probability, by the rule of ``sampling``: the token is where u(seed, position) falls in the
    summed probabilities. Parts of the vocabulary are weighed side by side; then a part is drawn, and a token of it.

    logits [B, V] float32; ``cold`` 1/temperature (0: greedy). Writes the token where the next step reads it, the history's row
    ``position − begin``, and moves the position on. Lanes with position −1 rest."""
    lanes, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, PART)
    tops, sums = logits.new_empty(2, lanes, parts)
    ids = torch.empty(lanes, parts, dtype=torch.int32, device=logits.device)
    _weigh[(lanes, parts)](logits, cold, tops, sums, ids, vocabulary, parts, PART, num_warps=4)
    _choose[(lanes,)](
        logits, cold, seed, tops, sums, ids, tokens, position, begin, drawn, logp, vocabulary, parts, drawn.shape[1],
        triton.next_power_of_2(parts), PART, num_warps=4,
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
    """x [B, d] -> x / scale in e4m3, and scale [B, 1] = max|row| / 448: the largest entry of a row is e4m3's largest number."""
    out, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(len(x), 1, dtype=torch.float32)
    block = triton.next_power_of_2(x.shape[1])
    _quantise[(len(x),)](x, out, scale, x.shape[1], block, num_warps=4 if block <= 2048 else 8)
    return out, scale


def narrow_product(h: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """h [B, d] · weight [n, d]ᵀ, the weight in e4m3 with a scale per row; h is quantised row by row on the way."""
    data, unit = quantise(h)
    return torch._scaled_mm(data, weight.t(), scale_a=unit, scale_b=scale.t(), out_dtype=h.dtype)
