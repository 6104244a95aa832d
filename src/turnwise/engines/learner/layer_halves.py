"""The two halves of a decoder layer of the Llama family as autograd functions, and the norm after the last layer.

    pre-attention     h = norm(x + δ)·g        q, k, v = rotate(h Wᵀ)
    post-attention    x′ = x + a Woᵀ           y = (silu(n Wgᵀ) ⊙ n Wuᵀ) Wdᵀ,  n = norm(x′)·g′

A layer returns (x′, y) and the next one adds them, so every residual sum is fused into the norm that follows it. The backward
pass recomputes the norms' outputs and the activation: their share of the time is a tenth of their share of the memory. With
``recompute`` it computes q, k, v, gate and up again too, but never attention.

Legend: L positions, d width, H query heads, Hkv key heads, D head size. Knows projections; neither decoders nor layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turnwise.engines.learner.projections import Projection


@dataclass(frozen=True, eq=False)
class PreAttention:
    """The first half of a layer with its current weights: input norm, qkv projection, rotary embedding."""

    ops: ModuleType
    norm: Tensor
    qkv: Projection
    head_norms: tuple[Tensor, ...]  # if any, q and k are normalised and rotated outside
    packed_qkv: bool  # return q, k and v as one tensor; attention rotates them
    heads: int  # query heads + key heads
    keys: int  # key heads
    size: int  # of a head
    eps: float
    dtype: torch.dtype  # of products

    def __call__(self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """x and delta [L, d] -> q [L, H, D], k and v [L, Hkv, D] (or one tensor of all), and x + delta."""
        return _PreAttentionFunction.apply(self, cos, sin, x, delta, self.norm, *self.qkv.parameters)

    @torch.no_grad()
    def qkv_again(self, total: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The rotated qkv [L, H + 2 Hkv, D] of a residual stream, for a backward pass that did not keep it."""
        qkv = self.qkv(self.ops.add_norm(total, None, self.norm, self.eps, self.dtype)[1])[0]
        self.ops.rotate_(qkv, cos, sin, self.heads, self.size)
        return qkv.view(len(total), -1, self.size)


class _PreAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        half: PreAttention,
        cos: Tensor,
        sin: Tensor,
        x: Tensor,
        delta: Tensor | None,
        norm: Tensor,
        *parameters: Tensor,
    ) -> Any:
        total, h = half.ops.add_norm(x, delta, norm, half.eps, half.dtype)
        qkv, inner = half.qkv(h)
        ctx.half, ctx.added = half, delta is not None
        ctx.save_for_backward(cos, sin, total, norm, inner)
        parts = qkv.view(len(x), -1, half.size)
        if half.packed_qkv:
            return parts, total.view_as(total)
        if not half.head_norms:
            half.ops.rotate_(qkv, cos, sin, half.heads, half.size)
        return *parts.split([half.heads - half.keys, half.keys, half.keys], 1), total.view_as(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Any) -> tuple[Any, ...]:
        half: PreAttention = ctx.half
        cos, sin, total, norm, inner = ctx.saved_tensors
        *parts, d_total = d_outputs
        if half.packed_qkv or half.head_norms:
            d = (parts[0] if half.packed_qkv else torch.cat(parts, 1)).flatten(1)
        else:
            d = half.ops.rotate_backward(*parts, cos, sin)
        dh, d_inner = half.qkv.d_input(d)
        dx, d_delta, h, d_norm = half.ops.norm_backward(dh, total, norm, half.eps, d_total)
        grads = half.qkv.d_parameters(d, h, inner, d_inner, norm, ctx.needs_input_grad[6:])
        return None, None, None, dx, d_delta if ctx.added else None, d_norm, *grads


@dataclass(frozen=True, eq=False)
class PostAttention:
    """The second half of a layer: attention's output projection and the MLP."""

    ops: ModuleType
    norm: Tensor
    out: Projection
    gate_up: Projection
    down: Projection
    eps: float
    recompute: bool  # compute gate and up again in the backward pass: they are half of what a layer keeps

    def __call__(self, mixed: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """mixed [L, H D] and x [L, d] -> (x′, y)."""
        parameters = (*self.out.parameters, *self.gate_up.parameters, *self.down.parameters)
        return _PostAttentionFunction.apply(self, mixed, x, self.norm, *parameters)


class _PostAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, half: PostAttention, mixed: Tensor, x: Tensor, norm: Tensor, *parameters: Tensor) -> Any:
        projected, out_inner = half.out(mixed)
        total, h = half.ops.add_norm(x, projected, norm, half.eps, mixed.dtype)
        gate_up, inner = half.gate_up(h)
        y, down_inner = half.down(half.ops.swiglu(gate_up))
        ctx.half = half
        kept = (None, None) if half.recompute else (gate_up, inner)
        ctx.save_for_backward(mixed, total, norm, out_inner, down_inner, *kept)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor | None, dy: Tensor) -> tuple[Any, ...]:
        half: PostAttention = ctx.half
        mixed, total, norm, out_inner, down_inner, gate_up, inner = ctx.saved_tensors
        needed, sizes = ctx.needs_input_grad[4:], [len(p.parameters) for p in (half.out, half.gate_up)]
        need_out, need_gate_up, need_down = needed[: sizes[0]], needed[sizes[0] : sum(sizes)], needed[sum(sizes) :]
        if half.recompute:
            gate_up, inner = half.gate_up(half.ops.add_norm(total, None, norm, half.eps, mixed.dtype)[1])
        d_act, d_down_inner = half.down.d_input(dy)
        d_gate_up, act = half.ops.swiglu_backward(gate_up, d_act)
        del gate_up, d_act
        w_down = half.down.d_parameters(dy, act, down_inner, d_down_inner, norm, need_down)
        del act
        dh, d_inner = half.gate_up.d_input(d_gate_up)
        dx, d_out, h, d_norm = half.ops.norm_backward(dh, total, norm, half.eps, d_total)
        w_gate_up = half.gate_up.d_parameters(d_gate_up, h, inner, d_inner, norm, need_gate_up)
        d_mixed, d_out_inner = half.out.d_input(d_out)
        w_out = half.out.d_parameters(d_out, mixed, out_inner, d_out_inner, norm, need_out)
        return None, d_mixed, dx, d_norm, *w_out, *w_gate_up, *w_down


class FinalNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: ModuleType, eps: float, dtype: torch.dtype, x: Tensor, delta: Tensor, norm: Tensor
    ) -> Tensor:
        total, h = ops.add_norm(x, delta, norm, eps, dtype)
        ctx.ops, ctx.eps = ops, eps
        ctx.save_for_backward(total, norm)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Any, ...]:
        total, norm = ctx.saved_tensors
        dx, d_delta, _, d_norm = ctx.ops.norm_backward(dh.contiguous(), total, norm, ctx.eps, None)
        return None, None, None, dx, d_delta, d_norm
