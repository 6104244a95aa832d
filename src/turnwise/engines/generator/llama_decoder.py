"""A hand-written forward for the Llama family (Llama, Qwen2, Qwen3, Mistral, SmolLM): the generator's fast path.

RMSNorm, optional biases, optional q/k norm, rotary embeddings from the model's own module, grouped-query attention, SwiGLU. Same
arithmetic as the stock forward with a third of its operations: q, k, v and gate, up are one matrix product each, residuals are
added by the product itself, and weights are stored transposed (on a CPU the stock layout is up to 2.5 times slower for a few
rows). ``ModelRunner`` compares its logits with the stock forward before it uses it.

Knows weights and layouts; neither requests nor sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from turnwise.engines.generator.attention_layouts import DecodeLayout, PrefillLayout
from turnwise.engines.generator.kv_cache import KVCache
from turnwise.engines.kernels.cpu import attention as c_attention
from turnwise.engines.kernels.cpu import fused_layers
from turnwise.engines.kernels.cpu import layers as c_layers
from turnwise.engines.kernels.decode_reference import dequantise, quantise

MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")
STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # rotary angles depend on the position alone


@dataclass(frozen=True, slots=True)
class _Layer:
    norm: Tensor
    qkv: Tensor  # [d, (H + 2 Hkv) D]; all weights here are transposed and contiguous
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [H + Hkv, D]
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def _bias(*layers: nn.Linear) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    zeros = [layer.weight.new_zeros(layer.out_features) for layer in layers]
    return torch.cat([z if layer.bias is None else layer.bias.detach() for layer, z in zip(layers, zeros)])


class LlamaDecoder:
    model_types = MODEL_TYPES

    @classmethod
    def unsupported_reason(cls, model: PreTrainedModel, windows: set[int | None]) -> str:
        """Why this decoder does not support a model; empty if it does."""
        config = model.config
        if config.model_type not in cls.model_types:
            return f"model type {config.model_type}"
        if config.hidden_act not in ("silu", "swish") or getattr(config, "mlp_bias", False):
            return "its MLP is not a plain SwiGLU"
        if model.dtype == torch.float64:
            return "float64: the stock norms round to float32"
        if windows != {None}:
            return "sliding windows"
        if (config.rope_parameters or {}).get("rope_type", "default") not in STATIC_ROPES:
            return "rotary angles that depend on the length"
        linears = [m for name, m in model.named_modules() if name.endswith("_proj")]
        return "" if all(type(m) is nn.Linear for m in linears) else "projections that are not plain linear layers"

    def __init__(self, model: PreTrainedModel, kv_cache: KVCache, fp8: bool = False) -> None:
        """``fp8``: round the layers' weights to fp8 (e4m3, one scale per output)."""
        config = model.config
        self.model, self.kv_cache, self.fp8 = model, kv_cache, fp8
        self.H, self.Hkv, self.D = config.num_attention_heads, kv_cache.shapes[0][0][0], kv_cache.shapes[0][0][1]
        self.eps = config.rms_norm_eps
        self.scale = model.model.layers[0].self_attn.scaling
        self.c_kernels = False  # decided below, from the loaded weights
        self.refresh_weights()
        position = torch.arange(kv_cache.context, device=kv_cache.device)[None]
        cos, sin = model.model.rotary_emb(self.embedding, position)
        half = self.D // 2
        self.cos = cos[0, :, None]  # [context, 1, D]
        self.sin = torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), -1)  # x·cos + roll(x)·sin
        self.half_cos, self.half_sin = (t[0, :, :half].contiguous() for t in (cos, sin))
        supported = self.D % c_attention.HEAD_MULTIPLE == 0 and all(layer.qk_norm is None for layer in self.layers)
        # a subclass brings its own kernels
        self.c_kernels = supported and type(self) is LlamaDecoder and c_layers.fits(self.norm)
        self.fused = self._fused_layers()

    def describe(self) -> str:
        dtype = str(self.kv_cache.dtype).removeprefix("torch.")
        kernels = "" if not self.c_kernels else "C kernels, " if self.fused is None else "C kernels and products, "
        return f"hand-written decoder, {kernels}{dtype}" + (", weights rounded to fp8" if self.fp8 else "")

    def prove(self, deviation: Callable[[], float], tolerance: float) -> float:
        """The largest logit error. A decoder that can compute in several ways keeps those within the tolerance."""
        return deviation()

    def warm_up(self) -> None:
        """Do once what the first request would otherwise wait for, or fail now."""

    def refresh_weights(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Fuse the model's current weights again. ``weights``: the published ones, if any."""
        base = self.model.model
        self._free_weights()
        self.embedding = base.embed_tokens.weight.detach()
        self.head = self.model.lm_head.weight.detach().t().contiguous()
        self.norm = base.norm.weight.detach()
        self.layers = [self._fuse(layer) for layer in base.layers]
        self.fused = self._fused_layers()

    def _free_weights(self) -> None:
        """Free the old fused weights before new ones are made: both at once would take twice the memory."""
        if "layers" in vars(self):
            self.fused = None
            self.layers.clear()

    def _fused_layers(self) -> fused_layers.FusedLayers | None:
        """All layers and the head as one C call for a small batch, where that is faster."""
        weights = [w for layer in self.layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        fits = self.c_kernels and self.kv_cache.uniform and fused_layers.fits(weights)
        return fused_layers.FusedLayers(self.layers, self.head) if fits else None

    def _fused_for(self, rows: int) -> fused_layers.FusedLayers | None:
        return self.fused if rows <= fused_layers.MAX_ROWS else None

    def _fuse(self, layer: Any) -> _Layer:
        a = layer.self_attn
        qk_norm = None
        if self._norms_heads(a):
            q, k = a.q_norm.weight.detach(), a.k_norm.weight.detach()
            qk_norm = torch.cat((q.expand(self.H, -1), k.expand(self.Hkv, -1)))
        return _Layer(
            layer.input_layernorm.weight.detach(),
            self._transposed(a.q_proj, a.k_proj, a.v_proj),
            _bias(a.q_proj, a.k_proj, a.v_proj),
            qk_norm,
            self._transposed(a.o_proj),
            _bias(a.o_proj),
            layer.post_attention_layernorm.weight.detach(),
            *self._mlp_weights(layer.mlp),
        )

    def _norms_heads(self, attention: Any) -> bool:
        return hasattr(attention, "q_norm")

    def _mlp_weights(self, mlp: Any) -> tuple[Any, Any]:
        return self._transposed(mlp.gate_proj, mlp.up_proj), self._transposed(mlp.down_proj)

    def _transposed(self, *layers: nn.Linear) -> Any:
        """Several linear layers as one weight [in, out], in this decoder's precision."""
        weight = torch.cat([layer.weight.detach() for layer in layers])
        return (dequantise(*quantise(weight)).to(weight.dtype) if self.fp8 else weight).t().contiguous()

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.c_kernels:
            return c_layers.norm(x, weight, self.eps)
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _qkv_flat(self, layer: _Layer, x: Tensor) -> Tensor:
        """x [N, d] -> q, k and v side by side, [N, (H + 2 Hkv) D]."""
        h = self._rms_norm(x, layer.norm)
        return torch.mm(h, layer.qkv) if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, h, layer.qkv)

    def _qkv(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, d] -> rotated q and k [N, H + Hkv, D], v [N, Hkv, D]."""
        heads = self._qkv_flat(layer, x).view(len(x), -1, self.D)
        qk, v = heads[:, : self.H + self.Hkv], heads[:, self.H + self.Hkv :]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (self.D,), None, self.eps) * layer.qk_norm
        return (qk * cos).addcmul_(qk.roll(self.D // 2, -1), sin), v

    def _after_attention(self, layer: _Layer, x: Tensor, attention: Tensor) -> Tensor:
        """The attention's output projection and the MLP, both added to the residual stream."""
        x = torch.addmm(x, attention, layer.out)
        if layer.out_bias is not None:
            x += layer.out_bias
        gate_up = torch.mm(self._rms_norm(x, layer.mlp_norm), layer.gate_up)
        if self.c_kernels:
            return torch.addmm(x, c_layers.swiglu(gate_up), layer.down)
        gate, up = gate_up.chunk(2, -1)
        return torch.addmm(x, F.silu(gate).mul_(up), layer.down)

    def _forward_kernels(self, tokens: Tensor, row: Tensor, position: Tensor, longest: int, last: bool) -> Tensor:
        """Tokens of any rows through all layers, with C kernels: each attends to the columns of its row up to its own. Without
        ``last`` only the keys and values of the last layer are computed, not its output."""
        x = F.embedding(tokens, self.embedding)
        if (fused := self._fused_for(len(x))) is not None:
            rotary = (self.half_cos, self.half_sin)
            return fused(x, self.kv_cache, *rotary, row, position, self.H, longest, self.scale, self.eps, last)
        table = self.kv_cache.table
        for i, layer in enumerate(self.layers):
            qkv, keys, values = self._qkv_flat(layer, x), self.kv_cache.keys[i], self.kv_cache.values[i]
            c_attention.rope_and_cache(qkv, self.half_cos, self.half_sin, row, position, keys, values, table)
            if i < len(self.layers) - 1 or last:
                attention = c_attention.cached_attention(qkv, row, position, keys, values, longest, self.scale, table)
                x = self._after_attention(layer, x, attention)
        return x

    def prefill(self, layout: PrefillLayout) -> None:
        """Compute keys and values of packed tokens. The last layer's attention and MLP feed only logits, which prefill does not
        need."""
        packed = layout.on_device
        if self.c_kernels and layout.width <= c_attention.MAX_KEYS:
            self._forward_kernels(packed.tokens, packed.row, packed.position, layout.width, False)
            return
        x = F.embedding(packed.tokens, self.embedding)
        cos, sin = self.cos[packed.position], self.sin[packed.position]
        for i, layer in enumerate(self.layers):
            qk, v = self._qkv(layer, x, cos, sin)
            q, k, v = (t.transpose(0, 1)[None] for t in (qk[:, : self.H], qk[:, self.H :], v))
            if i == len(self.layers) - 1:
                layout.write(i, k, v)
                return
            attention = layout.attention(i, q, k, v, self.scale, None)
            x = self._after_attention(layer, x, attention.view(len(x), -1))

    def decode_step(self, tokens: Tensor, layout: DecodeLayout) -> Tensor:
        """Feed one token per row [n]; return the logits [n, V] of the next."""
        if self.c_kernels:
            x = self._forward_kernels(tokens, layout.row, layout.position, layout.width, True)
            h, fused = self._rms_norm(x, self.norm), self._fused_for(len(x))
            if fused is None or fused.head is None:
                return torch.mm(h, self.head)
            return fused_layers.panel_matmul(h, fused.head)
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.cos[layout.position], self.sin[layout.position]
        for i, layer in enumerate(self.layers):
            qk, v = self._qkv(layer, x, cos, sin)
            layout.write(i, qk[:, self.H :], v)
            attention = layout.cached_attention(i, qk[:, : self.H, None], self.scale, None)
            x = self._after_attention(layer, x, attention.view(len(x), -1))
        return torch.mm(self._rms_norm(x, self.norm), self.head)
