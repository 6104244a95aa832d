"""The pieces between the products of a decoder layer as C kernels on a CPU: what ``plain`` says, in one pass over memory each.

Same names and shapes as ``plain``, float32 only. Knows tensors; neither models nor what the states are for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.engines.kernels.cpu.build import library
from turnwise.engines.kernels.reference import collect, copies  # noqa: F401 - of layouts that only a GPU has

CHUNK = 32  # rows of one partial sum, as in kernels.c


def fits(x: Tensor) -> bool:
    """Whether products of this tensor are for these kernels."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    return library()[0] is not None


def at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def flat(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    x, delta, weight = flat(x), None if delta is None else flat(delta), flat(weight)
    h, total = torch.empty_like(x), x if delta is None else torch.empty_like(x)
    _lib().add_norm(at(x), at(delta), at(weight), eps, at(total), at(h), *x.shape)
    return total, h


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / rms(x)."""
    return add_norm(x, None, weight, eps, x.dtype)[1]


def norm_backward(
    dh: Tensor, total: Tensor, weight: Tensor, eps: float, beside: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dh, total, weight, beside = flat(dh), flat(total), flat(weight), None if beside is None else flat(beside)
    dx, h = torch.empty_like(total), torch.empty_like(total)
    partial = total.new_empty(-(-total.shape[0] // CHUNK), total.shape[1])
    given = (at(dh), at(total), at(weight), eps, at(beside))
    _lib().norm_backward(*given, at(dx), at(h), at(partial), *total.shape)
    return dx, dx, h, partial.sum(0)


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, size: int) -> None:
    _lib().rotate(at(qkv), at(flat(cos)), at(flat(sin)), 1.0, qkv.shape[0], heads, size, qkv.stride(0))


def unrotate(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    whole = one_buffer(dq, dk, dv)
    if whole is None:
        whole = torch.cat((dq, dk, dv), 1).flatten(1)
    heads, size = dq.shape[1] + dk.shape[1], dq.shape[2]
    _lib().rotate(at(whole), at(flat(cos)), at(flat(sin)), -1.0, whole.shape[0], heads, size, whole.stride(0))
    return whole


def one_buffer(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """[L, (H + 2K) D] if q [L, H, D], k and v [L, K, D] lie side by side in it already."""
    rows, heads, size = q.shape[0], (q.shape[1], k.shape[1], v.shape[1]), q.shape[2]
    width = sum(heads) * size
    place, side = q.data_ptr(), True
    for part, count in zip((q, k, v), heads):
        side &= part.stride() == (width, size, 1) and part.data_ptr() == place
        place += count * size * part.element_size()
    return q.as_strided((rows, width), (width, 1)) if side else None


def swiglu(both: Tensor) -> Tensor:
    rows, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, width)
    _lib().swiglu(at(both), at(out), rows, width)
    return out


def swiglu_backward(both: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    d, d_both = flat(d), torch.empty_like(both)
    act = torch.empty_like(d)
    _lib().swiglu_backward(at(both), at(d), at(d_both), at(act), *d.shape)
    return d_both, act


def scores(
    logits: Tensor, targets: Tensor, inverse: Tensor, want_entropy: bool, keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    logits, targets, inverse = flat(logits), flat(targets), flat(inverse)
    logp, lse = torch.empty_like(inverse), torch.empty_like(inverse)
    entropy = torch.empty_like(inverse) if want_entropy else None
    assert keep is None or keep.is_contiguous()
    _lib().scores(at(logits), at(targets), at(inverse), at(logp), at(lse), at(entropy), at(keep), *logits.shape)
    return logp, lse, entropy


def pull(
    logits: Tensor, targets: Tensor, inverse: Tensor, lse: Tensor, g_logp: Tensor | None, g_entropy: Tensor | None,
    entropy: Tensor | None, kind: torch.dtype,
) -> Tensor:  # fmt: skip
    """As ``plain.pull``; the logits are overwritten."""
    logits, targets, inverse, lse = flat(logits), flat(targets), flat(inverse), flat(lse)
    if entropy is None:
        g_entropy = None
    pulls = [None if g is None else flat(g) for g in (g_logp, g_entropy, entropy)]
    _lib().pull(at(logits), at(targets), at(inverse), at(lse), *map(at, pulls), *logits.shape)
    return logits.to(kind)


def _lib() -> Any:
    return library()[0]
