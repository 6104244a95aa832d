"""Capture of CUDA graphs in a process where a generator and a learner use the same GPU from two threads.

``torch.cuda.graph`` captures on one stream per process unless it is given one, and two captures that overlap end each other. So
one lock admits one capture at a time, every engine captures on a stream of its own, and the capture mode is thread-local: the
other thread may allocate, copy and launch meanwhile. Knows streams and graphs; nothing of what is captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

CAPTURE_LOCK = threading.RLock()


class GraphCapture:
    """Captures the graphs of one engine, all into one memory pool."""

    def __init__(self) -> None:
        self.pool: Any = None
        self._stream: Any = None

    def reset(self) -> None:
        """Use a new pool from now on: every graph of the old one is gone, and the allocator has given it up."""
        self.pool = self._stream = None

    @contextmanager
    def into(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record what is launched inside into ``graph``."""
        with CAPTURE_LOCK:
            self._stream = self._stream or torch.cuda.Stream()
            with torch.cuda.graph(graph, pool=self.pool, stream=self._stream, capture_error_mode="thread_local"):
                yield
            self.pool = self.pool or graph.pool()


@contextmanager
def exclusive() -> Iterator[None]:
    """Inside, no other thread captures: for what a capture elsewhere would break, such as freeing cached memory."""
    with CAPTURE_LOCK:
        yield


def warm_up(run: Callable[[], object]) -> None:
    """Run once on a side stream, so that kernels are compiled and libraries allocate their workspaces before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
