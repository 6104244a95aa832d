"""Copies from the host to a device that do not synchronise. Knows tensors only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 16  # bytes: offsets of tensors in a shared buffer are multiples of this


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy to a device; to a GPU through pinned memory, without synchronising."""
    pinned = x.device.type == "cpu" and torch.device(device).type == "cuda"
    return x.pin_memory().to(device, non_blocking=True) if pinned else x.to(device)


def to_device_packed(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Copy many tensors; from the host to a GPU in one transfer, because dozens of small ones cost milliseconds of launches."""
    if torch.device(device).type != "cuda" or any(x.device.type != "cpu" for x in tensors):
        return [to_device(x, device) for x in tensors]
    return copy_packed(tensors, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True), device)


def copy_packed(
    tensors: Sequence[Tensor], allocate: Callable[[int], Tensor], device: torch.device | str
) -> list[Tensor]:
    """Pack the tensors into one buffer from ``allocate(bytes)`` and transfer that."""
    starts, size = [], 0
    for x in tensors:
        starts.append(size)
        size += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
    staging = allocate(size)

    def views(buffer: Tensor) -> list[Tensor]:
        return [buffer[a : a + x.nbytes].view(x.dtype).view(x.shape) for a, x in zip(starts, tensors)]

    for target, x in zip(views(staging), tensors):
        target.copy_(x)
    return views(staging.to(device, non_blocking=True))
