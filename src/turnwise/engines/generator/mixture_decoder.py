"""The graph decoder for mixtures of experts with layers like Llama's: Mixtral, Qwen 2 and 3 MoE, OLMoE.

Attention, norms and sampling are those of ``GraphDecoder``; a layer's router and experts are the model's own modules, run by an
implementation that never asks the host (``expert_computation``). Every implementation is compared with the loop over experts
before it is used, and on a GPU captured once. What the routers choose goes into a buffer at a fixed address and from there into
the cache, all inside the graph. Knows weights, the KV cache and sampling; neither requests nor text.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.engines.expert_computation import ExpertChoice, expert_configs, expert_modules, using
from turnwise.engines.generator.cuda_graphs import GraphDecoder, batch_buckets
from turnwise.engines.generator.graph_inputs import GraphInputs
from turnwise.engines.generator.kv_cache import KVCache
from turnwise.engines.generator.llama_decoder import _Layer
from turnwise.engines.generator.route_cache import RouteCache

MODEL_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


class MixtureDecoder(GraphDecoder):
    """``experts``: how many rows are computed by which implementation."""

    model_types = MODEL_TYPES
    takes_adapters = False  # those of experts are not beside a linear layer
    prefills_last_layer = True  # its routers' choices are recorded too

    @classmethod
    def unsupported_reason(cls, model: PreTrainedModel, windows: set[int | None]) -> str:
        reason = super().unsupported_reason(model, windows)
        if not reason and getattr(model.config, "clip_qkv", None) is not None:
            reason = "clipped queries and keys"
        return reason or ("" if expert_modules(model) else "experts that can only be computed one after another")

    def __init__(self, model: PreTrainedModel, kv_cache: KVCache, route_cache: RouteCache | None, kernels: Any) -> None:
        """``route_cache``: where the routers' choices go; None: they are not recorded."""
        self.blocks = [layer.mlp if expert_modules(layer.mlp) else None for layer in model.model.layers]
        experts = ExpertChoice.of(model, int(model.config.num_experts_per_tok))
        assert experts is not None, "see unsupported_reason"
        self.experts, self._configs, self.route_cache = experts, expert_configs(model), route_cache
        super().__init__(model, kv_cache, False, kernels)
        if route_cache is not None:
            shape = (kv_cache.rows, route_cache.routing.routers, route_cache.routing.k)
            self.routes = torch.zeros(shape, dtype=torch.int16, device=kv_cache.device)
        self._attentions = [layer.self_attn for layer in model.model.layers]

    def describe(self) -> str:
        return f"{super().describe()}, {self.experts.describe()}"

    # ------------------------------------------------------------------ weights

    def _norms_heads(self, attention: Any) -> bool:
        return super()._norms_heads(attention) and attention.q_norm.weight.numel() == self.D

    def _mlp_weights(self, mlp: Any) -> tuple[Any, Any]:
        """None where experts follow: they stay in the model, which new weights are copied into."""
        if not expert_modules(mlp):
            return super()._mlp_weights(mlp)
        empty = next(mlp.parameters()).new_empty(0, 0)
        return empty, empty

    # ------------------------------------------------------------------ one forward pass

    def _qkv_rows(self, i: int, layer: _Layer, x: Tensor, delta: Tensor | None) -> Tensor:
        qkv, attention = super()._qkv_rows(i, layer, x, delta), self._attentions[i]
        if layer.qk_norm is not None or not hasattr(attention, "q_norm"):
            return qkv
        q, k, v = qkv.split([self.H * self.D, self.Hkv * self.D, self.Hkv * self.D], 1)
        return torch.cat((attention.q_norm(q), attention.k_norm(k), v), 1)  # over all heads together

    def _attention_rows(self, x: Tensor) -> Tensor:
        """Zeros: inactive lanes then choose few experts, all the same ones."""
        return torch.zeros(len(x), self.H * self.D, dtype=self.dtype, device=x.device)

    def _mlp(self, x: Tensor, attention: Tensor, i: int, layer: _Layer) -> Tensor:
        block = self.blocks[i]
        if block is None:
            return super()._mlp(x, attention, i, layer)
        delta = self._linear(attention, layer.out, layer.out_bias)
        out: Tensor = block(self._norm(x, delta, layer.mlp_norm)[None])
        return out[0]

    def _logits(self, tokens: Tensor, position: Tensor, shared: Tensor | None = None) -> Tensor:
        lane = torch.arange(len(tokens), device=tokens.device)
        with using(self._configs, self.experts.for_rows(len(tokens))), self._recording(len(tokens)) as chosen:
            logits = super()._logits(tokens, position, shared)
        if self.route_cache is not None:
            block, _ = self.kv_cache.places(lane, position.clamp(0, self.kv_cache.context - 1))
            self.route_cache.store(self.kv_cache, chosen(), block, position)
        return logits

    def _prefill(self, inputs: GraphInputs) -> None:
        with using(self._configs, self.experts.for_rows(inputs.shape.tokens)), self._recording(None) as chosen:
            super()._prefill(inputs)
        if self.route_cache is not None:
            self.route_cache.store(self.kv_cache, chosen(), inputs.block, inputs.position)

    def _recording(self, lanes: int | None) -> AbstractContextManager[Any]:
        if self.route_cache is None:
            return nullcontext()
        return self.route_cache.routing.recording(None if lanes is None else self.routes[:lanes])

    # ------------------------------------------------------------------ verification

    def prove(self, deviation: Callable[[], float], tolerance: float) -> float:
        """Keep the implementations that compute the model's own logits within the tolerance and, on a GPU, can be captured.
        Returns their largest error; with none left, the smallest of all."""
        every, kept, errors = self.experts, self.experts, dict[str, float]()
        for name in every.proven:
            self.experts = every.only(name)
            try:
                errors[name] = deviation()
                fault = "" if errors[name] <= tolerance else f"its logits were off by {errors[name]:.2g}"
                fault = fault or self._capture_fault()
            except RuntimeError as error:
                fault = (str(error).splitlines() or [type(error).__name__])[0]
            finally:
                self._forget_graphs()
            kept = kept.without(name, fault) if fault else kept
        if not kept.proven:
            self.experts = every
            if all(error <= tolerance for error in errors.values()):
                raise RuntimeError("; ".join(f"{name}: {why}" for name, why in kept.refused.items()))
            return min(errors.values())
        self.experts = kept
        return max(errors[name] for name in kept.proven)

    def _capture_fault(self) -> str:
        """Why a decode step cannot be captured; empty if it can, and without a GPU, where nothing is captured."""
        self._decode_graph(batch_buckets(self.kv_cache.rows)[0], False, False)
        return next(iter(self.capture_errors), "")

    def _forget_graphs(self) -> None:
        self.decode_graphs.clear()
        self.prefill_graphs.clear()
        self.prefilled_once.clear()
        self.capture_errors.clear()
        self.capture.reset()


def make_graph_decoder(
    model: PreTrainedModel, kv_cache: KVCache, route_cache: RouteCache | None, windows: set[int | None], fp8: bool, kernels: Any
) -> GraphDecoder | str:  # fmt: skip
    """The graph decoder of a model's family, or why there is none."""
    mixture = model.config.model_type in MODEL_TYPES
    kind: type[GraphDecoder] = MixtureDecoder if mixture else GraphDecoder
    if reason := kind.unsupported_reason(model, windows):
        return reason
    if not mixture:
        return GraphDecoder(model, kv_cache, fp8, kernels)
    return "experts, which are not rounded" if fp8 else MixtureDecoder(model, kv_cache, route_cache, kernels)


__all__ = ["MixtureDecoder", "make_graph_decoder"]
