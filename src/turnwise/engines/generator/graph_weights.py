"""The weights of a decoder on a GPU: fused, in the cache's dtype, at addresses that captured graphs keep; adapters beside them.

New weights are copied in place. The model's own matrices are views of the fused ones, so both exist once. Knows weights;
neither the forward pass nor sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.engines.adapters import Adapter
from turnwise.engines.capture import GraphCapture
from turnwise.engines.generator import weight_views
from turnwise.engines.generator.decoder_adapters import DecoderAdapters
from turnwise.engines.generator.graph_inputs import GraphInputs, GraphShape
from turnwise.engines.generator.llama_decoder import LlamaDecoder, _Layer
from turnwise.engines.kernels.decode_reference import quantise

DecodeGraphKey = tuple[int, bool, bool]
"""What a decode graph is captured for: lanes, whether any lane truncates, whether lanes share prefixes."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A weight in e4m3: data [out, in], scale [out, 1]."""

    data: Tensor
    scale: Tensor


class GraphWeights(LlamaDecoder):
    """A ``LlamaDecoder`` whose fused weights stay where they are."""

    dtype: torch.dtype  # of the matrices
    adapters: DecoderAdapters
    capture: GraphCapture
    decode_graphs: dict[DecodeGraphKey, Callable[[], None]]
    prefill_graphs: dict[GraphShape, tuple[GraphInputs, Callable[[], None]]]

    def refresh_weights(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Update the weights in place. ``weights``: the published ones, before they were rounded to the cache's dtype."""
        if self.__dict__.get("adapters"):
            self.load_adapters({})
        if hasattr(self, "layers") and not self.fp8:
            for name, view, parameter in self._weight_views:
                view.copy_((weights or {}).get(name, parameter))
            return
        base = self.model.model
        exact = lambda name, p: (weights or {}).get(name, p).detach().to(self.kv_cache.device, torch.float32)  # noqa: E731
        embedding = exact("model.embed_tokens.weight", base.embed_tokens.weight)
        norm = exact("model.norm.weight", base.norm.weight)
        head = self.model.lm_head.weight.detach().to(self.dtype).t().contiguous()
        layers = [self._fused_layer(i, layer, exact) for i, layer in enumerate(base.layers)]
        if not hasattr(self, "layers"):
            self.embedding, self.norm, self.head, self.layers = embedding, norm, head, layers
            return
        new = [embedding, norm, head, *(t for layer in layers for t in _tensors(layer))]
        old = [self.embedding, self.norm, self.head, *(t for layer in self.layers for t in _tensors(layer))]
        for target, value in zip(old, new):
            target.copy_(value)

    def _fused_layer(self, number: int, module: Any, exact: Any) -> _Layer:
        """A layer's fused weights. The model's own matrices become views of them, so that both exist once."""
        layer = self._with_float32_norms(f"model.layers.{number}", module, exact)
        if not self.fp8 and self.model.dtype == self.dtype:
            parameters = dict(module.named_parameters(prefix=f"model.layers.{number}"))
            for name, view in weight_views.layer_views(number, layer, self.H, self.Hkv, self.D):
                if name in parameters and view.dtype == self.dtype and view.shape == parameters[name].shape:
                    parameters[name].data = view
        return layer

    @cached_property
    def _weight_views(self) -> list[tuple[str, Tensor, Tensor]]:
        """Each parameter's name, its view in the fused weights, and the model's own tensor."""
        views = list(weight_views.model_views(self.embedding, self.norm, self.head))
        for i, layer in enumerate(self.layers):
            views += weight_views.layer_views(i, layer, self.H, self.Hkv, self.D)
        parameters = self.model.state_dict()
        return [
            (name, view, parameters[name])
            for name, view in views
            if name in parameters and parameters[name].data_ptr() != view.data_ptr()
        ]

    def load_adapters(self, adapters: Mapping[str, Adapter]) -> None:
        """Apply these adapters beside the weights from now on, by the names of the weights; none: the weights alone. Captured
        graphs stay valid while the same layers have adapters of the same ranks."""
        here = {name: adapter.to(self.kv_cache.device) for name, adapter in adapters.items()}
        if not self.adapters.load(here, len(self.layers), self.dtype):
            self.decode_graphs.clear()
            self.prefill_graphs.clear()
            self.capture.reset()

    def _with_float32_norms(self, name: str, module: Any, exact: Any) -> _Layer:
        """A layer with its matrices in ``self.dtype`` and its norms in float32, as they were published."""
        fused, attention = self._fuse(module), module.self_attn
        qk_norm = None
        if fused.qk_norm is not None:
            q = exact(f"{name}.self_attn.q_norm.weight", attention.q_norm.weight)
            k = exact(f"{name}.self_attn.k_norm.weight", attention.k_norm.weight)
            qk_norm = torch.cat((q.expand(self.H, -1), k.expand(self.Hkv, -1)))
        cast = lambda t: t.to(self.dtype) if isinstance(t, Tensor) else t  # noqa: E731
        return _Layer(
            exact(f"{name}.input_layernorm.weight", fused.norm),
            cast(fused.qkv),
            cast(fused.qkv_bias),
            qk_norm,
            cast(fused.out),
            cast(fused.out_bias),
            exact(f"{name}.post_attention_layernorm.weight", fused.mlp_norm),
            cast(fused.gate_up),
            cast(fused.down),
        )

    def _transposed(self, *layers: nn.Linear) -> Any:
        if not self.fp8:
            return super()._transposed(*layers)
        return Fp8Matrix(*quantise(torch.cat([layer.weight.detach() for layer in layers])))


def _tensors(layer: _Layer) -> list[Tensor]:
    values = [getattr(layer, f.name) for f in fields(layer)]
    parts = [(x.data, x.scale) if isinstance(x, Fp8Matrix) else (x,) for x in values]
    return [t for part in parts for t in part if t is not None]
