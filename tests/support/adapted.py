"""Small models with LoRA adapters, for tests of how a policy is published."""

from __future__ import annotations

import torch

from support.generators import make
from turnwise.engines.adapters import factors_of
from turnwise.engines.learner import lora

RANK = 3


def adapted_model(seed=3, rank=RANK):
    """A model with adapters; ``turn`` gives it others."""
    model = make(seed=seed)
    lora.inject(model, rank, None)
    return model


def turn(model, seed):
    """The weights of other adapters of the same base."""
    rng = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if ".lora_" in name:
            p.data.copy_(torch.randn(p.shape, generator=rng) * 0.2)
    return lora.merged(model)


def factor_bytes(weights):
    return sum(t.numel() * t.element_size() for t in factors_of(weights.adapters)[0].values())
