"""The experts of a mixture in 4 bits: parameters [E, n, d] are packed, and every implementation reads them as before.

``module.gate_up_proj`` dequantises. While the module runs it does so once, and the numbers are gone when it returns: autograd
would keep them for the backward pass, so hooks on saved tensors keep the place of each view instead, and dequantise the experts
it covers when the backward pass asks for it. Inside activation checkpointing nothing is kept anyway, and the hooks stay away:
they would replace those of the checkpoint.

Knows modules with stacked experts; neither routers nor how experts are multiplied. The weights are frozen and have no adapters.

Legend: E experts, n outputs, d inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from turnwise.engines import compat
from turnwise.engines.kernels.four_bit import BLOCK, FourBitMatrix


class FourBitStack(nn.Module):
    """Matrices [E, n, d], packed as one whose rows are experts, so that no block of scales holds numbers of two."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape = weight.shape
        rows = weight.detach().flatten(1)
        self.size = rows.shape[1]
        self.matrix = FourBitMatrix(nn.functional.pad(rows, (0, -self.size % BLOCK)))

    def dequantised(self, dtype: torch.dtype, first: int = 0, last: int | None = None) -> Tensor:
        """Experts ``first`` to before ``last``, [.., n, d]."""
        last = self.shape[0] if last is None else last
        rows = self.matrix.dequantised_rows(first, last, dtype)
        return rows[:, : self.size].contiguous().view(-1, *self.shape[1:])


@dataclass(frozen=True, eq=False)
class _Place:
    """A view of dequantised experts, in place of its numbers."""

    stack: FourBitStack
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def numbers(self) -> Tensor:
        end = self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride))
        first, last = self.offset // self.stack.size, end // self.stack.size + 1
        found = self.stack.dequantised(self.dtype, first, last)
        return found.as_strided(self.size, self.stride, self.offset - first * self.stack.size)


class FourBitExperts(nn.Module):
    """The part of a module with packed experts that is not its family's: see ``pack_experts``."""

    packed_experts: nn.ModuleDict
    _read: dict[str, Tensor]  # while the module runs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        keeping: AbstractContextManager[Any] = nullcontext()
        if torch.is_grad_enabled() and not compat.saved_tensors_are_hooked():
            keeping = saved_tensors_hooks(self._place_of, _numbers)
        self._read = {}
        self._running = True
        try:
            with keeping:
                return super().__call__(*args, **kwargs)
        finally:
            self._read, self._running = {}, False

    def _dequantised(self, name: str) -> Tensor:
        if name in self._read:
            return self._read[name]
        stack: Any = self.packed_experts[name]
        kind = stack.matrix.packed.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        found: Tensor = stack.dequantised(dtype)
        if self._running:
            self._read[name] = found
        return found

    def _place_of(self, tensor: Tensor) -> Tensor | _Place:
        """What autograd keeps of a tensor: its place, if it is a view of dequantised experts."""
        for name, whole in self._read.items():
            if tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
                stack: Any = self.packed_experts[name]
                return _Place(stack, whole.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _without_contents, (type(self).__mro__[2], tuple(self.packed_experts)), self.__dict__


def _numbers(kept: Tensor | _Place) -> Tensor:
    return kept.numbers() if isinstance(kept, _Place) else kept


_classes: dict[tuple[Any, ...], type[nn.Module]] = {}


def _packed_class(family: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class of a family's experts whose parameters ``names`` are packed."""
    read = {name: property(partial(FourBitExperts._dequantised, name=name)) for name in names}
    return _classes.setdefault((family, names), type(f"FourBit{family.__name__}", (FourBitExperts, family), read))


def _without_contents(family: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    kind = _packed_class(family, names)
    made: nn.Module = kind.__new__(kind)
    return made


def stacked_experts(module: nn.Module) -> Iterator[tuple[nn.Module, dict[str, nn.Parameter]]]:
    """Modules that hold the matrices of all their experts in parameters [E, n, d], and these."""
    for m in module.modules():
        found = {n: p for n, p in m.named_parameters(recurse=False) if p.dim() == 3}
        found = {n: p for n, p in found.items() if len(p) == getattr(m, "num_experts", None)}
        if found:
            yield m, found


def pack_experts(module: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Pack the stacked experts inside ``module`` on ``device``, one parameter at a time; returns how many. Biases of experts
    stay as they are."""
    found = list(stacked_experts(module))
    for m, parameters in found:
        packed = nn.ModuleDict()
        for name, p in parameters.items():
            packed[name] = FourBitStack(p.detach().to(device=device, dtype=dtype))
            delattr(m, name)
        m.packed_experts, m._read, m._running = packed, {}, False  # type: ignore[assignment]
        m.__class__ = _packed_class(type(m), tuple(parameters))
    return sum(len(parameters) for _, parameters in found)


def packed_experts(module: nn.Module) -> dict[str, FourBitStack]:
    """The packed experts of a module by the names of the parameters that they were."""
    found: dict[str, Any] = {
        f"{name}.{parameter}": stack
        for name, m in module.named_modules()
        if isinstance(m, FourBitExperts)
        for parameter, stack in m.packed_experts.items()
    }
    return found


__all__ = ["FourBitExperts", "FourBitStack", "pack_experts", "packed_experts", "stacked_experts"]
