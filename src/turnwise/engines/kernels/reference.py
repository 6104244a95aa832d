"""The operations of a decoder layer between its matrix products, forward and backward, in plain PyTorch.

Legend: L positions, d width, H query heads, K key heads, D head size, F MLP width, U and R rows. ``dtype``: of matrix products;
the residual stream and all sums are accumulated in float32 (float64 for float64).

``triton.layers`` and ``cpu.layers`` compute the same with one kernel each; this module runs where neither is available.
``varlen_attention`` is slow and for tests: ``triton.attention`` computes the same. Knows tensors; neither models nor batches.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


def _rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(1, keepdim=True) + eps)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x + delta, and weight · (x + delta) / rms rounded to ``dtype``."""
    total = x if delta is None else x + delta
    return total, (total * _rms(total, eps)).mul_(weight).to(dtype)


def norm_backward(
    dh: Tensor, total: Tensor, weight: Tensor, eps: float, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dh [L, d] -> d(total), the same in dh's dtype, the norm's output recomputed, d(weight). ``residual_grad``: the
    gradient that reaches total through the residual stream."""
    scale = _rms(total, eps)
    unit, grad = total * scale, dh.to(total.dtype)
    d_weight = torch.linalg.vecdot(grad, unit, dim=0)
    grad = grad * weight
    projection = torch.linalg.vecdot(grad, unit).div_(total.shape[1])[:, None]
    d = grad.addcmul_(unit, projection, value=-1).mul_(scale)
    if residual_grad is not None:
        d += residual_grad
    return d, d.to(dh.dtype), unit.mul_(weight).to(dh.dtype), d_weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [L, heads, D] rotated by the angles [L, 1, D/2], in pairs (i, i + D/2)."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, size: int) -> None:
    """Rotate the first ``heads`` heads (queries and keys) of qkv [L, (H + 2K) D] in place. cos and sin [L, D/2]."""
    rotated = qkv.view(len(qkv), -1, size)[:, :heads]
    rotated.copy_(_rotate(rotated, cos[:, None], sin[:, None]))


def rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients of rotated q [L, H, D] and k, and of v [L, K, D] -> gradient before rotation, [L, (H + 2K) D]."""
    unrotated = [_rotate(g, cos[:, None], -sin[:, None]) for g in (dq, dk)]
    return torch.cat((*unrotated, dv), 1).flatten(1)


def swiglu(gate_up: Tensor) -> Tensor:
    """[L, 2F] -> silu(first half) · second half, [L, F]."""
    gate, up = gate_up.chunk(2, 1)
    return F.silu(gate).mul_(up)


def swiglu_backward(gate_up: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """d [L, F] -> d(gate_up) [L, 2F], and the activation recomputed."""
    wide = torch.float64 if gate_up.dtype == torch.float64 else torch.float32
    gate, up = gate_up.to(wide).chunk(2, 1)
    s = torch.sigmoid(gate)
    silu, grad = gate * s, d.to(wide)
    d_gate = grad * up * (s + silu * (1 - s))
    return torch.cat((d_gate, grad * silu), 1).to(gate_up.dtype), (silu.to(gate_up.dtype) * gate_up.chunk(2, 1)[1])


def gather_copies(x: Tensor, y: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x and y [U, K, D] -> copies [M, K, D]: copy i is row ``source[i]``."""
    return x[source], y[source]


def sum_copies(
    dx: Tensor, dy: Tensor, first: Tensor, members: Tensor, into: tuple[Tensor, Tensor] | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx and dy [M, K, D] -> sums over each row's copies [U, K, D]: the copies of row u are ``members[first[u]:first[u + 1]]``.
    ``into``: output tensors. ``angles``: cos and sin [U, D/2] by which the rows of x were rotated; the gradient is
    rotated back."""
    count = (first[1:] - first[:-1]).long()
    owner = torch.repeat_interleave(torch.arange(len(count), device=dx.device), count)
    copies = members[: len(owner)].long()
    wide = lambda d: d[copies].to(torch.promote_types(d.dtype, torch.float32))  # noqa: E731
    x, y = (wide(d).new_zeros(len(count), *d.shape[1:]).index_add_(0, owner, wide(d)) for d in (dx, dy))
    if angles is not None:
        x = _rotate(x, angles[0][:, None], -angles[1][:, None])
    x_out, y_out = into or (torch.empty_like(x, dtype=dx.dtype), torch.empty_like(y, dtype=dy.dtype))
    return x_out.copy_(x), y_out.copy_(y)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, source: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """q [U, H, D], k and v [R, K, D] -> out [U, H, D], and log₂ Σ exp of the scores, [H, U].

    Sequence s has queries ``queries[s]:queries[s + 1]`` and keys ``keys[s]:keys[s + 1]`` of k and v, or of their rows ``source``.
    Its last query is aligned with its last key. A query without keys, or outside all sequences, gets 0 and an infinite lse."""
    if source is not None:
        k, v = k[source], v[source]
    wide, group = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).to(wide) for x in (k, v))
    out, lse = k.new_zeros(q.shape), k.new_full((q.shape[1], len(q)), torch.inf)
    for (a, b), (c, d) in zip(pairwise(queries.tolist()), pairwise(keys.tolist())):
        z = torch.einsum("qhd,khd->hqk", q[a:b].to(wide), k[c:d]) * scale
        visible = torch.ones_like(z[0], dtype=torch.bool).tril((d - c) - (b - a))
        has_keys = visible.any(1)
        z = z[:, has_keys].masked_fill(~visible[has_keys], -torch.inf)
        out[a:b][has_keys] = torch.einsum("hqk,khd->qhd", z.softmax(2), v[c:d])
        lse[:, a:b][:, has_keys] = z.detach().logsumexp(2) / math.log(2)
    return out.to(q.dtype), lse


def log_probs(
    logits: Tensor, targets: Tensor, inverse: Tensor, with_entropy: bool, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """logits [N, V], z = logits · inverse temperature -> log p of the targets, lse(z), entropy (``with_entropy``), each [N].
    ``residual`` [N, V] receives p − onehot: minus the gradient of log p with respect to z."""
    z = logits * inverse[:, None]
    lse = torch.logsumexp(z, 1)
    logp = z.gather(1, targets[:, None]).squeeze(1) - lse
    entropy = None
    if residual is not None:
        p = (z - lse[:, None]).exp()
        residual.copy_(p.scatter_add_(1, targets[:, None], -torch.ones_like(p[:, :1])))
    if with_entropy:
        z -= lse[:, None]
        entropy = -torch.linalg.vecdot(z.exp(), z)
    return logp, lse, entropy


def log_probs_backward(
    logits: Tensor, targets: Tensor, inverse: Tensor, lse: Tensor, g_logp: Tensor | None, g_entropy: Tensor | None,
    entropy: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The backward pass of ``log_probs``: d(logits) [N, V] = (g·(onehot − p) − g′·p·(log p + H)) / temperature, in ``dtype``."""
    log_p = logits * inverse[:, None] - lse[:, None]
    p = log_p.exp()
    d = torch.zeros_like(p)
    if g_entropy is not None and entropy is not None:
        d = (log_p + entropy[:, None]).mul_(-g_entropy[:, None]).mul_(p)
    if g_logp is not None:
        d -= p * g_logp[:, None]
        d.scatter_add_(1, targets[:, None], g_logp[:, None])
    return d.mul_(inverse[:, None]).to(dtype)
