"""The one place that hooks into a Transformers model: its attention call, which an ``AttentionLayout`` implements.

A layout says how packed tokens attend: the learner's follows sequence boundaries, the generator's reads and writes the KV cache.
The rest of the model (norms, MLPs, rotary embeddings) stays stock, so any causal LM that follows the Transformers attention
interface works. Knows neither batches nor caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.utils import logging

from turnwise.errors import SettingError

NAME = "turnwise"
# what models pass on to every attention call; dropout is 0 in evaluation mode
HARMLESS = {"dropout", "position_ids", "cache_position", "use_cache", "is_causal", "return_dict", "logits_to_keep"}


class AttentionLayout(Protocol):
    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [1, H, L, D], k and v [1, Hkv, L, D] -> [1, L, H, D]. ``window``: sliding window, None for none."""
        ...


@torch.compiler.disable  # layouts are data of a batch: traced, every batch would be compiled again
def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    layout: AttentionLayout | None = None, sliding_window: int | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if layout is None:
        raise SettingError(
            "its layers do not pass our attention layout on (call a model that Turnwise prepared through a generator or learner)"
        )
    # Layouts implement plain causal attention and windows. On random weights a soft cap is too weak to be noticed by a
    # comparison of logits, so what a model asks for is read here and not only measured.
    unserved = ["a mask of its own"] if attention_mask is not None else []
    for name, given in options.items():
        if name not in HARMLESS and (isinstance(given, Tensor) or bool(given)):
            unserved.append(f"the option {name}")
    if unserved:
        raise SettingError(f"its attention has {unserved[0]}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attention(module.layer_idx, query, key, value, scale, sliding_window), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)  # layouts build their own masks


def install_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Route this model's attention through layouts."""
    fault: Exception | None = None
    try:
        with _quiet():
            model.set_attn_implementation(NAME)
    except (ValueError, AttributeError, KeyError) as error:
        fault = error
    if fault or model.config.get_text_config()._attn_implementation != NAME:  # of the latter Transformers only warns
        why = f": {fault}" if fault else ""
        raise SettingError(
            f"{type(model).__name__} does not follow the Transformers attention interface{why}"
        ) from fault
    return model


def use_eager_attention(model: PreTrainedModel) -> None:
    """Every model with attention has this implementation; one without attention needs none."""
    with suppress(ValueError, AttributeError, KeyError), _quiet():
        model.set_attn_implementation("eager")


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, attention as the learner computes it; afterwards the model's own again."""
    before = model.config._attn_implementation
    use_eager_attention(model)
    try:
        yield
    finally:
        with suppress(ValueError, AttributeError, KeyError), _quiet():
            model.set_attn_implementation(before)


@contextmanager
def _quiet() -> Iterator[None]:
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


class LayerProbe:
    """A layout that only records head shapes and windows."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        self.windows: set[int | None] = set()

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        self.shapes[layer] = ((k.shape[1], k.shape[3]), (v.shape[1], v.shape[3]))
        self.windows.add(window)
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

    def check_all_layers(self, model: PreTrainedModel) -> None:
        """Refuse a model with layers that mix positions otherwise: a state-space or convolution layer reads across packed
        sequences, and by so little with random weights that logits alone may not show it."""
        layers = getattr(model.config.get_text_config(), "num_hidden_layers", len(self.shapes))
        if sorted(self.shapes) != list(range(layers)):
            raise SettingError(f"{type(model).__name__} does not route every layer through its attention interface")
