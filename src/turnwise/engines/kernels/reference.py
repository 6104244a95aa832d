"""The pieces of a decoder layer between its matrix products, forward and backward, in plain PyTorch.

Legend: L positions, d width, H query heads, K key heads, D head size, F MLP width, U and R rows. ``kind``: the dtype of products;
the residual stream and all sums are wide (float32, or float64 for float64).

This is what ``cuda/training.py`` computes in one kernel each, and what runs where there is no Triton. ``attend``, slow and for
tests, is what ``cuda/attention.py`` computes.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


def _rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(1, keepdim=True) + eps)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """x + delta, and weight · (x + delta) / rms rounded to ``kind``."""
    total = x if delta is None else x + delta
    return total, (total * _rms(total, eps)).mul_(weight).to(kind)


def norm_backward(
    dh: Tensor, total: Tensor, weight: Tensor, eps: float, beside: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dh [L, d] -> d(total), the same in dh's dtype, the norm's output again, d(weight). ``beside``: what else flows to total."""
    scale = _rms(total, eps)
    unit, pull = total * scale, dh.to(total.dtype)
    d_weight = torch.linalg.vecdot(pull, unit, dim=0)
    pull = pull * weight
    down = torch.linalg.vecdot(pull, unit).div_(total.shape[1])[:, None]
    d = pull.addcmul_(unit, down, value=-1).mul_(scale)
    if beside is not None:
        d += beside
    return d, d.to(dh.dtype), unit.mul_(weight).to(dh.dtype), d_weight


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [L, heads, D] turned by the angles [L, 1, D/2], in pairs (i, i + D/2)."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, size: int) -> None:
    """Turn the first ``heads`` heads (queries and keys) of qkv [L, (H + 2K) D] in place. cos and sin [L, D/2]."""
    turned = qkv.view(len(qkv), -1, size)[:, :heads]
    turned.copy_(_turn(turned, cos[:, None], sin[:, None]))


def unrotate(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients of turned q [L, H, D] and k, v [L, K, D] -> gradient of what was turned, [L, (H + 2K) D]."""
    back = [_turn(g, cos[:, None], -sin[:, None]) for g in (dq, dk)]
    return torch.cat((*back, dv), 1).flatten(1)


def swiglu(both: Tensor) -> Tensor:
    """[L, 2F] -> silu(first half) · second half, [L, F]."""
    gate, up = both.chunk(2, 1)
    return F.silu(gate).mul_(up)


def swiglu_backward(both: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """d [L, F] -> d(both) [L, 2F], and the activation again."""
    wide = torch.float64 if both.dtype == torch.float64 else torch.float32
    gate, up = both.to(wide).chunk(2, 1)
    s = torch.sigmoid(gate)
    silu, pull = gate * s, d.to(wide)
    d_gate = pull * up * (s + silu * (1 - s))
    return torch.cat((d_gate, pull * silu), 1).to(both.dtype), (silu.to(both.dtype) * both.chunk(2, 1)[1])


def copies(x: Tensor, y: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x and y [U, K, D] -> [M, K, D]: place i gets row ``source[i]``."""
    return x[source], y[source]


def collect(
    dx: Tensor, dy: Tensor, first: Tensor, members: Tensor, into: tuple[Tensor, Tensor] | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx and dy [M, K, D] -> sums over each row's copies [U, K, D]: row u has ``members[first[u]:first[u + 1]]``. ``into``: where
    to put them. ``angles``: cos and sin [U, D/2] by which the rows of x were turned; their gradient is turned back."""
    count = (first[1:] - first[:-1]).long()
    owner = torch.repeat_interleave(torch.arange(len(count), device=dx.device), count)
    places = members[: len(owner)].long()
    wide = lambda d: d[places].to(torch.promote_types(d.dtype, torch.float32))  # noqa: E731
    x, y = (wide(d).new_zeros(len(count), *d.shape[1:]).index_add_(0, owner, wide(d)) for d in (dx, dy))
    if angles is not None:
        x = _turn(x, angles[0][:, None], -angles[1][:, None])
    x_out, y_out = into or (torch.empty_like(x, dtype=dx.dtype), torch.empty_like(y, dtype=dy.dtype))
    return x_out.copy_(x), y_out.copy_(y)


def attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, source: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """q [U, H, D], k and v [R, K, D] -> out [U, H, D], and log₂ Σ exp of the scores, [H, U].

    Sequence s asks rows ``queries[s]:queries[s + 1]`` over keys ``keys[s]:keys[s + 1]`` of k and v, or of their rows ``source``.
    Its last query stands over its last key. A query that sees no key, or is of no sequence, gets zeros; its sum is infinite."""
    if source is not None:
        k, v = k[source], v[source]
    wide, group = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).to(wide) for x in (k, v))
    out, lse = k.new_zeros(q.shape), k.new_full((q.shape[1], len(q)), torch.inf)
    for (a, b), (c, d) in zip(pairwise(queries.tolist()), pairwise(keys.tolist())):
        z = torch.einsum("qhd,khd->hqk", q[a:b].to(wide), k[c:d]) * scale
        sees = torch.ones_like(z[0], dtype=torch.bool).tril((d - c) - (b - a))
        some = sees.any(1)
        z = z[:, some].masked_fill(~sees[some], -torch.inf)
        out[a:b][some] = torch.einsum("hqk,khd->qhd", z.softmax(2), v[c:d])
        lse[:, a:b][:, some] = z.detach().logsumexp(2) / math.log(2)
    return out.to(q.dtype), lse


def scores(
    logits: Tensor, targets: Tensor, inverse: Tensor, want_entropy: bool, keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """logits [N, V], z = logits · inverse -> log p of the targets, lse(z), entropy (where wanted), each [N]. ``keep`` [N, V]
    receives p − onehot: minus the gradient of log p by z."""
    z = logits * inverse[:, None]
    lse = torch.logsumexp(z, 1)
    logp = z.gather(1, targets[:, None]).squeeze(1) - lse
    entropy = None
    if keep is not None:
        p = (z - lse[:, None]).exp()
        keep.copy_(p.scatter_add_(1, targets[:, None], -torch.ones_like(p[:, :1])))
    if want_entropy:
        z -= lse[:, None]
        entropy = -torch.linalg.vecdot(z.exp(), z)
    return logp, lse, entropy


def pull(
    logits: Tensor, targets: Tensor, inverse: Tensor, lse: Tensor, g_logp: Tensor | None, g_entropy: Tensor | None,
    entropy: Tensor | None, kind: torch.dtype,
) -> Tensor:  # fmt: skip
    """d(logits) [N, V] of what ``scores`` said: g·(onehot − p) − g′·p·(log p + H), over the temperature, in ``kind``."""
    log_p = logits * inverse[:, None] - lse[:, None]
    p = log_p.exp()
    d = torch.zeros_like(p)
    if g_entropy is not None and entropy is not None:
        d = (log_p + entropy[:, None]).mul_(-g_entropy[:, None]).mul_(p)
    if g_logp is not None:
        d -= p * g_logp[:, None]
        d.scatter_add_(1, targets[:, None], g_logp[:, None])
    return d.mul_(inverse[:, None]).to(kind)
