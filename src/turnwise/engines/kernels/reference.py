"""Every operation of ``kernels`` in plain PyTorch: what it means, and what runs where no kernel does.

Legend: L positions, B lanes (one new token each), d width, H query heads, K key heads, D head size, F MLP width, N tokens, V
vocabulary, U and R rows. ``dtype``: of matrix products; the residual stream and all sums are accumulated in float32 (float64 for
float64).

``varlen_attention`` and attention over the cache are loops over sequences, for tests. Knows tensors; neither models nor batches.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from turnwise.engines.kernels.sampling import pick, uniforms

LANES_PER_PROGRAM = 4  # neighbouring lanes that read a shared prefix of their rows together
LOWEST = -1e30  # not −inf: the difference of two infinities is NaN


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x + delta, and weight · (x + delta) / rms rounded to ``dtype``."""
    total = x if delta is None else x + delta
    return total, F.rms_norm(total, weight.shape, weight, eps).to(dtype)  # sums in float32, whatever the stream's dtype


def norm_backward(
    dh: Tensor, total: Tensor, weight: Tensor, eps: float, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dh [L, d] -> d(total), the same in dh's dtype, the norm's output recomputed, d(weight). ``residual_grad``: the
    gradient that reaches total through the residual stream."""
    scale = torch.rsqrt(total.square().mean(1, keepdim=True) + eps)
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


# ---------------------------------------------------------------------- over the KV cache


def norm_and_rotate(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """Heads x [.., D], normalised if there is a ``norm``, then rotated. cos and sin [.., D] hold every angle twice, the first
    time with −sin: three operations instead of the eight of ``rotate_``."""
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], None, eps) * norm
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def _columns(cache: Tensor, table: Tensor | None, row: int, count: int) -> Tensor:
    """The first columns of a row, [K, count, D]. Without a ``table`` block ``row`` of the cache is the row."""
    if table is None:
        return cache[row, :, :count]
    return cache[table[row].long()].transpose(0, 1).flatten(1, 2)[:, :count]


def decode_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, table: Tensor | None, context: int, cos: Tensor, sin: Tensor,
    qk_norm: Tensor | None, position: Tensor, out: Tensor, scale: float, eps: float, shared: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rotate q and k of one new token per lane, write k and v into column ``position`` of its row, attend to all columns up to
    it. qkv [B, (H + 2K) D], keys and values [blocks, K, T, D], out [B, H D]. Lanes with a position outside the context are
    inactive. ``table`` [rows, pages of a row] int32: the blocks that are each lane's pages; None where block b is the whole row
    of lane b.

    ``shared`` [2, B / 4], for rows alone: how many leading columns four neighbouring lanes have in common, and the row from which
    they are read, once for all four."""
    K, size, D = keys.shape[1:]
    H = out.shape[1] // D
    for lane, column in enumerate(position.tolist()):
        if not 0 <= column < context:
            continue
        heads = qkv[lane].view(-1, D)
        qk = norm_and_rotate(heads[: H + K].float(), cos[column], sin[column], qk_norm, eps).to(keys.dtype)
        block = lane if table is None else int(table[lane, column // size])
        keys[block, :, column % size], values[block, :, column % size] = qk[H:], heads[H + K :]
        k, v = (_columns(t, table, lane, column + 1) for t in (keys, values))
        if shared is not None:
            common, leader = shared[:, lane // LANES_PER_PROGRAM].tolist()
            k, v = (torch.cat((t[leader, :, :common], x[:, common:]), 1) for t, x in ((keys, k), (values, v)))
        k, v = (t.float().repeat_interleave(H // K, 0) for t in (k, v))
        p = torch.softmax(torch.einsum("hd,hnd->hn", qk[:H].float(), k) * scale, 1)
        out[lane] = torch.einsum("hn,hnd->hd", p, v).flatten().to(out.dtype)
    return out


def rope_and_cache(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, position: Tensor,
    block: Tensor, q: Tensor, eps: float,
) -> None:  # fmt: skip
    """Prefill: rotate q and k, write q to q [N, H D], k and v into column ``position`` of cache row ``block``, or where the cache
    has pages into that column of page ``block``, modulo their size. Tokens with position −1 are padding."""
    real = position >= 0
    block, position, D, K = block[real], position[real], keys.shape[3], keys.shape[1]
    heads, H = qkv.view(len(qkv), -1, D)[real], q.shape[1] // D
    norm = None if qk_norm is None else qk_norm[None]
    qk = norm_and_rotate(heads[:, : H + K].float(), cos[position, None], sin[position, None], norm, eps).to(keys.dtype)
    q[real] = qk[:, :H].flatten(1)
    column = position % keys.shape[2]
    keys[block, :, column], values[block, :, column] = qk[:, H:], heads[:, H + K :]


def prefill_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor | None, boundaries: Tensor, start: Tensor, rows: Tensor,
    longest: int, out: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """The queries q[boundaries[j]:boundaries[j + 1]] of chunk j attend to the columns of cache row ``rows[j]``: the first to
    columns up to ``start[j]``, each further one to one more. q and out [N, H D]; no chunk has more than ``longest`` queries.
    ``table``: as in ``decode_attention``."""
    K, D = keys.shape[1], keys.shape[3]
    H = q.shape[1] // D
    for (a, b), cached, row in zip(pairwise(boundaries.tolist()), start.tolist(), rows.tolist()):
        queries = q[a:b].float().view(b - a, K, H // K, D)  # query heads of one key head side by side
        k, v = (_columns(t, table, row, cached + b - a).float() for t in (keys, values))
        score = torch.einsum("nkgd,kmd->kgnm", queries, k) * scale
        p = torch.softmax(score + torch.full(score.shape[2:], -torch.inf, device=q.device).triu(cached + 1), 3)
        out[a:b] = torch.einsum("kgnm,kmd->nkgd", p, v).flatten(1).to(out.dtype)
    return out


# ---------------------------------------------------------------------- sampling


def sample(
    logits: Tensor, inverse_temperature: Tensor, seed: Tensor, tokens: Tensor, position: Tensor, start: Tensor,
    sampled: Tensor, logp: Tensor,
) -> None:  # fmt: skip
    """Sample one token per lane and its log-probability by the rule of ``sampling``: the token is where u(seed, position) falls
    in the cumulative probabilities.

    logits [B, V] float32; ``inverse_temperature``: 0 for greedy. Writes the token to ``tokens``, where the next step reads it,
    and to row ``position − start`` of ``sampled``, and increments the position. Lanes with position −1 are inactive."""
    greedy = (inverse_temperature == 0)[:, None]
    z = (logits * torch.where(greedy, 1.0, inverse_temperature[:, None])).clamp(min=LOWEST)
    picked = pick(z.softmax(1), uniforms(seed, position + 1))[:, 0]
    # with NaN logits it lies beyond the last entry
    picked.clamp_(max=logits.shape[1] - 1)
    token = torch.where(greedy[:, 0], z.argmax(1), picked)
    lane = (position >= 0).nonzero()[:, 0]
    step = (position - start)[lane]
    sampled[step, lane] = tokens[lane] = token[lane]
    logp[step, lane] = z.log_softmax(1).gather(1, token[:, None])[lane, 0]
    position[lane] += 1


# ---------------------------------------------------------------------- fp8


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, d] -> e4m3 numbers, and a scale per row [B, 1] = max|row| / 448."""
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def dequantise(data: Tensor, scale: Tensor) -> Tensor:
    """The float32 values of e4m3 numbers with a scale per row."""
    return data.float() * scale


def fp8_matmul(h: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """h · weightᵀ with both sides in e4m3, in the dtype of h."""
    return (dequantise(*quantise(h)) @ dequantise(weight, scale).t()).to(h.dtype)
