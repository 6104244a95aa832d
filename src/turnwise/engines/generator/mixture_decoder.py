"""Mixtures of experts with layers like Llama's (Mixtral, Qwen 2 and 3 MoE, OLMoE): their graph decoder, and where the experts
that routers chose are kept.

``RouteCache`` keeps them as one more layer of the KV cache. So they follow whatever happens to a row: a prefix that another
dialogue computed, a copy, a move, an eviction, a recomputation after a weight update.

In ``MixtureDecoder`` attention, norms and sampling are those of ``GraphDecoder``; a layer's router and experts are the model's
own modules, run by an implementation that never asks the host (``experts``). Every implementation is compared with
the loop over experts before it is used, and on a GPU captured once. What the routers choose goes into a buffer at a fixed
address and from there into the cache, all inside the graph. Knows weights, the KV cache and sampling; neither requests nor
text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.engines.experts import (
    ExpertChoice,
    ExpertRouting,
    as_cache_entries,
    as_rows,
    expert_configs,
    expert_modules,
    from_cache_entries,
    using,
)
from turnwise.engines.generator.attention_layouts import DecodeLayout, PrefillLayout
from turnwise.engines.generator.cuda_graphs import GraphDecoder, GraphInputs, batch_buckets
from turnwise.engines.generator.kv_cache import KVCache
from turnwise.engines.generator.llama_decoder import LayerWeights

log = logging.getLogger(__name__)

MODEL_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")

Span = tuple[int, int, int]
"""A cache row and the columns [begin, end)."""


class RouteCache:
    """``layer``: the number of the cache layer that holds the routes, after those of the model."""

    def __init__(self, routing: ExpertRouting, layer: int) -> None:
        self.routing, self.layer = routing, layer

    @contextmanager
    def recording(self, layout: PrefillLayout | DecodeLayout) -> Iterator[None]:
        """Store what the routers choose in a forward pass of this layout."""
        with self.routing.recording() as chosen:
            yield
        high, low = as_cache_entries(chosen(), layout.kv_cache.dtype)
        layout.write(self.layer, high[:, None], low[:, None])  # [N, 1, W]: one head

    def store(self, kv_cache: KVCache, chosen: Tensor, block: Tensor, position: Tensor) -> None:
        """Store choices [N, R, k] in columns ``position`` of blocks ``block`` [N], without asking the device anything: part of a
        captured graph. Rows outside [0, context) are padding and inactive lanes, whose blocks may belong to others. They repeat
        the write of the first row that counts; if none does, all write back what is there."""
        counts = (position >= 0) & (position < kv_cache.context)
        row = torch.arange(len(position), device=position.device)
        source = torch.where(counts, row, counts.int().argmax())
        block, offset = block[source], position[source].clamp(min=0) % kv_cache.block_width
        entries = as_cache_entries(chosen.flatten(1)[source], kv_cache.dtype)
        for cached, new in zip((kv_cache.keys[self.layer], kv_cache.values[self.layer]), entries):
            cached[block, 0, offset] = torch.where(counts.any(), new, cached[block, 0, offset])

    def read(self, kv_cache: KVCache, spans: Sequence[Span]) -> list[list[bytes]]:
        """The routes of these columns. One copy from the device for all of them."""
        parts = []
        for row, begin, end in spans:
            keys, values = kv_cache.columns(self.layer, torch.tensor([row], device=kv_cache.device), end)
            parts.append(from_cache_entries(keys[0, 0, begin:end], values[0, 0, begin:end]))
        rows = iter(as_rows(torch.cat(parts)))
        return [[next(rows) for _ in range(end - begin)] for _, begin, end in spans]


class MixtureDecoder(GraphDecoder):
    """``experts``: how many rows are computed by which implementation."""

    model_types = MODEL_TYPES
    takes_adapters = False  # those of experts are not beside a linear layer
    prefills_last_layer = True  # its routers' choices are recorded too
    attention_buffer = staticmethod(torch.zeros)  # inactive lanes then choose few experts, all the same ones

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

    def _qkv(self, i: int, layer: LayerWeights, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        (x, qkv), attention = super()._qkv(i, layer, x, delta), self._attentions[i]
        if layer.qk_norm is not None or not hasattr(attention, "q_norm"):
            return x, qkv
        q, k, v = qkv.split(self.qkv_sizes, 1)
        return x, torch.cat((attention.q_norm(q), attention.k_norm(k), v), 1)  # over all heads together

    def _mlp(self, i: int, layer: LayerWeights, x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor | None]:
        block = self.blocks[i]
        if block is None:
            return super()._mlp(i, layer, x, attention)
        delta = self._linear(attention, layer.out, layer.out_bias)
        x, h = self.kernels.add_norm(x, delta, layer.mlp_norm, self.eps, self.dtype)
        return x, block(h[None])[0]

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
        every, proven, errors = self.experts, self.experts, dict[str, float]()
        for name in every.proven:
            self.experts = every.only(name)
            try:
                errors[name] = deviation()
                fault = "" if errors[name] <= tolerance else f"its logits were off by {errors[name]:.2g}"
                fault = fault or self._capture_fault()
            except RuntimeError as error:
                fault = (str(error).splitlines() or [type(error).__name__])[0]
                log.warning("experts are not computed by %s: %s: %s", name, type(error).__name__, fault)
            finally:
                self._forget_graphs()
            proven = proven.without(name, fault) if fault else proven
        if not proven.proven:
            self.experts = every
            if all(error <= tolerance for error in errors.values()):
                raise RuntimeError("; ".join(f"{name}: {why}" for name, why in proven.refused.items()))
            return min(errors.values())
        self.experts = proven
        return max(errors[name] for name in proven.proven)

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
