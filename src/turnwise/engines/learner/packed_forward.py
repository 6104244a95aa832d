"""Forward pass of packed sequences through a causal LM, and the choice of how a model runs them.

Legend: L packed positions, U computed positions, N sampled tokens, D hidden size, V vocabulary size.

``prepare`` decides by comparison: our attention layouts and hand-written layers where the logits stay the same, else the model's
own forward on one sequence at a time; its linear head, or its own way to logits (a scale, a soft cap); experts of a mixture in
the compute dtype, or as the model computes them. The decisions are attributes of the modules, so that copies (a reference, a
critic's trunk) run as the original does.

``ForwardPass`` is one such pass over a micro-batch, shared by all signals that need it. Does not know what a signal is for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from turnwise.core.batch import Batch, Sequences
from turnwise.core.kept_sets import KeptSets
from turnwise.core.levels import TOKEN
from turnwise.core.transfer import to_device
from turnwise.engines import attention_interface, experts
from turnwise.engines.experts import forced_routes, routing_of
from turnwise.engines.kernels.dispatch import attention_for, compute_dtype
from turnwise.engines.learner import llama_layers, lora
from turnwise.engines.learner.layouts import PackedLayout, SharedPrefixes, VarlenAttention
from turnwise.engines.learner.logprobs import logprobs_of, token_logprobs
from turnwise.errors import SettingError

log = logging.getLogger(__name__)

CAUSAL_TOLERANCE = 1e-5  # only rounding may differ, and random weights barely look at other positions
TOLERANCE = 1e-3  # largest difference between two execution paths, relative to the largest logit ...
HALF_TOLERANCE = 0.05  # ... and where products round to half precision
SEPARATE, OWN_HEAD = "_turnwise_separate", "_turnwise_own_head"
CHUNK = 1 << 22  # elements in one chunk of logits [tokens, vocabulary]
PROBE_SCALES = (1.0, 1000.0)  # a soft cap of 30 does nothing to the small logits of random weights


@dataclass(frozen=True, eq=False)
class PackedStates:
    """Inputs of the LM head: ``values`` [U, D] of the computed positions, and the row of each packed position, [L]."""

    values: Tensor
    row_of: Tensor

    def at(self, positions: Tensor) -> Tensor:
        return _GatherRows.apply(self.values, self.row_of[positions])


class _GatherRows(torch.autograd.Function):
    """index_select whose backward pass sums the gradients of repeated rows in at least float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size = len(x)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        total = wide.new_zeros(ctx.size, *grad.shape[1:])
        return total.index_add_(0, ctx.saved_tensors[0], wide).to(grad.dtype), None


def hidden_states(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """Inputs of the LM head at every packed position, [L, D]."""
    states = packed_states(model, sequences, all_positions=True)
    return states.at(torch.arange(len(states.row_of), device=states.row_of.device))


def packed_states(
    model: PreTrainedModel, sequences: Sequences, after_sampled: bool = False, all_positions: bool = False
) -> PackedStates:
    """Hidden states of packed sequences. Call ``prepare`` on the model first.

    If tokens were sampled, only the states they were sampled from are valid: many others are not computed. ``after_sampled``:
    also the states after the sampled tokens. ``all_positions``: and all states before them."""
    sequences = sequences.host or sequences  # the host copy: reading it does not wait for the GPU
    to = partial(to_device, device=next(model.parameters()).device)
    needed, position, start = _positions_to_compute(sequences, after_sampled)
    ids, routing = sequences.ids[needed], routing_of(model.get_decoder())
    routes = None if routing is None or sequences.routes is None else sequences.routes[needed]
    if runs_separately(model.get_decoder()):
        row_of = torch.zeros_like(sequences.ids).index_copy(0, needed, torch.arange(len(needed), device=needed.device))
        routes = None if routes is None else to(routes)
        return PackedStates(separate_states(model.get_decoder(), to(ids), start, routes), to(row_of))
    # Stock norms round gradients to float32 even in a float64 model, and rounding a sum differs from summing the rounded
    # terms. float64 is chosen for exactness, so it shares no prefixes.
    if model.dtype == torch.float64:
        prefixes = SharedPrefixes.unshared(ids)
    else:
        prefixes = SharedPrefixes.of(experts.distinct_positions(ids, routes), start)
    row_of = torch.zeros_like(sequences.ids).index_copy(0, needed, prefixes.row_of)
    decoder, weight = model.get_decoder(), next(model.parameters())
    layout: PackedLayout | VarlenAttention
    ids, position = ids[prefixes.computed], position[prefixes.computed]
    layers = llama_layers.fast_path(decoder)
    if weight.is_cuda and compute_dtype(weight) in (torch.bfloat16, torch.float16):
        config = model.config.get_text_config()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention_for(weight, int(size))  # checks itself when first asked: not inside a recomputation
        layout = VarlenAttention.of(start, prefixes)
        if layers is not None:  # every row: captured graphs have fixed shapes
            return PackedStates(layers(ids, position, layout), to(row_of))
        layout = layout.to(weight.device)
    else:
        layout = PackedLayout(to(start), SharedPrefixes(to(prefixes.computed), to(prefixes.row_of)))
    ids, position, row_of = to(ids), to(position), to(row_of)
    sampled_at = sequences.sampled_at
    if layers is not None and (all_positions or not sampled_at.numel()):
        return PackedStates(layers(ids, position, layout), row_of)
    if layers is not None:
        outputs = torch.cat([sampled_at - 1, sampled_at]) if after_sampled else sampled_at - 1
        # the last layer computes the distinct rows that are read, ascending; ``index_of``: each row's index among them
        present = torch.zeros(len(ids), dtype=torch.bool, device=ids.device).index_fill_(0, row_of[to(outputs)], True)
        rows, index_of = present.nonzero().squeeze(1), (present.long().cumsum(0) - 1).clamp_(min=0)
        return PackedStates(layers(ids, position, layout, rows), index_of[row_of])
    with forced_routes(decoder, None if routes is None else to(routes[prefixes.computed])):
        out = decoder(input_ids=ids[None], position_ids=position[None], use_cache=False, layout=layout)
    return PackedStates(out.last_hidden_state[0], row_of)


def _positions_to_compute(sequences: Sequences, after_sampled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The packed positions to compute, their positions within their sequences, and where each sequence starts among them."""
    # No requested state depends on what follows a sequence's last sampled token, nor on that token itself unless
    # ``after_sampled``. Sampled tokens are in the order of the sequences.
    begin, at = sequences.start[:-1], sequences.sampled_at
    lengths = sequences.lengths
    if at.numel():
        until = torch.searchsorted(at, sequences.start)  # number of sampled tokens before each sequence
        last = at[(until[1:] - 1).clamp(min=0)]
        lengths = torch.where(until.diff() > 0, last + after_sampled - begin, 1)
    start = torch.cat([begin.new_zeros(1), lengths.cumsum(0)])
    position = torch.arange(int(start[-1]), device=begin.device) - torch.repeat_interleave(start[:-1], lengths)
    return position + torch.repeat_interleave(begin, lengths), position, start


def runs_separately(decoder: nn.Module) -> bool:
    """Whether this decoder runs on one sequence at a time."""
    return getattr(decoder, SEPARATE, False)


def separate_states(decoder: nn.Module, ids: Tensor, start: Tensor, routes: Tensor | None = None) -> Tensor:
    """Inputs of the LM head at every position, [L, D]. ``routes`` [L, experts]: what the routers must choose."""
    lengths = start.diff().tolist()
    parts, forced = ids.split(lengths), None if routes is None else routes.split(lengths)
    by_length: dict[int, list[int]] = {}  # sequences of equal length share a pass, because they need no padding
    for n, part in enumerate(parts):
        by_length.setdefault(len(part), []).append(n)
    states: dict[int, Tensor] = {}
    for members in by_length.values():
        with forced_routes(decoder, None if forced is None else torch.cat([forced[n] for n in members])):
            out = decoder(input_ids=torch.stack([parts[n] for n in members]), use_cache=False)
        states |= dict(zip(members, out.last_hidden_state))
    return torch.cat([states[n] for n in range(len(parts))])


def decoder_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """The decoder layers, in order."""
    layers = getattr(model.get_decoder(), "layers", None) or getattr(model.get_decoder(), "h", None)
    if layers is None:
        raise SettingError(
            f"{type(model).__name__} has neither `layers` nor `h`, so noise and recomputation cannot reach its layers; "
            "use a method without layer noise, and write recompute=False"
        )
    return list(layers)


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Enable activation checkpointing: keep only each layer's input and recompute the layer in the backward pass."""
    llama_layers.enable_recompute(model.get_decoder())
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if (routing := routing_of(model.get_decoder())) is not None:
        options["context_fn"] = routing.recompute_contexts
    for layer in decoder_layers(model):  # also in the stock forward, which may be the fallback
        layer.forward = partial(checkpoint, layer.forward, **options)


# ------------------------------------------------------------------ LM head


def lm_head(model: PreTrainedModel) -> nn.Linear:
    """The linear layer from hidden states to logits."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise SettingError(
            f"{type(model).__name__} has no linear output head (found {type(head).__name__}); use a causal LM that has one"
        )
    return head


def logits_of(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Logits [N, V] of states [N, D]."""
    if has_own_head(model):
        return own_logits(model, states)
    head = lm_head(model)
    if head.weight.dtype == states.dtype or torch.is_autocast_enabled(states.device.type):
        return head(states)
    return linear(states, head.weight.to(states.dtype), head.bias)  # frozen in half precision: logits are not rounded


class _GivenStates:
    """Stands for a decoder's output: the given states, and None for everything else a model may look up."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return self.last_hidden_state if index == 0 else ()


def own_logits(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Logits [N, V] of states [N, D] by all that the model's forward does after its decoder: head, scale, soft cap."""
    ids = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
    decoder: Any = model.get_decoder()
    previous = decoder.__dict__.get("forward")  # an instance's own forward, where something has wrapped it
    decoder.forward = lambda *args, **kwargs: _GivenStates(states[None])
    try:
        return model(input_ids=ids, use_cache=False).logits[0]
    finally:
        del decoder.forward
        if previous is not None:
            decoder.forward = previous


def has_own_head(model: nn.Module) -> bool:
    """Whether the model's own way to logits is more than its linear head."""
    return getattr(model, OWN_HEAD, False)


# ------------------------------------------------- one pass for all its readers


class ForwardPass:
    """Hidden states, log-probabilities and distributions of one model, each computed on first use."""

    def __init__(
        self, batch: Batch, model: PreTrainedModel, context: Callable[[], AbstractContextManager[Any]],
        after_sampled: bool = False, states: PackedStates | None = None,
    ) -> None:  # fmt: skip
        """``context``: what the model runs in: autocast, adapters switched off. ``after_sampled``: also compute the state after
        each sampled token. ``states``: already computed hidden states."""
        self.batch, self.model, self.context, self.after_sampled = batch, model, context, after_sampled
        self._token_logp: tuple[Tensor, Tensor | None] | None = None
        if states is not None:
            self.states = states

    @cached_property
    def states(self) -> PackedStates:
        """Inputs of the LM head at packed positions."""
        with self.context():
            if self.batch.sequences.ids.numel():
                return packed_states(self.model, self.batch.sequences, self.after_sampled)
            return PackedStates(next(self.model.get_input_embeddings().parameters())[:0], self.batch.sequences.ids)

    @cached_property
    def _head_input(self) -> Tensor:
        """``before`` in the compute dtype: the operand of the LM head."""
        return self.states.at(self.batch.sequences.sampled_at - 1)

    @cached_property
    def before(self) -> Tensor:
        """The state each token was sampled from, [N, D], in the dtype of sums."""
        return self._head_input.to(self._wide)

    @cached_property
    def after(self) -> Tensor:
        """The state after the model has read the token itself, [N, D], in the dtype of sums."""
        assert self.after_sampled, "this forward pass stopped before the last sampled tokens"
        return self.states.at(self.batch.sequences.sampled_at).to(self._wide)

    @property
    def _wide(self) -> torch.dtype:
        """The dtype of sums: that of the weights, and float32 for frozen weights in half precision."""
        return torch.promote_types(next(self.model.parameters()).dtype, torch.float32)

    def logp(self, want_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [N] of the sampled tokens, each over the ids that its sampler kept where these are recorded, and with
        ``want_entropy`` the entropies [N] over the whole vocabulary."""
        if self._token_logp is None or (want_entropy and self._token_logp[1] is None):
            self._token_logp = self._logp_over(self.batch.sequences.kept, want_entropy)
        return self._token_logp

    def logp_over_vocabulary(self) -> Tensor:
        """Log-probabilities [N] of the sampled tokens over the whole vocabulary, whatever their samplers kept."""
        return self.logp()[0] if self.batch.sequences.kept is None else self._logp_over(None, False)[0]

    def _logp_over(self, sets: KeptSets | None, want_entropy: bool) -> tuple[Tensor, Tensor | None]:
        target, temperature = self.batch.token.x, self.batch.temperature.at(TOKEN).x
        head, states = lm_head(self.model), self._head_input
        with self.context():
            if has_own_head(self.model):
                logits = partial(own_logits, self.model)
                return logprobs_of(logits, states, head.weight, target, temperature, want_entropy, sets)
            return token_logprobs(
                states, head.weight, head.bias, target, temperature, want_entropy=want_entropy, sets=sets
            )

    # -------------------------------------------------- full distributions
    @cached_property
    def inverse_temperature(self) -> Tensor:
        """1/temperature of each token; greedy turns count as temperature 1."""
        t = self.batch.temperature.at(TOKEN).x.to(self.before.dtype)
        return torch.where(t == 0, 1.0, t).reciprocal()

    def distributions(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, their log-probabilities over the whole vocabulary [rows, V]), one chunk of tokens at a time."""
        size = max(1, CHUNK // max(1, lm_head(self.model).weight.shape[0]))
        for a in range(0, self.before.shape[0], size):
            rows = slice(a, a + size)
            z = logits_of(self.model, self.before[rows])
            yield rows, torch.log_softmax(z * self.inverse_temperature[rows, None], 1)


# ------------------------------------------------------- how a model is run


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Choose how this model runs packed sequences, and verify on random ids that its logits do not change."""
    attention_interface.use_eager_attention(model)  # the model's own choice may not support float32
    experts.attach_routing(model)
    # three lengths, two of them with the same beginning: packing, padding and shared prefixes all take part
    lengths = (5, 12, 9)
    head = lm_head(model)
    device, generator = head.weight.device, torch.Generator().manual_seed(0)
    embedding: Tensor = next(model.get_input_embeddings().parameters())
    ids = torch.randint(min(len(head.weight), len(embedding)), (sum(lengths),), generator=generator).to(device)
    ids[-lengths[2] : -lengths[2] + 4] = ids[lengths[0] : lengths[0] + 4]
    start = torch.tensor([0, *lengths], device=device).cumsum(0)
    sequences = Sequences(ids, start, torch.arange(len(lengths), device=device), start[:0])
    with torch.no_grad():
        parts = ids.split(lengths)
        prepare_experts(model, parts[1])
        expected = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in parts])
        # a model whose logits depend on later ids cannot have sampled them one by one
        alone, shorter = expected[lengths[0] : sum(lengths[:2])], model(input_ids=parts[1][None, :-3], use_cache=False)
        difference = float((shorter.logits[0] - alone[:-3]).abs().max() / alone.abs().max())
        if not difference <= CAUSAL_TOLERANCE:
            raise SettingError(
                f"{type(model).__name__} is not a causal model: its logits change by {difference:.2g} of the largest with ids "
                "that come later; use a model that predicts each token from those before it"
            )
        _choose_head(model, head, parts[1])

        def gap() -> float:
            logits = logits_of(model, hidden_states(model, sequences))
            return float((logits - expected).abs().max() / expected.abs().max())

        # Our attention layouts where they reproduce the logits, else the model's own forward on one sequence at a time.
        reason = _packing_fault(model, gap)
        if reason:
            attention_interface.use_eager_attention(model)
            setattr(model.get_decoder(), SEPARATE, True)
            llama_layers.disable(model.get_decoder(), f"one sequence at a time, because {reason}")
            if not (difference := gap()) <= TOLERANCE:
                raise SettingError(
                    f"{type(model).__name__} computes other logits from its decoder's states than its forward does (off by "
                    f"{difference:.2g} of the largest); use another model"
                )
    return model


def _choose_head(model: PreTrainedModel, head: nn.Linear, ids: Tensor) -> None:
    """Keep the linear head, whose log-probabilities need no logits in memory, where the model does nothing beyond it."""
    try:
        states = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        expected = [(scale, own_logits(model, states * scale)) for scale in PROBE_SCALES]
        if not all(_gap(head(states * scale), logits) <= TOLERANCE for scale, logits in expected):
            setattr(model, OWN_HEAD, True)
    except (TypeError, ValueError, RuntimeError, AttributeError) as fault:
        raise SettingError(
            f"{type(model).__name__} does not separate its decoder from its head, which the learner needs: {fault}"
        ) from fault


def _packing_fault(model: PreTrainedModel, gap: Callable[[], float]) -> str:
    """Route attention through layouts; the reason why this model cannot run so, or an empty string."""
    try:
        attention_interface.install_attention(model)
        probe = attention_interface.LayerProbe()
        ids = torch.zeros(1, 1, dtype=torch.int64, device=lm_head(model).weight.device)
        model.get_decoder()(input_ids=ids, position_ids=ids, use_cache=False, layout=probe)
        probe.check_all_layers(model)
        if llama_layers.fast_path(model.get_decoder()) is not None:
            try:
                off = gap()
                why = "" if off <= TOLERANCE else f"their logits were off by {off:.2g}"
            except Exception as fault:  # no compiler, a newer version of the model ...
                why = f"they failed: {_first_line(fault)}"
            if why:
                log.warning(
                    "the learner runs %s by its stock forward, not by hand-written layers: %s",
                    type(model).__name__,
                    why,
                )
                llama_layers.disable(model.get_decoder(), why)
        difference = gap()
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as fault:
        if isinstance(fault, torch.OutOfMemoryError):
            raise
        return _first_line(fault)
    if difference <= TOLERANCE:
        return ""
    return f"packed sequences change its logits (off by {difference:.2g} of the largest)"


def run_adapters_by_hand(model: PreTrainedModel) -> None:
    """Let the hand-written layers run the adapters that were injected after ``prepare``, where the states they compute are those
    of the stock forward."""
    decoder = model.get_decoder()
    if llama_layers.fast_path(decoder) is None or llama_layers.run_adapters(decoder) is None:
        return
    size, device = len(next(model.get_input_embeddings().parameters())), lm_head(model).weight.device
    ids = torch.randint(size, (21,), generator=torch.Generator().manual_seed(1)).to(device)
    start = torch.tensor([0, 9, 21], device=device)
    sequences = Sequences(ids, start, torch.arange(2, device=device), start[:0])
    with torch.no_grad(), lora.random_adapters(model):
        by_hand = hidden_states(model, sequences)
        llama_layers.disable(decoder, "compared with the hand-written layers")
        expected = hidden_states(model, sequences)
    off = float((by_hand - expected).abs().max() / expected.abs().max())
    if off <= TOLERANCE:
        llama_layers.run_adapters(decoder)
    else:
        llama_layers.disable(decoder, f"adapters, with which hand-written layers were off by {off:.2g}")


def prepare_experts(model: PreTrainedModel, ids: Tensor) -> None:
    """Compute the experts of this model by grouped products in the compute dtype, or where that fails as it did before."""
    configs = experts.expert_configs(model)
    if not configs:
        return
    before = configs[0]._experts_implementation
    experts.use(model, experts.COMPUTE_DTYPE)
    try:
        fault = expert_fault(model, ids, half=ids.is_cuda)
    except (RuntimeError, TypeError, AttributeError, KeyError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        fault = _first_line(error)
    if fault:
        experts.use(model, before)
        log.warning("the learner computes experts of %s by %s: %s", type(model).__name__, before, fault)


@torch.no_grad()
def expert_fault(model: PreTrainedModel, ids: Tensor, half: bool) -> str:
    """What is wrong with the logits of these experts on ids [L]; empty if nothing. ``half``: also under autocast."""
    routing = routing_of(model.get_decoder())
    logits = lambda: model(input_ids=ids[None], use_cache=False).logits[0].float()  # noqa: E731
    eager = partial(experts.using, experts.expert_configs(model), experts.EAGER)
    with eager():
        expected = logits()
    off = _gap(logits(), expected)
    if not off <= TOLERANCE:
        return f"in the compute dtype their logits were off by {off:.2g}"
    if not half or routing is None:
        return ""
    with routing.recording() as chosen, eager():
        logits()
    with routing.forcing(chosen()), torch.autocast(ids.device.type, torch.bfloat16):
        off = _gap(logits(), expected)
    return "" if off <= HALF_TOLERANCE else f"in half precision their logits were off by {off:.2g}"


def _first_line(fault: Exception) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0]


def _gap(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).abs().max() / (1e-6 + expected.abs().max()))
