"""The operations of a decoder layer between its matrix products, forward and backward, one Triton kernel each.

Legend: L positions, d width, H query heads, K key heads, D head size, F MLP width, N rows, V vocabulary, U rows, M copies of
them. Same names and meanings as in ``kernels.reference``, which says what each computes. The residual stream is float32; the
inputs of matrix products are ``dtype``. Knows tensors; neither models nor batches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056  # of a norm's backward pass; each sums its part of the weight's gradient over its rows
SCAN = 4096  # entries of the vocabulary per load


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


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, d = x.shape
    total, out = x if delta is None else torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    block = triton.next_power_of_2(d)
    if rows:
        _add_norm[(rows,)](
            x, x if delta is None else delta, weight, total, out, d, eps, delta is not None, block,
            num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
    return total, out


@triton.jit
def _norm_backward(
    dh, total, weight, residual_grad, d_total, d_cast, out, d_weight, rows, d, eps,
    RESIDUAL: tl.constexpr, CAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < d
    w = tl.load(weight + at, mask=inside, other=0.0)
    weight_grad = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, programs):
        here = tl.cast(row, tl.int64) * d + at
        h = tl.load(total + here, mask=inside, other=0.0)
        g = tl.load(dh + here, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(h * h) / d + eps)
        unit = h * scale
        weight_grad += g * unit
        g *= w
        grad = (g - unit * (tl.sum(g * unit) / d)) * scale
        if RESIDUAL:
            grad += tl.load(residual_grad + here, mask=inside, other=0.0)
        tl.store(d_total + here, grad, mask=inside)
        if CAST:
            tl.store(d_cast + here, grad.to(d_cast.dtype.element_ty), mask=inside)
        tl.store(out + here, (w * unit).to(out.dtype.element_ty), mask=inside)
    tl.store(d_weight + program * d + at, weight_grad, mask=inside)


def norm_backward(
    dh: Tensor, total: Tensor, weight: Tensor, eps: float, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, d = total.shape
    programs = max(1, min(PROGRAMS, rows))
    d_total, out = torch.empty_like(total), torch.empty_like(dh)
    same_dtype = dh.dtype == total.dtype
    d_cast = d_total if same_dtype else torch.empty_like(dh)
    # a sum for every program, added afterwards in a fixed order: atomics would change the bits from run to run
    parts = torch.empty(programs, d, dtype=total.dtype, device=dh.device)
    block = triton.next_power_of_2(d)
    _norm_backward[(programs,)](
        dh, total, weight, total if residual_grad is None else residual_grad, d_total, d_cast, out, parts, rows, d, eps,
        residual_grad is not None, not same_dtype, block, num_warps=2 if block <= 1024 else 4 if block <= 2048 else 8,
    )  # fmt: skip
    return d_total, d_cast, out, parts.sum(0)


@triton.jit
def _rotate(
    x, out, cos, sin, row, head, out_row, heads, sign,
    D: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    i, h = tl.arange(0, PAD)[None, :], tl.arange(0, HEADS)[:, None]
    inside = (i < HALF) & (h < heads)
    c = tl.load(cos + at * HALF + i, mask=i < HALF, other=0.0)
    s = tl.load(sin + at * HALF + i, mask=i < HALF, other=0.0) * sign
    a = tl.load(x + at * row + h * head + i, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at * row + h * head + HALF + i, mask=inside, other=0.0).to(tl.float32)
    # one thread owns a pair, so it may be rotated in place
    dtype = out.dtype.element_ty
    tl.store(out + at * out_row + h * D + i, (a * c - b * s).to(dtype), mask=inside)
    tl.store(out + at * out_row + h * D + HALF + i, (b * c + a * s).to(dtype), mask=inside)


def _launch_rotate(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    """Rotate x [L, heads, D] into out [L, heads, D], whose heads are adjacent; both may be views of wider rows."""
    rows, heads, size = x.shape
    assert x.stride(2) == 1 and out.stride(2) == 1 and out.stride(1) == size
    if rows:
        _rotate[(rows,)](
            x, out, cos, sin, x.stride(0), x.stride(1), out.stride(0), heads, sign,
            size, size // 2, triton.next_power_of_2(size // 2), triton.next_power_of_2(heads), num_warps=2,
        )  # fmt: skip


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, size: int) -> None:
    rotated = qkv.view(len(qkv), -1, size)[:, :heads]
    _launch_rotate(rotated, rotated, cos, sin, 1.0)


def rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (rows, H, size), K = dq.shape, dk.shape[1]
    out = torch.empty(rows, H + 2 * K, size, dtype=dq.dtype, device=dq.device)
    _launch_rotate(dq, out[:, :H], cos, sin, -1.0)
    _launch_rotate(dk, out[:, H : H + K], cos, sin, -1.0)
    out[:, H + K :] = dv
    return out.flatten(1)


@triton.jit
def _swiglu(gate_up, out, F, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    gate = tl.load(gate_up + row * 2 * F + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + at, mask=inside, other=0.0).to(tl.float32)
    # rounded where the stock MLP rounds
    act = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * F + at, (act * up).to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    block = min(1024, triton.next_power_of_2(size))
    if rows:
        _swiglu[(rows, triton.cdiv(size, block))](gate_up, out, size, block)
    return out


@triton.jit
def _swiglu_backward(gate_up, d, d_gate_up, out, F, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * F + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(d + row * F + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    tl.store(d_gate_up + row * 2 * F + at, (g * up * (s + silu * (1.0 - s))).to(dtype), mask=inside)
    tl.store(d_gate_up + row * 2 * F + F + at, (g * silu).to(dtype), mask=inside)
    tl.store(out + row * F + at, (silu.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


def swiglu_backward(gate_up: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    rows, size = d.shape
    d_gate_up, out = torch.empty_like(gate_up), torch.empty_like(d)
    block = min(1024, triton.next_power_of_2(size))
    if rows:
        _swiglu_backward[(rows, triton.cdiv(size, block))](gate_up, d, d_gate_up, out, size, block)
    return d_gate_up, out


# -------------------------------------------------------------------- copies


@triton.jit
def _gather_copies(x, y, x_out, y_out, source, M, C, x_row, y_row, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)[None, :]
    inside = (place < M)[:, None] & (at < C)
    row = tl.load(source + place, mask=place < M, other=0)[:, None]
    here = place.to(tl.int64)[:, None] * C + at
    tl.store(x_out + here, tl.load(x + row * x_row + at, mask=inside), mask=inside)
    tl.store(y_out + here, tl.load(y + row * y_row + at, mask=inside), mask=inside)


def gather_copies(x: Tensor, y: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    heads, size = x.shape[1:]
    x, y = (t if t.stride()[1:] == (size, 1) else t.contiguous() for t in (x, y))
    out = torch.empty(2, len(source), heads, size, dtype=x.dtype, device=x.device)
    if len(source):
        _gather_copies[(triton.cdiv(len(source), 8),)](
            x, y, out[0], out[1], source, len(source), heads * size, x.stride(0), y.stride(0),
            8, triton.next_power_of_2(heads * size),
        )  # fmt: skip
    return out[0], out[1]


@triton.jit
def _sum_copies(
    dx, dy, x_out, y_out, first, members, cos, sin, U, C, x_row, y_row,
    D: tl.constexpr, HALF: tl.constexpr, ROTATED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    row, pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    # the first of a rotated pair; the second lies HALF further on
    at, there = pair // HALF * D + pair % HALF, 2 * pair < C
    begin = tl.load(first + row, mask=row < U, other=0)
    count = tl.load(first + row + 1, mask=row < U, other=0) - begin
    xa = tl.zeros((ROWS, BLOCK), tl.float32)
    xb, ya, yb = xa, xa, xa
    for k in range(0, tl.max(count), UNROLL):
        # loads in flight together: a prefix shared by a whole batch has a hundred copies
        for j in tl.static_range(UNROLL):
            more = k + j < count
            here = tl.load(members + begin + k + j, mask=more, other=0).to(tl.int64)[:, None] * C + at
            inside = more[:, None] & there
            xa += tl.load(dx + here, mask=inside, other=0.0).to(tl.float32)
            xb += tl.load(dx + here + HALF, mask=inside, other=0.0).to(tl.float32)
            ya += tl.load(dy + here, mask=inside, other=0.0).to(tl.float32)
            yb += tl.load(dy + here + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = x_out.dtype.element_ty
    inside, wide = (row < U)[:, None] & there, row.to(tl.int64)[:, None]
    if ROTATED:
        c = tl.load(cos + wide * HALF + pair % HALF, mask=inside, other=0.0)
        s = tl.load(sin + wide * HALF + pair % HALF, mask=inside, other=0.0)
        xa, xb = xa * c + xb * s, xb * c - xa * s
    tl.store(x_out + wide * x_row + at, xa.to(dtype), mask=inside)
    tl.store(x_out + wide * x_row + at + HALF, xb.to(dtype), mask=inside)
    tl.store(y_out + wide * y_row + at, ya.to(dtype), mask=inside)
    tl.store(y_out + wide * y_row + at + HALF, yb.to(dtype), mask=inside)


def sum_copies(
    dx: Tensor, dy: Tensor, first: Tensor, members: Tensor, into: tuple[Tensor, Tensor] | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, (heads, size) = len(first) - 1, dx.shape[1:]
    dx, dy = dx.contiguous(), dy.contiguous()
    x, y = into or torch.empty(2, rows, heads, size, dtype=dx.dtype, device=dx.device)
    assert all(t.stride()[1:] == (size, 1) for t in (x, y)) and size % 2 == 0
    if rows:
        _sum_copies[(triton.cdiv(rows, 4),)](
            dx, dy, x, y, first, members, *(angles or (dx, dx)), rows, heads * size, x.stride(0), y.stride(0),
            size, size // 2, angles is not None, 4, triton.next_power_of_2(heads * size // 2), 4,
        )  # fmt: skip
    return x, y


# -------------------------------------------------------------------- log-probabilities


@triton.jit
def _log_probs(
    logits, targets, inverse, logp, lse, entropy, residual, V,
    ENTROPY: tl.constexpr, KEEP_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(inverse + row)
    at = tl.arange(0, BLOCK)
    # running statistics of each column of the block; columns meet once, at the end
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)  # Σ e^(z − top) · (z − top)
    for start in range(0, V, BLOCK):
        inside = start + at < V
        z = tl.load(logits + row * V + start + at, mask=inside, other=0.0).to(tl.float32) * inverse
        # masked after the product: fused with z - high, a masked z would be off by more than exp can take
        z = tl.where(inside, z, -1e30)
        high = tl.maximum(top, z)
        decay, e = tl.exp(top - high), tl.exp(z - high)
        if ENTROPY:
            mean = decay * (mean + total * (top - high)) + e * (z - high)
        total = total * decay + e
        top = high
    high = tl.max(top)
    decay = tl.exp(top - high)
    whole = tl.sum(total * decay)
    log_sum = tl.log(whole)
    target = tl.load(targets + row)
    target_logit = tl.load(logits + row * V + target).to(tl.float32) * inverse
    tl.store(logp + row, target_logit - high - log_sum)
    tl.store(lse + row, high + log_sum)
    if ENTROPY:
        shift = tl.where(total > 0, top - high, 0.0)
        tl.store(entropy + row, log_sum - tl.sum(decay * (mean + total * shift)) / whole)
    if KEEP_RESIDUAL:  # the row is still in the L2 cache
        for start in range(0, V, BLOCK):
            inside = start + at < V
            z = tl.load(logits + row * V + start + at, mask=inside, other=-1e30).to(tl.float32) * inverse
            difference = tl.exp(z - high - log_sum) - tl.where(start + at == target, 1.0, 0.0)
            tl.store(residual + row * V + start + at, difference.to(residual.dtype.element_ty), mask=inside)


def log_probs(
    logits: Tensor, targets: Tensor, inverse: Tensor, with_entropy: bool, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows, vocabulary = logits.shape
    logp, lse, entropy = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    block = min(SCAN, triton.next_power_of_2(vocabulary))
    if rows:
        _log_probs[(rows,)](
            logits, targets, inverse, logp, lse, entropy, logits if residual is None else residual, vocabulary,
            with_entropy, residual is not None, block, num_warps=8,
        )  # fmt: skip
    return logp, lse, entropy if with_entropy else None


@triton.jit
def _log_probs_backward(
    logits, targets, inverse, lse, g_logp, g_entropy, entropy, out, V,
    LOGP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    inverse = tl.load(inverse + row)
    log_p = tl.load(logits + row * V + at, mask=inside, other=-1e30).to(tl.float32) * inverse - tl.load(lse + row)
    p = tl.exp(log_p)
    d = tl.zeros((BLOCK,), tl.float32)
    if ENTROPY:
        d -= tl.load(g_entropy + row) * p * (log_p + tl.load(entropy + row))
    if LOGP:
        d += tl.load(g_logp + row) * (tl.where(at == tl.load(targets + row), 1.0, 0.0) - p)
    tl.store(out + row * V + at, (d * inverse).to(out.dtype.element_ty), mask=inside)


def log_probs_backward(
    logits: Tensor, targets: Tensor, inverse: Tensor, lse: Tensor, g_logp: Tensor | None, g_entropy: Tensor | None,
    entropy: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=dtype, device=logits.device)
    block = min(SCAN, triton.next_power_of_2(vocabulary))
    with_entropy = g_entropy is not None and entropy is not None
    grads = [lse if g is None else g.contiguous() for g in (g_logp, g_entropy, entropy)]
    if rows:
        _log_probs_backward[(rows, triton.cdiv(vocabulary, block))](
            logits, targets, inverse, lse, *grads, out, vocabulary, g_logp is not None, with_entropy, block, num_warps=8
        )  # fmt: skip
    return out
