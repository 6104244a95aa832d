"""PyTorch references of the decode kernels, with the signatures of ``triton.decode``: for tests and devices without Triton.

Legend: B lanes, d width, H query heads, K key heads, D head size, F MLP width, N tokens, V vocabulary.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from turnwise.engines.kernels import reference
from turnwise.engines.kernels.sampling import pick, uniforms

LANES_PER_PROGRAM = 4  # neighbouring lanes that read a shared prefix of their rows together
LOWEST = -1e30  # not −inf: the difference of two infinities is NaN


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> Tensor:
    """x += delta; out = weight · x / rms(x)."""
    total, normed = reference.add_norm(x, delta, weight, eps, out.dtype)
    if delta is not None:
        x.copy_(total)
    return out.copy_(normed)


def swiglu(gate_up: Tensor, out: Tensor) -> Tensor:
    """gate_up [B, 2F] -> out [B, F] = silu(first half) · second half."""
    return out.copy_(reference.swiglu(gate_up))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def decode_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, position: Tensor,
    out: Tensor, scale: float, eps: float, shared: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One new token per lane: see ``triton.decode.decode_attention``."""
    K, D = keys.shape[1], keys.shape[3]
    H = out.shape[1] // D
    for lane, column in enumerate(position.tolist()):
        if not 0 <= column < keys.shape[2]:
            continue
        heads = qkv[lane].view(-1, D)
        qk = _rotated(heads[: H + K].float(), cos[column], sin[column], qk_norm, eps).to(keys.dtype)
        keys[lane, :, column], values[lane, :, column] = qk[H:], heads[H + K :]
        common, leader = (0, lane) if shared is None else shared[:, lane // LANES_PER_PROGRAM].tolist()
        columns = lambda t: torch.cat((t[leader, :, :common], t[lane, :, common : column + 1]), 1)  # noqa: B023, E731
        k, v = (columns(t).float().repeat_interleave(H // K, 0) for t in (keys, values))
        p = torch.softmax(torch.einsum("hd,hnd->hn", qk[:H].float(), k) * scale, 1)
        out[lane] = torch.einsum("hn,hnd->hd", p, v).flatten().to(out.dtype)
    return out


def rope_and_cache(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, position: Tensor,
    row: Tensor, q: Tensor, eps: float,
) -> None:  # fmt: skip
    """Prefill tokens into the cache: see ``triton.decode.rope_and_cache``."""
    real = position >= 0
    row, position, D, K = row[real], position[real], keys.shape[3], keys.shape[1]
    heads, H = qkv.view(len(qkv), -1, D)[real], q.shape[1] // D
    norm = None if qk_norm is None else qk_norm[None]
    qk = _rotated(heads[:, : H + K].float(), cos[position, None], sin[position, None], norm, eps).to(keys.dtype)
    q[real] = qk[:, :H].flatten(1)
    column = position % keys.shape[2]
    keys[row, :, column], values[row, :, column] = qk[:, H:], heads[:, H + K :]


def prefill_attention(
    q: Tensor, keys: Tensor, values: Tensor, boundaries: Tensor, start: Tensor, rows: Tensor, longest: int, out: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attention of prefilled chunks: see ``triton.attention.prefill_attention``."""
    K, D = keys.shape[1], keys.shape[3]
    H = q.shape[1] // D
    for (a, b), cached, row in zip(pairwise(boundaries.tolist()), start.tolist(), rows.tolist()):
        queries = q[a:b].float().view(b - a, K, H // K, D)  # query heads of one key head side by side
        k, v = (t[row, :, : cached + b - a].float() for t in (keys, values))
        score = torch.einsum("nkgd,kmd->kgnm", queries, k) * scale
        p = torch.softmax(score + torch.full(score.shape[2:], -torch.inf, device=q.device).triu(cached + 1), 3)
        out[a:b] = torch.einsum("kgnm,kmd->nkgd", p, v).flatten(1).to(out.dtype)
    return out


# ---------------------------------------------------------------------- pages


def _row_of_pages(cache: Tensor, pages: Tensor, columns: int) -> Tensor:
    """cache [pages, K, P, D] -> the first columns of a row [1, K, columns, D]."""
    return cache[pages.long()].transpose(0, 1).flatten(1, 2)[None, :, :columns]


def paged_decode_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, table: Tensor, context: int, cos: Tensor, sin: Tensor, qk_norm: Tensor | None,
    position: Tensor, out: Tensor, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """One new token per lane: see ``triton.paged.paged_decode_attention``."""
    size = keys.shape[2]
    for lane, column in enumerate(position.tolist()):
        if not 0 <= column < context:
            continue
        k, v = (_row_of_pages(cache, table[lane], column + 1) for cache in (keys, values))
        one = slice(lane, lane + 1)
        decode_attention(qkv[one], k, v, cos, sin, qk_norm, position[one], out[one], scale, eps)
        page = int(table[lane, column // size])
        keys[page, :, column % size], values[page, :, column % size] = k[0, :, column], v[0, :, column]
    return out


def paged_prefill_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, boundaries: Tensor, start: Tensor, rows: Tensor, longest: int,
    out: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Attention of prefilled chunks: see ``triton.paged.paged_prefill_attention``."""
    zero = torch.zeros(1, dtype=torch.int64, device=q.device)
    for (a, b), cached, row in zip(pairwise(boundaries.tolist()), start, rows.tolist()):
        k, v = (_row_of_pages(cache, table[row], int(cached) + b - a) for cache in (keys, values))
        prefill_attention(q[a:b], k, v, torch.tensor([0, b - a]), cached[None], zero, longest, out[a:b], scale)
    return out


# ---------------------------------------------------------------------- sampling


def sample(
    logits: Tensor, inverse_temperature: Tensor, seed: Tensor, tokens: Tensor, position: Tensor, start: Tensor,
    sampled: Tensor, logp: Tensor,
) -> None:  # fmt: skip
    """One token per lane: see ``triton.decode.sample``."""
    greedy = (inverse_temperature == 0)[:, None]
    z = (logits * torch.where(greedy, 1.0, inverse_temperature[:, None])).clamp(min=LOWEST)
    picked = pick(z.softmax(1), uniforms(seed, position + 1))[:, 0]
    picked.clamp_(max=logits.shape[1] - 1)  # with NaN logits it lies beyond the last
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
