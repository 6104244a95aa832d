"""The one place that hooks into a Transformers model: its attention call, which an ``AttentionLayout`` implements.

A layout says how packed tokens attend: the learner's follows sequence boundaries, the generator's reads and writes the KV cache.
The rest of the model (norms, MLPs, rotary embeddings) stays stock, so any causal LM that follows the Transformers attention
interface works. Knows neither batches nor caches.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from turnwise.errors import SettingError

NAME = "turnwise"


class AttentionLayout(Protocol):
    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [1, H, L, D], k and v [1, Hkv, L, D] -> [1, L, H, D]. ``window``: sliding window, None for none."""
        ...


@torch.compiler.disable  # layouts are data of a batch: traced, every batch would be compiled again
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: AttentionLayout | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if layout is None:
        raise SettingError(
            "this model's attention was replaced by Turnwise; call it through a generator or learner, or prepare a copy"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attention(module.layer_idx, query, key, value, scale, sliding_window), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)  # layouts build their own masks


def install_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Route this model's attention through layouts."""
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, AttributeError, KeyError) as fault:
        raise SettingError(
            f"{type(model).__name__} does not follow the Transformers attention interface: {fault}"
        ) from fault
    return model
