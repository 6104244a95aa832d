"""Refuses a model that does not fit before any of it is loaded: its size comes from the headers of its files, or from its
configuration. ``training.memory`` says how much a run takes; here nothing is allocated and nothing written.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from turnwise.config.settings import Settings
from turnwise.engines.memory import GIB, ModelShape
from turnwise.errors import SettingError
from turnwise.models import loading
from turnwise.models.facts import stored_parameters
from turnwise.models.fetch import resolve
from turnwise.recipes.recipe import Recipe
from turnwise.training import engines, memory

LOADED = 4  # bytes of a weight while a model is loaded, on the host: it is read in float32


def check_memory(settings: Settings, recipe: Recipe, config: Any) -> None:
    """Refuse a model that fits neither the device it is trained on nor the host it is read on. ``config``: that of the model. The
    learner of a cluster works on the machine of this command."""
    shape = ModelShape.of(config, stored_parameters(settings.model.name) or parameters_of(config))
    if shape.parameters < memory.TOLD_FROM or not shape.layers:
        return
    if settings.cluster and settings.device == "auto" and not settings.cluster.gpus:
        settings = replace(settings, device="cpu")  # Ray hides the GPUs from actors that reserve none
    device, host = engines.select_device(settings), torch.device("cpu")
    memory.fit_memory(settings, memory.memory_plan(settings, recipe, shape), memory.device_memory(device))
    needed, available = LOADED * shape.parameters, memory.device_memory(host)
    if needed > memory.USABLE * available:
        raise SettingError(
            f"this model cannot be read: in float32 its {shape.parameters / 1e9:.1f} B parameters take {needed / GIB:.1f} GiB of "
            f"memory on the host, which has {available / GIB:.1f}; write a smaller --model, or take a machine with more memory"
        )


def check_resumed_memory(settings: Settings, recipe: Recipe, initial: Path) -> None:
    """``check_memory`` of a run that goes on. ``initial``: the model that it began with, once it is written."""
    if not initial.is_dir() and settings.model.tiny:
        return
    source = replace(settings.model, name=str(initial)) if initial.is_dir() else settings.model
    check_memory(replace(settings, model=source), recipe, loading.load_config(resolve(source.name)))


def parameters_of(config: Any) -> int:
    """The parameters of the model that a configuration describes, none of them allocated; 0 if it cannot be built."""
    from transformers import AutoModelForCausalLM

    from turnwise.models.trust import remote_code_is_trusted

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=remote_code_is_trusted())
    except Exception:  # whatever a stranger's code raises: loading refuses it in words
        return 0
    return sum(p.numel() for p in model.parameters())
