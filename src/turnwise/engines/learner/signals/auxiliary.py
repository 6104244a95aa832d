"""Small models that are trained beside the policy, and the buffer of features they are trained on.

An auxiliary model measures a batch using only what earlier batches taught it. While it measures, it buffers the features it
will train on. It trains when the batch returns with its rewards, once per trajectory, in the first update that contains it.

Knows features and trajectories; does not know what the signals are for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from turnwise.core.batch import Batch
from turnwise.core.levels import Field
from turnwise.core.signals import Signal
from turnwise.engines.learner.forward_pass import ForwardPass


class AuxiliaryModel(Protocol):
    """A model that provides one signal."""

    signal: Signal
    features: FeatureBuffer

    def begin_batch(self) -> None:
        """Start measuring a new batch and discard buffered features that were never trained on."""
        ...

    def measure(self, forward: ForwardPass) -> Field: ...

    def learn(self, batch: Batch) -> None: ...

    def tensors(self) -> dict[str, Tensor]:
        """Its state by name. Empty before the first training step."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None: ...


class FeatureBuffer:
    """Feature rows keyed by the seed of their trajectory. Each row is taken once."""

    def __init__(self) -> None:
        self._seed: list[Tensor] = []
        self._rows: list[Tensor] = []

    def clear(self) -> None:
        self._seed, self._rows = [], []

    def add(self, seed: Tensor, rows: Tensor) -> None:
        """``seed`` [n]: the trajectory of each of the ``rows`` [n, ...]."""
        self._seed.append(seed)
        self._rows.append(rows.detach())

    def contents(self) -> tuple[Tensor, Tensor] | None:
        """All buffered seeds and rows, in the order in which they were added; None if there are none."""
        return (torch.cat(self._seed), torch.cat(self._rows)) if self._seed else None

    def take(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Remove and return the rows of this batch, and the index of each row's trajectory in it; None if there are none.

        Ordered by seed, then by insertion, so that neither micro-batches nor packing change the order."""
        if not self._seed or not len(batch):
            return None
        seed, rows = torch.cat(self._seed), torch.cat(self._rows)
        batch_seeds, order = batch.seed.x.to(seed.device).sort(stable=True)
        index = torch.searchsorted(batch_seeds, seed).clamp(max=batch_seeds.numel() - 1)
        present = batch_seeds[index] == seed
        self._seed, self._rows = [seed[~present]], [rows[~present]]
        if not present.any():
            return None
        by_seed = torch.argsort(seed[present], stable=True)
        return rows[present][by_seed], order[index[present][by_seed]]
