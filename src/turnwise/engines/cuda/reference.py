"""What the kernels compute, in plain PyTorch: slow, exact twins for tests, and for devices without Triton."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> Tensor:
    if delta is not None:
        x += delta.float()
    return out.copy_(weight * (x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps)))


def swiglu(both: Tensor, out: Tensor) -> Tensor:
    gate, up = both.float().chunk(2, 1)
    return out.copy_(F.silu(gate).to(out.dtype).float() * up)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def attend(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, position: Tensor,
    out: Tensor, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    K, D = keys.shape[1], keys.shape[3]
    H = out.shape[1] // D
    for lane, place in enumerate(position.tolist()):
        if not 0 <= place < keys.shape[2]:
            continue
        heads = qkv[lane].view(-1, D)
        qk = _rotated(heads[: H + K].float(), cos[place], sin[place], qk_norm, eps).to(keys.dtype)
        keys[lane, :, place], values[lane, :, place] = qk[H:], heads[H + K :]
        k = keys[lane, :, : place + 1].float().repeat_interleave(H // K, 0)
        v = values[lane, :, : place + 1].float().repeat_interleave(H // K, 0)
        p = torch.softmax(torch.einsum("hd,hnd->hn", qk[:H].float(), k) * scale, 1)
        out[lane] = torch.einsum("hn,hnd->hd", p, v).flatten().to(out.dtype)
    return out


def settle(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, position: Tensor,
    row: Tensor, slot: Tensor, q: Tensor, k: Tensor, v: Tensor, eps: float,
) -> None:  # fmt: skip
    H, K, D = q.shape[1], keys.shape[1], keys.shape[3]
    heads = qkv.view(len(qkv), -1, D)
    norm = None if qk_norm is None else qk_norm[None]
    qk = _rotated(heads[:, : H + K].float(), cos[position, None], sin[position, None], norm, eps).to(keys.dtype)
    q[slot], k[slot], v[slot] = qk[:, :H], qk[:, H:], heads[:, H + K :]
    keys[row, :, position], values[row, :, position] = qk[:, H:], heads[:, H + K :]


# ---------------------------------------------------------------------- drawing

MASK = (1 << 32) - 1
LOWEST = -1e30


def philox(seed: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10 with key ``seed`` (64 bits) and counter (offset, 0, 0, 0): four 32-bit numbers, as int64."""
    low, high = seed & MASK, (seed >> 32) & MASK
    a, b, c, d = offset & MASK, offset * 0, offset * 0, offset * 0
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57  # 64 bits: wrapped products keep them all
        a, b, c, d = ((right >> 32) & MASK) ^ b ^ low, right & MASK, ((left >> 32) & MASK) ^ d ^ high, left & MASK
        low, high = (low + 0x9E3779B9) & MASK, (high + 0xBB67AE85) & MASK
    return a, b, c, d


def noise(seed: Tensor, position: Tensor, size: int) -> Tensor:
    """Gumbel noise [B, size] of (seed, position, entry): entries of a block of 1,024 share 256 counters, four by four."""
    entry = torch.arange(size, device=seed.device)
    key = (seed ^ (position << 33))[:, None]
    four = torch.stack(philox(key, (entry - entry % 1024 + entry % 256)[None]))
    bits = four.gather(0, (entry % 1024 // 256).expand(1, len(seed), -1))[0]
    u = torch.where(bits >= 1 << 31, MASK - bits, bits).float() * 4.6566127342e-10  # −x − 1 of a negative number
    wait = torch.where(u < 1e-3, u + 0.5 * u * u, -torch.log(1 - u))
    return -torch.log(wait.clamp(min=2e-10))


def draw(
    logits: Tensor, cold: Tensor, seed: Tensor, tokens: Tensor, position: Tensor, begin: Tensor, drawn: Tensor,
    logp: Tensor,
) -> None:  # fmt: skip
    greedy = (cold == 0)[:, None]
    z = (logits * torch.where(greedy, 1.0, cold[:, None])).clamp(min=LOWEST)
    token = torch.where(greedy, z, z + noise(seed, position, logits.shape[1])).argmax(1)
    lane = (position >= 0).nonzero()[:, 0]
    step = (position - begin)[lane]
    drawn[step, lane] = tokens[lane] = token[lane]
    logp[step, lane] = z.log_softmax(1).gather(1, token[:, None])[lane, 0]
    position[lane] += 1


# ---------------------------------------------------------------------- eight bits


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def widened(data: Tensor, scale: Tensor) -> Tensor:
    """What e4m3 numbers with a scale per row stand for."""
    return data.float() * scale


def narrow_product(h: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return (widened(*quantise(h)) @ widened(weight, scale).t()).to(h.dtype)
