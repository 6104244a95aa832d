"""Refuses numbers that this machine or this model cannot use: more ranks than cores, adapters wider than a weight."""

from __future__ import annotations

import os
from typing import Any

import torch

from turnwise.config.settings import Settings
from turnwise.engines.memory import ModelShape
from turnwise.engines.sharded.torchrun import ranks_here, torchrun_rank
from turnwise.errors import SettingError
from turnwise.models.tiny import tiny_config

RANKS_PER_CORE = 4  # a few too many serve to try something out


def check_rank_cores(settings: Settings, device_type: str) -> None:
    """Ranks that share a core wait for each other in every layer."""
    if device_type != "cpu" or settings.cluster:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if ranks_here(settings.ranks) > RANKS_PER_CORE * cores:
        raise SettingError(
            f"ranks is {settings.ranks}, and this machine has {cores} processor cores, which they would share; write "
            f"--ranks {cores} or fewer, or start them on several machines with torchrun"
        )


def check_rank_devices(settings: Settings, device_type: str) -> None:
    """Refuse more ranks than GPUs."""
    if settings.ranks == 1 or device_type == "cpu":
        return
    cards, here = torch.cuda.device_count() if device_type == "cuda" else 0, ranks_here(settings.ranks)
    if cards < here:
        raise SettingError(
            f"ranks is {settings.ranks} and every rank needs a GPU of its own, but this machine has {cards} that torch can use; "
            f"write {'--nproc-per-node' if torchrun_rank() else '--ranks'} {max(1, cards)}, or --device cpu"
        )


def check_adapter_rank(settings: Settings, config: Any = None) -> None:
    """A rank above the width of a weight has no use: the weight itself has no higher one. ``config``: None for the tiny model."""
    if not settings.lora_rank:
        return
    config = config or tiny_config(0, hidden=settings.hidden, layers=settings.layers, context=settings.context)
    shape = ModelShape.of(config, 0)
    widths = [width for width in (shape.hidden, shape.attention, shape.kv // 2, shape.expert or shape.mlp) if width]
    if widths and settings.lora_rank > min(widths):
        raise SettingError(
            f"lora_rank is {settings.lora_rank}, and the narrowest weights of this model are {min(widths)} wide, so a higher "
            f"rank adds nothing; write --lora-rank {min(16, min(widths))}, or leave it out to train all weights"
        )
