"""Weights of a policy that is a frozen base model and low-rank adapters: Δ = scale · up · down for a linear layer.

A generator that knows adapters loads them alone and adds their product to the base model's; every other reader gets merged
weights, made one at a time when it reads them. Another process gets the base once and then only factors. Knows tensors and
names; neither models nor PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from turnwise.errors import SettingError

DOWN, UP = ".down", ".up"  # factors of the adapter of a weight, after its name


@dataclass(frozen=True, eq=False)
class Adapter:
    """The adapter of one linear layer with n outputs and d inputs."""

    down: Tensor  # [r, d]
    up: Tensor  # [n, r]
    scale: float

    def delta(self) -> Tensor:
        """What it adds to the weight: the floats that PEFT merges."""
        return (self.up @ self.down) * self.scale

    def to(self, device: torch.device) -> Adapter:
        return replace(self, down=self.down.to(device), up=self.up.to(device))


class TensorsWhenRead(Mapping[str, Tensor]):
    """Tensors by name, each of them read, collected or made when it is asked for."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:  # that of ``Mapping`` would read the tensor
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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


class HeldWeights(dict[str, Tensor]):
    """Frozen weights that another process sent. A generator that applies adapters beside its own copy needs them once: then they
    are released, and the object still says that the base is the same."""

    release = dict.clear


# ------------------------------------------------------- to another process


class SentBase:
    """Frozen weights as they were when they were sent."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights, self._state = weights, _state(weights)

    def is_still(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether these are the same tensors, and nothing was written into them. Packed ones, made when they are read, are one
        object."""
        return self.weights is weights if self._state is None else self._state == _state(weights)


def _state(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, int]] | None:
    if isinstance(weights, AdaptedWeights):
        return None
    return {name: (tensor.data_ptr(), tensor._version) for name, tensor in weights.items()}


def factors_of(adapters: Mapping[str, Adapter]) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """All factors by name, and the rank and scale of each adapter."""
    tensors = {f"{n}{end}": t.detach() for n, a in adapters.items() for end, t in ((DOWN, a.down), (UP, a.up))}
    return tensors, {n: {"rank": a.down.shape[0], "scale": a.scale} for n, a in adapters.items()}


def adapted_weights(base: Mapping[str, Tensor], factors: Mapping[str, Tensor], described: Any) -> AdaptedWeights:
    """The weights that ``factors_of`` took apart. Refuses factors that are missing or do not fit the base."""
    if not isinstance(described, Mapping) or {*factors} != {f"{n}{end}" for n in described for end in (DOWN, UP)}:
        raise SettingError("the factors sent are not those of the adapters named; write 'down' and 'up' of each")
    adapters = {}
    for name, facts in described.items():
        try:
            rank, scale = int(facts["rank"]), float(facts["scale"])
        except (TypeError, KeyError, ValueError):
            raise SettingError(f"the adapter of {name!r} is described by {facts!r:.60}; write rank and scale") from None
        # memory of its own: the order of a product's sums may depend on how its factors are aligned
        adapter = Adapter(factors[name + DOWN].clone(), factors[name + UP].clone(), scale)
        product = (*adapter.up.shape[:1], *adapter.down.shape[1:])
        shapes = (product, adapter.down.shape[0], adapter.up.shape[1])
        if len(base) and (name not in base or shapes != (tuple(base[name].shape), rank, rank)):
            raise SettingError(f"the adapter of {name!r} (rank {rank}) does not fit a weight of the base")
        adapters[name] = adapter
    return AdaptedWeights(base, {name: a.delta for name, a in adapters.items()}, adapters)


# ------------------------------------------------------------ fused products


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
