"""Hand-written forward and backward passes for the Llama family: the learner's counterpart of the generator's decoder.

A layer is two autograd functions with attention between them, which belongs to the layout and uses ordinary autograd:

    pre-attention     h = norm(x + δ)·g        q, k, v = rotate(h Wᵀ)
    post-attention    x′ = x + a Woᵀ           y = (silu(n Wgᵀ) ⊙ n Wuᵀ) Wdᵀ,  n = norm(x′)·g′
    every product     h Wᵀ + b + (h downᵀ) upᵀ, with low-rank adapters beside frozen weights where there are any

A layer returns (x′, y) and the next one adds them, so every residual sum is fused into the norm that follows it. q, k and v are
one matrix product, and so are gate and up. The backward pass recomputes the norms' outputs and the activation: their share of the
time is a tenth of their share of the memory. With ``recompute`` it computes q, k, v, gate and up again too, but never attention.

Adapters are applied as they are trained, not merged: in half precision a merged weight would lose every change smaller than the
spacing of its numbers. The adapters of all layers of a product are two products as well: ``up`` is block-diagonal.

Rounds where the stock model rounds under autocast: products in the compute dtype, residual stream and sums in the norms'.
Legend: L positions, d width, H query heads, Hkv key heads, D head size, n outputs, R ranks of all adapters. Knows weights and
layouts; knows neither what the states are for nor who needs them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from turnwise.core.transfer import to_device
from turnwise.engines.adapters import Adapter, fuse_down, fuse_up
from turnwise.engines.generator.llama_decoder import MODEL_TYPES, STATIC_ROPES
from turnwise.engines.kernels import cpu, fp8
from turnwise.engines.kernels import reference as plain
from turnwise.engines.kernels.dispatch import attention_for, compute_dtype, ops_for
from turnwise.engines.kernels.four_bit import FourBitLinear, FourBitWeight, packed_layers
from turnwise.engines.kernels.reference import dequantise, quantise
from turnwise.engines.learner import lora
from turnwise.engines.learner.cuda_graphs import CapturedLayers
from turnwise.engines.learner.layouts import PackedLayout, VarlenAttention
from turnwise.errors import SettingError

FP8_FLAG = "narrow_products"  # attribute set on a decoder, so that its deep copies run in fp8 too
RECOMPUTE_FLAG = "recomputed_layers"  # likewise, for ``recompute``
ADAPTERS_FLAG = "adapters_by_hand"  # likewise: these layers may run its adapters
Layout = PackedLayout | VarlenAttention

# ------------------------------------------------------------------ one layer


@dataclass(frozen=True, eq=False)
class Projection:
    """``parameters`` are what autograd differentiates by: the layers' weights, their biases, then ``down`` and ``up`` of each."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    adapters: tuple[Adapter | None, ...]
    fused: fp8.Weight  # [n, d] in the dtype of the product
    bias: Tensor | None
    down: Tensor | None  # [R, d]
    up: Tensor | None  # [n, R]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        factors = [t for a in self.adapters if a is not None for t in (a.down, a.up)]
        return *self.weights, *self.biases, *factors

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """h [L, d] -> y [L, n], and h downᵀ [L, R] for the backward pass."""
        y = fp8.linear(h, self.fused, self.bias)
        if self.down is None or self.up is None:
            return y, None
        inner = torch.mm(h, self.down.t())
        return y.addmm_(inner, self.up.t()), inner

    def d_input(self, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradient of h, and dy up [L, R] for ``d_parameters``."""
        dh = fp8.input_gradient(dy, self.fused)
        if self.down is None or self.up is None:
            return dh, None
        d_inner = torch.mm(dy, self.up)
        return dh.addmm_(d_inner, self.down), d_inner

    def d_parameters(
        self, dy: Tensor, h: Tensor, inner: Tensor | None, d_inner: Tensor | None, like: Tensor, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of ``parameters`` in the dtype of ``like``; None where ``needed`` is false."""
        n, b = len(self.weights), len(self.biases)
        grads: list[Tensor | None] = [None] * n
        if any(needed[:n]):
            whole = fp8.weight_gradient(dy, fp8.quantised_input(h, self.fused), like)
            grads = fp8.split_gradient(whole, self.weights, needed[:n])
        biases: list[Tensor | None] = [None] * b
        if any(needed[n : n + b]):
            biases = fp8.split_gradient(dy.sum(0, dtype=like.dtype), self.biases, needed[n : n + b])
        if inner is None or d_inner is None or not any(needed[n + b :]):
            return [*grads, *biases, *[None] * len(needed[n + b :])]
        d_down, d_up = fp8.weight_gradient(d_inner, h, like), fp8.weight_gradient(dy, inner, like)
        factors: list[Tensor | None] = []
        row = column = 0
        for weight, adapter in zip(self.weights, self.adapters):  # each adapter's block of the block-diagonal ``up``
            if adapter is not None:
                rank = adapter.down.shape[0]
                block = d_up[row : row + len(weight), column : column + rank]
                factors += [d_down[column : column + rank], block * adapter.scale]
                column += rank
            row += len(weight)
        return [*grads, *biases, *factors]


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
        ctx: Any, half: PreAttention, cos: Tensor, sin: Tensor, x: Tensor, delta: Tensor | None, norm: Tensor, *parameters: Tensor
    ) -> Any:  # fmt: skip
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
        again = (None, None) if half.recompute else (gate_up, inner)
        ctx.save_for_backward(mixed, total, norm, out_inner, down_inner, *again)
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


# ------------------------------------------------------------------ the model


class LlamaLayers:
    """A decoder of the Llama family, run by these halves. Every pass casts and fuses trained weights again, because nothing
    signals that they changed: a fused optimizer does not even increment their version counter. Frozen weights in the compute
    dtype are fused once, in place."""

    def __init__(self, decoder: Any) -> None:
        self._decoder: Callable[[], Any] = weakref.ref(decoder)
        config = decoder.config
        attention = decoder.layers[0].self_attn
        self.eps, self.scale, self.size = config.rms_norm_eps, attention.scaling, attention.head_dim
        self.has_qk_norm = hasattr(attention, "q_norm")
        # keep the residual stream and attention's output (on other paths a layer's input); compute the rest again
        self.recompute = getattr(decoder, RECOMPUTE_FLAG, False)
        self.fp8 = getattr(decoder, FP8_FLAG, False)  # round the layers' matrix products to fp8
        self.four_bit = bool(packed_layers(decoder))  # frozen weights are dequantised for each product
        self.weights = list(decoder.parameters())
        self.captured = CapturedLayers(self.weights)
        self.frozen = {layer: fused for layer in decoder.layers if (fused := _fused_in_place(layer)) is not None}

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
        by_hand = getattr(decoder, ADAPTERS_FLAG, False)
        plain_layers = all(type(m) in (nn.Linear, FourBitLinear) or (by_hand and lora.is_plain(m)) for m in linears)
        return "" if plain_layers else "projections that are not plain linear layers"

    def __call__(self, ids: Tensor, position: Tensor, layout: Layout, rows: Tensor | None = None) -> Tensor:
        """ids and position [L] -> inputs of the LM head [L, d], in the compute dtype; with ``rows``, only theirs. With a
        variable-length layout, ids, positions and layout are on the host."""
        if rows is None and isinstance(layout, VarlenAttention) and not self.recompute and not self.four_bit:
            first = self._decoder().layers[0]  # adapters are switched off for the reference policy
            adapted = any(lora.adapter_of(p) is not None for p in (first.self_attn.q_proj, first.mlp.down_proj))
            kind = (compute_dtype(self.weights[0]), adapted)
            states = self.captured(self._forward, kind, ids, position, layout)
            if states is not None:
                return states
        if isinstance(layout, VarlenAttention):
            device = self.weights[0].device
            ids, position, layout = to_device(ids, device), to_device(position, device), layout.to(device)
        return self._forward(ids, position, layout, rows=rows)

    def _forward(
        self, ids: Tensor, position: Tensor, layout: Layout, alias: Mapping[Tensor, Tensor] | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``alias``: the tensor to use in place of each weight."""
        weight_of = (lambda p: alias[p]) if alias is not None else (lambda p: p)
        decoder: Any = self._decoder()
        dtype, ops = compute_dtype(self.weights[0]), ops_for(self.weights[0])
        with torch.autocast(ids.device.type, enabled=False):
            embedding = decoder.embed_tokens
            x = F.embedding(ids, weight_of(embedding.weight), embedding.padding_idx).to(decoder.norm.weight.dtype)
            cos, sin = (t[0, :, : self.size // 2].contiguous() for t in decoder.rotary_emb(x, position[None]))
            delta: Tensor | None = None
            packed_qkv = (
                isinstance(layout, VarlenAttention) and not self.has_qk_norm and attention_for(x, self.size) is not None
            )
            for layer in decoder.layers:
                outputs = rows if layer is decoder.layers[-1] else None
                args = (*self._halves(layer, dtype, ops, weight_of, packed_qkv), x, delta, cos, sin, layout, outputs)
                if self.recompute and torch.is_grad_enabled() and not packed_qkv:
                    x, delta = checkpoint(self._layer, *args, use_reentrant=False, preserve_rng_state=False)
                else:
                    x, delta = self._layer(*args)
            return FinalNorm.apply(ops, self.eps, dtype, x, delta, weight_of(decoder.norm.weight))

    def _layer(
        self, pre: PreAttention, post: PostAttention, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor,
        layout: Layout, rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """``rows``: the last layer computes its second half for these rows only."""
        *parts, x = pre(x, delta, cos, sin)
        if pre.packed_qkv and isinstance(layout, VarlenAttention):
            again = (pre.qkv_again, x.detach()) if self.recompute else None
            mixed = layout.attend_fused_qkv(parts[0], pre.keys, cos, sin, self.scale, again).flatten(1)
        else:
            q, k, v = parts
            if pre.head_norms:
                # Qwen3 normalises each head, and rotates what is normalised
                norm = lambda x, w: F.rms_norm(x.to(w.dtype), (self.size,), None, self.eps).to(x.dtype) * w  # noqa: E731
                unit = (norm(x, w) for x, w in zip((q, k), pre.head_norms))
                q, k = (plain._rotate(x, cos[:, None], sin[:, None]).to(v.dtype) for x in unit)
            mixed = layout.attend_rows(q, k, v, self.scale).flatten(1)
        return post(mixed, x) if rows is None else post(mixed.index_select(0, rows), x.index_select(0, rows))

    @staticmethod
    def _rounded(weight: Tensor) -> fp8.Weight:
        """Round to fp8 as the generator does on this device: on a CPU only the weights."""
        return fp8.EmulatedFp8Weight.of(weight) if weight.is_cuda else dequantise(*quantise(weight)).to(weight.dtype)

    @torch.no_grad()
    def _halves(
        self, layer: Any, dtype: torch.dtype, ops: ModuleType, weight_of: Callable[[Tensor], Tensor], packed_qkv: bool
    ) -> tuple[PreAttention, PostAttention]:
        a, m = layer.self_attn, layer.mlp
        norms = tuple(weight_of(n.weight) for n in (layer.input_layernorm, layer.post_attention_layernorm))
        head_norms = tuple(weight_of(n.weight) for n in (a.q_norm, a.k_norm)) if self.has_qk_norm else ()
        frozen_qkv, frozen_gate_up = self.frozen.get(layer, (None, None))
        project = partial(self._projection, dtype, weight_of)
        qkv = project((a.q_proj, a.k_proj, a.v_proj), frozen_qkv)
        heads, keys = (sum(len(w) for w in part) // self.size for part in (qkv.weights[:2], qkv.weights[1:2]))
        pre = PreAttention(ops, norms[0], qkv, head_norms, packed_qkv, heads, keys, self.size, self.eps, dtype)
        gate_up = project((m.gate_proj, m.up_proj), frozen_gate_up)
        recompute = self.recompute and packed_qkv
        return pre, PostAttention(
            ops, norms[1], project((a.o_proj,)), gate_up, project((m.down_proj,)), self.eps, recompute
        )

    def _projection(
        self, dtype: torch.dtype, weight_of: Callable[[Tensor], Tensor], modules: Sequence[Any], frozen: Tensor | None = None
    ) -> Projection:  # fmt: skip
        """``frozen``: the modules' weights, fused already."""
        layers = [lora.base_layer(m) for m in modules]
        biases = tuple(weight_of(m.bias) for m in layers if m.bias is not None)
        packed = [m for m in layers if isinstance(m, FourBitLinear)]
        weights = tuple(m.sizes() if isinstance(m, FourBitLinear) else weight_of(m.weight) for m in layers)
        if packed:
            fused: fp8.Weight = FourBitWeight(tuple(m.matrix for m in packed), dtype)
        elif frozen is not None and frozen.dtype == dtype and not self.fp8:
            fused = frozen
        else:
            # ``cat`` of one tensor would copy it
            fused = (weights[0] if len(weights) == 1 else torch.cat(weights)).to(dtype)
            fused = self._rounded(fused) if self.fp8 else fused
        bias = (biases[0] if len(biases) == 1 else torch.cat(biases)).to(dtype) if biases else None
        adapters = tuple(lora.adapter_of(m, weight_of) for m in modules)
        up = fuse_up(adapters, [len(w) for w in weights], dtype)
        return Projection(weights, biases, adapters, fused, bias, fuse_down(adapters, dtype), up)


def _fused_in_place(layer: Any) -> tuple[Tensor, Tensor] | None:
    """Frozen weights of q, k, v and of gate, up as one tensor each, of which the layers' own become views; None: the layer trains
    weights, or keeps them in the dtype of the sums."""
    if packed_layers(layer):
        return None
    a, m = layer.self_attn, layer.mlp
    modules = ((a.q_proj, a.k_proj, a.v_proj), (m.gate_proj, m.up_proj))
    groups = [[lora.base_layer(module).weight for module in group] for group in modules]
    wide = layer.input_layernorm.weight.dtype
    if any(w.requires_grad or w.dtype == wide for group in groups for w in group):
        return None
    fused = []
    for group in groups:
        fused.append(torch.cat([w.detach() for w in group]))
        for weight, part in zip(group, fused[-1].split([len(w) for w in group])):
            weight.data = part
    return fused[0], fused[1]


_registry: weakref.WeakKeyDictionary[nn.Module, LlamaLayers | str] = weakref.WeakKeyDictionary()


def fast_path(decoder: nn.Module) -> LlamaLayers | None:
    """The hand-written layers of this decoder; None if it must run its stock forward."""
    if decoder not in _registry:
        _registry[decoder] = LlamaLayers.unsupported_reason(decoder) or LlamaLayers(decoder)
    entry = _registry[decoder]
    return entry if isinstance(entry, LlamaLayers) else None


@contextmanager
def accumulating_gradients(*decoders: nn.Module | None) -> Iterator[None]:
    """Inside, ``backward`` adds directly into the .grad of these decoders' weights; ``autograd.grad`` returns None for them."""
    paths = [fast_path(decoder) for decoder in decoders if decoder is not None]
    graphs = [layers.captured for layers in paths if layers is not None]
    for each in graphs:
        each.accumulates = True
    try:
        yield
    finally:
        for each in graphs:
            each.accumulates = False


def run_adapters(decoder: nn.Module) -> LlamaLayers | None:
    """Let these layers run the adapters of this decoder; call again after its weights were replaced. None: they cannot."""
    setattr(decoder, ADAPTERS_FLAG, True)
    _registry.pop(decoder, None)
    return fast_path(decoder)


def enable_recompute(decoder: nn.Module) -> None:
    """Keep less for the backward pass and compute it again, here and in copies of this decoder."""
    setattr(decoder, RECOMPUTE_FLAG, True)
    layers = fast_path(decoder)
    if layers is not None:
        layers.recompute = True


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
    if layers is None:
        return f"stock forward ({_registry[decoder]})"
    ops = ops_for(layers.weights[0])
    if ops in (plain, cpu):
        kernels = "plain kernels" if ops is plain else "C kernels"
    else:
        flash = "" if attention_for(layers.weights[0], layers.size) else ", flash attention of PyTorch"
        captured = layers.captured.enabled and not layers.recompute and not layers.four_bit
        kernels = f"Triton kernels{flash}, {'CUDA graphs' if captured else 'no CUDA graphs'}"
    return f"hand-written layers, {kernels}" + (", weights rounded to fp8" if layers.fp8 else "")
