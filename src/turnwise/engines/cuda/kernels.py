"""The kernels of a decode step, in Triton: add-and-normalise, attend, SwiGLU, draw; settle for reading, quantise for fp8.

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
    qkv, keys, values, cos, sin, qk_norm, position, out, scale, eps, width,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, G: tl.constexpr, PAD: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    lane, head = tl.program_id(0), tl.program_id(1)
    place = tl.load(position + lane)
    if (place >= 0) & (place < width):
        kind = keys.dtype.element_ty
        d = tl.arange(0, D)
        roll = (d + D // 2) % D
        base = qkv + lane.to(tl.int64) * (H + 2 * K) * D
        c, s = tl.load(cos + place * D + d)[None, :], tl.load(sin + place * D + d)[None, :]
        one = tl.zeros((1, 1), tl.int32)
        # this token's key and value
        k = tl.load(base + (H + head) * D + one + d[None, :]).to(tl.float32)
        k2 = tl.load(base + (H + head) * D + one + roll[None, :]).to(tl.float32)
        w = tl.load(qk_norm + (H + head) * D + d)[None, :] if NORM else k
        w2 = tl.load(qk_norm + (H + head) * D + roll)[None, :] if NORM else k
        k = _turned(k, k2, c, s, w, eps, D, NORM, w2).to(kind)
        v = tl.load(base + (H + K + head) * D + one + d[None, :])
        row = (lane.to(tl.int64) * K + head) * width * D
        tl.store(keys + row + place * D + one + d[None, :], k)
        tl.store(values + row + place * D + one + d[None, :], v)
        # the queries of this key, padded to what a matrix product takes
        g = tl.arange(0, PAD)
        mine = (g < G)[:, None]
        q = tl.load(base + (head * G + g)[:, None] * D + d[None, :], mask=mine, other=0.0).to(tl.float32)
        q2 = tl.load(base + (head * G + g)[:, None] * D + roll[None, :], mask=mine, other=0.0).to(tl.float32)
        w = tl.load(qk_norm + (head * G + g)[:, None] * D + d[None, :], mask=mine, other=0.0) if NORM else q
        w2 = tl.load(qk_norm + (head * G + g)[:, None] * D + roll[None, :], mask=mine, other=0.0) if NORM else q
        q = _turned(q, q2, c, s, w, eps, D, NORM, w2).to(kind)
        best = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale  # [PAD]
        total = tl.full((PAD,), 1.0, tl.float32)
        mixed = tl.zeros((PAD, D), tl.float32) + v.to(tl.float32)
        for start in range(0, place, BLOCK):
            n = start + tl.arange(0, BLOCK)
            known = n < place
            at = row + n[:, None] * D + d[None, :]
            kk = tl.load(keys + at, mask=known[:, None], other=0.0)
            score = tl.dot(q, tl.trans(kk), input_precision="ieee" if EXACT else "tf32") * scale  # [PAD, BLOCK]
            score = tl.where(known[None, :], score, float("-inf"))
            top = tl.maximum(best, tl.max(score, axis=1))
            fade = tl.exp(best - top)
            p = tl.exp(score - top[:, None])
            vv = tl.load(values + at, mask=known[:, None], other=0.0)
            mixed = mixed * fade[:, None] + tl.dot(p.to(kind), vv, input_precision="ieee" if EXACT else "tf32")
            total = total * fade + tl.sum(p, axis=1)
            best = top
        done = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + (lane * H + head * G + g)[:, None] * D + d[None, :], done, mask=mine)


class Look(NamedTuple):
    """How many columns of a row are looked at at once, by how many warps, and how many such blocks are on their way."""

    columns: int
    warps: int
    stages: int


LOOKS = {256: Look(64, 4, 3), 1024: Look(64, 4, 2), sys.maxsize: Look(32, 1, 2)}
"""By programs: few must each be fast, many must all find a place at once. Measured on an H200."""


def attend(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, position: Tensor,
    out: Tensor, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """Rotate q and k of one new token a lane, write k and v into column ``position`` of its slot row, attend to all columns
    up to it. qkv [B, (H + 2K) D], keys and values [rows, K, W, D], out [B, H D]. Lanes with position −1 rest."""
    lanes, heads, width, size = out.shape[0], keys.shape[1], keys.shape[2], keys.shape[3]
    queries = out.shape[1] // size
    group = queries // heads
    pad = max(16, triton.next_power_of_2(group))
    norm = cos if qk_norm is None else qk_norm
    look = next(look for most, look in LOOKS.items() if lanes * heads <= most)
    _attend[(lanes, heads)](
        qkv, keys, values, cos, sin, norm, position, out, scale, eps, width,
        queries, heads, size, group, pad, qk_norm is not None, look.columns, keys.dtype == torch.float32,
        num_warps=look.warps, num_stages=look.stages,
    )  # fmt: skip
    return out


@triton.jit
def _settle(
    qkv, keys, values, cos, sin, qk_norm, position, row, slot, q_out, k_out, v_out, eps, width,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    place, mine = tl.load(position + token), tl.load(row + token)
    into = tl.load(slot + token).to(tl.int64)
    kind = keys.dtype.element_ty
    d, h = tl.arange(0, D)[None, :], tl.arange(0, PAD)[:, None]
    roll = (d + D // 2) % D
    base = qkv + token.to(tl.int64) * (H + 2 * K) * D
    turned = h < H + K
    x = tl.load(base + h * D + d, mask=turned, other=0.0).to(tl.float32)
    other = tl.load(base + h * D + roll, mask=turned, other=0.0).to(tl.float32)
    w = tl.load(qk_norm + h * D + d, mask=turned, other=0.0) if NORM else x
    w2 = tl.load(qk_norm + h * D + roll, mask=turned, other=0.0) if NORM else x
    c, s = tl.load(cos + place * D + d), tl.load(sin + place * D + d)
    x = _turned(x, other, c, s, w, eps, D, NORM, w2).to(kind)
    tl.store(q_out + into * H * D + h * D + d, x, mask=h < H)
    key = turned & (h >= H)
    tl.store(k_out + into * K * D + (h - H) * D + d, x, mask=key)
    column = (mine.to(tl.int64) * K * width + place) * D
    tl.store(keys + column + (h - H) * width * D + d, x, mask=key)
    value = (h >= H + K) & (h < H + 2 * K)
    v = tl.load(base + h * D + d, mask=value, other=0.0)
    tl.store(v_out + into * K * D + (h - H - K) * D + d, v, mask=value)
    tl.store(values + column + (h - H - K) * width * D + d, v, mask=value)


def settle(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, position: Tensor,
    row: Tensor, slot: Tensor, q: Tensor, k: Tensor, v: Tensor, eps: float,
) -> None:  # fmt: skip
    """Many tokens at once: rotate q and k, write k and v into column ``position`` of slot row ``row``, and all three into
    place ``slot`` of padded buffers q [P, H, D], k and v [P, K, D]."""
    heads, size, width = keys.shape[1], keys.shape[3], keys.shape[2]
    pad = triton.next_power_of_2(q.shape[1] + 2 * heads)
    norm = cos if qk_norm is None else qk_norm
    _settle[(len(qkv),)](
        qkv, keys, values, cos, sin, norm, position, row, slot, q, k, v, eps, width,
        q.shape[1], heads, size, pad, qk_norm is not None, num_warps=4,
    )  # fmt: skip


LOWEST = tl.constexpr(-1e30)  # not −inf: the difference of two of them is no number


@triton.jit
def _scan(logits, cold, seed, position, tops, ids, bests, sums, V, CHUNKS, BLOCK: tl.constexpr, PART: tl.constexpr):
    lane, chunk = tl.program_id(0), tl.program_id(1)
    inverse = tl.load(cold + lane)  # 1/temperature; 0 for greedy
    greedy = inverse == 0.0
    heat = tl.where(greedy, 1.0, inverse)
    mine, place = tl.load(seed + lane), tl.load(position + lane)
    quarter = tl.arange(0, BLOCK // 4)
    top = tl.full((BLOCK // 4,), LOWEST, tl.float32)  # running statistics of each column of the block
    total = tl.zeros((BLOCK // 4,), tl.float32)
    best = tl.full((BLOCK // 4,), float("-inf"), tl.float32)
    chosen = quarter
    for start in range(0, PART, BLOCK):
        first = chunk * PART + start
        noise = tl.rand4x(mine ^ (place.to(tl.int64) << 33), first + quarter)  # one hash gives four numbers
        for part in tl.static_range(4):
            at = first + part * (BLOCK // 4) + quarter
            z = tl.load(logits + lane.to(tl.int64) * V + at, mask=at < V, other=LOWEST)
            z = tl.maximum(z * heat, LOWEST)  # a tiny temperature must not make an infinity of it
            high = tl.maximum(top, z)
            total = total * tl.exp(top - high) + tl.exp(z - high)
            top = high
            u = noise[part]  # steps of 2⁻³¹ near 0, of 2⁻²⁴ near 1: the winners must come from the fine end
            wait = tl.where(u < 1e-3, u + 0.5 * u * u, -tl.log(1.0 - u))
            noisy = tl.where(greedy, z, z - tl.log(tl.maximum(wait, 2e-10)))
            chosen = tl.where(noisy > best, at, chosen)
            best = tl.maximum(best, noisy)
    slot = lane * CHUNKS + chunk
    high = tl.max(top)
    peak = tl.max(best)
    tl.store(tops + slot, high)
    tl.store(sums + slot, tl.sum(total * tl.exp(top - high)))
    tl.store(bests + slot, peak)
    tl.store(ids + slot, tl.minimum(tl.min(tl.where(best == peak, chosen, V)), V - 1))  # V: when peak is no number


@triton.jit
def _choose(
    logits, cold, tops, ids, bests, sums, tokens, position, begin, drawn, logp, V, CHUNKS, lanes, PAD: tl.constexpr
):  # fmt: skip
    lane = tl.program_id(0)
    place = tl.load(position + lane)
    if place >= 0:
        c = tl.arange(0, PAD)
        there = c < CHUNKS
        top = tl.load(tops + lane * CHUNKS + c, mask=there, other=float("-inf"))
        high = tl.max(top)
        total = tl.sum(tl.load(sums + lane * CHUNKS + c, mask=there, other=0.0) * tl.exp(top - high))
        best = tl.load(bests + lane * CHUNKS + c, mask=there, other=float("-inf"))
        which = tl.minimum(tl.min(tl.where(best == tl.max(best), c, PAD)), CHUNKS - 1)
        token = tl.load(ids + lane * CHUNKS + which)
        inverse = tl.load(cold + lane)
        z = tl.load(logits + lane.to(tl.int64) * V + token) * tl.where(inverse == 0.0, 1.0, inverse)
        z = tl.maximum(z, LOWEST)
        step = place - tl.load(begin + lane)
        tl.store(drawn + step * lanes + lane, token)
        tl.store(logp + step * lanes + lane, z - high - tl.log(total))
        tl.store(tokens + lane, token)
        tl.store(position + lane, place + 1)


PART = 4096  # entries of the vocabulary one program scans


def draw(
    logits: Tensor, cold: Tensor, seed: Tensor, tokens: Tensor, position: Tensor, begin: Tensor, drawn: Tensor,
    logp: Tensor,
) -> None:  # fmt: skip
    """One token a lane by the Gumbel-max trick with noise hashed from (seed, position, entry), and its log-probability.

    logits [B, V] float32; ``cold`` 1/temperature (0: greedy). Writes the token where the next step reads it, the history's row
    ``position − begin``, and moves the position on. Lanes with position −1 rest."""
    lanes, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, PART)
    part = logits.new_empty(3, lanes, chunks)
    ids = torch.empty(lanes, chunks, dtype=torch.int32, device=logits.device)
    _scan[(lanes, chunks)](
        logits, cold, seed, position, part[0], ids, part[1], part[2], vocabulary, chunks, 1024, PART, num_warps=4
    )  # fmt: skip
    _choose[(lanes,)](
        logits, cold, part[0], ids, part[1], part[2], tokens, position, begin, drawn, logp, vocabulary, chunks,
        drawn.shape[1], triton.next_power_of_2(chunks), num_warps=1,
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
