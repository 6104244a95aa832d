"""Weights of a policy that is a frozen base model and low-rank adapters: Δ = scale · up · down for a linear layer.

A generator that knows adapters loads them alone and adds their product to the base model's; every other reader gets merged
weights, made one at a time when it reads them. Knows tensors and names; neither models nor PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Adapter:
    """The adapter of one linear layer with n outputs and d inputs."""

    down: Tensor  # [r, d]
    up: Tensor  # [n, r]
    scale: float


class WeightsMadeWhenRead(Mapping[str, Tensor]):
    """Weights by name, of which some are made when they are read."""

    def __init__(self, plain: Mapping[str, Tensor], made: Mapping[str, Callable[[], Tensor]]) -> None:
        self._plain, self._made = plain, made

    def __getitem__(self, name: str) -> Tensor:
        return self._plain[name] if name in self._plain else self._made[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._plain or name in self._made

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        yield from self._made

    def __len__(self) -> int:
        return len(self._plain) + len(self._made)


class AdaptedWeights(Mapping[str, Tensor]):
    """Merged weights by the base model's parameter names, each made when it is read: all at once they would take the memory of
    a second model in float32. ``adapters`` holds those that a generator can apply without merging, by the name of the weight."""

    def __init__(
        self,
        base: Mapping[str, Tensor],
        deltas: Mapping[str, Callable[[], Tensor]],
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        """``deltas``: what is added to a weight, by its name."""
        self.base, self._deltas, self.adapters = base, deltas, adapters or {}

    @property
    def mergeless(self) -> bool:
        """Whether ``base`` and ``adapters`` say everything."""
        return self._deltas.keys() == self.adapters.keys()

    def __getitem__(self, name: str) -> Tensor:
        with torch.no_grad():
            weight = self.base[name]
            return weight + self._deltas[name]() if name in self._deltas else weight

    def __contains__(self, name: object) -> bool:
        return name in self.base

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def fuse_down(adapters: Sequence[Adapter | None], dtype: torch.dtype) -> Tensor | None:
    """The first factors of layers that read the same input, below each other [R, d]; None without adapters."""
    parts = [a.down.detach() for a in adapters if a is not None]
    return torch.cat(parts).to(dtype) if parts else None


def fuse_up(adapters: Sequence[Adapter | None], sizes: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """The second factors, scaled, as one block-diagonal matrix [n, R]. ``sizes``: outputs of each layer."""
    present = [a for a in adapters if a is not None]
    if not present:
        return None
    ranks = [0 if a is None else a.down.shape[0] for a in adapters]
    out = torch.zeros(sum(sizes), sum(ranks), dtype=dtype, device=present[0].up.device)
    row = column = 0
    for adapter, size, rank in zip(adapters, sizes, ranks):
        if adapter is not None:
            out[row : row + size, column : column + rank] = adapter.up.detach() * adapter.scale
        row, column = row + size, column + rank
    return out
