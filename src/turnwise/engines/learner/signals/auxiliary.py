"""What is learned beside the policy, and the notes it learns from.

A pupil measures a batch knowing only the batches before it. What it will learn from, it notes while it measures; it learns
when the batch comes back with its rewards, in the first update that sees a trajectory, and once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from turnwise.core.batch import Batch
from turnwise.core.levels import Field
from turnwise.core.signals import Signal
from turnwise.engines.learner.forward_pass import Reading


class Pupil(Protocol):
    signal: Signal

    def open(self) -> None:
        """A new batch is about to be measured; what nobody came back for is forgotten."""
        ...

    def measure(self, reading: Reading) -> Field: ...

    def learn(self, batch: Batch) -> None: ...

    def tensors(self) -> dict[str, Tensor]:
        """All it knows, by name. Empty where it has learned nothing."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None: ...


class Notes:
    """Rows of trajectories, by the trajectory's number, each until it is taken."""

    def __init__(self) -> None:
        self._seed: list[Tensor] = []
        self._rows: list[Tensor] = []

    def clear(self) -> None:
        self._seed, self._rows = [], []

    def add(self, seed: Tensor, rows: Tensor) -> None:
        """``seed`` [n]: whose each of the ``rows`` [n, ...] is."""
        self._seed.append(seed)
        self._rows.append(rows.detach())

    def take(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """(rows, the place of their trajectory in the batch), in an order that no cut and no packing changes: by number of
        the trajectory, then as noted. None where there is nothing of this batch."""
        if not self._seed or not len(batch):
            return None
        seed, rows = torch.cat(self._seed), torch.cat(self._rows)
        known, order = batch.seed.x.to(seed.device).sort(stable=True)
        place = torch.searchsorted(known, seed).clamp(max=known.numel() - 1)
        mine = known[place] == seed
        self._seed, self._rows = [seed[~mine]], [rows[~mine]]
        if not mine.any():
            return None
        by_seed = torch.argsort(seed[mine], stable=True)
        return rows[mine][by_seed], order[place[mine][by_seed]]
