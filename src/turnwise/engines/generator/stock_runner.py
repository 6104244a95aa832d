"""The model runner for models that our KV cache cannot serve: their own forward with their own cache, or without any.

Soft-capping, attention sinks, ALiBi and state-space layers are right here because nothing replaces them. The price: rows are
decoded together only while they have the same length, and a dialogue is read again when its rows change. Knows nothing of
requests, sampling or text.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.engines.attention_interface import use_eager_attention
from turnwise.engines.expert_routing import as_rows, attach_routing
from turnwise.engines.generator.attention_layouts import DecodeLayout, PrefillChunk
from turnwise.engines.generator.cache_choice import CacheChoice
from turnwise.engines.generator.kv_cache import KVCache
from turnwise.engines.generator.model_runner import MIN_CONTEXT, ModelRunner, copy_weights, dtype_name, model_copy
from turnwise.engines.generator.paged_cache import CacheTooSmall
from turnwise.engines.generator.route_cache import Span
from turnwise.engines.kernels.dispatch import limit_host_threads
from turnwise.errors import SettingError

log = logging.getLogger(__name__)

CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state")  # names under which models return and take their cache
UNSERVED = (SettingError, TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError)
Ids = tuple[int, ...]


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
        except (AttributeError, NotImplementedError, TypeError, RuntimeError):
            return False
        self.rows = list(wanted)
        self.routes = None if self.routes is None else self.routes[index]
        return True


class StockRunner:
    """A ``ModelRunner`` by the model's own forward. ``reason``: why the faster runner does not serve this model. ``layout``: of
    the KV cache, as the user asked for it; the model keeps its own."""

    decoder = None
    graphs = None

    def __init__(
        self, model: PreTrainedModel, rows: int, context: int, device: torch.device, reason: str,
        dtype: torch.dtype | None = None, share_weights: bool = False, layout: str = "",
    ) -> None:  # fmt: skip
        if dtype == torch.float8_e4m3fn:
            dtype = torch.bfloat16 if device.type == "cuda" else None
        self.model = model_copy(model, device, dtype, share_weights)
        self.device, self.reason, self.layout = device, reason, layout
        limit_host_threads(device)
        self.kv_cache = KVCache(
            (), rows, context, next(self.model.parameters()).dtype, device
        )  # rows and ids, no tensors
        self.prefills = 0
        self._caches: list[StockCache] = []
        self._layout: DecodeLayout | None = None
        self._prefixes: list[Ids] = []
        self.routing = attach_routing(self.model)
        self._routes: dict[int, Tensor] = {}  # of the running rows, [positions, experts]
        if not self._is_causal():
            # Some fused kernels read a missing mask as "causal", and a model that adds a bias of its own to the mask (Doge
            # in Transformers 5.17) turns that into "sees everything". The eager implementation always gets the mask.
            use_eager_attention(self.model)
        self.cached = self._cache_is_exact()
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
        out: dict[int, Tensor] = {}
        caches: list[StockCache] = []
        for members in by_length.values():
            group = [prefixes[row] for row in members]
            if self.cached:
                logits, cache = self._decode(group, [tokens[row] for row in members])
                caches.append(cache)
                routes = cache.routes
            else:
                logits, routes = self._read([(*ids, tokens[row]) for ids, row in zip(group, members)])
            out |= dict(zip(members, logits))
            self._routes |= {} if routes is None else dict(zip(members, routes))
        self._caches = caches
        return torch.stack([out[row] for row in range(len(prefixes))])

    def _run(self, ids: Sequence[Ids], **options: Any) -> tuple[Any, Tensor | None]:
        """The model's output for rows of equal length, and the experts chosen at their positions."""
        tokens = torch.tensor(ids, device=self.device)
        if self.routing is None:
            return self.model(input_ids=tokens, **options), None
        with self.routing.recording() as chosen:
            out = self.model(input_ids=tokens, **options)
        return out, chosen().unflatten(0, tokens.shape)

    def _read(self, rows: Sequence[Ids]) -> tuple[Tensor, Tensor | None]:
        """Logits [n, V] after rows of equal length, and the experts chosen, without a cache."""
        out, routes = self._run(rows, use_cache=False)
        return out.logits[:, -1], routes

    def _decode(self, prefixes: list[Ids], tokens: list[int]) -> tuple[Tensor, StockCache]:
        """Feed one token after prefixes of equal length, from the cache that holds them; else read them first."""
        found = next((c for c in self._caches if c.select(prefixes)), None)
        if found is None and prefixes[0]:
            _, found = self._forward(prefixes, None, [()] * len(prefixes))
        return self._forward([(token,) for token in tokens], found, prefixes)

    def _forward(
        self, ids: Sequence[Ids], known: StockCache | None, before: Sequence[Ids]
    ) -> tuple[Tensor, StockCache]:
        out, routes = self._run(ids, use_cache=True, **({} if known is None else {known.argument: known.cache}))
        if known is not None and known.routes is not None and routes is not None:
            routes = torch.cat([known.routes, routes], 1)
        argument = next((name for name in CACHE_ARGUMENTS if getattr(out, name, None) is not None), None)
        if argument is None:
            raise SettingError("it returns no cache")
        rows = [(*prefix, *more) for prefix, more in zip(before, ids)]
        return out.logits[:, -1], StockCache(argument, getattr(out, argument), rows, routes)

    # ------------------------------------------------------------------ verification

    @torch.inference_mode()
    def _is_causal(self) -> bool:
        """Whether the logits of a prefix stay the same when ids follow it."""
        size = self.model.config.get_text_config().vocab_size
        ids = torch.randint(0, size, (1, min(8, self.kv_cache.context)), generator=torch.Generator().manual_seed(0))
        ids = ids.to(self.device)
        whole, prefix = (self.model(input_ids=part, use_cache=False).logits for part in (ids, ids[:, :-2]))
        return bool((whole[:, :-2] - prefix).abs().max() <= self._tolerance * (1e-6 + prefix.abs().max()))

    @property
    def _tolerance(self) -> float:
        """Of the largest logit: rounding differs between shapes, and half precision rounds coarsely."""
        return 1e-3 if self.kv_cache.dtype in (torch.float32, torch.float64) else 0.05

    @torch.inference_mode()
    def _cache_is_exact(self) -> bool:
        """Whether decoding with the model's own cache, in rows that split and repeat, gives the logits of plain reading."""
        size = self.model.config.get_text_config().vocab_size
        length = min(8, self.kv_cache.context)
        ids = torch.randint(0, size, (2, length), generator=torch.Generator().manual_seed(0)).tolist()
        a, b = (tuple(row) for row in ids)
        self.cached = True
        try:
            errors = []
            for rows in ([a[:-2], b[:-2]], [a[:-1], b[:-1]], [b, (*a[:-1], 0), b]):
                logits = self._next_logits([row[:-1] for row in rows], [row[-1] for row in rows])
                expected, _ = self._read(rows)
                errors.append(float((logits - expected).abs().max() / (1e-6 + expected.abs().max())))
        except UNSERVED as fault:
            log.info("%s decodes without its cache: %s", type(self.model).__name__, fault)
            return False
        finally:
            self._caches = []
        return max(errors) <= self._tolerance


Runner = ModelRunner | StockRunner


def make_runner(
    model: PreTrainedModel, rows: int, context: int, device: torch.device, fast: bool, dtype: torch.dtype | None,
    share_weights: bool = False, cache: CacheChoice | None = None,
) -> Runner:  # fmt: skip
    """The fastest runner that reproduces the model's own logits."""
    if context < MIN_CONTEXT:
        raise SettingError(f"context={context} is too short to verify a model in; write at least {MIN_CONTEXT}")
    try:
        return ModelRunner(model, rows, context, device, fast, dtype, share_weights, cache)
    except (torch.OutOfMemoryError, CacheTooSmall):
        raise
    except UNSERVED as fault:
        lines = str(fault).strip().splitlines() or [type(fault).__name__]
        layout = cache.layout if cache is not None else ""
        return StockRunner(model, rows, context, device, lines[0], dtype, share_weights, layout)
