"""The main program of the generator process: build a generator, then do what the run says until it closes the pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from turnwise.core.records import Sampling
from turnwise.engines.adapters import HeldWeights, adapted_weights
from turnwise.engines.capture import using_gpu
from turnwise.engines.generator.generator import LocalGenerator, LocalSession
from turnwise.engines.generator.kv_cache import CacheChoice
from turnwise.engines.own_process.weights import BLOCK, SharedBlockReader, from_handles

PING = ("ping",)


@dataclass(frozen=True)
class GeneratorSpec:
    """What a generator is made of, besides the model and its tokenizer."""

    slots: int
    context: int
    stop_ids: tuple[int, ...]
    deterministic: bool
    device: str
    dtype: torch.dtype | None
    threads: int
    cache: CacheChoice | None = None

    def make(self, file: Path) -> LocalGenerator:
        """``file`` holds the model and its tokenizer."""
        model, tokenizer = torch.load(file, weights_only=False)
        torch.set_num_threads(self.threads)
        return LocalGenerator(
            model,
            partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
            slots=self.slots,
            context=self.context,
            stop_ids=self.stop_ids,
            deterministic=self.deterministic,
            device=self.device,
            dtype=self.dtype,
            threads=self.threads,
            share_weights=self.device == "cpu",
            cache=self.cache,
        )


class GeneratorWorker:
    """Serves one run: its dialogues by number, its requests as tasks."""

    def __init__(self, connection: Connection, generator: LocalGenerator) -> None:
        self.connection, self.generator = connection, generator
        self.sessions: dict[int, LocalSession] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.block = SharedBlockReader()
        self.base = HeldWeights({})  # of adapters that are published alone
        self._answers: list[tuple[Any, ...]] = []
        self._lock = threading.Lock()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        await asyncio.Event().wait()  # the reader ends the process

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Always read, so that the run never waits at the pipe; a pipe that is closed ends this process."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = pickle.loads(self.connection.recv_bytes())
                if message == PING:
                    # in a thread of its own: this one must go on reading while another sends to a run that only writes
                    threading.Thread(target=self._send, args=([PING],), daemon=True).start()
                else:
                    loop.call_soon_threadsafe(self._apply, message)
        os._exit(0)

    def _send(self, answers: list[tuple[Any, ...]]) -> None:
        data = pickle.dumps(answers, protocol=5)
        with self._lock:
            self.connection.send_bytes(data)

    def _answer(self, *answer: Any) -> None:
        """Send the answer with all others of this moment."""
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._answers.append(answer)

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        with contextlib.suppress(OSError):  # the run has ended, and the reader ends this process
            self._send(answers)

    def _apply(self, changes: list[tuple[Any, ...]]) -> None:
        """Everything that happened in the run at one moment, before the generator composes its next batch."""
        try:
            for verb, *arguments in changes:
                getattr(self, f"_do_{verb}")(*arguments)
        except Exception as fault:  # a mistake of ours: end, rather than let the run wait
            print(f"{type(fault).__name__}: {fault}", file=sys.stderr, flush=True)
            os._exit(1)

    def _do_open(self, number: int, seed: int) -> None:
        self.sessions[number] = self.generator.open(seed)

    def _do_generate(self, number: int, request: int, ids: list[int], sampling: Sampling) -> None:
        self.sessions[number].unpark()
        work = self.sessions[number].generate(ids, sampling)
        self.tasks[request] = asyncio.ensure_future(self._answered(request, work))

    def _do_hold(self, request: int, kind: str, told: Any) -> None:
        self.tasks[request] = asyncio.ensure_future(self._answered(request, self._hold(kind, told)))

    def _do_publish(self, request: int, kind: str, told: Any, version: int, adapters: Any) -> None:
        work = self._publish(kind, told, version, adapters)
        self.tasks[request] = asyncio.ensure_future(self._answered(request, work))

    def _do_stats(self, request: int) -> None:
        self._answer(request, None, self.generator.stats())

    def _do_drop(self, request: int) -> None:
        """Nobody waits for the answer any longer."""
        if (task := self.tasks.get(request)) is not None:
            task.cancel()

    def _do_park(self, number: int) -> None:
        if number in self.sessions:  # else it was closed meanwhile
            self.sessions[number].park()

    def _do_cancel(self, number: int) -> None:
        if number in self.sessions:
            self.sessions[number].cancel()

    def _do_close(self, number: int) -> None:
        self.sessions.pop(number).close()

    async def _hold(self, kind: str, told: Any) -> None:
        """Keep the frozen weights that later adapters belong to. The run does not write into them."""
        self.base, self.block = HeldWeights(await self._received(SharedBlockReader(), kind, told)), SharedBlockReader()

    async def _publish(self, kind: str, told: Any, version: int, adapters: Any) -> None:
        """``adapters`` describes the factors that are sent; None: all weights are."""
        tensors = await self._received(self.block, kind, told)
        weights: Mapping[str, torch.Tensor] = tensors
        if adapters is not None:
            weights = await asyncio.to_thread(using_gpu()(adapted_weights), self.base, tensors, adapters)
        await self.generator.publish(weights, version)
        if adapters is None or self.generator.applies_adapters:
            self.base.release()  # the generator has its own copy
        if kind != BLOCK:
            tensors.clear()
            await asyncio.to_thread(using_gpu()(_finish_reading))

    async def _received(self, block: SharedBlockReader, kind: str, told: Any) -> dict[str, torch.Tensor]:
        if kind == BLOCK:
            return block.get(told)
        return await asyncio.to_thread(using_gpu()(from_handles), told)  # not while the generator captures a graph

    async def _answered(self, request: int, work: Any) -> None:
        try:
            self._answer(request, None, await work)
        except asyncio.CancelledError:
            pass
        except Exception as fault:
            self._answer(
                request, fault if _can_travel(fault) else RuntimeError(f"{type(fault).__name__}: {fault}"), None
            )
        finally:
            self.tasks.pop(request, None)


def _finish_reading() -> None:
    """Wait until the tensors of the run are copied, and let go of them."""
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()


def _can_travel(fault: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(fault))
    except Exception:
        return False
    return True


def main(descriptor: int) -> None:
    connection = Connection(descriptor)
    try:
        spec, file = pickle.loads(connection.recv_bytes())
        generator = spec.make(file)
    except EOFError:
        return
    except Exception as fault:
        told = fault if _can_travel(fault) else RuntimeError(f"{type(fault).__name__}: {fault}")
        connection.send_bytes(pickle.dumps((told, "")))
        return
    connection.send_bytes(pickle.dumps((None, generator.describe())))
    asyncio.run(GeneratorWorker(connection, generator).run())


if __name__ == "__main__":
    main(int(sys.argv[1]))
