"""A hand-written forward for the Llama family (Llama, Qwen2, Qwen3, Mistral, SmolLM): the generator's fast path.

RMSNorm, optional biases, optional q/k norm, rotary embeddings from the model's own module, grouped-query attention, SwiGLU. Same
arithmetic as the stock forward with a third of its operations: q, k, v and gate, up are one matrix product each, residuals are
added by the product itself, and weights are stored transposed (on a CPU the stock layout is up to 2.5 times slower for a few
rows). ``ModelRunner`` compares its logits with the stock forward before it uses it.

Prefill and decode are the same pass (``_layers``) with another attention; ``cuda_graphs.GraphDecoder`` runs it too, with kernels
for GPUs. Knows weights and layouts; neither requests nor sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from turnwise.engines.generator.attention_layouts import DecodeLayout, PrefillLayout
from turnwise.engines.generator.kv_cache import KVCache
from turnwise.engines.kernels import cpu, reference

MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")
STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # rotary angles depend on the position alone


@dataclass(frozen=True, slots=True)
class LayerWeights:
    norm: Tensor
    qkv: Any  # [d, (H + 2 Hkv) D]; all weights here are transposed and contiguous
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [H + Hkv, D]
    out: Any
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Any
    down: Any


Attend = Callable[[int, LayerWeights, Tensor, bool], Tensor | None]
"""(layer's number, its weights, q, k and v side by side [N, (H + 2 Hkv) D], whether to stop there): writes keys and values into
the cache and, unless told to stop, returns attention's output [N, H D]."""


def _bias(*layers: nn.Linear) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    zeros = [layer.weight.new_zeros(layer.out_features) for layer in layers]
    return torch.cat([z if layer.bias is None else layer.bias.detach() for layer, z in zip(layers, zeros)])


class LlamaDecoder:
    model_types = MODEL_TYPES
    layers: list[LayerWeights]
    fused: cpu.FusedLayers | None
    embedding: Tensor

    @classmethod
    def unsupported_reason(cls, model: PreTrainedModel, windows: set[int | None], fp8: bool) -> str:
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
        self.qkv_sizes = [self.H * self.D, self.Hkv * self.D, self.Hkv * self.D]
        self.eps = config.rms_norm_eps
        self.scale = model.model.layers[0].self_attn.scaling
        self.c_kernels = self.D % cpu.HEAD_MULTIPLE == 0 and cpu.fits(model.model.norm.weight)
        self.ops: ModuleType = cpu if self.c_kernels else reference
        self.refresh_weights()
        position = torch.arange(kv_cache.context, device=kv_cache.device)[None]
        cos, sin = model.model.rotary_emb(self.embedding, position)
        half = self.D // 2
        self.cos = cos[0, :, None]  # [context, 1, D]
        self.sin = torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), -1)  # x·cos + roll(x)·sin
        self.half_cos, self.half_sin = (t[0, :, :half].contiguous() for t in (cos, sin))

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
        if "layers" in vars(self):  # free the old weights before new ones are made: both would take twice the memory
            self.fused = None
            self.layers.clear()
        self.embedding = base.embed_tokens.weight.detach()
        self.head = self.model.lm_head.weight.detach().t().contiguous()
        self.norm = base.norm.weight.detach()
        self.layers = [self._fuse(layer) for layer in base.layers]
        matrices = [w for layer in self.layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        fits = self.c_kernels and self.kv_cache.uniform and all(layer.qk_norm is None for layer in self.layers)
        # all layers and the head as one C call for a small batch, where that is faster
        self.fused = cpu.FusedLayers(self.layers, self.head) if fits and cpu.panels_fit(matrices) else None

    def _fuse(self, layer: Any) -> LayerWeights:
        a, mlp = layer.self_attn, layer.mlp
        qk_norm = None
        # a norm over all heads together is not fused; the decoder of such a mixture calls the model's own
        if hasattr(a, "q_norm") and a.q_norm.weight.numel() == self.D:
            q, k = a.q_norm.weight.detach(), a.k_norm.weight.detach()
            qk_norm = torch.cat((q.expand(self.H, -1), k.expand(self.Hkv, -1)))
        # experts stay in the model, which new weights are copied into
        gate_up = down = layer.input_layernorm.weight.new_empty(0, 0)
        if hasattr(mlp, "gate_proj"):
            gate_up, down = self._transposed(mlp.gate_proj, mlp.up_proj), self._transposed(mlp.down_proj)
        return LayerWeights(
            norm=layer.input_layernorm.weight.detach(),
            qkv=self._transposed(a.q_proj, a.k_proj, a.v_proj),
            qkv_bias=_bias(a.q_proj, a.k_proj, a.v_proj),
            qk_norm=qk_norm,
            out=self._transposed(a.o_proj),
            out_bias=_bias(a.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=gate_up,
            down=down,
        )

    def _transposed(self, *layers: nn.Linear) -> Any:
        """Several linear layers as one weight [in, out], in this decoder's precision."""
        weight = torch.cat([layer.weight.detach() for layer in layers])
        if self.fp8:
            weight = reference.dequantise(*reference.quantise(weight)).to(weight.dtype)
        return weight.t().contiguous()

    # ------------------------------------------------------------------ one forward pass

    def _layers(self, x: Tensor, attend: Attend, last: bool) -> tuple[Tensor, Tensor | None]:
        """x [N, d] through all layers: the residual stream, and what the last MLP adds to it where it does not itself. Without
        ``last`` the last layer ends with its keys and values: the rest feeds only logits, which prefill does not need."""
        delta: Tensor | None = None
        for i, layer in enumerate(self.layers):
            x, qkv = self._qkv(i, layer, x, delta)
            attention = attend(i, layer, qkv, not last and i == len(self.layers) - 1)
            if attention is not None:
                x, delta = self._mlp(i, layer, x, attention)
        return x, delta

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed: Tensor = self.ops.add_norm(x, None, weight, self.eps, x.dtype)[1]
        return normed

    def _qkv(self, i: int, layer: LayerWeights, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [N, d] and what is still to be added to it -> their sum; q, k and v side by side, [N, (H + 2 Hkv) D]."""
        h = self._rms_norm(x, layer.norm)
        return x, torch.mm(h, layer.qkv) if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, h, layer.qkv)

    def _mlp(self, i: int, layer: LayerWeights, x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor | None]:
        """The attention's output projection and the MLP, both added to the residual stream by the products themselves."""
        x = torch.addmm(x, attention, layer.out)
        if layer.out_bias is not None:
            x += layer.out_bias
        gate_up = torch.mm(self._rms_norm(x, layer.mlp_norm), layer.gate_up)
        return torch.addmm(x, self.ops.swiglu(gate_up), layer.down), None

    def _forward(
        self, tokens: Tensor, row: Tensor, position: Tensor, layout: PrefillLayout | DecodeLayout, last: bool
    ) -> Tensor:
        """Tokens of any rows through all layers: each attends to the columns of its row up to its own."""
        x, cache = F.embedding(tokens, self.embedding), self.kv_cache
        by_kernels = self.c_kernels and (last or layout.width <= cpu.MAX_KEYS)
        if by_kernels and self.fused is not None and len(x) <= cpu.MAX_ROWS:
            rotary = (self.half_cos, self.half_sin)
            return self.fused(x, cache, *rotary, row, position, self.H, layout.width, self.scale, self.eps, last)

        def attend_by_kernels(i: int, layer: LayerWeights, qkv: Tensor, stop: bool) -> Tensor | None:
            where = (cache.keys[i], cache.values[i], cache.table)
            if layer.qk_norm is not None:
                qk = qkv.view(len(qkv), -1, self.D)[:, : self.H + self.Hkv]
                qk.copy_(F.rms_norm(qk, (self.D,), None, self.eps) * layer.qk_norm)
            cpu.rope_and_cache(qkv, *where, self.half_cos, self.half_sin, row, position)
            return None if stop else cpu.cached_attention(qkv, *where, row, position, layout.width, self.scale)

        cos: Any = None if by_kernels else self.cos[position]
        sin: Any = None if by_kernels else self.sin[position]

        def attend(i: int, layer: LayerWeights, qkv: Tensor, stop: bool) -> Tensor | None:
            qk, v = qkv.view(len(qkv), -1, self.D).split([self.H + self.Hkv, self.Hkv], 1)
            qk = reference.norm_and_rotate(qk, cos, sin, layer.qk_norm, self.eps)
            layout.write(i, qk[:, self.H :], v)
            return None if stop else layout.attend(i, qk[:, : self.H], self.scale, None).flatten(1)

        return self._layers(x, attend_by_kernels if by_kernels else attend, last)[0]

    def prefill(self, layout: PrefillLayout) -> None:
        """Compute keys and values of packed tokens."""
        packed = layout.on_device
        self._forward(packed.tokens, packed.row, packed.position, layout, False)

    def decode_step(self, tokens: Tensor, layout: DecodeLayout) -> Tensor:
        """Feed one token per row [n]; return the logits [n, V] of the next."""
        h = self._rms_norm(self._forward(tokens, layout.row, layout.position, layout, True), self.norm)
        if self.fused is None or self.fused.head is None or len(h) > cpu.MAX_ROWS:
            return torch.mm(h, self.head)
        return cpu.panel_matmul(h, self.fused.head)
