"""A model's own forward for what packing or a linear head would change: one sequence at a time, or its own way to logits.

``packed_forward.prepare`` decides by comparison which of both a model needs. The decision is an attribute of the module, so
that copies (a reference, a critic's trunk) run as the original does. Does not know what the states are for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.engines.experts import forced_routes

SEPARATE, OWN_HEAD = "_turnwise_separate", "_turnwise_own_head"
PROBE_SCALES = (1.0, 1000.0)  # a soft cap of 30 does nothing to the small logits of random weights


def run_separately(decoder: nn.Module) -> None:
    """Run this decoder on one sequence at a time from now on."""
    setattr(decoder, SEPARATE, True)


def runs_separately(decoder: nn.Module) -> bool:
    return getattr(decoder, SEPARATE, False)


def separate_states(decoder: nn.Module, ids: Tensor, start: Tensor, routes: Tensor | None = None) -> Tensor:
    """Inputs of the LM head at every position, [L, D]. Sequences of equal length share a pass: they need no padding.
    ``routes`` [L, experts]: what the routers must choose."""
    lengths = start.diff().tolist()
    parts, forced = ids.split(lengths), None if routes is None else routes.split(lengths)
    by_length: dict[int, list[int]] = {}
    for n, part in enumerate(parts):
        by_length.setdefault(len(part), []).append(n)
    states: dict[int, Tensor] = {}
    for members in by_length.values():
        with forced_routes(decoder, None if forced is None else torch.cat([forced[n] for n in members])):
            out = decoder(input_ids=torch.stack([parts[n] for n in members]), use_cache=False)
        states |= dict(zip(members, out.last_hidden_state))
    return torch.cat([states[n] for n in range(len(parts))])


# ------------------------------------------------------------------ LM head


class _GivenStates:
    """Stands for a decoder's output: the given states, and None for everything else a model may look up."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return self.last_hidden_state if index == 0 else ()


@contextmanager
def _decoder_returns(model: PreTrainedModel, states: Tensor) -> Iterator[None]:
    decoder: Any = model.get_decoder()
    previous = decoder.__dict__.get("forward")
    decoder.forward = lambda *args, **kwargs: _GivenStates(states)
    try:
        yield
    finally:
        del decoder.forward
        if previous is not None:
            decoder.forward = previous


def own_logits(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Logits [N, V] of states [N, D] by all that the model's forward does after its decoder: head, scale, soft cap."""
    ids = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
    with _decoder_returns(model, states[None]):
        return model(input_ids=ids, use_cache=False).logits[0]


def use_own_head(model: PreTrainedModel) -> None:
    setattr(model, OWN_HEAD, True)


def has_own_head(model: nn.Module) -> bool:
    return getattr(model, OWN_HEAD, False)


def head_deviation(model: PreTrainedModel, head: nn.Linear, states: Tensor) -> float:
    """Largest difference between the linear head and the model's own way to logits, relative to the largest logit."""
    gaps = []
    for scale in PROBE_SCALES:
        expected = own_logits(model, states * scale)
        gaps.append(float((head(states * scale) - expected).abs().max() / (1e-6 + expected.abs().max())))
    return max(gaps)
