"""What the kernels compute, in plain PyTorch: slow, exact twins for tests, and for devices without Triton."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from turnwise.engines.kernels.sampling import pick, uniforms


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


SISTERS = 4  # neighbouring lanes that look together at what their rows have in common


def attend(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, position: Tensor,
    out: Tensor, scale: float, eps: float, shared: Tensor | None = None,
) -> Tensor:  # fmt: skip
    K, D = keys.shape[1], keys.shape[3]
    H = out.shape[1] // D
    for lane, place in enumerate(position.tolist()):
        if not 0 <= place < keys.shape[2]:
            continue
        heads = qkv[lane].view(-1, D)
        qk = _rotated(heads[: H + K].float(), cos[place], sin[place], qk_norm, eps).to(keys.dtype)
        keys[lane, :, place], values[lane, :, place] = qk[H:], heads[H + K :]
        common, leader = (0, lane) if shared is None else shared[:, lane // SISTERS].tolist()
        whole = lambda t: torch.cat((t[leader, :, :common], t[lane, :, common : place + 1]), 1)  # noqa: B023, E731
        k, v = (whole(t).float().repeat_interleave(H // K, 0) for t in (keys, values))
        p = torch.softmax(torch.einsum("hd,hnd->hn", qk[:H].float(), k) * scale, 1)
        out[lane] = torch.einsum("hn,hnd->hd", p, v).flatten().to(out.dtype)
    return out


def settle(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, position: Tensor,
    row: Tensor, q: Tensor, eps: float,
) -> None:  # fmt: skip
    real = position >= 0
    row, position, D, K = row[real], position[real], keys.shape[3], keys.shape[1]
    heads, H = qkv.view(len(qkv), -1, D)[real], q.shape[1] // D
    norm = None if qk_norm is None else qk_norm[None]
    qk = _rotated(heads[:, : H + K].float(), cos[position, None], sin[position, None], norm, eps).to(keys.dtype)
    q[real] = qk[:, :H].flatten(1)
    keys[row, :, position], values[row, :, position] = qk[:, H:], heads[:, H + K :]


def look_back(
    q: Tensor, keys: Tensor, values: Tensor, ends: Tensor, start: Tensor, rows: Tensor, longest: int, out: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    K, D = keys.shape[1], keys.shape[3]
    H = q.shape[1] // D
    for (a, b), before, row in zip(pairwise(ends.tolist()), start.tolist(), rows.tolist()):
        asked = q[a:b].float().view(b - a, K, H // K, D)  # the heads that share a key side by side
        k, v = (t[row, :, : before + b - a].float() for t in (keys, values))
        score = torch.einsum("nkgd,kmd->kgnm", asked, k) * scale
        p = torch.softmax(score + torch.full(score.shape[2:], -torch.inf, device=q.device).triu(before + 1), 3)
        out[a:b] = torch.einsum("kgnm,kmd->nkgd", p, v).flatten(1).to(out.dtype)
    return out


# ---------------------------------------------------------------------- drawing

LOWEST = -1e30


def draw(
    logits: Tensor, cold: Tensor, seed: Tensor, tokens: Tensor, position: Tensor, begin: Tensor, drawn: Tensor,
    logp: Tensor,
) -> None:  # fmt: skip
    greedy = (cold == 0)[:, None]
    z = (logits * torch.where(greedy, 1.0, cold[:, None])).clamp(min=LOWEST)
    picked = pick(z.softmax(1), uniforms(seed, position + 1))[:, 0]
    picked.clamp_(max=logits.shape[1] - 1)  # where the logits are no numbers it is beyond the last
    token = torch.where(greedy[:, 0], z.argmax(1), picked)
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
