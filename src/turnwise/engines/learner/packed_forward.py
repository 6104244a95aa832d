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
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from turnwise.core.batch import Sequences
from turnwise.core.transfer import to_device
from turnwise.engines import attention_interface
from turnwise.engines.kernels.cpu import attention as kernels
from turnwise.engines.kernels.dispatch import compute_dtype
from turnwise.engines.learner import llama_layers
from turnwise.engines.learner.shared_prefix import PaddingMap, SharedPrefixes
from turnwise.engines.learner.varlen_attention import VarlenAttention
from turnwise.errors import SettingError

log = logging.getLogger(__name__)

MIN_FILL = 0.75  # a bucket takes sequences down to this fraction of its longest ...
MAX_PADDING = 16  # ... or this many ids shorter, whichever admits more: another launch costs as much as some padding
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
        self.packing = (
            kernels.Packing.of(prefixes.row_of, prefixes.computed, start) if start.device.type == "cpu" else None
        )

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [1, H, L, D], k and v [1, Hkv, L, D] -> [1, L, H, D]."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self.attend_rows(q, k, v, scale, window)[None]

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
        """q [L, H, D], k and v [L, Hkv, D] -> [L, H, D]."""
        if self.packing is not None and window is None and kernels.fits(q, k, v, self.packing):
            return kernels.varlen_attention(q, k, v, scale, self.packing)
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
        return VarlenAttention.of(start, prefixes)
    return PackedLayout(to(start), SharedPrefixes(to(prefixes.computed), to(prefixes.row_of)))


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
    ids = sequences.ids[kept]
    # Stock norms round gradients to float32 even in a float64 model, and rounding a sum differs from summing the rounded
    # terms. float64 is chosen for exactness, so it shares no prefixes.
    prefixes = SharedPrefixes.unshared(ids) if model.dtype == torch.float64 else SharedPrefixes.of(ids, start)
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
    fast = llama_layers.fast_path(model.get_decoder())
    if fast is not None:
        fast.recompute = True
    for layer in decoder_layers(model):  # also in the stock forward, which may be the fallback
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def lm_head(model: PreTrainedModel) -> nn.Linear:
    """The linear layer from hidden states to logits."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise SettingError(
            f"{type(model).__name__} has no linear output head (found {type(head).__name__}); use a causal LM that has one"
        )
    return head


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Route attention through layouts and verify on random ids that packing does not change this model's logits."""
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):  # the check below misses it on random weights
        if getattr(model.config, name, None):
            raise SettingError(f"{type(model).__name__} uses {name}, which packed training does not support")
    model.set_attn_implementation("eager")  # every model has it; the model's own choice may not support float32
    lengths = (5, 12, 9)
    linear = lm_head(model)
    device, generator = linear.weight.device, torch.Generator().manual_seed(0)
    ids = torch.randint(linear.weight.shape[0], (sum(lengths),), generator=generator).to(device)
    with torch.no_grad():
        expected = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(lengths)])
        attention_interface.install_attention(model)
        start = torch.tensor([0, *lengths], device=device).cumsum(0)
        sequences = Sequences(ids, start, torch.arange(len(lengths), device=device), start[:0])
        gap = lambda: float((linear(hidden_states(model, sequences)) - expected).abs().max() / expected.abs().max())  # noqa: E731
        if llama_layers.fast_path(model.get_decoder()) is not None:
            _verify_layers(model, gap)
        try:
            difference = gap()
        except (TypeError, RuntimeError, AttributeError, SettingError) as fault:
            reason = "its layers do not pass our attention layout on" if isinstance(fault, SettingError) else fault
            raise SettingError(f"{type(model).__name__} cannot run packed sequences: {reason}") from fault
    if not difference <= TOLERANCE:
        raise SettingError(
            f"{type(model).__name__} gives other logits for packed sequences (off by {difference:.2g} of the largest): it "
            "scales its logits, or its attention has an option that packing does not support; use another model"
        )
    return model


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
