"""The model runner: the generator's own copy of a model. Prefills tokens into the KV cache, decodes running rows, loads weights.

``ModelRunner`` runs any causal LM through its stock forward, or through a hand-written decoder where that one gives the same
logits. ``StockRunner`` serves models that our KV cache cannot: their own forward with their own cache, or without any.
Soft-capping, attention sinks, ALiBi and state-space layers are right there because nothing replaces them. The price: rows are
decoded together only while they have the same length, and a dialogue is read again when its rows change.

Knows nothing of requests, sampling or text.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.engines import compat
from turnwise.engines.adapters import AdaptedWeights
from turnwise.engines.attention_interface import LayerProbe, eager_attention, install_attention, use_eager_attention
from turnwise.engines.experts import EAGER, as_rows, attach_routing, expert_configs, using
from turnwise.engines.generator.attention_layouts import DecodeLayout, PrefillChunk, PrefillLayout
from turnwise.engines.generator.cuda_graphs import MIXTURES, GraphDecoder, MixtureDecoder, RouteCache, Span
from turnwise.engines.generator.kv_cache import CacheChoice, CacheTooSmall, RowCache
from turnwise.engines.generator.llama_decoder import LlamaDecoder
from turnwise.engines.kernels.dispatch import decode_ops, limit_host_threads
from turnwise.engines.learner.policy_check import TOLERANCE, TOLERANCES
from turnwise.errors import SettingError

log = logging.getLogger(__name__)

PROBE_TOKENS = 12  # tokens that verify a decode path ...
STOCK_PROBE_TOKENS = 48  # of a model's own forward, which may be right for short dialogues only
MIN_CONTEXT = 4  # ... and the shortest context in which that is meaningful
HALF_TOLERANCE = 0.05  # of the largest logit, for a decoder in half precision; more where the stock forward itself ...
ROUNDING_FACTOR, MAX_TOLERANCE = 4.0, 0.2  # ... differs more between two orders of summation. A bug is off by far more
PREFILL_BUDGET = 4096  # tokens of one packed prefill: bounds its memory ...
PREFILL_BUDGET_CUDA = 1 << 15  # ... with smaller ones a large GPU waits for launches
CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state")  # under which models return and take their own cache
UNSERVED = (SettingError, TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError)
Ids = tuple[int, ...]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class ModelRunner:
    def __init__(
        self, model: PreTrainedModel, rows: int, context: int, device: torch.device, fast: bool = True,
        dtype: torch.dtype | None = None, share_weights: bool = False, cache: CacheChoice | None = None,
    ) -> None:  # fmt: skip
        """``share_weights``: see ``model_copy``. ``dtype``: of weights and KV cache; float8_e4m3fn: layer weights in fp8, the
        others in bfloat16 (on a CPU in the model's own dtype)."""
        self.fp8, self.device = dtype == torch.float8_e4m3fn, device
        self.model = model_copy(model, device, dtype, share_weights)
        # the weights before rounding
        self.exact = dict(model.named_parameters()) if self.model.dtype != model.dtype else None
        self.prefills = 0  # forward passes so far
        self.rounding = 0.0  # how much the stock forward differs from itself with a KV cache: by the order of its sums
        self._base: Mapping[str, Tensor] | None = None  # the frozen weights that published adapters belong to
        limit_host_threads(device)
        count, vocabulary = min(PROBE_TOKENS, context), model.config.get_text_config().vocab_size
        ids = torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            routing = attach_routing(self.model)
            recording = nullcontext(None) if routing is None else routing.recording()
            with using(expert_configs(self.model), EAGER), recording as chosen:
                reference = self.model(input_ids=ids[None].to(device), use_cache=False).logits[0]
            # a router near a tie chooses by rounding: comparisons force what it chose here
            self._probe_routes = None if chosen is None else chosen()
            install_attention(self.model)
            probe = LayerProbe()
            self._forward(ids[None].to(device), torch.arange(count, device=device)[None], probe)
            probe.check_all_layers(self.model)
            shapes = [probe.shapes[layer] for layer in sorted(probe.shapes)]
            self.route_cache = RouteCache(routing, len(shapes)) if routing is not None else None
            if (
                routing is not None
            ):  # one more layer: its keys and values are high and low bytes of each expert's number
                shapes.append(((1, routing.width), (1, routing.width)))
            weight_dtype = next(self.model.parameters()).dtype
            self.kv_cache = (cache or CacheChoice()).make(shapes, rows, context, weight_dtype, device)
            self.decoder: LlamaDecoder | None = None
            self.path = f"stock forward, {dtype_name(self.kv_cache.dtype)}, because fast is off"
            error = self._deviation(ids, reference)
            if not error <= self._tolerance():
                raise SettingError(
                    f"{type(self.model).__name__} computes other logits with a KV cache than its stock forward (off by "
                    f"{error:.2g}): its attention uses something beyond the Transformers attention interface (soft-capping, "
                    "sinks ...)"
                )
            self.rounding = error
            if fast:
                self._accelerate(ids, reference, probe.windows)
        self.exact = None
        log.info("generator decodes %s with: %s", type(self.model).__name__, self.describe())

    def _forward(self, tokens: Tensor, position: Tensor, layout: object) -> Tensor:
        return self.model(input_ids=tokens, position_ids=position, layout=layout, use_cache=False).logits

    # ------------------------------------------------------------------ verification

    def _deviation(self, ids: Tensor, reference: Tensor) -> float:
        """Largest logit error of prefilling all ids but the last two and decoding those, relative to the largest logit."""

        def forcing(begin: int, end: int) -> AbstractContextManager[None]:
            if self.route_cache is None or self._probe_routes is None:
                return nullcontext()
            return self.route_cache.routing.forcing(self._probe_routes[begin:end], padded=True)

        self.kv_cache.hold([(0, len(ids))])
        with forcing(0, len(ids) - 2):
            self.prefill([PrefillChunk(0, 0, ids[:-2].tolist())])
        layout = DecodeLayout(self.kv_cache, [len(ids) - 2], 2)
        logits = []
        for at, token in enumerate(ids[-2:].to(self.device), len(ids) - 2):
            with forcing(at, at + 1):
                logits.append(self.decode_step(token[None], layout)[0])
            layout.advance()
        self.kv_cache.assign_rows([])
        return float((torch.stack(logits) - reference[-2:]).abs().max() / (1e-6 + reference.abs().max()))

    def _tolerance(self) -> float:
        if self.fp8 and self.decoder is not None:
            return 0.25
        if self.kv_cache.dtype in (torch.float32, torch.float64):
            return 1e-3
        # Half precision rounds the residual stream of every layer: what is right for 30 layers is too strict for 80.
        return min(max(HALF_TOLERANCE, ROUNDING_FACTOR * self.rounding), MAX_TOLERANCE)

    def _accelerate(self, ids: Tensor, reference: Tensor, windows: set[int | None]) -> None:
        """Use the fastest decoder that supports this model, works on this machine and gives the same logits."""
        kernels, no_kernels = decode_ops(self.device)
        kind: type[LlamaDecoder] = MixtureDecoder if self.model.config.model_type in MIXTURES else GraphDecoder
        parts = {"kernels": kernels} | ({"route_cache": self.route_cache} if kind is MixtureDecoder else {})
        # fastest first
        ways: list[tuple[str, type[LlamaDecoder], bool, dict[str, Any]]]
        ways = [("the hand-written decoder", LlamaDecoder, self.fp8, {})]
        if kernels is not None or self.device.type == "cuda":  # tests put reference operations on a CPU
            ways.insert(0, ("CUDA graphs", kind, False, parts))
            if self.fp8:
                ways.insert(0, ("CUDA graphs in fp8", kind, True, parts))
        reasons: list[str] = []
        for what, decoder_type, fp8, options in ways:
            try:
                reason = no_kernels if options else ""
                if reason := reason or decoder_type.unsupported_reason(self.model, windows, fp8):
                    reasons.append(f"not {what}, because of {reason}")
                    continue
                self.decoder = decoder_type(self.model, self.kv_cache, fp8, **options)
                if options:  # once more: a graph's weights are rounded from the exact ones, not from the copy's
                    self.decoder.refresh_weights(self.exact)
                error = self.decoder.prove(partial(self._deviation, ids, reference), self._tolerance())
                if error <= self._tolerance():
                    self.decoder.warm_up()
                    self.path = "; ".join(["", *reasons])
                    return
                reasons.append(f"not {what}, because its logits were off by {error:.2g}")
            except Exception as fault:  # no compiler, an old GPU, too little memory: fall back to a slower path
                reasons.append(f"not {what}, because of {type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}")
            log.warning("the generator decodes more slowly than it could: %s", reasons[-1])
        self.decoder = None
        rounding = "; weights are not rounded to fp8" if self.fp8 else ""
        self.path = f"stock forward, {dtype_name(self.kv_cache.dtype)}{rounding}; " + "; ".join(reasons)

    def describe(self) -> str:
        """The decode path in use, why no faster one is, and the layout of the cache."""
        path = self.path if self.decoder is None else self.decoder.describe() + self.path
        return f"{path}; {self.kv_cache.describe()}"

    @property
    def graphs(self) -> GraphDecoder | None:
        """The decoder, if it samples many tokens on the GPU without the host."""
        return self.decoder if isinstance(self.decoder, GraphDecoder) else None

    # ------------------------------------------------------------------ prefill and decode

    def prefill(self, chunks: Sequence[PrefillChunk]) -> int:
        """Compute the KV of these ids. Returns the number of tokens."""
        budget = PREFILL_BUDGET_CUDA if self.device.type == "cuda" else PREFILL_BUDGET
        for batch in _prefill_batches(chunks, budget, padded=self.graphs is None):
            layout = PrefillLayout(self.kv_cache, batch)
            if self.decoder is not None:
                self.decoder.prefill(layout)
            else:
                base, (ids, position, *_) = self.model.base_model, layout.on_device
                # no logits needed: the last id of a request is fed by its first decode step
                with self._recording_routes(layout):
                    base(input_ids=ids[None], position_ids=position[None], layout=layout, use_cache=False)
            self.prefills += 1
        return sum(len(chunk.ids) for chunk in chunks)

    def decode_step(self, tokens: Tensor, layout: DecodeLayout) -> Tensor:
        """Feed one token per row [n]; return the logits [n, V] of the next."""
        if self.decoder is not None:
            return self.decoder.decode_step(tokens, layout)
        with self._recording_routes(layout):
            return self._forward(tokens[:, None], layout.position[:, None], layout)[:, 0]

    def _recording_routes(self, layout: PrefillLayout | DecodeLayout) -> AbstractContextManager[None]:
        return nullcontext() if self.route_cache is None else self.route_cache.recording(layout)

    def read_routes(self, spans: Sequence[Span]) -> list[list[bytes]]:
        """The experts chosen at these columns of the cache; empty lists for a model without routers."""
        return [[] for _ in spans] if self.route_cache is None else self.route_cache.read(self.kv_cache, spans)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights by name. Names may be missing (a tied head), but never unknown. Adapters are loaded alone where the
        decoder applies them beside the weights; elsewhere they arrive merged."""
        adapted = (
            weights if self.applies_adapters and isinstance(weights, AdaptedWeights) and weights.mergeless else None
        )
        base, old = (weights, None) if adapted is None else (adapted.base, self._base)
        # Frozen weights stay where they are: the same memory is the same base. Packed ones are made when they are read.
        if old is None or (
            old is not base and (old.keys() != base.keys() or any(old[n].data_ptr() != base[n].data_ptr() for n in old))
        ):
            copy_weights(self.model, base)
            if self.decoder is not None:
                self.decoder.refresh_weights(base)
            self._base = None if adapted is None else base
        if adapted is not None and self.graphs is not None:
            self.graphs.load_adapters(adapted.adapters)
        self.kv_cache.invalidate()

    @property
    def applies_adapters(self) -> bool:
        """Whether adapters are applied beside the weights; else they are merged, for which their base is needed each time."""
        return self.graphs is not None and self.graphs.takes_adapters and not self.fp8


def model_copy(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype | None, share_weights: bool
) -> PreTrainedModel:
    """A frozen copy for the generator. ``share_weights``: its parameters alias the model's where device and dtype allow it, for
    a caller that publishes after every change and lets nothing be sampled in between. That saves one model's memory."""
    if dtype == torch.float8_e4m3fn:  # a decoder rounds the layers; the rest stays in the dtype of their products
        dtype = torch.bfloat16 if device.type == "cuda" else None
    aliases: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    out = copy.deepcopy(model, aliases if share_weights else {})
    out = out.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
    for p in out.parameters():  # not the buffers: rounded rotary frequencies soon differ by half a turn
        p.data = p.data.to(dtype or p.dtype)
    return out


def copy_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into the model by name. Names may be missing (a tied head), but never unknown."""
    parameters = model.state_dict()
    for name, value in (weights.base if isinstance(weights, AdaptedWeights) else weights).items():
        if name not in parameters:
            raise SettingError(f"published weights name {name!r}, which {type(model).__name__} does not have")
        if parameters[name].shape != value.shape:
            shape, expected = tuple(value.shape), tuple(parameters[name].shape)
            raise SettingError(f"weight {name!r} has shape {shape}; the model's is {expected}")
    if isinstance(weights, AdaptedWeights):  # merged when read: one at a time, so that a second model never exists
        for name, value in weights.items():
            parameters[name].copy_(value)
    elif weights:
        compat.foreach_copy_([parameters[name] for name in weights], list(weights.values()))


def _prefill_batches(chunks: Sequence[PrefillChunk], budget: int, padded: bool) -> list[list[PrefillChunk]]:
    """Group chunks into packed passes of at most ``budget`` tokens, and where chunks are padded to the longest, of at most twice
    as many with padding. Long chunks come first, so that chunks of similar length share a pass. A chunk over the budget is split,
    and its pieces go into consecutive passes."""
    pieces = [
        PrefillChunk(chunk.row, chunk.start + at, chunk.ids[at : at + budget])
        for chunk in sorted(chunks, key=lambda chunk: -len(chunk.ids))
        for at in range(0, len(chunk.ids), budget)
    ]
    batches: list[list[PrefillChunk]] = []
    room = longest = 0
    for piece in pieces:
        longest = max(longest, len(piece.ids))
        too_padded = padded and bool(batches) and (len(batches[-1]) + 1) * longest > 2 * budget
        if not batches or len(piece.ids) > room or too_padded or batches[-1][-1].row == piece.row:
            batches.append([])
            room, longest = budget, len(piece.ids)
        batches[-1].append(piece)
        room -= len(piece.ids)
    return batches


# ------------------------------------------------------------------ models with a cache of their own


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


@dataclass(eq=False, slots=True)
class StockCache:
    """A model's own cache of several rows of equal length, and the ids that each of them has read."""

    argument: str
    cache: Any
    rows: list[Ids]
    routes: Tensor | None = None  # [rows, positions, experts] chosen by routers

    def select(self, wanted: Sequence[Ids]) -> bool:
        """Keep exactly the wanted rows, in their order, repeated where wanted twice. False: they must be read again."""
        if list(wanted) == self.rows:
            return True
        place = {ids: n for n, ids in enumerate(self.rows)}
        if any(ids not in place for ids in wanted):
            return False
        self.rows = []  # unusable if not every layer can select
        index = torch.tensor([place[ids] for ids in wanted])
        try:
            self.cache.batch_select_indices(index)
        except (AttributeError, NotImplementedError, TypeError, RuntimeError) as fault:
            _warn_once(f"rows that change are read again, because this model's cache cannot select rows: {fault!r}")
            return False
        self.rows = list(wanted)
        self.routes = None if self.routes is None else self.routes[index]
        return True


class StockRunner:
    """A ``ModelRunner`` by the model's own forward. ``reason``: why the faster runner does not serve this model. ``layout``: of
    the KV cache, as the user asked for it; the model keeps its own."""

    decoder = None
    graphs = None

    applies_adapters = False

    def __init__(
        self, model: PreTrainedModel, rows: int, context: int, device: torch.device, reason: str,
        dtype: torch.dtype | None = None, share_weights: bool = False, layout: str = "",
    ) -> None:  # fmt: skip
        self.model = model_copy(model, device, dtype, share_weights)
        self.device, self.reason, self.layout = device, reason, layout
        limit_host_threads(device)
        # rows and ids, no tensors
        self.kv_cache = RowCache((), rows, context, next(self.model.parameters()).dtype, device)
        self.prefills = 0
        self._caches: list[StockCache] = []
        self._layout: DecodeLayout | None = None
        self._prefixes: list[Ids] = []
        self.routing = attach_routing(self.model)
        self._routes: dict[int, Tensor] = {}  # of the running rows, [positions, experts]
        size, length = self.model.config.get_text_config().vocab_size, min(STOCK_PROBE_TOKENS, context)
        ids = torch.randint(0, size, (2, length), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            a, b = (tuple(row) for row in ids.tolist())
            with eager_attention(self.model):
                reference = self._run([a, b], use_cache=False)[0].logits  # as the learner computes
            if not self._agrees(self._run([a, b], use_cache=False)[0].logits, reference):
                # Some fused kernels read a missing mask as "causal", and a model that adds a bias of its own to the mask (Doge
                # in Transformers 5.17) turns that into "sees everything". The eager implementation always gets the mask.
                use_eager_attention(self.model)
            self.cached = self._cache_is_exact(a, b, reference)
        log.info("generator decodes %s with: %s", type(self.model).__name__, self.describe())

    def describe(self) -> str:
        how = "its own cache" if self.cached else "every dialogue read again for every token"
        unheeded = f"; cache={self.layout} has no effect on such a model" if self.layout else ""
        return f"stock forward with {how}, {dtype_name(self.kv_cache.dtype)}, because {self.reason}{unheeded}"

    def prefill(self, chunks: Sequence[PrefillChunk]) -> int:
        """Nothing: the first decode step of a row reads its ids, which the KV cache lists."""
        return sum(len(chunk.ids) for chunk in chunks)

    def decode_step(self, tokens: Tensor, layout: DecodeLayout) -> Tensor:
        """Feed one token per row [n]; return the logits [n, V] of the next."""
        if layout is not self._layout:
            self._layout = layout
            self._prefixes = [tuple(ids) for ids in self.kv_cache.cached_ids[: layout.n]]
            assert [len(ids) for ids in self._prefixes] == layout.position.tolist()
        # finished rows stay in the batch until the next compaction: past the context they overwrite their last id
        prefixes = [ids[: self.kv_cache.context - 1] for ids in self._prefixes]
        logits = self._next_logits(prefixes, tokens.tolist())
        self._prefixes = [(*ids, token) for ids, token in zip(prefixes, tokens.tolist())]
        return logits

    def read_routes(self, spans: Sequence[Span]) -> list[list[bytes]]:
        """The experts chosen at these positions of the running rows; empty lists for a model without routers."""
        if self.routing is None:
            return [[] for _ in spans]
        return [as_rows(self._routes[row][begin:end]) for row, begin, end in spans]

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights by name. Names may be missing (a tied head), but never unknown."""
        copy_weights(self.model, weights)
        self.kv_cache.invalidate()
        self._caches, self._layout = [], None

    # ------------------------------------------------------------------ forward passes

    def _next_logits(self, prefixes: Sequence[Ids], tokens: Sequence[int]) -> Tensor:
        """Logits [n, V] after each prefix and its token; rows of equal length share a forward pass."""
        by_length: dict[int, list[int]] = {}
        for row, ids in enumerate(prefixes):
            by_length.setdefault(len(ids), []).append(row)
        logits_of: dict[int, Tensor] = {}
        caches: list[StockCache] = []
        for members in by_length.values():
            group = [prefixes[row] for row in members]
            if self.cached:  # from the cache that holds them; else they are read first
                cache = next((c for c in self._caches if c.select(group)), None)
                if cache is None and group[0]:
                    _, cache = self._forward(group, None, [()] * len(group))
                logits, cache = self._forward([(tokens[row],) for row in members], cache, group)
                caches.append(cache)
                routes = cache.routes
            else:
                out, routes = self._run([(*ids, tokens[row]) for ids, row in zip(group, members)], use_cache=False)
                logits = out.logits[:, -1]
            logits_of |= dict(zip(members, logits))
            self._routes |= {} if routes is None else dict(zip(members, routes))
        self._caches = caches
        return torch.stack([logits_of[row] for row in range(len(prefixes))])

    def _run(self, ids: Sequence[Ids], **options: Any) -> tuple[Any, Tensor | None]:
        """The model's output for rows of equal length, and the experts chosen at their positions."""
        tokens = torch.tensor(ids, device=self.device)
        if self.routing is None:
            return self.model(input_ids=tokens, **options), None
        with self.routing.recording() as chosen:
            out = self.model(input_ids=tokens, **options)
        return out, chosen().unflatten(0, tokens.shape)

    def _forward(
        self, ids: Sequence[Ids], cache: StockCache | None, before: Sequence[Ids]
    ) -> tuple[Tensor, StockCache]:
        out, routes = self._run(ids, use_cache=True, **({} if cache is None else {cache.argument: cache.cache}))
        if cache is not None and cache.routes is not None and routes is not None:
            routes = torch.cat([cache.routes, routes], 1)
        argument = next((name for name in CACHE_ARGUMENTS if getattr(out, name, None) is not None), None)
        if argument is None:
            raise SettingError("it returns no cache")
        rows = [(*prefix, *more) for prefix, more in zip(before, ids)]
        return out.logits[:, -1], StockCache(argument, getattr(out, argument), rows, routes)

    # ------------------------------------------------------------------ verification

    def _agrees(self, logits: Tensor, expected: Tensor) -> bool:
        """Whether a run would take the two [..., V] for one policy: by the largest error, relative to the largest logit, and by
        what the policy check measures, the mean difference of log-probabilities of tokens that the policy samples."""
        dtype = self.kv_cache.dtype
        # of the largest logit: rounding differs between shapes, and half precision rounds coarsely
        largest = 1e-3 if dtype in (torch.float32, torch.float64) else 0.05
        off = (logits - expected).abs().max() / (1e-6 + expected.abs().max())
        logp, reference = logits.float().log_softmax(-1), expected.float().log_softmax(-1)
        mean = (reference.exp() * (logp - reference).abs()).sum(-1).mean()
        return bool(off <= largest and mean <= TOLERANCES.get(dtype, TOLERANCE))

    def _cache_is_exact(self, a: Ids, b: Ids, reference: Tensor) -> bool:
        """Whether decoding with the model's own cache, token by token and in rows that split and repeat, gives the logits of
        plain reading. ``reference``: of ``a`` and ``b``, [2, L, V]."""
        self.cached = True
        try:
            steps = []
            for n in range(max(1, len(a) // 2), len(a)):
                steps.append(self._next_logits([a[: n - 1], b[: n - 1]], [a[n - 1], b[n - 1]]))
            exact = self._agrees(torch.stack(steps, 1), reference[:, -len(steps) - 1 : -1])
            rows = [b, (*a[:-1], 0), b]
            logits = self._next_logits([row[:-1] for row in rows], [row[-1] for row in rows])
            exact = exact and self._agrees(logits, self._run(rows, use_cache=False)[0].logits[:, -1])
        except UNSERVED as fault:
            name = type(fault).__name__
            log.warning("%s decodes without its cache, which is slow: %s: %s", type(self.model).__name__, name, fault)
            return False
        finally:
            self._caches = []
        return exact


Runner = ModelRunner | StockRunner


def make_runner(
    model: PreTrainedModel, rows: int, context: int, device: torch.device, fast: bool, dtype: torch.dtype | None,
    share_weights: bool = False, cache: CacheChoice | None = None,
) -> Runner:  # fmt: skip
    """The fastest runner that reproduces the model's own logits."""
    try:
        return ModelRunner(model, rows, context, device, fast, dtype, share_weights, cache)
    except (torch.OutOfMemoryError, CacheTooSmall):
        raise
    except UNSERVED as fault:
        reason = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
        log.warning(
            "%s decodes by its own forward, which is slow: %s: %s", type(model).__name__, type(fault).__name__, reason
        )
        # what the user asked for; empty where the room decides
        layout = "" if cache is None or cache.page is None else "pages" if cache.page else "rows"
        return StockRunner(model, rows, context, device, reason, dtype, share_weights, layout)
