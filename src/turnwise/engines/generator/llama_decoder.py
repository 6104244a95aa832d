"""A hand-written forward for the Llama family (Llama, Qwen2, Qwen3, Mistral, SmolLM): the generator's fast path.

RMSNorm, optional biases, optional q/k norm, rotary positions from the model's own module, grouped-query attention,
SwiGLU. Same arithmetic as the stock forward with a third of its operations: q, k, v and gate, up are one product each,
residuals ride on the product that adds to them, and weights lie transposed (on CPU the stock layout is up to 2.5 times
slower for a handful of rows). ``Network`` compares it with the stock forward before it is ever used.

Knows weights and layouts; neither requests nor sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from turnwise.engines.generator.attention_layouts import Reading, Stepping
from turnwise.engines.generator.kv_cache import Slots
from turnwise.engines.kernels.cpu import attention as kernels
from turnwise.engines.kernels.cpu import fused_layers
from turnwise.engines.kernels.cpu import layers as native
from turnwise.engines.kernels.decode_reference import quantise, widened

FAMILY = ("llama", "qwen2", "qwen3", "mistral")
STEADY_ROPES = ("default", "linear", "llama3", "yarn")  # angles depend on the position alone


@dataclass(frozen=True, slots=True)
class _Layer:
    norm: Tensor
    qkv: Tensor  # [d, (H + 2 Hkv) D], transposed and contiguous like all products here
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


class Decoder:
    @staticmethod
    def misfit(model: PreTrainedModel, windows: set[int | None]) -> str:
        """Why this model cannot be stepped here; empty if it can."""
        config = model.config
        if config.model_type not in FAMILY:
            return f"model type {config.model_type}"
        if config.hidden_act not in ("silu", "swish") or getattr(config, "mlp_bias", False):
            return "its MLP is not a plain SwiGLU"
        if model.dtype == torch.float64:
            return "float64: the stock norms round to float32, and so must we"
        if windows != {None}:
            return "sliding windows"
        if (config.rope_parameters or {}).get("rope_type", "default") not in STEADY_ROPES:
            return "rotary angles that depend on the length"
        linears = [m for name, m in model.named_modules() if name.endswith("_proj")]
        return "" if all(type(m) is nn.Linear for m in linears) else "projections that are not plain linear layers"

    def __init__(self, model: PreTrainedModel, slots: Slots, narrow: bool = False) -> None:
        """``narrow``: the layers' weights are rounded to fp8 (e4m3, a scale per output)."""
        config = model.config
        self.model, self.slots, self.narrow = model, slots, narrow
        self.H, self.Hkv, self.D = config.num_attention_heads, slots.shapes[0][0][0], slots.shapes[0][0][1]
        self.eps = config.rms_norm_eps
        self.scale = model.model.layers[0].self_attn.scaling
        self.compiled = False  # until the weights were seen
        self.refresh()
        position = torch.arange(slots.context, device=slots.device)[None]
        cos, sin = model.model.rotary_emb(self.embedding, position)
        half = self.D // 2
        self.cos = cos[0, :, None]  # [context, 1, D]
        self.sin = torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), -1)  # x·cos + roll(x)·sin
        self.half_cos, self.half_sin = (t[0, :, :half].contiguous() for t in (cos, sin))
        plain = self.D % kernels.STEP == 0 and all(layer.qk_norm is None for layer in self.layers)
        self.compiled = plain and type(self) is Decoder and native.fits(self.norm)  # a heir has kernels of its own
        self.few = self._in_panels()

    def describe(self) -> str:
        kind = str(self.slots.dtype).removeprefix("torch.")
        how = "" if not self.compiled else "C kernels, " if self.few is None else "C kernels and products, "
        return f"hand-written decoder, {how}{kind}" + (", weights rounded to fp8" if self.narrow else "")

    def rehearse(self) -> None:
        """Do once whatever the first request would have to wait for, or fail now."""

    def refresh(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Fuse the model's present weights anew. ``weights``: what was published, if anything was."""
        base = self.model.model
        self.embedding = base.embed_tokens.weight.detach()
        self.head = self.model.lm_head.weight.detach().t().contiguous()
        self.norm = base.norm.weight.detach()
        self.layers = [self._fuse(layer) for layer in base.layers]
        self.few = self._in_panels()

    def _in_panels(self) -> fused_layers.Layers | None:
        """The layers and the head as a few rows go through them fastest, where that is another way."""
        products = [w for layer in self.layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        fits = self.compiled and self.slots.uniform and fused_layers.fits(products)
        return fused_layers.Layers(self.layers, self.head) if fits else None

    def _for(self, rows: int) -> fused_layers.Layers | None:
        return self.few if rows <= fused_layers.FEW else None

    def _fuse(self, layer: Any) -> _Layer:
        a, m = layer.self_attn, layer.mlp
        qk_norm = None
        if hasattr(a, "q_norm"):
            q, k = a.q_norm.weight.detach(), a.k_norm.weight.detach()
            qk_norm = torch.cat((q.expand(self.H, -1), k.expand(self.Hkv, -1)))
        return _Layer(
            layer.input_layernorm.weight.detach(),
            self._turned(a.q_proj, a.k_proj, a.v_proj),
            _bias(a.q_proj, a.k_proj, a.v_proj),
            qk_norm,
            self._turned(a.o_proj),
            _bias(a.o_proj),
            layer.post_attention_layernorm.weight.detach(),
            self._turned(m.gate_proj, m.up_proj),
            self._turned(m.down_proj),
        )

    def _turned(self, *layers: nn.Linear) -> Any:
        """Several products as one [in, out], as this decoder keeps them."""
        weight = torch.cat([layer.weight.detach() for layer in layers])
        return (widened(*quantise(weight)).to(weight.dtype) if self.narrow else weight).t().contiguous()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.compiled:
            return native.norm(x, weight, self.eps)
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _flat(self, layer: _Layer, x: Tensor) -> Tensor:
        """x [N, d] -> q, k and v side by side, [N, (H + 2 Hkv) D]."""
        h = self._normed(x, layer.norm)
        return torch.mm(h, layer.qkv) if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, h, layer.qkv)

    def _qkv(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, d] -> rotated q and k [N, H + Hkv, D], v [N, Hkv, D]."""
        heads = self._flat(layer, x).view(len(x), -1, self.D)
        qk, v = heads[:, : self.H + self.Hkv], heads[:, self.H + self.Hkv :]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (self.D,), None, self.eps) * layer.qk_norm
        return (qk * cos).addcmul_(qk.roll(self.D // 2, -1), sin), v

    def _rest(self, layer: _Layer, x: Tensor, mixed: Tensor) -> Tensor:
        """What follows attention: its output product and the MLP, both added to the residual stream."""
        x = torch.addmm(x, mixed, layer.out)
        if layer.out_bias is not None:
            x += layer.out_bias
        both = torch.mm(self._normed(x, layer.mlp_norm), layer.gate_up)
        if self.compiled:
            return torch.addmm(x, native.swiglu(both), layer.down)
        gate, up = both.chunk(2, -1)
        return torch.addmm(x, F.silu(gate).mul_(up), layer.down)

    def _through(self, tokens: Tensor, row: Tensor, position: Tensor, longest: int, last: bool) -> Tensor:
        """Tokens of any rows through all layers, by kernels: each sees the columns of its row up to its own. Unless the ``last``
        layer's output is wanted, only its keys and values are computed."""
        x = F.embedding(tokens, self.embedding)
        if (layers := self._for(len(x))) is not None:
            given = (self.half_cos, self.half_sin, row, position, self.H, longest, self.scale, self.eps, last)
            return layers(x, self.slots, *given)
        for i, layer in enumerate(self.layers):
            flat, keys, values = self._flat(layer, x), self.slots.keys[i], self.slots.values[i]
            kernels.seat(flat, self.half_cos, self.half_sin, row, position, keys, values)
            if i < len(self.layers) - 1 or last:
                x = self._rest(layer, x, kernels.look(flat, row, position, keys, values, longest, self.scale))
        return x

    def read(self, layout: Reading) -> None:
        """Keys and values of packed tokens. The last layer's attention and MLP feed only logits, which nobody wants."""
        there = layout.there
        if self.compiled and layout.width <= kernels.LONGEST:
            self._through(there.tokens, there.row, there.position, layout.width, False)
            return
        x = F.embedding(there.tokens, self.embedding)
        cos, sin = self.cos[there.position], self.sin[there.position]
        for i, layer in enumerate(self.layers):
            qk, v = self._qkv(layer, x, cos, sin)
            q, k, v = (t.transpose(0, 1)[None] for t in (qk[:, : self.H], qk[:, self.H :], v))
            if i == len(self.layers) - 1:
                layout.write(i, k, v)
                return
            x = self._rest(layer, x, layout.attend(i, q, k, v, self.scale, None).view(len(x), -1))

    def step(self, tokens: Tensor, layout: Stepping) -> Tensor:
        if self.compiled:
            x = self._through(tokens, layout.row, layout.position, layout.width, True)
            h, layers = self._normed(x, self.norm), self._for(len(x))
            return (
                torch.mm(h, self.head)
                if layers is None or layers.head is None
                else fused_layers.product(h, layers.head)
            )
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.cos[layout.position], self.sin[layout.position]
        for i, layer in enumerate(self.layers):
            qk, v = self._qkv(layer, x, cos, sin)
            layout.write(i, qk[:, self.H :], v)
            mixed = layout.look(i, qk[:, : self.H, None], self.scale, None)
            x = self._rest(layer, x, mixed.view(len(x), -1))
        return torch.mm(self._normed(x, self.norm), self.head)
