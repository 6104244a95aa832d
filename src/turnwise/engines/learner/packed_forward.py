"""Packed sequences through a stock causal LM: attention that follows sequence boundaries, and the hidden states.

Legend: L packed positions, S sequences, P padded positions, H heads, D width.

Attention pads sequences of like length on the right into buckets. Under a causal mask no real position ever sees the
padding, so plain causal attention is exact and no mask is built. On a GPU in half precision and by the C kernels of a CPU
nothing is padded: one call reads ragged sequences. A beginning that several sequences share is read once.

This module does not know what the hidden states are for: no log-probabilities, no sampled tokens, no losses.
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
from turnwise.core.levels import send
from turnwise.engines import attention_interface
from turnwise.engines.kernels.cpu import attention as kernels
from turnwise.engines.kernels.dispatch import kind_of
from turnwise.engines.learner import llama_layers
from turnwise.engines.learner.shared_prefix import Copy, Shared
from turnwise.engines.learner.varlen_attention import Ragged
from turnwise.errors import SettingError

log = logging.getLogger(__name__)

FILL = 0.75  # a bucket takes sequences down to this part of its longest ...
SLACK = 16  # ... or this much shorter, whichever is more: one more launch costs as much as some padding
TOLERANCE = 1e-3  # of the largest logit, between two ways of reading


class PackedLayout:
    """How packed sequences attend: each to itself, causally. One layout serves all layers of a forward pass."""

    def __init__(self, start: Tensor, shared: Shared | None = None) -> None:
        """``shared``: q, k and v come for the positions that are read, not for their copies."""
        lengths = start[1:] - start[:-1]
        order = torch.argsort(lengths, stable=True)
        self.buckets = _buckets(lengths[order].tolist())
        padded = torch.tensor([t for rows, t in self.buckets for _ in range(rows)], dtype=torch.int64).to(start.device)
        offset = torch.empty_like(lengths)
        offset[order] = torch.cumsum(padded, 0) - padded
        total = int(padded.sum())
        here = torch.arange(int(start[-1]), device=start.device)
        slot = here + torch.repeat_interleave(offset - start[:-1], lengths)
        whole = shared or Shared.none(here)
        self.slot = None if total == len(whole.first) and torch.equal(slot, here) else slot
        self.copy = None if self.slot is None else Copy(whole, slot, total)
        self._masks: dict[tuple[int, int], Tensor] = {}
        self.packing = kernels.Packing.of(whole.row, whole.first, start) if start.device.type == "cpu" else None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [1, H, L, D], k and v [1, Hkv, L, D] -> [1, L, H, D]."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self.attend_rows(q, k, v, scale, window)[None]

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
        """q [L, H, D], k and v [L, Hkv, D] -> [L, H, D]."""
        if self.packing is not None and window is None and kernels.fits(q, k, v, self.packing):
            return kernels.attend(q, k, v, scale, self.packing)
        if self.copy is not None:
            q, k, v = (self.copy.spread(x) for x in (q, k, v))  # [P, H, D]
        parts, at = [], 0
        for rows, length in self.buckets:
            cut = slice(at, at + rows * length)
            a, b, c = (x[cut].unflatten(0, (rows, length)).transpose(1, 2) for x in (q, k, v))  # [rows, H, length, D]
            parts.append(self._bucket(a, b, c, scale, window).transpose(1, 2).flatten(0, 1))
            at = cut.stop
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self.copy is None else self.copy.take(out)

    def _bucket(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        length = q.shape[2]
        mask = None if window is None or length <= window else self._mask(length, window, q.device)
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)

    def _mask(self, length: int, window: int, device: torch.device) -> Tensor:
        if (length, window) not in self._masks:
            here = torch.arange(length, device=device)
            back = here[:, None] - here[None, :]
            self._masks[length, window] = (back >= 0) & (back < window)
        return self._masks[length, window]


def _layout(
    start: Tensor, shared: Shared, model: PreTrainedModel, to: Callable[[Tensor], Tensor]
) -> PackedLayout | Ragged:
    weight = next(model.parameters())
    if weight.is_cuda and kind_of(weight) in (torch.bfloat16, torch.float16):
        return Ragged.of(start, shared)
    return PackedLayout(to(start), Shared(to(shared.first), to(shared.row)))


def _buckets(lengths: list[int]) -> list[tuple[int, int]]:
    """Ascending lengths -> (rows, padded length) of each bucket."""
    out: list[tuple[int, int]] = []
    rows, longest = 0, 0
    for length in reversed(lengths):
        if rows and length < longest * FILL and length < longest - SLACK:
            out.append((rows, longest))
            rows = 0
        longest = longest if rows else length
        rows += 1
    return [*([(rows, longest)] if rows else []), *reversed(out)]


# --------------------------------------------------------------------- models


@dataclass(frozen=True, eq=False)
class States:
    """What the LM head would read at packed positions: ``values`` [U, D], and which of them each position has, [L]."""

    values: Tensor
    row: Tensor

    def at(self, positions: Tensor) -> Tensor:
        return _Rows.apply(self.values, self.row[positions])


class _Rows(torch.autograd.Function):
    """Chosen rows; what flows back to a row that was chosen often adds up in float32 at least."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size = len(x)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        whole = wide.new_zeros(ctx.size, *grad.shape[1:])
        return whole.index_add_(0, ctx.saved_tensors[0], wide).to(grad.dtype), None


def hidden_states(model: PreTrainedModel, sequences: Sequences, through: bool = False) -> Tensor:
    """What the LM head would read at every packed position, [L, D]."""
    states = read(model, sequences, through, whole=True)
    return states.at(torch.arange(len(states.row), device=states.row.device))


def read(model: PreTrainedModel, sequences: Sequences, through: bool = False, whole: bool = False) -> States:
    """The states of packed sequences. The model must have been adopted.

    If tokens were sampled, only the states they were sampled from are true: much of the rest is not computed. ``through``: those
    after the sampled tokens are wanted too. ``whole``: and all that come before."""
    here = sequences.host or sequences  # what is looked at on the host keeps no GPU waiting
    to = partial(send, device=next(model.parameters()).device)
    kept, position, start = _worth_reading(here, through)
    ids = here.ids[kept]
    # stock norms pass gradients through float32 even in a float64 model, where a rounded sum is not the sum of the
    # rounded: exactness is what float64 is asked for, so there nothing is shared
    shared = Shared.none(ids) if model.dtype == torch.float64 else Shared.of(ids, start)
    row = torch.zeros_like(here.ids).index_copy(0, kept, shared.row)
    decoder, layout = model.get_decoder(), _layout(start, shared, model, to)
    ids, position = ids[shared.first], position[shared.first]
    fast = llama_layers.of(decoder)
    if isinstance(layout, Ragged) and fast is not None:  # captured graphs have fixed sizes
        return States(fast(ids, position, layout), to(row))
    ids, position, row = to(ids), to(position), to(row)
    layout = layout.to(ids.device) if isinstance(layout, Ragged) else layout
    if fast is not None and here.at.numel() and not whole:
        wanted = torch.cat([here.at - 1, here.at]) if through else here.at - 1
        asked, place = _distinct(row[to(wanted)], len(ids))
        return States(fast(ids, position, layout, asked), place[row])
    if fast is not None:
        return States(fast(ids, position, layout), row)
    out = decoder(input_ids=ids[None], position_ids=position[None], use_cache=False, layout=layout)
    return States(out.last_hidden_state[0], row)


def _distinct(rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Some of ``size`` rows, each once, ascending; and the place of each row among them."""
    chosen = torch.zeros(size, dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
    return chosen.nonzero().squeeze(1), (chosen.long().cumsum(0) - 1).clamp_(min=0)


def _worth_reading(sequences: Sequences, through: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Packed positions, their places in their own sequences, and where each sequence begins among them: what follows a
    sequence's last sampled token, and the token itself unless the reading goes ``through`` it, predicts nothing that anybody
    asks for. Sampled tokens lie in the order of the sequences."""
    begin, at = sequences.start[:-1], sequences.at
    lengths = sequences.lengths
    if at.numel():
        until = torch.searchsorted(at, sequences.start)  # how many sampled tokens lie before each sequence's begin
        last = at[(until[1:] - 1).clamp(min=0)]
        lengths = torch.where(until.diff() > 0, last + through - begin, 1)
    start = torch.cat([begin.new_zeros(1), lengths.cumsum(0)])
    position = torch.arange(int(start[-1]), device=begin.device) - torch.repeat_interleave(start[:-1], lengths)
    return position + torch.repeat_interleave(begin, lengths), position, start


def layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """The decoder layers, in order."""
    found = getattr(model.get_decoder(), "layers", None) or getattr(model.get_decoder(), "h", None)
    if found is None:
        raise SettingError(
            f"{type(model).__name__} does not show its decoder layers, so no noise can be put between them"
        )
    return list(found)


def recompute(model: PreTrainedModel) -> None:
    """From now on keep only what enters each layer, and compute the layer again in the backward pass."""
    fast = llama_layers.of(model.get_decoder())
    if fast is not None:
        fast.recompute = True
    for layer in layers(model):  # for the stock forward, should it be needed
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def head(model: PreTrainedModel) -> nn.Linear:
    """The linear map from hidden states to logits."""
    found = model.get_output_embeddings()
    if not isinstance(found, nn.Linear):
        raise SettingError(f"{type(model).__name__} has no linear output head (found {type(found).__name__})")
    return found


def adopt(model: PreTrainedModel) -> PreTrainedModel:
    """Route attention through layouts, after proving on random ids that packing does not change this model's logits."""
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):  # too weak on random weights for the proof
        if getattr(model.config, name, None):
            raise SettingError(f"{type(model).__name__} uses {name}, which packed training does not support")
    model.set_attn_implementation("eager")  # the one every model has; what the model came with may not run in float32
    lengths = (5, 12, 9)
    linear = head(model)
    device, generator = linear.weight.device, torch.Generator().manual_seed(0)
    ids = torch.randint(linear.weight.shape[0], (sum(lengths),), generator=generator).to(device)
    with torch.no_grad():
        expected = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(lengths)])
        attention_interface.adopt(model)
        start = torch.tensor([0, *lengths], device=device).cumsum(0)
        sequences = Sequences(ids, start, torch.arange(len(lengths), device=device), start[:0])
        gap = lambda: float((linear(hidden_states(model, sequences)) - expected).abs().max() / expected.abs().max())  # noqa: E731
        if llama_layers.of(model.get_decoder()) is not None:
            _prove_blocks(model, gap)
        try:
            found = gap()
        except (TypeError, RuntimeError, AttributeError, SettingError) as fault:
            reason = "its layers do not hand our attention layout on" if isinstance(fault, SettingError) else fault
            raise SettingError(f"{type(model).__name__} cannot read packed sequences: {reason}") from fault
    if not found <= TOLERANCE:
        raise SettingError(
            f"{type(model).__name__} gives other logits for packed sequences (off by {found:.2g} of the largest): it scales "
            "its logits or its attention takes an option that packing does not know"
        )
    return model


def _prove_blocks(model: PreTrainedModel, gap: Callable[[], float]) -> None:
    """Keep to the stock forward where the hand-written layers fail or differ: no compiler, a new version of the model ..."""
    try:
        off = gap()
        why = "" if off <= TOLERANCE else f"their logits were off by {off:.2g}"
    except Exception as fault:
        why = f"they failed: {str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__}"
    if why:
        log.warning(
            "the learner reads %s by its stock forward, not by hand-written layers: %s", type(model).__name__, why
        )
        llama_layers.forbid(model.get_decoder(), why)
