"""Files of rank 0 on the machines of other ranks, which torchrun started: verbs that need no learner."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from turnwise.engines.sharded.torchrun import torchrun_rank

CHUNK = 1 << 26  # bytes that travel at once
FIND_SECONDS = 15.0
_written: list[Path] = []


def copy_file(path: Path, size: int) -> None:
    """Copy a file of rank 0 to the other machines, under the same name. The first rank of each machine writes it; the others may
    read it when all have finished."""
    if dist.get_rank() == 0:
        with path.open("rb") as file:
            for chunk in _chunks(size):
                chunk.numpy()[:] = numpy.fromfile(file, numpy.uint8, len(chunk))
                dist.broadcast(chunk, 0)
    elif _first_of_another_machine():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = path.with_suffix(f".{dist.get_rank()}.part")
        _written.extend((partial, path))
        with partial.open("wb") as file:
            for chunk in _chunks(size):
                dist.broadcast(chunk, 0)
                chunk.numpy().tofile(file)
        os.replace(partial, path)
    else:
        for chunk in _chunks(size):
            dist.broadcast(chunk, 0)
    dist.all_reduce(torch.zeros(1))  # a barrier over gloo, whatever the device: all have written


def remove_copies() -> None:
    """Remove what ``copy_file`` wrote on this machine; also done where the rank ends."""
    while _written:
        path = _written.pop()
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def find_file(path: Path) -> str:
    """Empty where this rank sees the file, which a network filesystem may show late; else the name of its machine."""
    until = time.monotonic() + FIND_SECONDS
    while not path.is_file():
        if time.monotonic() > until:
            return socket.gethostname()
        time.sleep(0.1)
    return ""


def _chunks(size: int) -> Iterator[torch.Tensor]:
    for begin in range(0, size, CHUNK):
        yield torch.empty(min(CHUNK, size - begin), dtype=torch.uint8)


def _first_of_another_machine() -> bool:
    started = torchrun_rank()
    return started is not None and started.node > 0 and started.local_rank == 0


FILE_VERBS: dict[str, Callable[..., Any]] = {
    "copy_file": copy_file,
    "remove_copies": remove_copies,
    "find_file": find_file,
}
