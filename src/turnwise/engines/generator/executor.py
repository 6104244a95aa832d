"""Where a generator computes: between two turns of the event loop, or in a worker thread beside it.

A thread of its own brings a second team of OpenMP threads, and two teams on the same cores wake each other up at every
product: a tenth of a whole training step. So a generator that others wait for anyway (a deterministic one) computes in
the event loop's thread and lets the loop turn whenever a request is done, so that tools run beside it. One that others
work beside has a worker, and the loop stays free. Does not know what is computed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

SETTLE = 8  # rounds of the event loop in which woken callers may come back before anything is decided


async def settle() -> None:
    for _ in range(SETTLE):
        await asyncio.sleep(0)


class Driver:
    def __init__(self, beside: bool, threads: int | None) -> None:
        """``threads`` of computing can only be set for a worker, so asking for a number asks for one."""
        self._worker: ThreadPoolExecutor | None = None
        if beside or threads is not None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="turnwise-generator")
        if self._worker is not None and threads is not None:
            own = torch.get_num_threads()
            self._worker.submit(torch.set_num_threads, threads).result()
            torch.set_num_threads(own)  # the setting is per thread, but also the default of threads yet to come

    def drain(self) -> None:
        """Wait for what a worker still does for an event loop that is gone."""
        if self._worker is not None:
            self._worker.submit(lambda: None).result()

    async def call(self, function: Callable[..., None], *args: Any) -> None:
        if self._worker is None:
            function(*args)
        else:
            await asyncio.get_running_loop().run_in_executor(self._worker, function, *args)

    async def drive(
        self, steps: Callable[[Callable[[Any], None]], Iterator[None]], answer: Callable[[Any], None]
    ) -> None:
        """Run ``steps(report)`` to its end; what it reports is answered in the event loop."""
        if self._worker is None:
            for _ in steps(answer):
                await settle()
            return
        loop = asyncio.get_running_loop()

        def report(done: Any) -> None:
            loop.call_soon_threadsafe(answer, done)

        await loop.run_in_executor(self._worker, lambda: deque(steps(report), 0))
