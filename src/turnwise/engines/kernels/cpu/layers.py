"""The operations between the matrix products of a decoder layer as C kernels for CPUs, in one pass over memory each.

Same names and shapes as ``kernels.reference``, which says what they compute; float32 only. Knows tensors; neither models nor
what the states are for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.engines.kernels.cpu.build import library
from turnwise.engines.kernels.reference import gather_copies, sum_copies  # noqa: F401 - only layouts on a GPU use them

CHUNK = 32  # rows of one partial sum, as in kernels.c


def fits(x: Tensor) -> bool:
    """Whether these kernels support this tensor."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    return library()[0] is not None


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, delta, weight = contiguous(x), None if delta is None else contiguous(delta), contiguous(weight)
    h, total = torch.empty_like(x), x if delta is None else torch.empty_like(x)
    _lib().add_norm(pointer(x), pointer(delta), pointer(weight), eps, pointer(total), pointer(h), *x.shape)
    return total, h


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / rms(x)."""
    return add_norm(x, None, weight, eps, x.dtype)[1]


def norm_backward(
    dh: Tensor, total: Tensor, weight: Tensor, eps: float, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dh, total, weight = contiguous(dh), contiguous(total), contiguous(weight)
    residual_grad = None if residual_grad is None else contiguous(residual_grad)
    dx, h = torch.empty_like(total), torch.empty_like(total)
    partial = total.new_empty(-(-total.shape[0] // CHUNK), total.shape[1])
    inputs = (pointer(dh), pointer(total), pointer(weight), eps, pointer(residual_grad))
    _lib().norm_backward(*inputs, pointer(dx), pointer(h), pointer(partial), *total.shape)
    return dx, dx, h, partial.sum(0)


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, size: int) -> None:
    _rotate(qkv, cos, sin, 1.0, heads, size)


def rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    whole = one_buffer(dq, dk, dv)
    if whole is None:
        whole = torch.cat((dq, dk, dv), 1).flatten(1)
    heads, size = dq.shape[1] + dk.shape[1], dq.shape[2]
    _rotate(whole, cos, sin, -1.0, heads, size)
    return whole


def _rotate(rows: Tensor, cos: Tensor, sin: Tensor, sign: float, heads: int, size: int) -> None:
    cos, sin = contiguous(cos), contiguous(sin)
    _lib().rotate(pointer(rows), pointer(cos), pointer(sin), sign, rows.shape[0], heads, size, rows.stride(0))


def one_buffer(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The buffer [L, (H + 2K) D] that q [L, H, D], k and v [L, K, D] are adjacent views of, if there is one."""
    rows, heads, size = q.shape[0], (q.shape[1], k.shape[1], v.shape[1]), q.shape[2]
    width = sum(heads) * size
    address, adjacent = q.data_ptr(), True
    for part, count in zip((q, k, v), heads):
        adjacent &= part.stride() == (width, size, 1) and part.data_ptr() == address
        address += count * size * part.element_size()
    return q.as_strided((rows, width), (width, 1)) if adjacent else None


def swiglu(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _lib().swiglu(pointer(gate_up), pointer(out), rows, width)
    return out


def swiglu_backward(gate_up: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    d, d_gate_up = contiguous(d), torch.empty_like(gate_up)
    act = torch.empty_like(d)
    _lib().swiglu_backward(pointer(gate_up), pointer(d), pointer(d_gate_up), pointer(act), *d.shape)
    return d_gate_up, act


def log_probs(
    logits: Tensor, targets: Tensor, inverse: Tensor, with_entropy: bool, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    logits, targets, inverse = contiguous(logits), contiguous(targets), contiguous(inverse)
    logp, lse = torch.empty_like(inverse), torch.empty_like(inverse)
    entropy = torch.empty_like(inverse) if with_entropy else None
    assert residual is None or residual.is_contiguous()
    tensors = (logits, targets, inverse, logp, lse, entropy, residual)
    _lib().log_probs(*map(pointer, tensors), *logits.shape)
    return logp, lse, entropy


def log_probs_backward(
    logits: Tensor, targets: Tensor, inverse: Tensor, lse: Tensor, g_logp: Tensor | None, g_entropy: Tensor | None,
    entropy: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """As in ``reference``, but overwrites the logits."""
    logits, targets, inverse, lse = contiguous(logits), contiguous(targets), contiguous(inverse), contiguous(lse)
    if entropy is None:
        g_entropy = None
    grads = [None if g is None else contiguous(g) for g in (g_logp, g_entropy, entropy)]
    _lib().log_probs_backward(*map(pointer, (logits, targets, inverse, lse, *grads)), *logits.shape)
    return logits.to(dtype)


def _lib() -> Any:
    return library()[0]
