"""The kernels of ``attention.py``, which says what they compute and launches them: one forward, two backward. And a forward over
slots, for the generator.

Legend: S sequences, U rows of queries, H query heads, K key heads, G = H/K, D head size; M by N is a block of scores, queries by
keys. A program has one block of queries, or of keys, of one head of one sequence; grids are as large as the largest sequence may
be, so programs whose block is not there leave at once.

Most blocks of scores lie wholly below the diagonal: they are looked at without masks, in a loop of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # not −inf: the difference of two of them is no number


# -------------------------------------------------------------------- pieces


@triton.jit
def _span(starts, sequence):
    begin = tl.load(starts + sequence)
    return begin, tl.load(starts + sequence + 1) - begin


@triton.jit
def _rows(base, at, row, inside, D: tl.constexpr, MASKED: tl.constexpr):
    """Rows ``at`` of one head; zeros where they are not ``inside``."""
    here = base + at[:, None] * row + tl.arange(0, D)[None, :]
    if MASKED:
        x = tl.load(here, mask=inside[:, None], other=0.0)
    else:
        x = tl.load(here)
    return x


@triton.jit
def _places(source, at, inside, SHARED: tl.constexpr, MASKED: tl.constexpr):
    """The rows that the places ``at`` of a sequence hold."""
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
def _store_back(
    base, at, row, x, inside, cos, sin, first, D: tl.constexpr, SIZE: tl.constexpr, TURN: tl.constexpr
):  # fmt: skip
    """Gradients of turned rows; with TURN of what was turned, in pairs (i, i + D/2), by the angles of row ``first + at``."""
    if TURN:
        a, b = tl.split(tl.permute(tl.reshape(x, (SIZE, 2, D // 2)), (0, 2, 1)))
        here = (first + at).to(tl.int64)[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
        c = tl.load(cos + here, mask=inside[:, None], other=0.0)
        s = tl.load(sin + here, mask=inside[:, None], other=0.0)
        _store(base, at, row, a * c + b * s, inside, D // 2)
        _store(base + D // 2, at, row, b * c - a * s, inside, D // 2)
    else:
        _store(base, at, row, x, inside, D)


@triton.jit
def _clear(base, row, first, end, block, blocks, D: tl.constexpr, SIZE: tl.constexpr):
    """Zeros to the rows from ``first`` to ``end``: this is one of ``blocks`` programs that share them."""
    for start in range(first + block * SIZE, end, blocks * SIZE):
        at = start + tl.arange(0, SIZE)
        _store(base, at, row, tl.zeros((SIZE, D), tl.float32), at < end, D)


# -------------------------------------------------------------------- forward


@triton.jit
def _look(
    q, k, v, source, k_row, v_row, scale, last, nk, begin, end, best, total, mixed,
    D: tl.constexpr, SHARED: tl.constexpr, EXACT: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys from ``begin`` to ``end`` added to the running softmax. ``last`` [queries]: the last key that each may see."""
    for start in range(begin, end, N):
        j = start + tl.arange(0, N)
        at = _places(source, j, j < nk, SHARED, MASKED)
        s = _scores(q, _rows(k, at, k_row, j < nk, D, MASKED), EXACT)
        if MASKED:
            s = tl.where(j[None, :] <= last[:, None], s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1) * scale)
        fade = tl.exp2(best - top)
        p = tl.exp2(s * scale - top[:, None])
        total = total * fade + tl.sum(p, 1)
        vv = _rows(v, at, v_row, j < nk, D, MASKED)
        mixed = _product(p.to(vv.dtype), vv, mixed * fade[:, None], EXACT)
        best = top
    return best, total, mixed


@triton.jit
def _softmax(
    q, k, v, source, k_row, v_row, scale, first, last, nk,
    D: tl.constexpr, SHARED: tl.constexpr, EXACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M queries over the keys they may see, the first of them up to ``first``: Σ of the powers, their largest exponent, and the
    values mixed, not yet divided."""
    whole = tl.maximum(first + 1, 0) // N * N  # keys that every one of these queries sees, in blocks
    end = tl.minimum(first + M, nk)
    best = tl.full((M,), LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    mixed = tl.zeros((M, D), tl.float32)
    best, total, mixed = _look(
        q, k, v, source, k_row, v_row, scale, last, nk, 0, whole, best, total, mixed, D, SHARED, EXACT, N, False
    )  # fmt: skip
    best, total, mixed = _look(
        q, k, v, source, k_row, v_row, scale, last, nk, whole, end, best, total, mixed, D, SHARED, EXACT, N, True
    )  # fmt: skip
    return total, best, mixed


@triton.jit(do_not_specialize=["U", "S"])
def forward(
    q, k, v, out, stats, queries, keys, source, q_row, k_row, v_row, scale, U, S,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr, EXACT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0) // H, tl.program_id(0) % H
    blocks = tl.num_programs(1)
    block = blocks - 1 - tl.program_id(1)  # late queries see most: they begin first
    q0, nq = _span(queries, sequence)
    k0, nk = _span(keys, sequence)
    if sequence == S - 1:
        _clear(out + head * D, H * D, q0 + nq, U, block, blocks, D, M)
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
    total, best, mixed = _softmax(
        qq, k, v, source, k_row, v_row, scale, block * M + (nk - nq), last, nk, D, SHARED, EXACT, M, N
    )  # fmt: skip
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    stats += (head.to(tl.int64) * U + q0 + i) * 2
    tl.store(stats, tl.where(seen, best + tl.log2(total), float("inf")), mask=i < nq)
    _store(out + q0.to(tl.int64) * (H * D) + head * D, i, H * D, mixed / total[:, None], i < nq, D)


@triton.jit
def look_back(
    q, keys, values, out, ends, starts, rows, scale, width,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, EXACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The same over slots: a sequence's keys are the columns of its row, of which some were there before its queries."""
    job, head = tl.program_id(0) // H, tl.program_id(0) % H
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    q0, nq = _span(ends, job)
    if block * M >= nq:
        return
    before = tl.load(starts + job).to(tl.int32)
    base = (tl.load(rows + job).to(tl.int64) * K + head // (H // K)) * width * D
    k, v = keys + base, values + base
    i = block * M + tl.arange(0, M)
    last, nk = i + before, before + nq.to(tl.int32)
    qq = _rows(q + q0.to(tl.int64) * (H * D) + head * D, i, H * D, i < nq, D, True)
    total, _, mixed = _softmax(qq, k, v, k, D, D, scale, block * M + before, last, nk, D, False, EXACT, M, N)
    _store(out + q0.to(tl.int64) * (H * D) + head * D, i, H * D, mixed / total[:, None], i < nq, D)


# -------------------------------------------------------------------- backward


@triton.jit
def _pull_queries(
    q, k, v, d_out, source, k_row, v_row, scale, last, lse, delta, nk, begin, end, dq,
    D: tl.constexpr, SHARED: tl.constexpr, EXACT: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, N):
        j = start + tl.arange(0, N)
        at = _places(source, j, j < nk, SHARED, MASKED)
        kk = _rows(k, at, k_row, j < nk, D, MASKED)
        p = tl.exp2(_scores(q, kk, EXACT) * scale - lse[:, None])
        if MASKED:
            p = tl.where(j[None, :] <= last[:, None], p, 0.0)
        pull = _scores(d_out, _rows(v, at, v_row, j < nk, D, MASKED), EXACT)
        ds = p * (pull - delta[:, None])
        dq = _product(ds.to(kk.dtype), kk, dq, EXACT)
    return dq


@triton.jit(do_not_specialize=["U", "S"])
def d_queries(
    q, k, v, out, d_out, stats, dq, queries, keys, source, cos, sin, q_row, k_row, v_row, d_out_row, dq_row, scale, unit,
    U, S,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr, EXACT: tl.constexpr, TURN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0) // H, tl.program_id(0) % H
    blocks = tl.num_programs(1)
    block = blocks - 1 - tl.program_id(1)
    q0, nq = _span(queries, sequence)
    k0, nk = _span(keys, sequence)
    if sequence == S - 1:
        _clear(dq + head * D, dq_row, q0 + nq, U, block, blocks, D, M)
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
    pull = _rows(d_out + q0 * d_out_row + head * D, i, d_out_row, i < nq, D, True)
    mixed = _rows(out + q0 * (H * D) + head * D, i, H * D, i < nq, D, True)
    down = tl.sum(pull.to(tl.float32) * mixed.to(tl.float32), 1)
    stats += (head.to(tl.int64) * U + q0 + i) * 2
    tl.store(stats + 1, down, mask=i < nq)
    known = tl.load(stats, mask=i < nq, other=float("inf"))
    whole = tl.maximum(block * M + (nk - nq) + 1, 0) // N * N
    end = tl.minimum(block * M + M + (nk - nq), nk)
    grad = tl.zeros((M, D), tl.float32)
    grad = _pull_queries(
        qq, k, v, pull, source, k_row, v_row, scale, last, known, down, nk, 0, whole, grad, D, SHARED, EXACT, N, False
    )  # fmt: skip
    grad = _pull_queries(
        qq, k, v, pull, source, k_row, v_row, scale, last, known, down, nk, whole, end, grad, D, SHARED, EXACT, N, True
    )  # fmt: skip
    _store_back(dq + q0 * dq_row + head * D, i, dq_row, grad * unit, i < nq, cos, sin, q0, D, M, TURN)


@triton.jit
def _pull_keys(
    q, d_out, k, v, stats, q_row, d_out_row, scale, first, nq, U, begin, each, rest, dk, dv,
    G: tl.constexpr, D: tl.constexpr, EXACT: tl.constexpr, M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """``each`` blocks of queries from ``begin`` on, of every head of the group; ``first`` [keys]: the first query that sees each.
    The last block of a masked look may be apart from the others: it begins ``rest`` after ``begin``."""
    per = tl.maximum(each, 1)  # a division by none, even in a loop of none, lets a compiler believe that there is one
    for step in range(G * each):  # one loop, not two: what is loaded ahead need not stop at a head's end
        head, block = step // per, step % per
        start = begin + block * M
        if MASKED:
            start = tl.where(block == each - 1, begin + rest, start)
        here = head.to(tl.int64)  # pointers move as scalars: what is added to them is the same in every step
        row, i = tl.arange(0, M), start + tl.arange(0, M)
        qq = _rows(q + here * D + tl.cast(start, tl.int64) * q_row, row, q_row, i < nq, D, MASKED)
        pair = stats + (here * U + start) * 2 + row[:, None] * 2 + tl.arange(0, 2)[None, :]
        if MASKED:
            both = tl.load(pair, mask=(i < nq)[:, None], other=0.0)
        else:
            both = tl.load(pair)
        known, down = tl.split(both)  # as one: alone, each would be loaded many times over, by all threads that ask
        p = tl.exp2(_scores(k, qq, EXACT) * scale - known[None, :])  # [keys, queries]
        if MASKED:
            p = tl.where(i[None, :] >= first[:, None], p, 0.0)  # beyond the end are zeros, which pull at nothing
        pull = _rows(d_out + here * D + tl.cast(start, tl.int64) * d_out_row, row, d_out_row, i < nq, D, MASKED)
        dv = _product(p.to(pull.dtype), pull, dv, EXACT)
        ds = p * (_scores(v, pull, EXACT) - down[None, :])
        dk = _product(ds.to(qq.dtype), qq, dk, EXACT)
    return dk, dv


@triton.jit(do_not_specialize=["U", "places", "S"])
def d_keys(
    q, k, v, d_out, stats, dk, dv, queries, keys, source, cos, sin, q_row, k_row, v_row, d_out_row, dk_row, dv_row,
    scale, unit, U, places, S,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr, EXACT: tl.constexpr, TURN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0) // K, tl.program_id(0) % K
    block, blocks = tl.program_id(1), tl.num_programs(1)  # early keys are seen by most: they begin first
    q0, nq = _span(queries, sequence)
    k0, nk = _span(keys, sequence)
    if sequence == S - 1:
        _clear(dk + head * D, dk_row, k0 + nk, places, block, blocks, D, N)
        _clear(dv + head * D, dv_row, k0 + nk, places, block, blocks, D, N)
    if block * N >= nk:
        return
    j = block * N + tl.arange(0, N)
    if SHARED:
        at = _places(source + k0, j, j < nk, True, True)
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
    # the blocks of queries that see these keys: some on the diagonal, whole ones, and one that the end cuts off
    every = tl.maximum(nq - begin, 0)
    some = tl.minimum(tl.cdiv(tl.maximum(block * N + N - 1 - (nk - nq) - begin, 0), M), tl.cdiv(every, M))
    whole = tl.maximum(every // M - some, 0)
    masked = tl.cdiv(every, M) - whole
    rest = (tl.where(masked > some, tl.cdiv(every, M), some) - 1) * M
    d_kk, d_vv = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
    d_kk, d_vv = _pull_keys(
        q, d_out, kk, vv, stats, q_row, d_out_row, scale, first, nq, U, begin, masked, rest, d_kk, d_vv,
        G, D, EXACT, M, True,
    )  # fmt: skip
    d_kk, d_vv = _pull_keys(
        q, d_out, kk, vv, stats, q_row, d_out_row, scale, first, nq, U, begin + some * M, whole, rest,
        d_kk, d_vv, G, D, EXACT, M, False,
    )  # fmt: skip
    k0 = k0.to(tl.int64)
    _store_back(dk + k0 * dk_row + head * D, j, dk_row, d_kk * unit, j < nk, cos, sin, k0, D, N, TURN)
    _store(dv + k0 * dv_row + head * D, j, dv_row, d_vv, j < nk, D)
