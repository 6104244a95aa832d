"""Capture of CUDA graphs in a process where a generator and a learner use the same GPU from two threads.

A capture breaks when another thread captures, frees memory, loads a kernel or synchronises the device meanwhile. So an engine
declares when it uses the GPU (``using_gpu``), and a capture waits until no other thread does; threads that want to begin wait for
it. A capture costs milliseconds and is rare, so the other engine loses little. Knows streams and graphs; nothing of what is
captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class GpuUse:
    """Many threads use the GPU at the same time, or one alone. A thread that uses it and wants it alone gives its use up first,
    so two that want it alone at once do not wait for each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users: dict[int, int] = {}  # thread -> nested uses
        self._alone: int | None = None  # the thread that has the GPU alone ...
        self._depth = 0  # ... so many times nested
        self._waiting = 0  # threads that want it alone go first

    @contextmanager
    def shared(self) -> Iterator[None]:
        me = threading.get_ident()
        self._begin(me, 1)
        try:
            yield
        finally:
            with self._changed:
                self._users[me] -= 1
                if not self._users[me]:
                    del self._users[me]
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            given_up = self._users.pop(me, 0) if self._alone != me else 0
            if self._alone != me:
                # new users wait for those who wait here: else two busy engines would starve a capture for ever
                self._waiting += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._alone is None and not self._users)
                self._waiting -= 1
            self._alone, self._depth = me, self._depth + 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._alone = None
                self._changed.notify_all()
            if given_up:
                self._begin(me, given_up)

    def _begin(self, me: int, uses: int) -> None:
        with self._changed:
            if me not in self._users and self._alone != me:
                self._changed.wait_for(lambda: self._alone is None and not self._waiting)
            self._users[me] = self._users.get(me, 0) + uses


GPU_USE = GpuUse()
# inside, this thread launches kernels, and no other thread captures
using_gpu = GPU_USE.shared
# inside, no other thread uses the GPU: for a capture, and for what would break one, such as freeing cached memory
exclusive = GPU_USE.alone


class GraphCapture:
    """Captures the graphs of one engine, all into one memory pool."""

    def __init__(self) -> None:
        self.pool: Any = None
        self._stream: Any = None

    def reset(self) -> None:
        """Use a new pool from now on. The graphs of the old one keep it."""
        self.pool = self._stream = None

    @contextmanager
    def into(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record what is launched inside into ``graph``."""
        with exclusive():
            self._stream = self._stream or torch.cuda.Stream()
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            before = torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph, pool=self.pool, stream=self._stream, capture_error_mode="thread_local"):
                    yield
            except BaseException:  # torch leaves its stream current, and the pool records for ever
                torch.cuda.set_stream(before)
                self.reset()
                raise


def warm_up(run: Callable[[], object]) -> None:
    """Run once on a side stream, so that kernels are compiled and libraries allocate their workspaces before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
