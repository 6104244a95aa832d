"""Hand-written forward and backward passes for the Llama family: the learner's counterpart of the generator's decoder.

    pre-attention     h = norm(x + δ)·g        q, k, v = rotate(h Wᵀ)
    post-attention    x′ = x + a Woᵀ           y = (silu(n Wgᵀ) ⊙ n Wuᵀ) Wdᵀ,  n = norm(x′)·g′

A layer returns (x′, y) and the next one adds them, so every residual sum is fused into the norm that follows it. The backward
pass recomputes the norms' outputs and the activation: their share of the time is a tenth of their share of the memory. q, k and
v are one matrix product, and so are gate and up. Attention between the halves belongs to the layout and uses ordinary autograd.

Rounds where the stock model rounds under autocast: products in the compute dtype, residual stream and sums in the weights'.
Knows weights and layouts; knows neither what the states are for nor who needs them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from turnwise.core.transfer import to_device
from turnwise.engines.generator.llama_decoder import MODEL_TYPES, STATIC_ROPES
from turnwise.engines.kernels import reference as plain
from turnwise.engines.kernels.cpu import layers as native
from turnwise.engines.kernels.decode_reference import dequantise, quantise
from turnwise.engines.kernels.dispatch import attention_for, compute_dtype, ops_for
from turnwise.engines.kernels.fp8 import (
    EmulatedFp8Weight,
    Weight,
    input_gradient,
    linear,
    quantised_input,
    split_gradient,
    weight_gradient,
)
from turnwise.engines.learner.cuda_graphs import CapturedLayers
from turnwise.engines.learner.varlen_attention import VarlenAttention
from turnwise.errors import SettingError

FP8_FLAG = "narrow_products"  # attribute set on a decoder, so that its deep copies run in fp8 too


class LayerLayout(Protocol):
    """How the rows of a packed batch attend."""

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [L, H, D], k and v [L, Hkv, D] -> [L, H, D]."""
        ...


# ---------------------------------------------------------- halves of a layer


@dataclass(frozen=True, eq=False)
class _PreAttention:
    """The first half of a layer with its current weights: input norm, qkv projection, rotary embedding."""

    ops: ModuleType
    norm: Tensor
    weights: tuple[Tensor, ...]  # q, k, v
    biases: tuple[Tensor, ...]
    fused: Weight
    bias: Tensor | None
    head_norms: tuple[Tensor, ...]  # if any, q and k are normalised and rotated outside
    packed_qkv: bool  # return q, k and v as one tensor; attention rotates them
    heads: int  # query heads + key heads
    keys: int  # key heads
    size: int  # of a head
    eps: float
    dtype: torch.dtype  # of products

    def __call__(self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """x and delta [L, d] -> q [L, H, D], k and v [L, Hkv, D] (or one tensor of all), and x + delta."""
        return _PreAttentionFunction.apply(self, cos, sin, x, delta, self.norm, *self.weights, *self.biases)


class _PreAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        half: _PreAttention,
        cos: Tensor,
        sin: Tensor,
        x: Tensor,
        delta: Tensor | None,
        norm: Tensor,
        *weights: Tensor,
    ) -> Any:
        total, h = half.ops.add_norm(x, delta, norm, half.eps, half.dtype)
        qkv = linear(h, half.fused, half.bias)
        ctx.half, ctx.added = half, delta is not None
        ctx.save_for_backward(cos, sin, total, norm)
        parts = qkv.view(len(x), -1, half.size)
        if half.packed_qkv:
            return parts, total.view_as(total)
        if not half.head_norms:
            half.ops.rotate_(qkv, cos, sin, half.heads, half.size)
        return *parts.split([half.heads - half.keys, half.keys, half.keys], 1), total.view_as(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Any) -> tuple[Any, ...]:
        half: _PreAttention = ctx.half
        cos, sin, total, norm = ctx.saved_tensors
        *parts, d_total = d_outputs
        if half.packed_qkv or half.head_norms:
            d = (parts[0] if half.packed_qkv else torch.cat(parts, 1)).flatten(1)
        else:
            d = half.ops.rotate_backward(*parts, cos, sin)
        dx, d_delta, h, d_norm = half.ops.norm_backward(input_gradient(d, half.fused), total, norm, half.eps, d_total)
        needed, count = ctx.needs_input_grad[6:], len(half.weights)
        grads: list[Tensor | None] = [None] * count
        if any(needed[:count]):
            grads = split_gradient(weight_gradient(d, quantised_input(h, half.fused), norm), half.weights, needed)
        biases = split_gradient(d.sum(0, dtype=norm.dtype), half.biases, needed[count:]) if half.biases else []
        return None, None, None, dx, d_delta if ctx.added else None, d_norm, *grads, *biases


@dataclass(frozen=True, eq=False)
class _PostAttention:
    """The second half of a layer: attention's output projection and the MLP."""

    ops: ModuleType
    weights: tuple[Tensor, ...]  # out, gate, up, down
    norm: Tensor
    bias: Tensor | None
    out: Weight
    out_bias: Tensor | None
    gate_up: Weight
    down: Weight
    eps: float

    def __call__(self, mixed: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """mixed [L, H D] and x [L, d] -> (x′, y)."""
        return _PostAttentionFunction.apply(self, mixed, x, self.norm, self.bias, *self.weights)


class _PostAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, half: _PostAttention, mixed: Tensor, x: Tensor, norm: Tensor, bias: Tensor | None, *weights: Tensor
    ) -> Any:
        total, h = half.ops.add_norm(x, linear(mixed, half.out, half.out_bias), norm, half.eps, mixed.dtype)
        gate_up = linear(h, half.gate_up)
        y = linear(half.ops.swiglu(gate_up), half.down)
        ctx.half = half
        ctx.save_for_backward(mixed, total, gate_up, norm)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor | None, dy: Tensor) -> tuple[Any, ...]:
        half: _PostAttention = ctx.half
        mixed, total, gate_up, norm = ctx.saved_tensors
        need_bias, need_out, need_gate, need_up, need_down = ctx.needs_input_grad[4:]
        d_gate_up, act = half.ops.swiglu_backward(gate_up, input_gradient(dy, half.down))
        w_down = weight_gradient(dy, quantised_input(act, half.down), norm) if need_down else None
        dx, d_out, h, d_norm = half.ops.norm_backward(
            input_gradient(d_gate_up, half.gate_up), total, norm, half.eps, d_total
        )
        w_gate_up: list[Tensor | None] = [None, None]
        if need_gate or need_up:
            fused = weight_gradient(d_gate_up, quantised_input(h, half.gate_up), norm)
            w_gate_up = split_gradient(fused, half.weights[1:3], (need_gate, need_up))
        w_out = weight_gradient(d_out, quantised_input(mixed, half.out), norm) if need_out else None
        d_bias = d_out.sum(0, dtype=norm.dtype) if need_bias else None
        return None, input_gradient(d_out, half.out), dx, d_norm, d_bias, w_out, *w_gate_up, w_down


class _FinalNorm(torch.autograd.Function):
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


# ------------------------------------------------------------------ the model


class LlamaLayers:
    """A decoder of the Llama family, run by these halves. Every pass casts and fuses the weights again, because nothing signals
    that they changed: a fused optimizer does not even increment their version counter."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = weakref.ref(decoder)
        config = decoder.config
        attention = decoder.layers[0].self_attn
        self.eps, self.scale, self.size = config.rms_norm_eps, attention.scaling, attention.head_dim
        self.has_qk_norm = hasattr(attention, "q_norm")
        self.recompute = False  # activation checkpointing: keep a layer's input, run it again in the backward pass
        self.fp8 = getattr(decoder, FP8_FLAG, False)  # round the layers' matrix products to fp8
        self.weights = list(decoder.parameters())
        self.captured = CapturedLayers(self.weights)

    @staticmethod
    def unsupported_reason(decoder: Any) -> str:
        """Why these layers cannot run this decoder; empty if they can."""
        config = getattr(decoder, "config", None)
        if config is None or config.model_type not in MODEL_TYPES:
            return f"model type {getattr(config, 'model_type', '?')}"
        if config.hidden_act not in ("silu", "swish") or getattr(config, "mlp_bias", False):
            return "its MLP is not a plain SwiGLU"
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            return "sliding windows"
        if (config.rope_parameters or {}).get("rope_type", "default") not in STATIC_ROPES:
            return "rotary angles that depend on the length"
        if next(decoder.parameters()).dtype == torch.float64:
            return "float64: its stock norms round to float32, and these layers do not"
        if any(layer._forward_pre_hooks or layer._forward_hooks for layer in decoder.layers):
            return "forward hooks on its layers"
        linears = [m for name, m in decoder.named_modules() if name.endswith("_proj")]
        return "" if all(type(m) is nn.Linear for m in linears) else "projections that are not plain linear layers"

    def describe(self) -> str:
        """The kernels in use, for a log."""
        ops = ops_for(self.weights[0])
        fp8 = ", weights rounded to fp8" if self.fp8 else ""
        if ops in (plain, native):
            return ("plain kernels" if ops is plain else "C kernels") + fp8
        graphs = "CUDA graphs" if self.captured.enabled and not self.recompute else "no CUDA graphs"
        flash = "" if attention_for(self.weights[0], self.size) else ", flash attention of PyTorch"
        return f"Triton kernels{flash}, {graphs}" + fp8

    def __call__(self, ids: Tensor, position: Tensor, layout: LayerLayout, rows: Tensor | None = None) -> Tensor:
        """ids and position [L] -> inputs of the LM head [L, d], in the compute dtype; with ``rows``, only theirs. With a
        variable-length layout, ids, positions and layout are on the host."""
        if rows is None and isinstance(layout, VarlenAttention) and not self.recompute:
            states = self.captured(self._forward, compute_dtype(self.weights[0]), ids, position, layout)
            if states is not None:
                return states
        if isinstance(layout, VarlenAttention):
            device = self.weights[0].device
            ids, position, layout = to_device(ids, device), to_device(position, device), layout.to(device)
        return self._forward(ids, position, layout, rows=rows)

    def _forward(
        self,
        ids: Tensor,
        position: Tensor,
        layout: LayerLayout,
        alias: Mapping[Tensor, Tensor] | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """``alias``: the tensor to use in place of each weight."""
        weight_of = (lambda p: alias[p]) if alias is not None else (lambda p: p)
        decoder: Any = self._decoder()
        dtype, ops = compute_dtype(self.weights[0]), ops_for(self.weights[0])
        with torch.autocast(ids.device.type, enabled=False):
            embedding = decoder.embed_tokens
            x = F.embedding(ids, weight_of(embedding.weight), embedding.padding_idx)
            cos, sin = (t[0, :, : self.size // 2].contiguous() for t in decoder.rotary_emb(x, position[None]))
            delta: Tensor | None = None
            packed_qkv = (
                isinstance(layout, VarlenAttention) and not self.has_qk_norm and layout.fuses_rotary(x, self.size)
            )
            for layer in decoder.layers:
                outputs = rows if layer is decoder.layers[-1] else None
                args = (*self._halves(layer, dtype, ops, weight_of, packed_qkv), x, delta, cos, sin, layout, outputs)
                if self.recompute and torch.is_grad_enabled():
                    x, delta = checkpoint(self._layer, *args, use_reentrant=False, preserve_rng_state=False)
                else:
                    x, delta = self._layer(*args)
            return _FinalNorm.apply(ops, self.eps, dtype, x, delta, weight_of(decoder.norm.weight))

    def _layer(
        self, pre: _PreAttention, post: _PostAttention, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor,
        layout: LayerLayout, rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """``rows``: the last layer computes its second half for these rows only."""
        *parts, x = pre(x, delta, cos, sin)
        if pre.packed_qkv and isinstance(layout, VarlenAttention):
            mixed = layout.attend_fused_qkv(parts[0], pre.keys, cos, sin, self.scale).flatten(1)
        else:
            q, k, v = parts
            if pre.head_norms:
                q, k = (_norm_and_rotate(t, w, self.eps, cos, sin) for t, w in zip((q, k), pre.head_norms))
            mixed = layout.attend_rows(q, k, v, self.scale).flatten(1)
        return post(mixed, x) if rows is None else post(mixed.index_select(0, rows), x.index_select(0, rows))

    @staticmethod
    def _rounded(weight: Tensor) -> Weight:
        """Round to fp8 as the generator does on this device: on a CPU only the weights."""
        return EmulatedFp8Weight.of(weight) if weight.is_cuda else dequantise(*quantise(weight)).to(weight.dtype)

    @torch.no_grad()
    def _halves(
        self, layer: Any, dtype: torch.dtype, ops: ModuleType, weight_of: Callable[[Tensor], Tensor], packed_qkv: bool
    ) -> tuple[_PreAttention, _PostAttention]:
        a, m = layer.self_attn, layer.mlp
        qkv = tuple(weight_of(p.weight) for p in (a.q_proj, a.k_proj, a.v_proj))
        biases = tuple(weight_of(p.bias) for p in (a.q_proj, a.k_proj, a.v_proj) if p.bias is not None)
        weights = tuple(weight_of(p.weight) for p in (a.o_proj, m.gate_proj, m.up_proj, m.down_proj))
        norms = tuple(weight_of(n.weight) for n in (layer.input_layernorm, layer.post_attention_layernorm))
        head_norms = tuple(weight_of(n.weight) for n in (a.q_norm, a.k_norm)) if self.has_qk_norm else ()
        out_bias = None if a.o_proj.bias is None else weight_of(a.o_proj.bias)
        heads = (len(qkv[0]) + len(qkv[1])) // self.size
        rounded = self._rounded if self.fp8 else lambda w: w
        matrices = (torch.cat(qkv), weights[0], torch.cat(weights[1:3]), weights[3])
        fused, out, gate_up, down = (rounded(w.to(dtype)) for w in matrices)
        pre = _PreAttention(
            ops, norms[0], qkv, biases, fused, torch.cat(biases).to(dtype) if biases else None,
            head_norms, packed_qkv, heads, len(qkv[1]) // self.size, self.size, self.eps, dtype,
        )  # fmt: skip
        cast_bias = None if out_bias is None else out_bias.to(dtype)
        return pre, _PostAttention(ops, weights, norms[1], out_bias, out, cast_bias, gate_up, down, self.eps)


def _norm_and_rotate(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Normalise each head, then apply the rotary embedding: q and k of Qwen3."""
    wide = F.rms_norm(x.to(weight.dtype), (x.shape[-1],), None, eps).to(x.dtype) * weight
    a, b = wide.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


_registry: weakref.WeakKeyDictionary[nn.Module, LlamaLayers | str] = weakref.WeakKeyDictionary()


def fast_path(decoder: nn.Module) -> LlamaLayers | None:
    """The hand-written layers of this decoder; None if it must run its stock forward."""
    if decoder not in _registry:
        _registry[decoder] = LlamaLayers.unsupported_reason(decoder) or LlamaLayers(decoder)
    entry = _registry[decoder]
    return entry if isinstance(entry, LlamaLayers) else None


def accumulating_gradients(*decoders: nn.Module | None) -> ExitStack:
    """Inside, ``backward`` adds directly into the .grad of these decoders' weights; ``autograd.grad`` returns None for them."""
    stack = ExitStack()
    for layers in [fast_path(decoder) for decoder in decoders if decoder is not None]:
        stack.enter_context(nullcontext() if layers is None else layers.captured.accumulating_gradients())
    return stack


def disable(decoder: nn.Module, why: str) -> None:
    """Run this decoder by its stock forward from now on."""
    _registry[decoder] = why


def enable_fp8(decoder: nn.Module) -> None:
    """Round the layers' matrix products to fp8 from now on, as an fp8 generator does."""
    layers = fast_path(decoder)
    if layers is None:
        raise SettingError(
            f"dtype fp8 needs hand-written layers, and this model runs its stock forward ({_registry[decoder]}); "
            "write --dtype auto, or --rollout-dtype fp8 with a method that corrects for the difference"
        )
    setattr(decoder, FP8_FLAG, True)
    layers.fp8 = True


def describe(decoder: nn.Module) -> str:
    """The execution path of this decoder, for a log."""
    layers = fast_path(decoder)
    return f"stock forward ({_registry[decoder]})" if layers is None else f"hand-written layers, {layers.describe()}"
