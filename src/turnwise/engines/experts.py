"""The experts of a mixture: how they are computed, and which of them its routers choose, recorded or forced.

**Computing.** The loop over experts (``eager``) asks the device which experts were chosen: the host waits for it in every
layer, and no CUDA graph can be captured. ``grouped_mm`` sorts the (row, expert) pairs by expert and multiplies all groups in
one launch: each chosen expert is read once. ``batched_mm`` gathers the weights of every pair first: fewer launches, more bytes.
On a GPU whose grouped product is a loop of the host too (before Hopper), only ``batched_mm`` can be captured. None of them
follows autocast: float32 weights are multiplied in float32. ``COMPUTE_DTYPE``, registered here, rounds weights and rows as
autocast does for a linear layer, and multiplies groups.

**Routing.** A router scores all experts, keeps the k best with ``torch.topk`` and turns their scores into gate weights. Only
the result of ``topk`` is replaced; the model's own code does the rest. So gate weights follow the present router, its gradient
flows, and every family keeps its own formula (softmax before or after the choice, sigmoid, a bias for balance). The routers are
found by a forward pass that watches who calls ``topk``. The state is an attribute of the decoder, so that copies (a reference,
a critic's trunk, the generator's model) have their own.

Knows modules and rows; neither batches nor caches. Legend: N rows of a forward pass, R routers in the order of the layers, k
experts for each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from turnwise.engines.kernels.dispatch import compute_dtype
from turnwise.errors import SettingError

log = logging.getLogger(__name__)

EAGER, GROUPED, BATCHED = "eager", "grouped_mm", "batched_mm"
COMPUTE_DTYPE = "turnwise"  # the name of our own, as of our attention
# what Transformers gives experts it dispatches
MARKS = ("config", "num_experts", "has_gate", "has_bias", "is_transposed")
GATHERED_BYTES = 32 << 20  # of one layer's gathered weights: up to here fewer launches outweigh more bytes (calculated)
ATTRIBUTE, OFF = "_turnwise_expert_routing", "_turnwise_free_routing"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # in configurations
TOP_K = (torch.topk, Tensor.topk)
PROBE_IDS = 5
FREE = -1  # in place of an expert: the router chooses itself
BYTE = 256


# ------------------------------------------------------------------ implementations


def expert_modules(model: nn.Module) -> list[Any]:
    """The modules whose implementation their configuration chooses; none for a family with experts of its own kind."""
    return [m for m in model.modules() if is_experts(m)]


def is_experts(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in MARKS)


def expert_configs(model: nn.Module) -> list[Any]:
    """The configurations that choose this model's implementation."""
    return list({id(m.config): m.config for m in expert_modules(model)}.values())


def use(model: nn.Module, implementation: str | None) -> None:
    """Compute all experts of this model so from now on; copies keep it."""
    for config in expert_configs(model):
        config._experts_implementation = implementation


@contextmanager
def using(configs: Sequence[Any], implementation: str) -> Iterator[None]:
    """Inside, experts with these configurations are computed so."""
    before = [config._experts_implementation for config in configs]
    try:
        for config in configs:
            config._experts_implementation = implementation
        yield
    finally:
        for config, name in zip(configs, before):
            config._experts_implementation = name


# ------------------------------------------------------------------ in the compute dtype


class _Rounded:
    """A module's experts with their weights in another dtype. The rounded ones live as long as autograd needs them."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _in_compute_dtype(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Rows [N, d] -> [N, d] in the dtype of the rows. The products round as those of a linear layer under autocast do."""
    dtype = compute_dtype(hidden_states)
    grouped: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS[GROUPED]
    return grouped(_Rounded(module, dtype), hidden_states.to(dtype), top_k_index, top_k_weights).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(COMPUTE_DTYPE, _in_compute_dtype)


# ------------------------------------------------------------------ a choice by rows


@dataclass(frozen=True)
class ExpertChoice:
    """Which implementation computes a number of rows, among those that are ``proven``: that give the model's own logits, and on
    a GPU run without the host."""

    expert_bytes: int  # weights of one expert
    k: int  # experts of a row
    proven: tuple[str, ...] = (GROUPED, BATCHED)
    refused: dict[str, str] = field(default_factory=dict)  # the others, and why

    @classmethod
    def of(cls, model: PreTrainedModel, k: int) -> ExpertChoice | None:
        """None: the family's experts cannot be exchanged."""
        modules = expert_modules(model)
        if not modules:
            return None
        sizes = [sum(p.nbytes for p in m.parameters()) // m.num_experts for m in modules]
        return cls(max(sizes), k)

    def for_rows(self, rows: int) -> str:
        few = rows * self.k * self.expert_bytes <= GATHERED_BYTES
        return next(name for name in ((BATCHED, GROUPED) if few else (GROUPED, BATCHED)) if name in self.proven)

    def without(self, name: str, why: str) -> ExpertChoice:
        return replace(self, proven=tuple(n for n in self.proven if n != name), refused={**self.refused, name: why})

    def only(self, name: str) -> ExpertChoice:
        return replace(self, proven=(name,))

    def describe(self) -> str:
        """``experts by grouped_mm and batched_mm``, and why not by others."""
        refused = [f"not {name}: {why}" for name, why in self.refused.items()]
        return ", ".join([f"experts by {' and '.join(self.proven)}", *refused])


# ------------------------------------------------------------------ routers


class _Record:
    """The choices of one forward pass in one buffer [N, R, k], which is made when the first router writes, if none is given."""

    def __init__(self, routers: int, buffer: Tensor | None) -> None:
        self.routers, self.buffer, self.written = routers, buffer, set[int]()

    def write(self, router: int, chosen: Tensor) -> None:
        if self.buffer is None:
            self.buffer = chosen.new_empty(len(chosen), self.routers, chosen.shape[1], dtype=torch.int16)
        if len(self.buffer) != len(chosen):
            raise SettingError(f"a router reads {len(chosen)} positions, and {len(self.buffer)} are being recorded")
        self.buffer[:, router].copy_(chosen)
        self.written.add(router)

    def rows(self) -> Tensor:
        assert self.buffer is not None and len(self.written) == self.routers, f"only routers {self.written} were asked"
        return self.buffer.flatten(1)


class ExpertRouting:
    """What the routers of one model do in its forward passes: choose, choose and record, or choose what was recorded."""

    def __init__(self, routers: int, experts: int, k: int) -> None:
        self.routers, self.experts, self.k = routers, experts, k
        self.told_missing = False  # that records of a policy lack its routes
        self._record: _Record | None = None
        self._forced: Tensor | None = None  # [N, R, k]
        self._padded = False

    @property
    def width(self) -> int:
        """Experts of one position: R · k."""
        return self.routers * self.k

    @property
    def active(self) -> bool:
        return self._record is not None or self._forced is not None

    @contextmanager
    def recording(self, into: Tensor | None = None) -> Iterator[Callable[[], Tensor]]:
        """Record the choices of one forward pass; the function returns them, [N, R · k] int16. ``into`` [N, R, k] int16 receives
        them: inside a captured graph a buffer that every replay writes again. Without it a new one is made."""
        record = self._record = _Record(self.routers, into)
        try:
            yield record.rows
        finally:
            self._record = None

    @contextmanager
    def forcing(self, routes: Tensor | None, padded: bool = False) -> Iterator[None]:
        """Make the routers choose ``routes`` [N, R · k] or [N, R, k]; ``FREE`` leaves the choice to them, None all choices.
        ``padded``: positions may follow that choose for themselves."""
        if routes is not None and routes[0].numel() != self.width:
            raise SettingError(
                f"records name {routes[0].numel()} experts for each position, and this model has {self.routers} routers that "
                f"choose {self.k}: another model sampled them"
            )
        before = self._forced, self._padded
        self._forced = None if routes is None else routes.unflatten(-1, (-1, self.k)).flatten(1, -2)
        self._padded = padded
        try:
            yield
        finally:
            self._forced, self._padded = before

    def recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For activation checkpointing: a recomputation, which runs after ``forcing`` has ended, is forced as now."""
        return nullcontext(), self.forcing(self._forced)

    def choose(self, router: int, scores: Tensor, best: Any) -> Any:
        """The result of ``topk`` over ``scores`` [N, experts], replaced where experts are forced."""
        if self._forced is not None:
            forced = self._forced[:, router].to(best.indices.dtype)
            if self._padded:
                forced = torch.nn.functional.pad(forced, (0, 0, 0, len(scores) - len(forced)), value=FREE)
            if len(forced) != len(scores):
                raise SettingError(f"a router reads {len(scores)} positions, and {len(forced)} are recorded")
            index = torch.where(forced == FREE, best.indices, forced)
            best = type(best)((scores.gather(-1, index), index))
        if self._record is not None:
            self._record.write(router, best.indices)
        return best


class _WatchTopK(TorchFunctionMode):
    """Calls ``seen(scores, best)`` with every ``topk`` over all experts, which returns what the caller gets."""

    def __init__(self, experts: int, seen: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.experts, self.seen = experts, seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in TOP_K:
            return out
        scores: Tensor = args[0] if args else kwargs["input"]
        return self.seen(scores, out) if scores.dim() == 2 and scores.shape[1] == self.experts else out


def _routed_forward(forward: Callable[..., Any], routing: ExpertRouting, router: int, *args: Any, **kwargs: Any) -> Any:
    if not routing.active:
        return forward(*args, **kwargs)
    with _WatchTopK(routing.experts, partial(routing.choose, router)):
        return forward(*args, **kwargs)


# ------------------------------------------------------------------ finding routers


def routing_of(decoder: nn.Module) -> ExpertRouting | None:
    """The routing that ``attach_routing`` gave this decoder; None without routers."""
    routing: ExpertRouting | None = getattr(decoder, ATTRIBUTE, None)
    return routing


def free_routing(model: PreTrainedModel) -> None:
    """Let the routers of this model choose for themselves, here and in its copies: nothing is recorded or forced."""
    setattr(model.get_decoder(), OFF, True)


def forced_routes(decoder: nn.Module, routes: Tensor | None) -> AbstractContextManager[None]:
    """Make the routers of this decoder choose ``routes`` [N, R · k]; None: what they choose themselves."""
    routing = routing_of(decoder)
    return nullcontext() if routing is None or routes is None else routing.forcing(routes)


def attach_routing(model: PreTrainedModel) -> ExpertRouting | None:
    """Find the routers of a model and let its forward passes record or force them; None where it has none. The model must run
    its own attention."""
    decoder: Any = model.get_decoder()
    if (routing := routing_of(decoder)) is not None:
        return routing
    config = model.config.get_text_config()
    places = (config, getattr(config, "ffn_config", None))
    counts = [getattr(place, name, None) for place in places for name in EXPERT_COUNTS]
    experts = max([count for count in counts if isinstance(count, int)], default=0)
    if experts < 2 or getattr(decoder, OFF, False):
        return None
    try:
        routers = _find_routers(decoder, experts)
        reason = "" if len({k for _, k in routers}) == 1 else "they choose no fixed number"
    except (TypeError, ValueError, RuntimeError, AttributeError) as fault:
        reason = f"{type(fault).__name__}: {fault}"
    if reason:
        log.warning("the routers of %s are not recorded: %s", type(model).__name__, reason)
        return None
    routing = ExpertRouting(len(routers), experts, routers[0][1])
    for number, (router, _) in enumerate(routers):
        router.forward = partial(_routed_forward, router.forward, routing, number)
    setattr(decoder, ATTRIBUTE, routing)
    return routing


@torch.no_grad()
def _find_routers(decoder: nn.Module, experts: int) -> list[tuple[nn.Module, int]]:
    """The modules that choose among the experts, and how many each chooses, in the order in which they run."""
    running: list[nn.Module] = []
    routers: dict[nn.Module, int] = {}

    def seen(scores: Tensor, best: Any) -> Any:
        if len(scores) == PROBE_IDS and running:
            routers[running[-1]] = best.indices.shape[1]
        return best

    def leave(
        module: nn.Module, args: Any, output: Any
    ) -> None:  # returns None: anything else would replace the output
        running.pop()

    enter = lambda module, args: running.append(module)  # noqa: E731
    hooks = [h for m in decoder.modules() for h in (m.register_forward_pre_hook(enter), m.register_forward_hook(leave))]
    try:
        ids = torch.arange(PROBE_IDS, device=next(decoder.parameters()).device)[None]
        with _WatchTopK(experts, seen):
            decoder(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return list(routers.items())


# ------------------------------------------------------------------ formats


def as_rows(routes: Tensor) -> list[bytes]:
    """Recorded choices [N, R · k] as the records hold them: a row of little-endian int16 for each position."""
    data = routes.to("cpu", torch.int16).contiguous().numpy().astype("<i2", copy=False)
    return [row.tobytes() for row in data]


def as_cache_entries(routes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Choices as numbers that bfloat16 holds exactly: high and low bytes."""
    return (routes // BYTE).to(dtype), (routes % BYTE).to(dtype)


def distinct_positions(ids: Tensor, routes: Tensor | None) -> Tensor:
    """Ids [L] that are equal only where the recorded choices are equal too: a shared prefix is computed once, in one way."""
    if routes is None:
        return ids
    numbers: dict[tuple[int, bytes], int] = {}
    pairs = zip(ids.tolist(), as_rows(routes))
    return torch.tensor([numbers.setdefault(pair, len(numbers)) for pair in pairs], dtype=ids.dtype, device=ids.device)
