"""Weights on their way to another process of this machine: one block of shared memory, or the learner's own memory on a GPU.

The receiver copies what it needs before it answers, so the sender may overwrite everything after the answer. Knows tensors;
neither models nor generators.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import tempfile
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # registers how tensors on a GPU are pickled
from torch import Tensor

from turnwise.engines.owned_files import owned_prefix, remove_orphans
from turnwise.errors import StoreError

SHARED_MEMORY = Path("/dev/shm")
KIND = "turnwise-weights-"
ALIGNMENT = 64
BLOCK, DEVICE = "block", "device"  # which way weights come


class Place(NamedTuple):
    """Where a tensor lies in the block."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _layout(weights: Mapping[str, Tensor]) -> tuple[dict[str, Place], int]:
    places, end = dict[str, Place](), 0
    for name, tensor in weights.items():
        places[name] = Place(end, tuple(tensor.shape), tensor.dtype)
        end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return places, end


def _views(block: Tensor, places: Mapping[str, Place]) -> dict[str, Tensor]:
    sizes = {name: place.dtype.itemsize * torch.Size(place.shape).numel() for name, place in places.items()}
    return {n: block[p.start : p.start + sizes[n]].view(p.dtype).view(p.shape) for n, p in places.items()}


def _allocate(size: int) -> Path:
    """A file of ``size`` bytes that really are there: in shared memory, or, where that is too small, in the temporary folder. A
    page that a full file system cannot give ends the process that touches it."""
    places = [SHARED_MEMORY] if SHARED_MEMORY.is_dir() else []
    faults = []
    for base in (*places, Path(tempfile.gettempdir())):
        remove_orphans(base, KIND)
        with tempfile.NamedTemporaryFile(prefix=owned_prefix(KIND), dir=base, delete=False) as file:
            try:
                _reserve(file.fileno(), size)
                return Path(file.name)
            except OSError as fault:
                Path(file.name).unlink()
                faults.append(f"{base}: {fault.strerror}")
    raise StoreError(
        f"{size / 2**20:,.0f} MiB of weights for the generator's process find no room ({'; '.join(faults)}); give more shared "
        "memory (docker run --shm-size), or leave --generator local out"
    )


def _reserve(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, max(size, 1))
    else:
        os.ftruncate(descriptor, size)


class SharedBlock:
    """Sends weights through memory that both processes map. Its file is removed as soon as both have mapped it."""

    def __init__(self) -> None:
        self._views: dict[str, Tensor] = {}
        self._path: Path | None = None
        self.size = 0  # bytes

    def put(self, weights: Mapping[str, Tensor]) -> Any:
        """Copy the weights into the block; what to tell the receiver."""
        if self._views:
            for name, view in self._views.items():
                view.copy_(weights[name])
            return None
        tensors = dict(weights.items())
        places, size = _layout(tensors)
        self._path, self.size = _allocate(size), size
        self._views = _views(torch.from_file(str(self._path), shared=True, size=size, dtype=torch.uint8), places)
        for name, view in self._views.items():
            view.copy_(tensors[name])
        return str(self._path), size, places

    def taken(self) -> None:
        """The receiver has mapped the block."""
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            self._path = None


class SharedBlockReader:
    """Receives what ``SharedBlock`` sends."""

    def __init__(self) -> None:
        self._views: dict[str, Tensor] = {}

    def get(self, told: Any) -> dict[str, Tensor]:
        if told is not None:
            path, size, places = told
            self._views = _views(torch.from_file(path, shared=True, size=size, dtype=torch.uint8), places)
        return self._views


def device_handles(weights: Mapping[str, Tensor]) -> bytes:
    """The addresses of tensors on a GPU, for another process that copies them on that GPU. Raises ``RuntimeError`` for others."""
    tensors = {name: tensor.detach() for name, tensor in weights.items()}
    if not all(tensor.is_cuda for tensor in tensors.values()):
        raise RuntimeError("these weights are not on a GPU")
    torch.cuda.synchronize()  # the other process does not wait for kernels of this one
    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(tensors)
    return buffer.getvalue()


def from_handles(handles: bytes) -> dict[str, Tensor]:
    """The tensors behind ``device_handles``."""
    return dict(pickle.loads(handles))
