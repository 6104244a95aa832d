"""Where a generator computes: in the event loop's thread, or in a worker thread beside it.

A worker thread brings a second OpenMP thread team, and two teams on the same cores wake each other up at every matrix
product: that costs a tenth of a whole training step. So a deterministic generator, for which everything else waits anyway,
computes in the event loop's thread and lets the loop run whenever a request finishes, so that tools run in between. A
generator that runs concurrently with other work gets a worker, and the loop stays free. On a GPU the worker launches on a stream
of its own: on the default stream its steps would queue behind the learner's. Does not know what is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from turnwise.engines.capture import using_gpu

_END = object()
LOOP_ROUNDS = 8  # rounds of the event loop in which resumed callers may submit their next request


async def run_callbacks() -> None:
    """Let the event loop run ready callbacks before the next batch is composed."""
    for _ in range(LOOP_ROUNDS):
        await asyncio.sleep(0)


class GeneratorExecutor:
    def __init__(self, in_worker: bool, threads: int | None, device: torch.device | None = None) -> None:
        """``threads``: CPU threads of the computation. They can be set only for a worker, so a number implies one."""
        self._worker: ThreadPoolExecutor | None = None
        self.stream: Any = None  # of the worker, where ``device`` is a GPU
        if in_worker or threads is not None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="turnwise-generator")
        if self._worker is not None and threads is not None:
            main_threads = torch.get_num_threads()
            self._worker.submit(torch.set_num_threads, threads).result()
            torch.set_num_threads(main_threads)  # the setting is per thread, but also the default of later threads
        if self._worker is not None and device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)  # what was made on the default stream is complete
            self.stream = torch.cuda.Stream(device, priority=-1)  # a decode step is short, a learner's pass long
            self._worker.submit(torch.cuda.set_stream, self.stream).result()

    @contextmanager
    def reading_learner(self) -> Iterator[None]:
        """Inside, the worker reads tensors that the learner wrote on the default stream: it waits for them, and what the learner
        launches later waits until they have been read."""
        if self.stream is None:
            yield
            return
        default = torch.cuda.default_stream(self.stream.device)
        self.stream.wait_stream(default)
        yield
        default.wait_stream(self.stream)

    def drain(self) -> None:
        """Wait for what the worker still computes for an event loop that has ended."""
        if self._worker is not None:
            self._worker.submit(lambda: None).result()

    async def call(self, function: Callable[..., None], *args: Any) -> None:
        if self._worker is None:
            function(*args)
        else:
            await asyncio.get_running_loop().run_in_executor(self._worker, using_gpu()(function), *args)

    async def run(
        self, steps: Callable[[Callable[[Any], None]], Iterator[None]], resolve: Callable[[Any], None]
    ) -> None:
        """Exhaust ``steps(report)``; call ``resolve`` in the event loop for everything it reports."""
        if self._worker is None:
            for _ in steps(resolve):
                await run_callbacks()
            return
        loop = asyncio.get_running_loop()

        def report(finished: Any) -> None:
            loop.call_soon_threadsafe(resolve, finished)

        def compute() -> None:
            remaining, more = steps(report), True
            while more:
                with using_gpu():  # released between steps, where a learner may capture
                    more = next(remaining, _END) is not _END

        await loop.run_in_executor(self._worker, compute)
