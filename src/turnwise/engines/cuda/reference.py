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
        if place < 0:
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
