"""LoRA adapters through PEFT: inject them into a stock model, disable them, merge them into its weights.

Does not know how adapters are trained.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.errors import SettingError

ADAPTER = "default"


def _peft() -> Any:
    try:
        import peft
    except ImportError as fault:
        raise SettingError("lora_rank > 0 needs PEFT: install `turnwise[peft]`, or write lora_rank=0") from fault
    return peft


def inject(model: PreTrainedModel, rank: int, alpha: float | None) -> None:
    """Add adapters to every linear layer except the LM head and freeze everything else. The model's outputs do not change."""
    peft = _peft()
    settings = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank if alpha is None else alpha, lora_dropout=0.0, target_modules="all-linear"
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)  # the same adapters on every machine and in every process
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # PEFT warns about GPT-2's Conv1D, then handles it
        peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)


@contextmanager
def disabled(model: PreTrainedModel) -> Iterator[None]:
    """Run the base model: adapters are bypassed inside this context."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    flags = {p: p.requires_grad for p in model.parameters()}
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for p, flag in flags.items():  # PEFT toggles requires_grad together with its adapters
            p.requires_grad_(flag)


@torch.no_grad()
def merged(model: PreTrainedModel) -> dict[str, Tensor]:
    """Merged weights under the names the model had before ``inject``. Leaves the model unchanged."""
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    out: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if ".base_layer." in name:
            owner, leaf = name.split(".base_layer.")
            delta = layers[owner].get_delta_weight(ADAPTER) if leaf == "weight" else 0
            out[f"{owner}.{leaf}"] = p.detach() + delta
        elif ".lora_" not in name:
            out[name] = p.detach()
    return out


def merged_model(model: PreTrainedModel) -> PreTrainedModel:
    """A model without adapters that holds the merged weights, for saving."""
    with torch.device("meta"):
        out = type(model)(copy.deepcopy(model.config))
    out.load_state_dict(merged(model), strict=False, assign=True)
    out.tie_weights()
    return out
