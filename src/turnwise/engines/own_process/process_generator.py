"""The generator of a run in a process of its own, as the run sees it.

Requests and changes of dialogues travel in one message per moment of the event loop, in order, so that the other process
composes the batches that a generator in this process would. Requests in flight survive a publication there as here. A process
that dies or is silent is named; the run then stops with a checkpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.core.records import Completion, Sampling
from turnwise.engines.adapters import AdaptedWeights, SentBase, factors_of
from turnwise.engines.capture import using_gpu
from turnwise.engines.own_process.link import WorkerLink
from turnwise.engines.own_process.weights import BLOCK, DEVICE, SharedBlock, device_handles
from turnwise.engines.own_process.worker import PING, GeneratorSpec
from turnwise.errors import GeneratorLost, SettingError

LOOP_ROUNDS = 8  # of the event loop in which changes are gathered; as many as a generator in this process allows
PING_SECONDS = 5.0


class ProcessGenerator:
    """Implements ``core.protocols.Generator``. ``seconds``: a process that says nothing for so long is given up."""

    def __init__(self, spec: GeneratorSpec, model: PreTrainedModel, tokenizer: Any, seconds: float = 30.0) -> None:
        self.version, self.seconds = 0, seconds
        self.fatal: GeneratorLost | None = None  # why nothing can be sampled any longer
        self.link = WorkerLink(seconds)
        self.close = weakref.finalize(self, self.link.close)
        with tempfile.TemporaryDirectory(prefix="turnwise-generator-") as folder:
            file = Path(folder) / "model.pt"
            torch.save((model.cpu(), tokenizer), file)
            self.link.send((spec, file))
            fault, self._path = self.link.first_answer()
        if fault is not None:
            self.close()
            raise fault
        self._by_device, self._block = spec.device != "cpu", SharedBlock()
        self._base: SentBase | None = None  # the frozen weights that the process has
        self.published_bytes = 0  # that the last publication sent through shared memory
        self._numbers, self._requests = itertools.count(), itertools.count()
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._changes: list[tuple[Any, ...]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open, self._tokens, self._heard = 0, 0, time.monotonic()
        self._ping_due = 0.0

    @property
    def process(self) -> int:
        """The id of the generator process."""
        return self.link.process.pid

    # ------------------------------------------------------------------ generator protocol

    def open(self, seed: int, draft: bool = False) -> ProcessSession:
        """Open a dialogue. ``draft`` is ignored."""
        self._open += 1
        session = ProcessSession(self, next(self._numbers))
        self.change("open", session.number, seed)
        return session

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load new weights there, between two decode steps. With the process gone the next request raises, not this call: the
        step that was trained is complete."""
        if self.fatal is not None:
            return
        try:
            self.published_bytes = 0
            if isinstance(weights, AdaptedWeights) and weights.mergeless:
                if self._base is None or not self._base.is_still(weights.base):
                    await self._transfer(SharedBlock(), weights.base, "hold")
                    self._base, self._block = SentBase(weights.base), SharedBlock()
                factors, described = factors_of(weights.adapters)
                await self._transfer(self._block, factors, "publish", version, described)
            else:
                self._block = self._block if self._base is None else SharedBlock()
                self._base = None
                await self._transfer(self._block, weights, "publish", version, None)
        except GeneratorLost:
            return
        self.version = version

    async def _transfer(self, block: SharedBlock, weights: Mapping[str, Tensor], verb: str, *arguments: Any) -> None:
        if not (self._by_device and await self._transfer_on_device(weights, verb, *arguments)):
            told = await asyncio.to_thread(block.put, weights)
            self.published_bytes += block.size
            await self.ask(verb, BLOCK, told, *arguments)
            block.taken()

    async def _transfer_on_device(self, weights: Mapping[str, Tensor], verb: str, *arguments: Any) -> bool:
        """Send without a way through the host; False where the other process cannot read this one's tensors."""
        try:
            await self.ask(verb, DEVICE, await asyncio.to_thread(using_gpu()(device_handles), weights), *arguments)
        except GeneratorLost:
            raise
        except RuntimeError:  # weights in host memory, or a container that keeps processes apart
            self._by_device = False
        return self._by_device

    def stats(self) -> dict[str, float]:
        return {"tokens": float(self._tokens), "open": float(self._open)}

    def describe(self) -> str:
        return f"{self._path}; in a process of its own ({self.process})"

    # ------------------------------------------------------------------ called by sessions

    def change(self, *change: Any) -> None:
        """Tell the process about a dialogue, together with all that happens in the same moment."""
        if self.fatal is not None:
            return
        self._changes.append(change)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no event loop: the next one that needs an answer sends it
            return
        self._use(loop)
        if self._flushing is None or self._flushing.done():
            self._flushing = loop.create_task(self._flush())

    async def ask(self, verb: str, *arguments: Any, before: tuple[Any, ...] = ()) -> Any:
        """The answer to a request; ``before`` are its arguments that come before its number."""
        if self.fatal is not None:
            raise self.fatal
        loop = asyncio.get_running_loop()
        self._use(loop)
        request, future = next(self._requests), loop.create_future()
        self._futures[request] = future
        self.change(verb, *before, request, *arguments)
        try:
            return await future
        finally:
            if self._futures.pop(request, None) is not None and self.fatal is None:
                self.change("drop", request)

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    def closed(self) -> None:
        self._open -= 1

    # ------------------------------------------------------------------ messages

    def _use(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read answers in the event loop that runs now."""
        if self._loop is loop or self.fatal is not None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.link.connection.fileno())
        self._loop, self._flushing, self._futures = loop, None, {}
        loop.add_reader(self.link.connection.fileno(), self._read)
        self._heard = time.monotonic()
        self._ping_later(loop)

    async def _flush(self) -> None:
        """Send changes, in order. What happens while callbacks run is one message: the process applies it at once."""
        while self._changes and self.fatal is None:
            for _ in range(LOOP_ROUNDS):
                await asyncio.sleep(0)
            changes, self._changes = self._changes, []
            self._send(changes)

    def _send(self, message: object) -> None:
        try:
            self.link.send(message)
        except GeneratorLost as fault:
            self._lose(fault)

    def _read(self) -> None:
        try:
            answers = self.link.receive()
        except GeneratorLost as fault:
            self._lose(fault)
            return
        self._heard = time.monotonic()
        for answer in answers:
            if answer == PING:
                continue
            request, failure, value = answer
            future = self._futures.pop(request, None)
            if future is None or future.done():
                continue
            future.set_exception(failure) if failure is not None else future.set_result(value)

    def _ping_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ping_due = time.monotonic() + PING_SECONDS
        loop.call_later(PING_SECONDS, self._ping, loop)

    def _ping(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ask whether the process still runs while it owes an answer. Time in which this loop itself stood still, because a
        large checkpoint was written or the machine slept, is not counted: answers may wait to be read."""
        if self.fatal is not None or self._loop is not loop:
            return
        self._heard += max(time.monotonic() - self._ping_due, 0.0)
        if not self._futures:
            self._heard = time.monotonic()
        elif (silent := time.monotonic() - self._heard) > self.seconds:
            self._lose(GeneratorLost(f"the generator process has said nothing for {silent:.0f} s"))
            return
        else:
            self._send(PING)
        self._ping_later(loop)

    def _lose(self, fault: GeneratorLost) -> None:
        """Sample no longer; everyone who waits gets the error."""
        self.fatal = fault
        if self._loop is not None:
            self._loop.remove_reader(self.link.connection.fileno())
        self.close()
        futures, self._futures = self._futures, {}
        for future in futures.values():
            if not future.done():
                future.set_exception(fault)


class ProcessSession:
    """Implements ``core.protocols.Session`` by a session of the other process."""

    def __init__(self, owner: ProcessGenerator, number: int) -> None:
        self.number, self.closed = number, False
        self._owner, self._generating = owner, False

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue ``ids``, the whole sequence so far."""
        if self.closed:
            raise SettingError("this session was closed; open a new one")
        if self._generating:
            raise SettingError("this session is already generating; await it, or fork the session")
        self._generating = True
        try:
            done: Completion = await self._owner.ask("generate", list(ids), sampling, before=(self.number,))
        finally:
            self._generating = False
        self._owner.count(len(done.tokens))
        return done

    def fork(self, seed: int) -> ProcessSession:
        """Open another dialogue with the same history; the prefix that both share is found there."""
        return self._owner.open(seed)

    def park(self) -> None:
        """Tell the process not to wait for this dialogue. The next ``generate`` unparks it."""
        self._owner.change("park", self.number)

    def cancel(self) -> None:
        """Make an unfinished ``generate`` return the tokens it has."""
        self._owner.change("cancel", self.number)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._owner.change("close", self.number)
            self._owner.closed()
