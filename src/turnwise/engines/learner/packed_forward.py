"""Forward pass of packed sequences through a causal LM: attention within sequence boundaries, and the hidden states.

Legend: L packed positions, S sequences, P padded positions, U computed positions, H heads, D hidden size.

The fallback right-pads sequences of similar length into buckets. Under a causal mask no real position attends to the padding,
so plain causal attention is exact and needs no mask. Half precision on a GPU and the C kernels on a CPU run variable-length
attention without padding. A prefix that several sequences share is computed once.

Does not know what the hidden states are for: no log-probabilities, no losses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from turnwise.core.batch import Sequences
from turnwise.core.transfer import to_device
from turnwise.engines import attention_interface
from turnwise.engines.experts import attach_routing, distinct_positions, forced_routes, routing_of
from turnwise.engines.kernels import cpu
from turnwise.engines.kernels.dispatch import attention_for, compute_dtype
from turnwise.engines.learner import expert_products, llama_layers, lora, stock_forward
from turnwise.engines.learner.shared_prefix import PaddingMap, SharedPrefixes
from turnwise.engines.learner.varlen_attention import VarlenAttention
from turnwise.errors import SettingError

log = logging.getLogger(__name__)

MIN_FILL = 0.75  # a bucket takes sequences down to this fraction of its longest ...
MAX_PADDING = 16  # ... or this many ids shorter, whichever admits more: another launch costs as much as some padding
CAUSAL_TOLERANCE = 1e-5  # only rounding may differ, and random weights barely look at other positions
TOLERANCE = 1e-3  # largest difference between two execution paths, relative to the largest logit


class PackedLayout:
    """Causal attention within each packed sequence, by padded buckets. One layout serves all layers of a forward pass."""

    def __init__(self, start: Tensor, prefixes: SharedPrefixes | None = None) -> None:
        """``prefixes``: q, k and v hold the computed positions only, not their copies."""
        lengths = start[1:] - start[:-1]
        order = torch.argsort(lengths, stable=True)
        self.buckets = _buckets(lengths[order].tolist())
        padded = torch.tensor([t for rows, t in self.buckets for _ in range(rows)], dtype=torch.int64).to(start.device)
        offset = torch.empty_like(lengths)
        offset[order] = torch.cumsum(padded, 0) - padded
        total = int(padded.sum())
        here = torch.arange(int(start[-1]), device=start.device)
        slot = here + torch.repeat_interleave(offset - start[:-1], lengths)
        prefixes = prefixes or SharedPrefixes.unshared(here)
        self.slot = None if total == len(prefixes.computed) and torch.equal(slot, here) else slot
        self.padding_map = None if self.slot is None else PaddingMap(prefixes, slot, total)
        self._masks: dict[tuple[int, int], Tensor] = {}
        self.packing = cpu.Packing.of(prefixes.row_of, prefixes.computed, start) if start.device.type == "cpu" else None

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [1, H, L, D], k and v [1, Hkv, L, D] -> [1, L, H, D]."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self.attend_rows(q, k, v, scale, window)[None]

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
        """q [L, H, D], k and v [L, Hkv, D] -> [L, H, D]."""
        if self.packing is not None and window is None and cpu.attention_fits(q, k, v, self.packing):
            return cpu.varlen_attention(q, k, v, scale, self.packing)
        if self.padding_map is not None:
            q, k, v = (self.padding_map.scatter(x) for x in (q, k, v))  # [P, H, D]
        parts, at = [], 0
        for rows, length in self.buckets:
            bucket = slice(at, at + rows * length)
            # [rows, H, length, D]
            a, b, c = (x[bucket].unflatten(0, (rows, length)).transpose(1, 2) for x in (q, k, v))
            parts.append(self._attend_bucket(a, b, c, scale, window).transpose(1, 2).flatten(0, 1))
            at = bucket.stop
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self.padding_map is None else self.padding_map.gather(out)

    def _attend_bucket(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        length = q.shape[2]
        mask = None if window is None or length <= window else self._mask(length, window, q.device)
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)

    def _mask(self, length: int, window: int, device: torch.device) -> Tensor:
        if (length, window) not in self._masks:
            here = torch.arange(length, device=device)
            distance = here[:, None] - here[None, :]
            self._masks[length, window] = (distance >= 0) & (distance < window)
        return self._masks[length, window]


def _attention_layout(
    start: Tensor, prefixes: SharedPrefixes, model: PreTrainedModel, to: Callable[[Tensor], Tensor]
) -> PackedLayout | VarlenAttention:
    weight = next(model.parameters())
    if weight.is_cuda and compute_dtype(weight) in (torch.bfloat16, torch.float16):
        attention_for(weight, _head_size(model))  # checks itself when first asked: not inside a recomputation
        return VarlenAttention.of(start, prefixes)
    return PackedLayout(to(start), SharedPrefixes(to(prefixes.computed), to(prefixes.row_of)))


def _head_size(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def _buckets(lengths: list[int]) -> list[tuple[int, int]]:
    """Ascending sequence lengths -> (sequences, padded length) of each bucket."""
    out: list[tuple[int, int]] = []
    rows, longest = 0, 0
    for length in reversed(lengths):
        if rows and length < longest * MIN_FILL and length < longest - MAX_PADDING:
            out.append((rows, longest))
            rows = 0
        longest = longest if rows else length
        rows += 1
    return [*([(rows, longest)] if rows else []), *reversed(out)]


# --------------------------------------------------------------------- models


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


def hidden_states(model: PreTrainedModel, sequences: Sequences, after_sampled: bool = False) -> Tensor:
    """Inputs of the LM head at every packed position, [L, D]."""
    states = packed_states(model, sequences, after_sampled, all_positions=True)
    return states.at(torch.arange(len(states.row_of), device=states.row_of.device))


def packed_states(
    model: PreTrainedModel, sequences: Sequences, after_sampled: bool = False, all_positions: bool = False
) -> PackedStates:
    """Hidden states of packed sequences. Call ``prepare`` on the model first.

    If tokens were sampled, only the states they were sampled from are valid: many others are not computed. ``after_sampled``:
    also the states after the sampled tokens. ``all_positions``: and all states before them."""
    sequences = sequences.host or sequences  # the host copy: reading it does not wait for the GPU
    to = partial(to_device, device=next(model.parameters()).device)
    kept, position, start = _positions_to_compute(sequences, after_sampled)
    ids, routing = sequences.ids[kept], routing_of(model.get_decoder())
    routes = None if routing is None or sequences.routes is None else sequences.routes[kept]
    if stock_forward.runs_separately(model.get_decoder()):
        row_of = torch.zeros_like(sequences.ids).index_copy(0, kept, torch.arange(len(kept), device=kept.device))
        routes = None if routes is None else to(routes)
        return PackedStates(stock_forward.separate_states(model.get_decoder(), to(ids), start, routes), to(row_of))
    # Stock norms round gradients to float32 even in a float64 model, and rounding a sum differs from summing the rounded
    # terms. float64 is chosen for exactness, so it shares no prefixes.
    unshared = model.dtype == torch.float64
    prefixes = SharedPrefixes.unshared(ids) if unshared else SharedPrefixes.of(distinct_positions(ids, routes), start)
    row_of = torch.zeros_like(sequences.ids).index_copy(0, kept, prefixes.row_of)
    decoder, layout = model.get_decoder(), _attention_layout(start, prefixes, model, to)
    ids, position = ids[prefixes.computed], position[prefixes.computed]
    layers = llama_layers.fast_path(decoder)
    if isinstance(layout, VarlenAttention) and layers is not None:
        # Compute every row: captured graphs have fixed shapes.
        return PackedStates(layers(ids, position, layout), to(row_of))
    ids, position, row_of = to(ids), to(position), to(row_of)
    layout = layout.to(ids.device) if isinstance(layout, VarlenAttention) else layout
    sampled_at = sequences.sampled_at
    if layers is not None and sampled_at.numel() and not all_positions:
        outputs = torch.cat([sampled_at - 1, sampled_at]) if after_sampled else sampled_at - 1
        rows, index_of = _distinct(row_of[to(outputs)], len(ids))
        return PackedStates(layers(ids, position, layout, rows), index_of[row_of])
    if layers is not None:
        return PackedStates(layers(ids, position, layout), row_of)
    with forced_routes(decoder, None if routes is None else to(routes[prefixes.computed])):
        out = decoder(input_ids=ids[None], position_ids=position[None], use_cache=False, layout=layout)
    return PackedStates(out.last_hidden_state[0], row_of)


def _distinct(rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The distinct ``rows`` of ``size``, ascending; and the index of each row among them, [size]."""
    present = torch.zeros(size, dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
    return present.nonzero().squeeze(1), (present.long().cumsum(0) - 1).clamp_(min=0)


def _positions_to_compute(sequences: Sequences, after_sampled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The packed positions to compute, their positions within their sequences, and where each sequence starts among them.

    Drops what follows a sequence's last sampled token, and that token itself unless ``after_sampled``: no requested state
    depends on it. Sampled tokens are in the order of the sequences."""
    begin, at = sequences.start[:-1], sequences.sampled_at
    lengths = sequences.lengths
    if at.numel():
        until = torch.searchsorted(at, sequences.start)  # number of sampled tokens before each sequence
        last = at[(until[1:] - 1).clamp(min=0)]
        lengths = torch.where(until.diff() > 0, last + after_sampled - begin, 1)
    start = torch.cat([begin.new_zeros(1), lengths.cumsum(0)])
    position = torch.arange(int(start[-1]), device=begin.device) - torch.repeat_interleave(start[:-1], lengths)
    return position + torch.repeat_interleave(begin, lengths), position, start


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
    if stock_forward.has_own_head(model):
        return stock_forward.own_logits(model, states)
    head = lm_head(model)
    if head.weight.dtype == states.dtype or torch.is_autocast_enabled(states.device.type):
        return head(states)
    return linear(states, head.weight.to(states.dtype), head.bias)  # frozen in half precision: logits are not rounded


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Choose how this model runs packed sequences, and verify on random ids that its logits do not change: our attention
    layouts where they reproduce them, else its own forward on one sequence at a time."""
    attention_interface.use_eager_attention(model)  # the model's own choice may not support float32
    attach_routing(model)
    lengths = (5, 12, 9)
    head = lm_head(model)
    device, generator = head.weight.device, torch.Generator().manual_seed(0)
    embedding: Tensor = next(model.get_input_embeddings().parameters())
    ids = torch.randint(min(len(head.weight), len(embedding)), (sum(lengths),), generator=generator).to(device)
    ids[-lengths[2] : -lengths[2] + 4] = ids[lengths[0] : lengths[0] + 4]  # a shared prefix
    start = torch.tensor([0, *lengths], device=device).cumsum(0)
    sequences = Sequences(ids, start, torch.arange(len(lengths), device=device), start[:0])
    with torch.no_grad():
        parts = ids.split(lengths)
        expert_products.prepare(model, parts[1])
        expected = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in parts])
        _check_causal(model, parts[1], expected[lengths[0] : sum(lengths[:2])])
        _choose_head(model, head, parts[1])

        def gap() -> float:
            return float(
                (logits_of(model, hidden_states(model, sequences)) - expected).abs().max() / expected.abs().max()
            )

        reason = _packing_fault(model, gap)
        if reason:
            attention_interface.use_eager_attention(model)
            stock_forward.run_separately(model.get_decoder())
            llama_layers.disable(model.get_decoder(), f"one sequence at a time, because {reason}")
            if not (difference := gap()) <= TOLERANCE:
                raise SettingError(
                    f"{type(model).__name__} computes other logits from its decoder's states than its forward does (off by "
                    f"{difference:.2g} of the largest); use another model"
                )
    return model


def _check_causal(model: PreTrainedModel, ids: Tensor, expected: Tensor) -> None:
    """Refuse a model whose logits depend on later ids: it cannot have sampled them one by one."""
    shorter = model(input_ids=ids[None, :-3], use_cache=False).logits[0]
    difference = float((shorter - expected[:-3]).abs().max() / expected.abs().max())
    if not difference <= CAUSAL_TOLERANCE:
        raise SettingError(
            f"{type(model).__name__} is not a causal model: its logits change by {difference:.2g} of the largest with ids that "
            "come later; use a model that predicts each token from those before it"
        )


def _choose_head(model: PreTrainedModel, linear: nn.Linear, ids: Tensor) -> None:
    """Keep the linear head, whose log-probabilities need no logits in memory, where the model does nothing beyond it."""
    try:
        states = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        if not stock_forward.head_deviation(model, linear, states) <= TOLERANCE:
            stock_forward.use_own_head(model)
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
            _verify_layers(model, gap)
        difference = gap()
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as fault:
        if isinstance(fault, torch.OutOfMemoryError):
            raise
        return (str(fault).strip().splitlines() or [type(fault).__name__])[0]
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


def _verify_layers(model: PreTrainedModel, gap: Callable[[], float]) -> None:
    """Fall back to the stock forward where the hand-written layers fail or differ: no compiler, a newer model version ..."""
    try:
        off = gap()
        why = "" if off <= TOLERANCE else f"their logits were off by {off:.2g}"
    except Exception as fault:
        why = f"they failed: {str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__}"
    if why:
        log.warning(
            "the learner runs %s by its stock forward, not by hand-written layers: %s", type(model).__name__, why
        )
        llama_layers.disable(model.get_decoder(), why)
