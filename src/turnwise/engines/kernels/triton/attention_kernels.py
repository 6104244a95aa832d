"""The kernels that ``attention.py`` describes and launches: one forward, two backward, and a forward over the KV cache for the
generator.

Legend: S sequences, U rows of queries, H query heads, K key heads, G = H/K, D head size; M by N is a tile of scores, queries by
keys. A program owns one block of queries, or of keys, of one head of one sequence; grids are sized for the longest sequence, so
programs without a block return at once.

Most tiles of scores lie wholly below the diagonal: a separate loop computes them without masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # not −inf: the difference of two infinities is NaN


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


# -------------------------------------------------------------------- forward


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
    whole = tl.maximum(first + 1, 0) // N * N  # keys visible to all of these queries, in whole blocks
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
def forward(
    q, k, v, out, stats, queries, keys, source, q_row, k_row, v_row, scale, U, S,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr, EXACT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0) // H, tl.program_id(0) % H
    blocks = tl.num_programs(1)
    block = blocks - 1 - tl.program_id(1)  # late queries have the most keys: start them first
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
def prefill_attention(
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


# -------------------------------------------------------------------- backward


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
def d_queries(
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
def d_keys(
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
