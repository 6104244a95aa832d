"""Gaussian noise at the input of every decoder layer, with a learnable scale per layer. Off unless enabled for a pass.

Knows layers and seeds; does not know when noise is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class LayerNoiseHooks:
    """Forward pre-hooks on a model's layers. The noise depends only on step, micro-batch and layer, so a run is reproducible."""

    def __init__(self, layers: Sequence[nn.Module], sigma: float, device: torch.device, dtype: torch.dtype) -> None:
        self.log_sigma = nn.Parameter(torch.full((len(layers),), math.log(sigma), device=device, dtype=dtype))
        self._seed: int | None = None
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, n=number: self._add(n, args, kwargs), with_kwargs=True
            )

    def _add(self, layer: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if self._seed is None:
            return None
        h = args[0] if args else kwargs["hidden_states"]
        generator = torch.Generator(h.device).manual_seed(self._seed * 1009 + layer)
        e = torch.randn(h.shape, generator=generator, device=h.device, dtype=h.dtype)
        noisy = h + self.log_sigma[layer].exp().to(h.dtype) * e
        return ((noisy, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": noisy})

    @contextmanager
    def enabled(self, step: int, micro: int) -> Iterator[None]:
        self._seed = step * 65537 + micro
        try:
            yield
        finally:
            self._seed = None
