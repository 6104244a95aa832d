"""A hand-written forward and backward for the Llama family: the learner's fast path, as ``decoder`` is the generator's.

    enter    h = norm(x + δ)·g        q, k, v = turned(h Wᵀ)
    leave    x′ = x + a Woᵀ           y = (silu(n Wgᵀ) ⊙ n Wuᵀ) Wdᵀ,  n = norm(x′)·g′

A layer hands (x′, y) on and the next one adds them, so every sum rides on the norm that reads it. The norms' outputs and the
activation are computed again in the backward pass: they cost a tenth of what they weigh. q, k, v are one product and so are gate
and up. Attention between ``enter`` and ``leave`` is the layout's, by ordinary autograd.

Same rounding as the stock model under autocast: products in ``kind``, residual stream and sums wide. Knows weights and layouts;
neither what the states are for nor who asks.
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

from turnwise.core.levels import send
from turnwise.engines.generator.llama_decoder import FAMILY, STEADY_ROPES
from turnwise.engines.kernels import reference as plain
from turnwise.engines.kernels.cpu import layers as native
from turnwise.engines.kernels.decode_reference import quantise, widened
from turnwise.engines.kernels.dispatch import attention_for, kind_of, ops_for
from turnwise.engines.kernels.fp8 import Rounded, Weight, back, parts_of, product, seen, weight_gradient
from turnwise.engines.learner.cuda_graphs import Body
from turnwise.engines.learner.varlen_attention import Ragged
from turnwise.errors import SettingError

NARROW = "narrow_products"  # what says so on a decoder: its copies say it, too


class Layout(Protocol):
    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [L, H, D], k and v [L, Hkv, D] -> [L, H, D]."""
        ...


# ------------------------------------------------------------------ functions


@dataclass(frozen=True, eq=False)
class _Enter:
    """The first half of a layer, with the weights of one moment."""

    ops: ModuleType
    norm: Tensor
    own: tuple[Tensor, ...]  # q, k, v
    biases: tuple[Tensor, ...]
    fused: Weight
    bias: Tensor | None
    head_norms: tuple[Tensor, ...]  # where there are any, q and k are normed and turned afterwards
    whole: bool  # q, k and v are handed over as one, and turned by whoever attends
    heads: int  # of queries and keys
    keys: int  # of keys alone
    size: int
    eps: float
    kind: torch.dtype  # of products

    def __call__(self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """x and delta [L, d] -> q [L, H, D], k and v [L, Hkv, D], or all in one, and the sum x + delta."""
        return _EnterFunction.apply(self, cos, sin, x, delta, self.norm, *self.own, *self.biases)


class _EnterFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, half: _Enter, cos: Tensor, sin: Tensor, x: Tensor, delta: Tensor | None, norm: Tensor, *own: Tensor
    ) -> Any:
        total, h = half.ops.add_norm(x, delta, norm, half.eps, half.kind)
        qkv = product(h, half.fused, half.bias)
        ctx.half, ctx.added = half, delta is not None
        ctx.save_for_backward(cos, sin, total, norm)
        parts = qkv.view(len(x), -1, half.size)
        if half.whole:
            return parts, total.view_as(total)
        if not half.head_norms:
            half.ops.rotate_(qkv, cos, sin, half.heads, half.size)
        return *parts.split([half.heads - half.keys, half.keys, half.keys], 1), total.view_as(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *pulls: Any) -> tuple[Any, ...]:
        half: _Enter = ctx.half
        cos, sin, total, norm = ctx.saved_tensors
        *parts, d_total = pulls
        if half.whole or half.head_norms:
            d = (parts[0] if half.whole else torch.cat(parts, 1)).flatten(1)
        else:
            d = half.ops.unrotate(*parts, cos, sin)
        dx, d_kind, h, d_norm = half.ops.norm_backward(back(d, half.fused), total, norm, half.eps, d_total)
        wanted = ctx.needs_input_grad[6:]
        grads: list[Tensor | None] = [None] * len(half.own)
        if any(wanted[: len(half.own)]):
            grads = parts_of(weight_gradient(d, seen(h, half.fused), norm), half.own, wanted)
        biases = parts_of(d.sum(0, dtype=norm.dtype), half.biases, wanted[len(half.own) :]) if half.biases else []
        return None, None, None, dx, d_kind if ctx.added else None, d_norm, *grads, *biases


@dataclass(frozen=True, eq=False)
class _Leave:
    """The second half of a layer: the attention's output product and the MLP."""

    ops: ModuleType
    own: tuple[Tensor, ...]  # out, gate, up, down
    norm: Tensor
    bias: Tensor | None
    out: Weight
    out_bias: Tensor | None
    gate_up: Weight
    down: Weight
    eps: float

    def __call__(self, mixed: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """mixed [L, H D] and x [L, d] -> (x′, y)."""
        return _LeaveFunction.apply(self, mixed, x, self.norm, self.bias, *self.own)


class _LeaveFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, half: _Leave, mixed: Tensor, x: Tensor, norm: Tensor, bias: Tensor | None, *own: Tensor
    ) -> Any:
        total, h = half.ops.add_norm(x, product(mixed, half.out, half.out_bias), norm, half.eps, mixed.dtype)
        both = product(h, half.gate_up)
        y = product(half.ops.swiglu(both), half.down)
        ctx.half = half
        ctx.save_for_backward(mixed, total, both, norm)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor | None, dy: Tensor) -> tuple[Any, ...]:
        half: _Leave = ctx.half
        mixed, total, both, norm = ctx.saved_tensors
        want_bias, want_out, want_gate, want_up, want_down = ctx.needs_input_grad[4:]
        d_both, act = half.ops.swiglu_backward(both, back(dy, half.down))
        d_down = weight_gradient(dy, seen(act, half.down), norm) if want_down else None
        dx, d_out, h, d_norm = half.ops.norm_backward(back(d_both, half.gate_up), total, norm, half.eps, d_total)
        gate_up: list[Tensor | None] = [None, None]
        if want_gate or want_up:
            found = weight_gradient(d_both, seen(h, half.gate_up), norm)
            gate_up = parts_of(found, half.own[1:3], (want_gate, want_up))
        out = weight_gradient(d_out, seen(mixed, half.out), norm) if want_out else None
        d_bias = d_out.sum(0, dtype=norm.dtype) if want_bias else None
        return None, back(d_out, half.out), dx, d_norm, d_bias, out, *gate_up, d_down


class _FinalNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: ModuleType, eps: float, kind: torch.dtype, x: Tensor, delta: Tensor, norm: Tensor
    ) -> Tensor:
        total, h = ops.add_norm(x, delta, norm, eps, kind)
        ctx.ops, ctx.eps = ops, eps
        ctx.save_for_backward(total, norm)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Any, ...]:
        total, norm = ctx.saved_tensors
        dx, d_kind, _, d_norm = ctx.ops.norm_backward(dh.contiguous(), total, norm, ctx.eps, None)
        return None, None, None, dx, d_kind, d_norm


# ------------------------------------------------------------------ the model


class Blocks:
    """A decoder of the Llama family, read by these halves. Weights are rounded to ``kind`` and fused anew in every pass: nobody
    says when they change (a fused optimiser does not even move their version)."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = weakref.ref(decoder)
        config = decoder.config
        attention = decoder.layers[0].self_attn
        self.eps, self.scale, self.size = config.rms_norm_eps, attention.scaling, attention.head_dim
        self.normed = hasattr(attention, "q_norm")
        self.recompute = False  # keep only what enters a layer, and run the layer again in the backward pass
        self.narrow = getattr(decoder, NARROW, False)  # products of the layers in fp8
        self.weights = list(decoder.parameters())
        self.body = Body(self.weights)

    @staticmethod
    def misfit(decoder: Any) -> str:
        """Why this decoder cannot be read here; empty if it can."""
        config = getattr(decoder, "config", None)
        if config is None or config.model_type not in FAMILY:
            return f"model type {getattr(config, 'model_type', '?')}"
        if config.hidden_act not in ("silu", "swish") or getattr(config, "mlp_bias", False):
            return "its MLP is not a plain SwiGLU"
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            return "sliding windows"
        if (config.rope_parameters or {}).get("rope_type", "default") not in STEADY_ROPES:
            return "rotary angles that depend on the length"
        if next(decoder.parameters()).dtype == torch.float64:
            return "float64: the stock norms round to float32, and so must we"
        if any(layer._forward_pre_hooks or layer._forward_hooks for layer in decoder.layers):
            return "something listens at its layers"
        linears = [m for name, m in decoder.named_modules() if name.endswith("_proj")]
        return "" if all(type(m) is nn.Linear for m in linears) else "projections that are not plain linear layers"

    def describe(self) -> str:
        """Which path reads, for a log."""
        ops = ops_for(self.weights[0])
        fp8 = ", weights rounded to fp8" if self.narrow else ""
        if ops in (plain, native):
            return ("plain kernels" if ops is plain else "C kernels") + fp8
        graphs = "CUDA graphs" if self.body.works and not self.recompute else "no CUDA graphs"
        flash = "" if attention_for(self.weights[0], self.size) else ", flash attention of PyTorch"
        return f"Triton kernels{flash}, {graphs}" + fp8

    def __call__(self, ids: Tensor, position: Tensor, layout: Layout, asked: Tensor | None = None) -> Tensor:
        """ids and position [L] -> what the LM head would read, [L, d], in ``kind``; where rows are ``asked`` for, only theirs. A
        ragged layout comes from the host, with ids and positions."""
        if asked is None and isinstance(layout, Ragged) and not self.recompute:
            states = self.body(self._read, kind_of(self.weights[0]), ids, position, layout)
            if states is not None:
                return states
        if isinstance(layout, Ragged):
            device = self.weights[0].device
            ids, position, layout = send(ids, device), send(position, device), layout.to(device)
        return self._read(ids, position, layout, asked=asked)

    def _read(
        self,
        ids: Tensor,
        position: Tensor,
        layout: Layout,
        own: Mapping[Tensor, Tensor] | None = None,
        asked: Tensor | None = None,
    ) -> Tensor:
        """``own``: what stands for each of the weights."""
        as_own = (lambda p: own[p]) if own is not None else (lambda p: p)
        decoder: Any = self._decoder()
        kind, ops = kind_of(self.weights[0]), ops_for(self.weights[0])
        with torch.autocast(ids.device.type, enabled=False):
            embedding = decoder.embed_tokens
            x = F.embedding(ids, as_own(embedding.weight), embedding.padding_idx)
            cos, sin = (t[0, :, : self.size // 2].contiguous() for t in decoder.rotary_emb(x, position[None]))
            delta: Tensor | None = None
            whole = isinstance(layout, Ragged) and not self.normed and layout.turns(x, self.size)
            for layer in decoder.layers:
                rows = asked if layer is decoder.layers[-1] else None
                given = (*self._cut(layer, kind, ops, as_own, whole), x, delta, cos, sin, layout, rows)
                if self.recompute and torch.is_grad_enabled():
                    x, delta = checkpoint(self._layer, *given, use_reentrant=False, preserve_rng_state=False)
                else:
                    x, delta = self._layer(*given)
            return _FinalNorm.apply(ops, self.eps, kind, x, delta, as_own(decoder.norm.weight))

    def _layer(
        self, enter: _Enter, leave: _Leave, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Of the last layer only some ``rows`` are wanted: what follows its attention is not computed for the others."""
        *parts, x = enter(x, delta, cos, sin)
        if enter.whole and isinstance(layout, Ragged):
            mixed = layout.attend_product(parts[0], enter.keys, cos, sin, self.scale).flatten(1)
        else:
            q, k, v = parts
            if enter.head_norms:
                q, k = (_normed_turned(t, w, self.eps, cos, sin) for t, w in zip((q, k), enter.head_norms))
            mixed = layout.attend_rows(q, k, v, self.scale).flatten(1)
        return leave(mixed, x) if rows is None else leave(mixed.index_select(0, rows), x.index_select(0, rows))

    @staticmethod
    def _rounded(weight: Tensor) -> Weight:
        """To fp8, as the sampler of this device rounds: on a CPU the weights alone."""
        return Rounded.of(weight) if weight.is_cuda else widened(*quantise(weight)).to(weight.dtype)

    @torch.no_grad()
    def _cut(
        self, layer: Any, kind: torch.dtype, ops: ModuleType, as_own: Callable[[Tensor], Tensor], whole: bool
    ) -> tuple[_Enter, _Leave]:
        a, m = layer.self_attn, layer.mlp
        qkv = tuple(as_own(p.weight) for p in (a.q_proj, a.k_proj, a.v_proj))
        biases = tuple(as_own(p.bias) for p in (a.q_proj, a.k_proj, a.v_proj) if p.bias is not None)
        own = tuple(as_own(p.weight) for p in (a.o_proj, m.gate_proj, m.up_proj, m.down_proj))
        norms = tuple(as_own(n.weight) for n in (layer.input_layernorm, layer.post_attention_layernorm))
        head_norms = tuple(as_own(n.weight) for n in (a.q_norm, a.k_norm)) if self.normed else ()
        out_bias = None if a.o_proj.bias is None else as_own(a.o_proj.bias)
        heads = (len(qkv[0]) + len(qkv[1])) // self.size
        rounded = self._rounded if self.narrow else lambda w: w
        fused, out, gate_up, down = (rounded(w.to(kind)) for w in (torch.cat(qkv), own[0], torch.cat(own[1:3]), own[3]))
        enter = _Enter(
            ops, norms[0], qkv, biases, fused, torch.cat(biases).to(kind) if biases else None,
            head_norms, whole, heads, len(qkv[1]) // self.size, self.size, self.eps, kind,
        )  # fmt: skip
        leave = _Leave(
            ops, own, norms[1], out_bias, out, None if out_bias is None else out_bias.to(kind), gate_up, down, self.eps
        )  # fmt: skip
        return enter, leave


def _normed_turned(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads normalised one by one, then turned: q and k of Qwen3."""
    wide = F.rms_norm(x.to(weight.dtype), (x.shape[-1],), None, eps).to(x.dtype) * weight
    a, b = wide.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


_known: weakref.WeakKeyDictionary[nn.Module, Blocks | str] = weakref.WeakKeyDictionary()


def of(decoder: nn.Module) -> Blocks | None:
    """The blocks of this decoder; None if it must be read by its stock forward."""
    if decoder not in _known:
        _known[decoder] = Blocks.misfit(decoder) or Blocks(decoder)
    found = _known[decoder]
    return found if isinstance(found, Blocks) else None


def adding(*decoders: nn.Module | None) -> ExitStack:
    """Within, ``backward`` adds to the gradients of these decoders' weights without copies; ``autograd.grad`` finds none."""
    within = ExitStack()
    for fast in [of(decoder) for decoder in decoders if decoder is not None]:
        within.enter_context(nullcontext() if fast is None else fast.body.adding())
    return within


def forbid(decoder: nn.Module, why: str) -> None:
    """Read this decoder by its stock forward from now on."""
    _known[decoder] = why


def narrow(decoder: nn.Module) -> None:
    """From now on round the layers' products to fp8, as a sampler does."""
    fast = of(decoder)
    if fast is None:
        raise SettingError(
            f"dtype fp8 needs hand-written layers, and these are read by their stock forward ({_known[decoder]}); "
            "write --dtype auto, or --rollout-dtype fp8 with a method that corrects for the difference"
        )
    setattr(decoder, NARROW, True)
    fast.narrow = True


def describe(decoder: nn.Module) -> str:
    """Which path reads it, for a log."""
    fast = of(decoder)
    return f"stock forward ({_known[decoder]})" if fast is None else f"hand-written layers, {fast.describe()}"
