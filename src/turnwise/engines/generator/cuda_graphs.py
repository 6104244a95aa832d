"""Decoding on a GPU: one decode step of all lanes, sampling included, captured as a CUDA graph and replayed without the host.

A decode graph is captured for each batch bucket when it is first needed, a prefill graph for each shape when it occurs a second
time. Unused lanes of a bucket are inactive (position −1): their cache rows, which may belong to a waiting dialogue, are neither
read nor written. Where capture fails, the same step runs without a graph.

Weights and KV cache keep their addresses for the life of a graph. Weights are fused, in the cache's dtype; new ones are copied
in place, and the model's own matrices are views of the fused ones, so both exist once. Adapters are a pair of factors for each
fused product: a step adds (h down) up to the product of the frozen weight, and publishing a policy copies the factors alone, a
hundredth of the weights.

``MixtureDecoder`` is for mixtures of experts with layers like Llama's. A layer's router and experts are the model's own modules,
run by an implementation that never asks the host (``experts``); each is compared with the loop over experts before it is used,
and on a GPU captured once. What the routers choose goes into a buffer at a fixed address and from there into the cache, all
inside the graph. ``RouteCache`` keeps it as one more layer of the KV cache, so it follows whatever happens to a row: a prefix
that another dialogue computed, a copy, a move, an eviction, a recomputation after a weight update.

Knows weights, the KV cache and sampling; neither requests nor text.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cached_property, partial
from itertools import repeat
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.core.transfer import to_device
from turnwise.engines import capture, experts
from turnwise.engines.adapters import Adapter, fuse_down, fuse_up
from turnwise.engines.generator.attention_layouts import DecodeLayout, PrefillLayout
from turnwise.engines.generator.kv_cache import KVCache
from turnwise.engines.generator.llama_decoder import LayerWeights, LlamaDecoder
from turnwise.engines.kernels.reference import LANES_PER_PROGRAM, quantise
from turnwise.engines.kernels.sampling import KEEP_ALL, KEPT_LIMIT, kept_ids, pick, truncate, uniforms
from turnwise.maths.numbers import first_at_least

log = logging.getLogger(__name__)

MAX_STEPS = 512  # decode steps of one ``decode_steps`` call
SYNC_EVERY = 4  # copy sampled tokens to the host every 4 decode steps ...
BLOCKS_IN_FLIGHT = 2  # ... with at most 2 such blocks launched and not yet read: an early stop wastes at most these

MIN_PROGRAMS = 768  # programs (lanes times key heads) from which shared prefixes pay: fewer would leave a GPU idle ...
MIN_SAVED_SHARE = 0.25  # ... and the share of column reads it must save: 4 lanes per program have a cost of their own

# padding of tokens costs compute ...
TOKEN_BUCKETS = [2**k * quarters // 4 for k in range(8, 24) for quarters in range(4, 8)]
CHUNK_BUCKETS = [4**k for k in range(2, 12)]  # ... padding in these two costs next to nothing
LENGTH_BUCKETS = [2**k for k in range(6, 24)]
MAX_CAPTURED_TOKENS = 8192  # larger prefills run without a graph: their launches hide behind the matrix products

PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")  # model types

Truncation = tuple[int, float, float]
"""(top-k, top-p, min-p) of a lane; (0, 1, 0) keeps the whole distribution."""

Span = tuple[int, int, int]
"""A cache row and the columns [begin, end)."""

DecodeGraphKey = tuple[int, bool, bool]
"""What a decode graph is captured for: lanes, whether any lane truncates, whether lanes share prefixes."""


def batch_buckets(most: int) -> list[int]:
    """Batch sizes that graphs are captured for: powers of two and their midpoints."""
    sizes = [2**k for k in range(31)] + [3 * 2**k for k in range(4, 30)]
    return sorted({min(size, most) for size in sizes if size < 2 * most})


class GraphShape(NamedTuple):
    """The bucket of a prefill: tokens, chunks, tokens of the longest chunk."""

    tokens: int
    chunks: int
    longest: int


class GraphInputs:
    """The inputs of a prefill of one shape in one device buffer. Padding tokens have position −1."""

    def __init__(self, shape: GraphShape, device: torch.device) -> None:
        self.shape = shape
        self.buffer = self._padding().to(device)
        self.tokens, self.position, self.block, self.chunk_rows, self.start, self.boundaries = self._views(self.buffer)

    def _padding(self) -> Tensor:
        padding = torch.zeros(3 * self.shape.tokens + 3 * self.shape.chunks + 1, dtype=torch.int64)
        self._views(padding)[1].fill_(-1)
        return padding

    def _views(self, buffer: Tensor) -> list[Tensor]:
        n, chunks, _ = self.shape
        return list(buffer.split([n, n, n, chunks, chunks, chunks + 1]))

    def fill(self, layout: PrefillLayout) -> None:
        """Stage all inputs in one host-to-device copy."""
        staged, host = self._padding(), layout.host
        views = self._views(staged)
        inputs = (host.tokens, host.position, host.block, host.chunk_rows, host.start, host.boundaries)
        for view, value in zip(views, inputs):
            view[: len(value)] = value
        views[-1][len(host.boundaries) :] = len(host.tokens)  # chunks of the padding are empty
        self.buffer.copy_(to_device(staged, self.buffer.device))


class LowRankPair(NamedTuple):
    """The adapter of a fused product."""

    down: Tensor  # [d, R]
    up: Tensor  # [R, n]


class Fp8Matrix(NamedTuple):
    """A weight in e4m3: data [out, in], scale [out, 1]."""

    data: Tensor
    scale: Tensor


class GraphDecoder(LlamaDecoder):
    """The Llama family in the cache's dtype with a float32 residual stream, like a learner under autocast."""

    takes_adapters = True  # beside its weights; else they arrive merged
    prefills_last_layer = False  # beyond its keys and values
    # where attention writes the rows of active lanes
    attention_buffer: ClassVar[Callable[..., Tensor]] = staticmethod(torch.empty)

    @classmethod
    def unsupported_reason(cls, model: PreTrainedModel, windows: set[int | None], fp8: bool) -> str:
        config = model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        reason = "" if size >= 16 and not size & (size - 1) else f"head size {size}, not a power of two from 16 on"
        return super().unsupported_reason(model, windows, fp8) or reason

    def __init__(self, model: PreTrainedModel, kv_cache: KVCache, fp8: bool, kernels: Any) -> None:
        """``kernels``: the module with the operations, ``kernels.triton.decode`` or ``kernels.reference``."""
        self.kernels, self.on_gpu = kernels, kv_cache.device.type == "cuda"
        kv_cache.allocate_all()  # a graph needs the cache at a fixed address
        self.dtype = kv_cache.dtype
        super().__init__(model, kv_cache, fp8)
        self.cos, self.sin = self.cos[:, 0].float().contiguous(), self.sin[:, 0].float().contiguous()
        rows, device = kv_cache.rows, kv_cache.device
        self.tokens, self.position, self.start, self.seed = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self.inverse_temperature = torch.ones(rows, device=device)
        self.top_k = torch.full((rows, 1), KEEP_ALL, device=device)
        self.top_p = torch.ones(rows, 1, dtype=torch.float64, device=device)
        self.min_p = torch.zeros_like(self.top_p)
        self.shared = torch.zeros(2, -(-rows // LANES_PER_PROGRAM), dtype=torch.int64, device=device)
        self.sampled = torch.zeros(MAX_STEPS, rows, dtype=torch.int64, device=device)
        self.logp, self.mass = torch.zeros(2, MAX_STEPS, rows, device=device)
        buffers = [torch.zeros_like(x, device="cpu") for x in (self.sampled, self.logp, self.mass)]
        self._host_buffers = [x.pin_memory() for x in buffers] if self.on_gpu else buffers
        # kept ids of one block on the device, and on the host of those that are not yet read
        width = min(KEPT_LIMIT, model.get_output_embeddings().weight.shape[0])
        self.kept = torch.full((SYNC_EVERY, rows, width), -1, dtype=torch.int32, device=device)
        self._host_kept = torch.empty(BLOCKS_IN_FLIGHT + 1, *self.kept.shape, dtype=torch.int32, pin_memory=self.on_gpu)
        self.decode_graphs: dict[DecodeGraphKey, Callable[[], None]] = {}
        self.prefill_graphs: dict[GraphShape, tuple[GraphInputs, Callable[[], None]]] = {}
        self.prefilled_once: set[GraphShape] = set()  # shapes that occurred once, without a graph
        self.capture = capture.GraphCapture()
        self.adapters: list[dict[str, LowRankPair]] = [{} for _ in self.layers]  # of each layer, by its products
        self.capture_errors: set[str] = set()

    def describe(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.") + (" with fp8 weights" if self.fp8 else "")
        graphs = "kernels without CUDA graphs" if self.capture_errors or not self.on_gpu else "CUDA graphs"
        adapters = ", adapters beside the weights" if any(self.adapters) else ""
        return "; ".join([f"{graphs}, {dtype}, grouped-query kernel{adapters}", *sorted(self.capture_errors)])

    # ------------------------------------------------------------------ weights

    def refresh_weights(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Update the weights in place. ``weights``: the published ones, before they were rounded to the cache's dtype."""
        if any(self.__dict__.get("adapters", ())):  # not yet there in the first call
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
        weights_of = lambda layers: [getattr(layer, f.name) for layer in layers for f in fields(layer)]  # noqa: E731
        new = [embedding, norm, head, *weights_of(layers)]
        for target, value in zip([self.embedding, self.norm, self.head, *weights_of(self.layers)], new):
            if isinstance(target, Fp8Matrix):
                target.data.copy_(value.data)
                target.scale.copy_(value.scale)
            elif target is not None:
                target.copy_(value)

    def _fused_layer(self, number: int, module: Any, exact: Any) -> LayerWeights:
        """A layer's fused weights: matrices in ``self.dtype``, norms in float32, as they were published. The model's own matrices
        become views of them, so that both exist once."""
        prefix, fused, attention = f"model.layers.{number}", self._fuse(module), module.self_attn
        qk_norm = None
        if fused.qk_norm is not None:
            q = exact(f"{prefix}.self_attn.q_norm.weight", attention.q_norm.weight)
            k = exact(f"{prefix}.self_attn.k_norm.weight", attention.k_norm.weight)
            qk_norm = torch.cat((q.expand(self.H, -1), k.expand(self.Hkv, -1)))
        matrices = {name: getattr(fused, name) for name in ("qkv", "qkv_bias", "out", "out_bias", "gate_up", "down")}
        layer = replace(
            fused,
            norm=exact(f"{prefix}.input_layernorm.weight", fused.norm),
            mlp_norm=exact(f"{prefix}.post_attention_layernorm.weight", fused.mlp_norm),
            qk_norm=qk_norm,
            **{name: t.to(self.dtype) if isinstance(t, Tensor) else t for name, t in matrices.items()},
        )
        if not self.fp8 and self.model.dtype == self.dtype:
            parameters = dict(module.named_parameters(prefix=prefix))
            for name, view in self._layer_views(number, layer):
                if name in parameters and view.dtype == self.dtype and view.shape == parameters[name].shape:
                    parameters[name].data = view
        return layer

    @cached_property
    def _weight_views(self) -> list[tuple[str, Tensor, Tensor]]:
        """Each parameter's name, its view in the fused weights, and the model's own tensor."""
        views = [("model.embed_tokens.weight", self.embedding), ("model.norm.weight", self.norm)]
        views += [("lm_head.weight", self.head.t())]
        views += [view for i, layer in enumerate(self.layers) for view in self._layer_views(i, layer)]
        parameters = self.model.state_dict()
        return [
            (name, view, parameters[name])
            for name, view in views
            if name in parameters and parameters[name].data_ptr() != view.data_ptr()
        ]

    def load_adapters(self, adapters: Mapping[str, Adapter]) -> None:
        """Apply these adapters beside the weights from now on, by the names of the weights; none: the weights alone. Captured
        graphs stay valid while the same layers have adapters of the same ranks."""
        device, new = self.kv_cache.device, list[dict[str, LowRankPair]]()
        for number in range(len(self.layers)):
            new.append({})
            for product, names in PRODUCTS.items():
                parts = [adapters.get(f"model.layers.{number}.{name}.weight") for name in names]
                parts = [None if part is None else part.to(device) for part in parts]
                outputs = next((len(p.up) for p in parts if p is not None), 0)  # gate and up have the same size
                sizes = self.qkv_sizes if product == "qkv" else [outputs] * len(parts)
                down, up = fuse_down(parts, self.dtype), fuse_up(parts, sizes, self.dtype)
                if down is not None and up is not None:
                    new[-1][product] = LowRankPair(down.t().contiguous(), up.t().contiguous())
        shapes = lambda layers: [{name: pair.up.shape for name, pair in layer.items()} for layer in layers]  # noqa: E731
        if shapes(new) != shapes(self.adapters):  # graphs hold the addresses of the old factors
            self.adapters = new
            self.decode_graphs.clear()
            self.prefill_graphs.clear()
            self.capture.reset()
            return
        for old_layer, layer in zip(self.adapters, new):
            for name, pair in layer.items():
                old_layer[name].down.copy_(pair.down)
                old_layer[name].up.copy_(pair.up)

    def _layer_views(self, number: int, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
        """Views of a layer's fused weights by the model's parameter names: one copy loads a published parameter. Not every model
        has all of them. A view has the parameter's shape or one that it broadcasts to."""
        a, parts = "self_attn", self.qkv_sizes
        views = {"input_layernorm.weight": layer.norm, "post_attention_layernorm.weight": layer.mlp_norm}
        views |= zip((f"{a}.{x}_proj.weight" for x in "qkv"), layer.qkv.t().split(parts))
        views |= zip(("mlp.gate_proj.weight", "mlp.up_proj.weight"), layer.gate_up.t().chunk(2))
        views |= {f"{a}.o_proj.weight": layer.out.t(), "mlp.down_proj.weight": layer.down.t()}
        if layer.qkv_bias is not None:
            views |= zip((f"{a}.{x}_proj.bias" for x in "qkv"), layer.qkv_bias.split(parts))
        if layer.out_bias is not None:
            views[f"{a}.o_proj.bias"] = layer.out_bias
        if layer.qk_norm is not None:
            views |= zip((f"{a}.q_norm.weight", f"{a}.k_norm.weight"), layer.qk_norm.split([self.H, self.Hkv]))
        yield from ((f"model.layers.{number}.{name}", view) for name, view in views.items())

    def _transposed(self, *layers: nn.Linear) -> Any:
        if not self.fp8:
            return super()._transposed(*layers)
        return Fp8Matrix(*quantise(torch.cat([layer.weight.detach() for layer in layers])))

    # ------------------------------------------------------------------ one forward pass

    def _linear(self, h: Tensor, weight: Any, bias: Tensor | None = None, adapter: LowRankPair | None = None) -> Tensor:
        if adapter is not None:
            return self._linear(h, weight, bias).addmm_(torch.mm(h, adapter.down), adapter.up)
        if isinstance(weight, Fp8Matrix):
            out = self.kernels.fp8_matmul(h, weight.data, weight.scale)
            return out if bias is None else out.add_(bias)
        return torch.mm(h, weight) if bias is None else torch.addmm(bias, h, weight)

    def _qkv(self, i: int, layer: LayerWeights, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        x, h = self.kernels.add_norm(x, delta, layer.norm, self.eps, self.dtype)
        return x, self._linear(h, layer.qkv, layer.qkv_bias, self.adapters[i].get("qkv"))

    def _mlp(self, i: int, layer: LayerWeights, x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor | None]:
        """The attention's output projection is added to x; the MLP's output is added by the norm that follows."""
        adapter = self.adapters[i]
        delta = self._linear(attention, layer.out, layer.out_bias, adapter.get("out"))
        x, h = self.kernels.add_norm(x, delta, layer.mlp_norm, self.eps, self.dtype)
        gate_up = self._linear(h, layer.gate_up, None, adapter.get("gate_up"))
        return x, self._linear(self.kernels.swiglu(gate_up), layer.down, None, adapter.get("down"))

    def _logits(self, tokens: Tensor, position: Tensor, shared: Tensor | None = None) -> Tensor:
        """Feed one token per lane; return the float32 logits of the next."""
        cache = self.kv_cache

        def attend(i: int, layer: LayerWeights, qkv: Tensor, stop: bool) -> Tensor:
            out = self.attention_buffer(len(qkv), self.H * self.D, dtype=self.dtype, device=qkv.device)
            where = (cache.keys[i], cache.values[i], cache.table, cache.context)
            self.kernels.decode_attention(
                qkv, *where, self.cos, self.sin, layer.qk_norm, position, out, self.scale, self.eps, shared
            )
            return out

        # not F.embedding: 12.5 µs for 16 lanes, against 2 µs here
        x, delta = self._layers(self.embedding[tokens], attend, True)
        _, h = self.kernels.add_norm(x, delta, self.norm, self.eps, self.dtype)
        # accumulated and returned in float32: rounded logits would cost the log-probabilities three digits
        if h.dtype == torch.float32:
            return torch.mm(h, self.head)
        return torch.mm(h, self.head, out_dtype=torch.float32) if h.is_cuda else torch.mm(h.float(), self.head.float())

    def prefill(self, layout: PrefillLayout) -> None:
        """Compute keys and values of packed tokens. Shapes that recur are captured, where launches would dominate."""
        shape = GraphShape(
            first_at_least(TOKEN_BUCKETS, len(layout.host.tokens)),
            first_at_least(CHUNK_BUCKETS, len(layout.host.chunk_rows)),
            first_at_least(LENGTH_BUCKETS, layout.longest_chunk),
        )
        if shape in self.prefill_graphs:
            inputs, run = self.prefill_graphs[shape]
        else:
            inputs = GraphInputs(shape, self.kv_cache.device)
            run = partial(self._prefill, inputs)
            if shape in self.prefilled_once and shape.tokens <= MAX_CAPTURED_TOKENS:
                run = self._capture(run, f"for a prefill of {shape.tokens} tokens")
                self.prefill_graphs[shape] = inputs, run
            self.prefilled_once.add(shape)
        inputs.fill(layout)
        run()

    def _prefill(self, inputs: GraphInputs) -> None:
        x, cache = self.embedding[inputs.tokens], self.kv_cache
        # zeros, not empty: padding tokens must stay finite
        q, attention = torch.zeros(2, len(x), self.H * self.D, dtype=self.dtype, device=x.device)
        chunks = (inputs.boundaries, inputs.start, inputs.chunk_rows, inputs.shape.longest)

        def attend(i: int, layer: LayerWeights, qkv: Tensor, stop: bool) -> Tensor | None:
            k, v = cache.keys[i], cache.values[i]
            rotary = (self.cos, self.sin, layer.qk_norm, inputs.position)
            self.kernels.rope_and_cache(qkv, k, v, *rotary, inputs.block, q, self.eps)
            if not stop:
                self.kernels.prefill_attention(q, k, v, cache.table, *chunks, attention, self.scale)
            return None if stop else attention

        self._layers(x, attend, self.prefills_last_layer)

    def decode_step(self, tokens: Tensor, layout: DecodeLayout) -> Tensor:
        """One decode step without a graph, to compare with other forwards."""
        return self._logits(tokens, layout.position)

    # ------------------------------------------------------------------ many decode steps

    def _decode_and_sample(self, lanes: int, truncates: bool, shares: bool) -> None:
        batch = slice(0, lanes)
        position = self.position[batch].clone() if truncates else None
        shared = self.shared.flatten()[: 2 * -(-lanes // LANES_PER_PROGRAM)].view(2, -1) if shares else None
        logits = self._logits(self.tokens[batch], self.position[batch], shared)
        self.kernels.sample(
            logits, self.inverse_temperature[batch], self.seed[batch], self.tokens[batch], self.position[batch],
            self.start[batch], self.sampled, self.logp,
        )  # fmt: skip
        if position is None:
            return
        # lanes with top-k, top-p or min-p are sampled again, as ``TokenSampler`` does; the other lanes keep their token
        inverse, limits = self.inverse_temperature[batch], (self.top_k[batch], self.top_p[batch], self.min_p[batch])
        whole = ((limits[0] == KEEP_ALL) & (limits[1] == 1) & (limits[2] == 0)) | (inverse == 0)[:, None]
        p = (logits * inverse[:, None]).softmax(-1)
        weight, mass = truncate(p, whole, *limits)
        token = pick(weight, uniforms(self.seed[batch], position + 1))
        token.clamp_(max=logits.shape[1] - 1)  # the logits of inactive lanes are arbitrary
        truncated = (position >= 0) & ~whole[:, 0]
        lane, step = torch.arange(lanes, device=position.device), (position - self.start[batch]).clamp(min=0)
        values = (token[:, 0], p.gather(1, token)[:, 0].log() - mass, mass)
        for history, value in zip((self.sampled, self.logp, self.mass), values):
            history[step, lane] = torch.where(truncated, value, history[step, lane])
        self.kept[step % SYNC_EVERY, lane] = torch.where(truncated[:, None], kept_ids(weight, whole), -1)
        self.tokens[batch] = torch.where(truncated, token[:, 0], self.tokens[batch])

    def _decode_graph(self, *key: *DecodeGraphKey) -> Callable[[], None]:
        """One decode step of a bucket: a captured graph, or where capture failed the step itself."""
        if key not in self.decode_graphs:
            lanes, truncates, _ = key
            saved = self.position.clone()
            self.position.fill_(-1)  # warm up with every lane inactive
            what = f"of {lanes} lanes{' with truncated distributions' * truncates}"
            try:
                self.decode_graphs[key] = self._capture(partial(self._decode_and_sample, *key), what)
            finally:
                self.position.copy_(saved)
        return self.decode_graphs[key]

    def _capture(self, run: Callable[[], None], what: str) -> Callable[[], None]:
        """``run`` as a CUDA graph, or ``run`` itself where capture fails. It is also called once to warm up, so its inputs must
        have no side effects."""
        if not self.on_gpu:
            return run
        try:
            capture.warm_up(run)
            graph = torch.cuda.CUDAGraph()
            with self.capture.into(graph):
                run()
        except RuntimeError as fault:
            error = f"no graph {what}: {type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}"
            self.capture_errors.add(error)
            log.warning("%s; it runs without a graph, which is slower", error)
            return run
        return graph.replay

    def warm_up(self) -> None:
        deque(self.decode_steps(2, [0], [0], [0], [1.0]), 0)

    def decode_steps(
        self, steps: int, tokens: Sequence[int], cached: Sequence[int], seeds: Sequence[int], temperatures: Sequence[float],
        truncations: Sequence[Truncation] | None = None, should_stop: Callable[[int], bool] = lambda launched: False,
        common_prefixes: Sequence[int] = (),
    ) -> Iterator[tuple[list[int], Tensor, tuple[Tensor, Tensor] | None]]:  # fmt: skip
        """Decode ``steps`` tokens of every lane [0, n). Yields per step: ids, log-probabilities, and with ``truncations`` the
        kept log mass [n] and ids. The host processes a block of steps while the GPU computes the next. Once
        ``should_stop(launched)`` nothing more is launched; what was launched is still yielded.

        ``cached``: columns that each row holds; ``common_prefixes``: how many of them equal those of the row before. Temperature
        0 is greedy. A lane becomes inactive at the end of the context."""
        assert steps <= MAX_STEPS, f"{steps} steps in a run; at most {MAX_STEPS}"
        n = len(tokens)
        lanes = next(size for size in batch_buckets(self.kv_cache.rows) if size >= n)
        shared = self._shared_prefixes(lanes, steps, cached, common_prefixes)
        replay = self._decode_graph(lanes, truncations is not None, shared is not None)
        device, free = self.kv_cache.device, [0] * (lanes - n)
        if shared is not None:
            flat = torch.tensor(shared).flatten()
            self.shared.flatten()[: len(flat)] = flat.to(device, non_blocking=True)
        # one copy for the state of every lane of the bucket; position −1 makes unused lanes inactive
        rows = ([*tokens, *free], [*cached, *[-1] * len(free)], [*cached, *free], [*seeds, *free])
        staged = torch.tensor(rows).to(device, non_blocking=True)
        for target, value in zip((self.tokens, self.position, self.start, self.seed), staged):
            target[:lanes] = value
        inverse = torch.tensor([0.0 if t == 0 else 1 / t for t in temperatures])
        self.inverse_temperature[:n] = inverse.to(device, non_blocking=True)
        if truncations is not None:
            top_k, top_p, min_p = zip(*truncations)
            self.top_k[:n, 0] = torch.tensor([k or KEEP_ALL for k in top_k]).to(device, non_blocking=True)
            self.top_p[:n, 0] = torch.tensor(top_p, dtype=torch.float64).to(device, non_blocking=True)
            self.min_p[:n, 0] = torch.tensor(min_p, dtype=torch.float64).to(device, non_blocking=True)
            self.mass.zero_()
        in_flight: deque[tuple[Any, list[Tensor]]] = deque()
        begin = 0
        while True:
            while begin < steps and len(in_flight) < BLOCKS_IN_FLIGHT and not should_stop(begin):
                block = slice(begin, min(steps, begin + SYNC_EVERY))
                in_flight.append(self._launch_block(replay, block))
                begin = block.stop
            if not in_flight:
                return
            copied, (sampled, logp, mass, kept_sets) = in_flight.popleft()
            if copied is not None:
                copied.synchronize()
            # clones: the host buffers are written again by the blocks that follow
            truncated: Iterable[tuple[Tensor, Tensor] | None] = repeat(None, len(sampled))
            if truncations is not None:
                truncated = zip(mass[:, :n].clone(), kept_sets[:, :n].clone())
            yield from zip(sampled[:, :n].tolist(), logp[:, :n].clone(), truncated)

    def _shared_prefixes(
        self, lanes: int, steps: int, cached: Sequence[int], common_prefixes: Sequence[int]
    ) -> list[list[int]] | None:
        """For each program's lanes: the columns they share, and the row to read these from. None where sharing does not pay."""
        if not common_prefixes or lanes * self.Hkv < MIN_PROGRAMS or self.kv_cache.table is not None:
            return None
        leaders = range(0, lanes, LANES_PER_PROGRAM)
        common = [min(common_prefixes[at + 1 : at + LANES_PER_PROGRAM], default=0) for at in leaders]
        columns_read = sum(cached) + len(cached) * steps // 2
        if (LANES_PER_PROGRAM - 1) * sum(common) < MIN_SAVED_SHARE * columns_read:
            return None
        return [common, list(leaders)]

    def _launch_block(self, replay: Callable[[], None], block: slice) -> tuple[Any, list[Tensor]]:
        """Launch a block of decode steps and the copies of their results to the host."""
        for _ in range(block.start, block.stop):
            replay()
        buffers = zip(self._host_buffers, (self.sampled, self.logp, self.mass))
        copies = [host[block].copy_(device[block], non_blocking=True) for host, device in buffers]
        size, slot = block.stop - block.start, block.start // SYNC_EVERY % len(self._host_kept)
        copies.append(self._host_kept[slot, :size].copy_(self.kept[:size], non_blocking=True))
        copied = torch.cuda.Event() if self.on_gpu else None
        if copied is not None:
            copied.record()
        return copied, copies


# ---------------------------------------------------------------------- mixtures of experts


class RouteCache:
    """``layer``: the number of the cache layer that holds the routes, after those of the model."""

    def __init__(self, routing: experts.ExpertRouting, layer: int) -> None:
        self.routing, self.layer = routing, layer

    @contextmanager
    def recording(self, layout: PrefillLayout | DecodeLayout) -> Iterator[None]:
        """Store what the routers choose in a forward pass of this layout."""
        with self.routing.recording() as chosen:
            yield
        high, low = experts.as_cache_entries(chosen(), layout.kv_cache.dtype)
        layout.write(self.layer, high[:, None], low[:, None])  # [N, 1, W]: one head

    def store(self, kv_cache: KVCache, chosen: Tensor, block: Tensor, position: Tensor) -> None:
        """Store choices [N, R, k] in columns ``position`` of blocks ``block`` [N], without asking the device anything: part of a
        captured graph. Rows outside [0, context) are padding and inactive lanes, whose blocks may belong to others. They repeat
        the write of the first row that counts; if none does, all write back what is there."""
        counts = (position >= 0) & (position < kv_cache.context)
        row = torch.arange(len(position), device=position.device)
        source = torch.where(counts, row, counts.int().argmax())
        block, offset = block[source], position[source].clamp(min=0) % kv_cache.block_width
        entries = experts.as_cache_entries(chosen.flatten(1)[source], kv_cache.dtype)
        for cached, new in zip((kv_cache.keys[self.layer], kv_cache.values[self.layer]), entries):
            cached[block, 0, offset] = torch.where(counts.any(), new, cached[block, 0, offset])

    def read(self, kv_cache: KVCache, spans: Sequence[Span]) -> list[list[bytes]]:
        """The routes of these columns. One copy from the device for all of them."""
        parts = []
        for row, begin, end in spans:
            keys, values = kv_cache.columns(self.layer, torch.tensor([row], device=kv_cache.device), end)
            high, low = (t[0, 0, begin:end].to(torch.int16) for t in (keys, values))
            parts.append(high * experts.BYTE + low)
        rows = iter(experts.as_rows(torch.cat(parts)))
        return [[next(rows) for _ in range(end - begin)] for _, begin, end in spans]


class MixtureDecoder(GraphDecoder):
    """``experts``: how many rows are computed by which implementation."""

    model_types = MIXTURES
    takes_adapters = False  # those of experts are not beside a linear layer
    prefills_last_layer = True  # its routers' choices are recorded too
    attention_buffer = staticmethod(torch.zeros)  # inactive lanes then choose few experts, all the same ones

    @classmethod
    def unsupported_reason(cls, model: PreTrainedModel, windows: set[int | None], fp8: bool) -> str:
        if reason := super().unsupported_reason(model, windows, fp8):
            return reason
        if getattr(model.config, "clip_qkv", None) is not None:
            return "clipped queries and keys"
        if not experts.expert_modules(model):
            return "experts that can only be computed one after another"
        return "experts, which are not rounded" if fp8 else ""

    def __init__(
        self, model: PreTrainedModel, kv_cache: KVCache, fp8: bool, kernels: Any, route_cache: RouteCache | None
    ) -> None:
        """``route_cache``: where the routers' choices go; None: they are not recorded."""
        self.blocks = [layer.mlp if experts.expert_modules(layer.mlp) else None for layer in model.model.layers]
        choice = experts.ExpertChoice.of(model, int(model.config.num_experts_per_tok))
        assert choice is not None, "see unsupported_reason"
        self.experts, self._configs, self.route_cache = choice, experts.expert_configs(model), route_cache
        super().__init__(model, kv_cache, fp8, kernels)
        if route_cache is not None:
            shape = (kv_cache.rows, route_cache.routing.routers, route_cache.routing.k)
            self.routes = torch.zeros(shape, dtype=torch.int16, device=kv_cache.device)
        self._attentions = [layer.self_attn for layer in model.model.layers]

    def describe(self) -> str:
        return f"{super().describe()}, {self.experts.describe()}"

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
        with experts.using(self._configs, self.experts.for_rows(len(tokens))), self._recording(len(tokens)) as chosen:
            logits = super()._logits(tokens, position, shared)
        if self.route_cache is not None:
            block, _ = self.kv_cache.places(lane, position.clamp(0, self.kv_cache.context - 1))
            self.route_cache.store(self.kv_cache, chosen(), block, position)
        return logits

    def _prefill(self, inputs: GraphInputs) -> None:
        with experts.using(self._configs, self.experts.for_rows(inputs.shape.tokens)), self._recording(None) as chosen:
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
