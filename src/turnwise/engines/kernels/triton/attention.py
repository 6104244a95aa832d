"""Causal variable-length attention with grouped queries, forward and backward, in Triton; and forward over the KV cache.

Legend: S sequences, U rows of queries, R rows of keys and values, M key indices, H query heads, K key heads, D head size.

Sequence s has the queries ``queries[s]:queries[s + 1]`` of q and the key indices ``keys[s]:keys[s + 1]``; key index m is row
``source[m]`` of k and v, or row m without a ``source``. Its last query is aligned with its last key. ``longest``: the most
queries and keys of any sequence. Rows and key indices beyond the last sequence get zeros. ``reference.varlen_attention`` computes
the same.

Softmax uses powers of two: log₂e is folded into the scale, and the logsumexp passed from forward to backward is in base 2. Sums
are float32; probabilities and their gradients are rounded to the inputs' dtype before they are multiplied. No atomics: each
program of the backward pass owns what it writes, first over queries (which store Σ out·dout for the second pass), then over keys
and all query heads of their group. So the same inputs give the same bits.

In kernels G = H/K, and M by N is a tile of scores, queries by keys. A program owns one block of queries, or of keys, of one
head of one sequence; grids are sized for the longest sequence, so programs without a block return at once. Most tiles of scores
lie wholly below the diagonal: a separate loop computes them without masks. Knows tensors; neither models nor requests.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.engines.kernels import reference

log = logging.getLogger(__name__)

LOWEST = tl.constexpr(-1e30)  # not −inf: the difference of two infinities is NaN


class TileShape(NamedTuple):
    """Queries and keys of a tile, warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


class Plan(NamedTuple):
    forward: TileShape
    d_queries: TileShape
    d_keys: TileShape


PLANS = {  # by head size, for 16-bit dtypes; head size 64 measured on an H200
    16: Plan(TileShape(128, 64, 4, 3), TileShape(64, 64, 4, 3), TileShape(64, 64, 4, 3)),
    32: Plan(TileShape(128, 64, 4, 3), TileShape(64, 64, 4, 3), TileShape(64, 64, 4, 3)),
    64: Plan(TileShape(64, 64, 4, 3), TileShape(64, 32, 4, 3), TileShape(64, 64, 4, 3)),
    128: Plan(TileShape(128, 64, 8, 2), TileShape(64, 32, 4, 2), TileShape(32, 128, 8, 2)),
}
EXACT = Plan(*[TileShape(32, 32, 4, 1)] * 3)  # for float32, where precision matters more than speed
LOG2E = 1.4426950408889634
TOLERANCE = 0.05  # of the norm: bfloat16 is off by 0.005, a bug by much more


# -------------------------------------------------------------------- helpers


@triton.jit
def _span(starts, sequence):
    begin = tl.load(starts + sequence)
    return begin, tl.load(starts + sequence + 1) - begin


@triton.jit
def _rows(base, at, row, inside, D: tl.constexpr, MASKED: tl.constexpr):
    """Load rows ``at`` of one head; zeros outside ``inside``."""
    here = base + at[:, None] * row + tl.arange(0, D)[None, :]
    if MASKED:
        x = tl.load(here, mask=inside[:, None], other=0.0)
    else:
        x = tl.load(here)
    return x


@triton.jit
def _source_rows(source, at, inside, SHARED: tl.constexpr, MASKED: tl.constexpr):
    """The rows of k and v at the key indices ``at`` of a sequence."""
    row = at
    if SHARED:
        if MASKED:
            row = tl.load(source + at, mask=inside, other=0)
        else:
            row = tl.load(source + at)
    return row


@triton.jit
def _product(a, b, total, EXACT: tl.constexpr):
    return tl.dot(a, b, total, input_precision="ieee" if EXACT else "tf32")


@triton.jit
def _scores(a, b, EXACT: tl.constexpr):
    return tl.dot(a, tl.trans(b), input_precision="ieee" if EXACT else "tf32")


@triton.jit
def _store(base, at, row, x, inside, D: tl.constexpr):
    here = base + at.to(tl.int64)[:, None] * row + tl.arange(0, D)[None, :]
    tl.store(here, x.to(base.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _store_unrotated(
    base, at, row, x, inside, cos, sin, first, D: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr
):  # fmt: skip
    """Store gradients of rows; with ROTATED, rotated back in pairs (i, i + D/2) by the angles of row ``first + at``."""
    if ROTATED:
        a, b = tl.split(tl.permute(tl.reshape(x, (SIZE, 2, D // 2)), (0, 2, 1)))
        here = (first + at).to(tl.int64)[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
        c = tl.load(cos + here, mask=inside[:, None], other=0.0)
        s = tl.load(sin + here, mask=inside[:, None], other=0.0)
        _store(base, at, row, a * c + b * s, inside, D // 2)
        _store(base + D // 2, at, row, b * c - a * s, inside, D // 2)
    else:
        _store(base, at, row, x, inside, D)


@triton.jit
def _zero_rows(base, row, first, end, block, blocks, D: tl.constexpr, SIZE: tl.constexpr):
    """Zero the rows from ``first`` to ``end``, shared by ``blocks`` programs."""
    for start in range(first + block * SIZE, end, blocks * SIZE):
        at = start + tl.arange(0, SIZE)
        _store(base, at, row, tl.zeros((SIZE, D), tl.float32), at < end, D)


# -------------------------------------------------------------------- forward kernels


@triton.jit
def _accumulate(
    q, k, v, source, k_row, v_row, scale, last, nk, begin, end, best, total, weighted,
    D: tl.constexpr, SHARED: tl.constexpr, EXACT: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys from ``begin`` to ``end`` to the running softmax. ``last`` [queries]: the last visible key of each query."""
    for start in range(begin, end, N):
        j = start + tl.arange(0, N)
        at = _source_rows(source, j, j < nk, SHARED, MASKED)
        s = _scores(q, _rows(k, at, k_row, j < nk, D, MASKED), EXACT)
        if MASKED:
            s = tl.where(j[None, :] <= last[:, None], s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1) * scale)
        decay = tl.exp2(best - top)
        p = tl.exp2(s * scale - top[:, None])
        total = total * decay + tl.sum(p, 1)
        vv = _rows(v, at, v_row, j < nk, D, MASKED)
        weighted = _product(p.to(vv.dtype), vv, weighted * decay[:, None], EXACT)
        best = top
    return best, total, weighted


@triton.jit
def _softmax(
    q, k, v, source, k_row, v_row, scale, first, last, nk,
    D: tl.constexpr, SHARED: tl.constexpr, EXACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M queries over their visible keys, those of the first query up to ``first``: Σ of the powers, the largest exponent, and the
    weighted values, not yet divided."""
    # keys visible to all of these queries, in whole blocks: they need no masks
    whole = tl.maximum(first + 1, 0) // N * N
    end = tl.minimum(first + M, nk)
    best = tl.full((M,), LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    weighted = tl.zeros((M, D), tl.float32)
    best, total, weighted = _accumulate(
        q, k, v, source, k_row, v_row, scale, last, nk, 0, whole, best, total, weighted, D, SHARED, EXACT, N, False
    )  # fmt: skip
    best, total, weighted = _accumulate(
        q, k, v, source, k_row, v_row, scale, last, nk, whole, end, best, total, weighted, D, SHARED, EXACT, N, True
    )  # fmt: skip
    return total, best, weighted


@triton.jit(do_not_specialize=["U", "S"])
def _forward(
    q, k, v, out, stats, queries, keys, source, q_row, k_row, v_row, scale, U, S,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr, EXACT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0) // H, tl.program_id(0) % H
    blocks = tl.num_programs(1)
    # late queries have the most keys: start them first
    block = blocks - 1 - tl.program_id(1)
    q0, nq = _span(queries, sequence)
    k0, nk = _span(keys, sequence)
    if sequence == S - 1:
        _zero_rows(out + head * D, H * D, q0 + nq, U, block, blocks, D, M)
    if block * M >= nq:
        return
    i = block * M + tl.arange(0, M)
    last = i + (nk - nq)
    q += q0.to(tl.int64) * q_row + head * D
    k += head // G * D
    v += head // G * D
    if SHARED:
        source += k0
    else:
        k += k0.to(tl.int64) * k_row
        v += k0.to(tl.int64) * v_row
    qq = _rows(q, i, q_row, i < nq, D, True)
    total, best, weighted = _softmax(
        qq, k, v, source, k_row, v_row, scale, block * M + (nk - nq), last, nk, D, SHARED, EXACT, M, N
    )  # fmt: skip
    has_keys = total > 0
    total = tl.where(has_keys, total, 1.0)
    stats += (head.to(tl.int64) * U + q0 + i) * 2
    tl.store(stats, tl.where(has_keys, best + tl.log2(total), float("inf")), mask=i < nq)
    _store(out + q0.to(tl.int64) * (H * D) + head * D, i, H * D, weighted / total[:, None], i < nq, D)


@triton.jit
def _prefill_attention(
    q, keys, values, out, boundaries, starts, rows, scale, width,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, EXACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The same over the KV cache: the keys of a chunk are the columns of its row, some of which precede its queries."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    q0, nq = _span(boundaries, chunk)
    if block * M >= nq:
        return
    before = tl.load(starts + chunk).to(tl.int32)
    base = (tl.load(rows + chunk).to(tl.int64) * K + head // (H // K)) * width * D
    k, v = keys + base, values + base
    i = block * M + tl.arange(0, M)
    last, nk = i + before, before + nq.to(tl.int32)
    qq = _rows(q + q0.to(tl.int64) * (H * D) + head * D, i, H * D, i < nq, D, True)
    total, _, weighted = _softmax(qq, k, v, k, D, D, scale, block * M + before, last, nk, D, False, EXACT, M, N)
    _store(out + q0.to(tl.int64) * (H * D) + head * D, i, H * D, weighted / total[:, None], i < nq, D)


# -------------------------------------------------------------------- backward kernels


@triton.jit
def _accumulate_dq(
    q, k, v, d_out, source, k_row, v_row, scale, last, lse, delta, nk, begin, end, dq,
    D: tl.constexpr, SHARED: tl.constexpr, EXACT: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, N):
        j = start + tl.arange(0, N)
        at = _source_rows(source, j, j < nk, SHARED, MASKED)
        kk = _rows(k, at, k_row, j < nk, D, MASKED)
        p = tl.exp2(_scores(q, kk, EXACT) * scale - lse[:, None])
        if MASKED:
            p = tl.where(j[None, :] <= last[:, None], p, 0.0)
        grad_out = _scores(d_out, _rows(v, at, v_row, j < nk, D, MASKED), EXACT)
        ds = p * (grad_out - delta[:, None])
        dq = _product(ds.to(kk.dtype), kk, dq, EXACT)
    return dq


@triton.jit(do_not_specialize=["U", "S"])
def _d_queries(
    q, k, v, out, d_out, stats, dq, queries, keys, source, cos, sin, q_row, k_row, v_row, d_out_row, dq_row, scale, unit,
    U, S,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr, EXACT: tl.constexpr, ROTATED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0) // H, tl.program_id(0) % H
    blocks = tl.num_programs(1)
    block = blocks - 1 - tl.program_id(1)
    q0, nq = _span(queries, sequence)
    k0, nk = _span(keys, sequence)
    if sequence == S - 1:
        _zero_rows(dq + head * D, dq_row, q0 + nq, U, block, blocks, D, M)
    if block * M >= nq:
        return
    i = block * M + tl.arange(0, M)
    last = i + (nk - nq)
    k += head // G * D
    v += head // G * D
    if SHARED:
        source += k0
    else:
        k += k0.to(tl.int64) * k_row
        v += k0.to(tl.int64) * v_row
    q0 = q0.to(tl.int64)
    qq = _rows(q + q0 * q_row + head * D, i, q_row, i < nq, D, True)
    grad_out = _rows(d_out + q0 * d_out_row + head * D, i, d_out_row, i < nq, D, True)
    weighted = _rows(out + q0 * (H * D) + head * D, i, H * D, i < nq, D, True)
    delta = tl.sum(grad_out.to(tl.float32) * weighted.to(tl.float32), 1)
    stats += (head.to(tl.int64) * U + q0 + i) * 2
    tl.store(stats + 1, delta, mask=i < nq)
    lse = tl.load(stats, mask=i < nq, other=float("inf"))
    whole = tl.maximum(block * M + (nk - nq) + 1, 0) // N * N
    end = tl.minimum(block * M + M + (nk - nq), nk)
    grad = tl.zeros((M, D), tl.float32)
    grad = _accumulate_dq(
        qq, k, v, grad_out, source, k_row, v_row, scale, last, lse, delta, nk, 0, whole, grad, D, SHARED, EXACT, N, False
    )  # fmt: skip
    grad = _accumulate_dq(
        qq, k, v, grad_out, source, k_row, v_row, scale, last, lse, delta, nk, whole, end, grad, D, SHARED, EXACT, N, True
    )  # fmt: skip
    _store_unrotated(dq + q0 * dq_row + head * D, i, dq_row, grad * unit, i < nq, cos, sin, q0, D, M, ROTATED)


@triton.jit
def _accumulate_dk_dv(
    q, d_out, k, v, stats, q_row, d_out_row, scale, first, nq, U, begin, each, tail, dk, dv,
    G: tl.constexpr, D: tl.constexpr, EXACT: tl.constexpr, M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """``each`` blocks of queries from ``begin`` on, of every head of the group; ``first`` [keys]: the first query that attends to
    each. The last block of a masked pass may not be adjacent to the others: it begins ``tail`` after ``begin``."""
    # not 0: a division by zero, even in an empty loop, lets the compiler assume that the loop is not empty
    per = tl.maximum(each, 1)
    for step in range(G * each):  # one loop, not two: prefetching then continues across heads
        head, block = step // per, step % per
        start = begin + block * M
        if MASKED:
            start = tl.where(block == each - 1, begin + tail, start)
        here = head.to(tl.int64)  # advance pointers as scalars: the offsets added to them are loop-invariant
        row, i = tl.arange(0, M), start + tl.arange(0, M)
        qq = _rows(q + here * D + tl.cast(start, tl.int64) * q_row, row, q_row, i < nq, D, MASKED)
        pair = stats + (here * U + start) * 2 + row[:, None] * 2 + tl.arange(0, 2)[None, :]
        if MASKED:
            both = tl.load(pair, mask=(i < nq)[:, None], other=0.0)
        else:
            both = tl.load(pair)
        lse, delta = tl.split(both)  # one load: separately, each would be loaded redundantly by many threads
        p = tl.exp2(_scores(k, qq, EXACT) * scale - lse[None, :])  # [keys, queries]
        if MASKED:
            # queries beyond the end are zeros and contribute nothing
            p = tl.where(i[None, :] >= first[:, None], p, 0.0)
        grad_out = _rows(d_out + here * D + tl.cast(start, tl.int64) * d_out_row, row, d_out_row, i < nq, D, MASKED)
        dv = _product(p.to(grad_out.dtype), grad_out, dv, EXACT)
        ds = p * (_scores(v, grad_out, EXACT) - delta[None, :])
        dk = _product(ds.to(qq.dtype), qq, dk, EXACT)
    return dk, dv


@triton.jit(do_not_specialize=["U", "places", "S"])
def _d_keys(
    q, k, v, d_out, stats, dk, dv, queries, keys, source, cos, sin, q_row, k_row, v_row, d_out_row, dk_row, dv_row,
    scale, unit, U, places, S,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr, EXACT: tl.constexpr, ROTATED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0) // K, tl.program_id(0) % K
    block, blocks = tl.program_id(1), tl.num_programs(1)  # early keys have the most queries: start them first
    q0, nq = _span(queries, sequence)
    k0, nk = _span(keys, sequence)
    if sequence == S - 1:
        _zero_rows(dk + head * D, dk_row, k0 + nk, places, block, blocks, D, N)
        _zero_rows(dv + head * D, dv_row, k0 + nk, places, block, blocks, D, N)
    if block * N >= nk:
        return
    j = block * N + tl.arange(0, N)
    if SHARED:
        at = _source_rows(source + k0, j, j < nk, True, True)
    else:
        at = j
        k += k0.to(tl.int64) * k_row
        v += k0.to(tl.int64) * v_row
    kk = _rows(k + head * D, at, k_row, j < nk, D, True)
    vv = _rows(v + head * D, at, v_row, j < nk, D, True)
    q += q0.to(tl.int64) * q_row + head * G * D
    d_out += q0.to(tl.int64) * d_out_row + head * G * D
    stats += ((head * G).to(tl.int64) * U + q0) * 2
    first = j - (nk - nq)
    begin = tl.maximum(block * N - (nk - nq), 0)
    # blocks of queries that attend to these keys: ``some`` on the diagonal, ``whole`` ones, and one cut off by the end
    every = tl.maximum(nq - begin, 0)
    some = tl.minimum(tl.cdiv(tl.maximum(block * N + N - 1 - (nk - nq) - begin, 0), M), tl.cdiv(every, M))
    whole = tl.maximum(every // M - some, 0)
    masked = tl.cdiv(every, M) - whole
    tail = (tl.where(masked > some, tl.cdiv(every, M), some) - 1) * M
    d_kk, d_vv = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
    d_kk, d_vv = _accumulate_dk_dv(
        q, d_out, kk, vv, stats, q_row, d_out_row, scale, first, nq, U, begin, masked, tail, d_kk, d_vv,
        G, D, EXACT, M, True,
    )  # fmt: skip
    d_kk, d_vv = _accumulate_dk_dv(
        q, d_out, kk, vv, stats, q_row, d_out_row, scale, first, nq, U, begin + some * M, whole, tail,
        d_kk, d_vv, G, D, EXACT, M, False,
    )  # fmt: skip
    k0 = k0.to(tl.int64)
    _store_unrotated(dk + k0 * dk_row + head * D, j, dk_row, d_kk * unit, j < nk, cos, sin, k0, D, N, ROTATED)
    _store(dv + k0 * dv_row + head * D, j, dv_row, d_vv, j < nk, D)


# -------------------------------------------------------------------- launches


@cache
def fits(size: int, device: torch.device) -> bool:
    """Whether the kernels support this head size, compile on this device and agree with the reference."""
    if size not in PLANS:
        return False
    try:
        error = relative_error(size, device, torch.bfloat16)
        reason = "" if error <= TOLERANCE else f"it was off by {error:.2g}"
    except Exception as fault:  # an old GPU, too little shared memory, a new compiler ...
        reason = f"it failed by {type(fault).__name__}: {(str(fault).strip().splitlines() or [''])[0]}"
    if reason:
        log.warning("using PyTorch's attention for head size %d, not the Triton kernels: %s", size, reason)
    return not reason


@torch.inference_mode(False)  # the first caller may be in inference mode
def relative_error(size: int, device: torch.device, kind: torch.dtype) -> float:
    """Relative error of the output and all gradients of two sequences of different lengths, against the reference."""
    g, rows, parts = torch.Generator().manual_seed(0), 75, [2, 1, 1]
    make = lambda *shape: torch.randn(*shape, generator=g).to(device)  # noqa: E731
    qkv, d_out, angle = (
        make(rows, sum(parts), size).to(kind),
        make(rows, parts[0], size).to(kind),
        make(rows, size // 2),
    )
    starts, scale = torch.tensor([0, 70, rows], dtype=torch.int32, device=device), 0.3
    where, angles = (starts, starts, None, (70, 70), scale), (angle.cos(), angle.sin())
    (q, k, v), d = qkv.split(parts, 1), torch.empty_like(qkv)
    out, stats = forward(q, k, v, *where)
    dq, dk, dv = d.split(parts, 1)
    d_queries(d_out, q, k, v, out, stats, *where, dq, angles)
    d_keys(d_out, q, k, v, stats, *where, dk, dv, angles)
    # the first caller may be recomputing a layer, whose hooks would drop what these gradients need
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False), keep:
        a, b, c = (x.float().requires_grad_() for x in (q, k, v))
        expected = reference.varlen_attention(a, b, c, starts, starts, None, scale)[0]
        da, db, dc = torch.autograd.grad(expected, (a, b, c), d_out.float())
    pairs = ((out, expected.detach()), (d.flatten(1), reference.rotate_backward(da, db, dc, *angles)))
    return max(float((actual.float() - expected).norm() / expected.norm()) for actual, expected in pairs)


def plan_of(q: Tensor) -> Plan:
    return EXACT if q.dtype == torch.float32 else PLANS[q.shape[2]]


def _heads_adjacent(x: Tensor) -> Tensor:
    """Make the heads of each row adjacent; rows may have any stride."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, source: Tensor | None, longest: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [U, H, D], k and v [R, K, D], queries and keys [S + 1] int32, source [M] -> out [U, H, D], and for the
    backward pass [H, U, 2]: log₂ Σ exp of the scores, and space for Σ out·dout."""
    q, k, v = _heads_adjacent(q), _heads_adjacent(k), _heads_adjacent(v)
    (rows, H, size), S = q.shape, len(queries) - 1
    out, stats = q.new_empty(rows, H, size), q.new_empty(H, rows, 2, dtype=torch.float32)
    m, n, warps, stages = plan_of(q).forward
    if rows:
        _forward[(S * H, triton.cdiv(longest[0], m))](
            q, k, v, out, stats, queries, keys, keys if source is None else source,
            q.stride(0), k.stride(0), v.stride(0), scale * LOG2E, rows, S,
            H, H // k.shape[1], size, source is not None, q.dtype == torch.float32, m, n, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, stats


Angles = tuple[Tensor, Tensor]
"""cos and sin [U, D/2], by which the rows of q and k were rotated."""


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, queries: Tensor, keys: Tensor,
    source: Tensor | None, longest: tuple[int, int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dq [U, H, D], dk and dv [M, K, D]: of every key index, where there is a ``source``."""
    q, k, v, d_out = _heads_adjacent(q), _heads_adjacent(k), _heads_adjacent(v), _heads_adjacent(d_out)
    where = (queries, keys, source, longest, scale)
    dq = torch.empty_like(out)
    dk, dv = k.new_empty(2, len(k if source is None else source), *k.shape[1:])
    d_queries(d_out, q, k, v, out, stats, *where, dq)
    d_keys(d_out, q, k, v, stats, *where, dk, dv)
    return dq, dk, dv


def d_queries(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, queries: Tensor, keys: Tensor,
    source: Tensor | None, longest: tuple[int, int], scale: float, dq: Tensor, angles: Angles | None = None,
) -> None:  # fmt: skip
    """Fill dq [U, H, D], rotated back by the angles, and the second half of ``stats``; call ``d_keys`` afterwards."""
    (rows, H, size), S = q.shape, len(queries) - 1
    m, n, warps, stages = plan_of(q).d_queries
    if rows:
        _d_queries[(S * H, triton.cdiv(longest[0], m))](
            q, k, v, out, d_out, stats, dq, queries, keys, keys if source is None else source, *(angles or (stats, stats)),
            q.stride(0), k.stride(0), v.stride(0), d_out.stride(0), dq.stride(0), scale * LOG2E, scale, rows, S,
            H, H // k.shape[1], size, source is not None, q.dtype == torch.float32, angles is not None, m, n,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip


def d_keys(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, queries: Tensor, keys: Tensor,
    source: Tensor | None, longest: tuple[int, int], scale: float, dk: Tensor, dv: Tensor, angles: Angles | None = None,
) -> None:  # fmt: skip
    """Fill dk, rotated back by the angles, and dv [M, K, D]."""
    (rows, H, size), S, K = q.shape, len(queries) - 1, k.shape[1]
    m, n, warps, stages = plan_of(q).d_keys
    if len(dk):
        _d_keys[(S * K, triton.cdiv(longest[1], n))](
            q, k, v, d_out, stats, dk, dv, queries, keys, keys if source is None else source, *(angles or (stats, stats)),
            q.stride(0), k.stride(0), v.stride(0), d_out.stride(0), dk.stride(0), dv.stride(0), scale * LOG2E, scale,
            rows, len(dk), S,
            K, H // K, size, source is not None, q.dtype == torch.float32, angles is not None, m, n,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip


def prefill_attention(
    q: Tensor, keys: Tensor, values: Tensor, boundaries: Tensor, start: Tensor, rows: Tensor, longest: int, out: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """The queries q[boundaries[j]:boundaries[j + 1]] of chunk j attend to the columns of cache row ``rows[j]``: the first to
    columns up to ``start[j]``, each further one to one more. q and out [N, H D]; no chunk has more than ``longest`` queries."""
    heads, width, size = keys.shape[1:]
    queries, exact = q.shape[1] // size, q.dtype == torch.float32
    m, n, warps, stages = (EXACT if exact or size not in PLANS else PLANS[size]).forward
    _prefill_attention[(len(rows) * queries, triton.cdiv(longest, m))](
        q, keys, values, out, boundaries, start, rows, scale * LOG2E, width, queries, heads, size, exact, m, n,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
