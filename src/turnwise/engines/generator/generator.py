"""The local generator: continuous batching over KV slots. One asyncio task decides who is admitted and when weights
change; a ``Driver`` computes.

With ``deterministic=True`` requests are admitted only every ``tick`` steps and only once every open session is running,
waiting or closed, so batches, and with them every float, do not depend on how long tools take. Sessions that will not
ask again for a while must be closed or parked, or the others wait for them.

Knows token ids; not text (but for stop strings), rewards or turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.core.records import Sampling, Stop
from turnwise.engines.generator.executor import Driver, settle
from turnwise.engines.generator.model_runner import SHORTEST, Network
from turnwise.engines.generator.scheduler import Lanes, Request
from turnwise.engines.generator.session import LocalSession
from turnwise.errors import SettingError

log = logging.getLogger(__name__)

TICK, TICK_AHEAD = 8, 64


class LocalGenerator:
    """Implements ``ports.Generator`` for any Hugging Face causal LM. Owns a copy of ``model``.

    ``tokenizer`` (or its decode function) is needed for stop strings only. ``patience``: seconds a deterministic
    generator waits for sessions that neither ask nor close before it goes on without them, with a warning.
    ``fast=False`` keeps the stock forward. ``dtype``: of weights and slots (default: the model's); float8_e4m3fn for weights in
    fp8. ``tick``: steps between two admissions, at most; by default 8, and 64 where a GPU draws ahead and stops by itself when
    a quarter of its lanes are done. ``threads``: CPU threads
    of decoding; 1 is nearly as fast as 2 for a small model, and where a learner computes at the same time two teams on the
    same cores stall each other tenfold."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        slots: int,
        context: int,
        stop_ids: tuple[int, ...],
        tick: int | None = None,
        deterministic: bool = True,
        device: torch.device | str | None = None,
        patience: float = 60.0,
        fast: bool = True,
        dtype: torch.dtype | None = None,
        threads: int | None = None,
    ) -> None:
        if min(slots, 1 + context - SHORTEST, 1 if tick is None else tick) < 1:
            raise SettingError(f"slots={slots}, context={context}, tick={tick}; write at least 1, {SHORTEST} and 1")
        decode: Callable[[list[int]], str] | None = getattr(tokenizer, "decode", tokenizer)
        self.context, self.deterministic, self.patience = context, deterministic, patience
        self.network = Network(model, slots, context, torch.device(device or model.device), fast, dtype)
        self.tick = tick or (TICK if self.network.graphs is None else TICK_AHEAD)
        self.lanes = Lanes(self.network, stop_ids, decode)
        self.sessions: dict[int, LocalSession] = {}  # open ones, by order
        self._closed: list[LocalSession] = []  # to be released between two runs
        self._updates: list[tuple[Mapping[str, Tensor], int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._urgent, self._opened = False, 0
        self._driver = Driver(not deterministic, threads)

    # ------------------------------------------------------------------ the port

    @property
    def version(self) -> int:
        return self.lanes.version

    @version.setter
    def version(self, value: int) -> None:
        self.lanes.version = value

    def open(self, seed: int, draft: bool = False) -> LocalSession:
        """Drafts are sampled like all else: whoever has something cheaper stands before this one (``engines/drafts.py``)."""
        session = LocalSession(self, seed, self._opened)
        self.sessions[self._opened] = session
        self._opened += 1
        return session

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights between two steps (between two ticks when deterministic). Running requests are read again
        under them at once, idle sessions when they next ask: no later token mixes two policies."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._updates.append((weights, version, future))
        self.poke()
        await future

    def stats(self) -> dict[str, float]:
        """Counts since the start. ``decoder`` is 1 when the hand-written forward steps, 0 when the stock one does."""
        return {**self.lanes.stats(), "open": float(len(self.sessions))}

    def describe(self) -> str:
        """Which path computes, in which precision, and why not a faster one."""
        return self.network.describe()

    # ------------------------------------------------------------------ called by sessions

    def request(self, session: LocalSession, ids: Sequence[int], sampling: Sampling) -> Request:
        """Check a turn and put it in line."""
        if not ids:
            raise SettingError("generate was given no ids; a model needs at least one token to continue")
        if sampling.stop and self.lanes.decode is None:
            raise SettingError("stop strings need a tokenizer; give one to the generator")
        budget = min(sampling.max_tokens, self.context - len(ids))
        future = asyncio.get_running_loop().create_future()
        return Request(session.seat, session.seed, list(ids), len(ids), sampling, budget, future)

    def leave(self, session: LocalSession) -> None:
        self.sessions.pop(session.seat.order, None)
        self._closed.append(session)
        self.poke()

    def poke(self) -> None:
        """Something changed: wake the task, or start one."""
        self._urgent = True
        self._wake.set()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # outside any event loop nothing can be waiting
            return
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._strays(loop)
            self._wake = asyncio.Event()
            self._task = loop.create_task(self._serve())

    def _strays(self, loop: asyncio.AbstractEventLoop) -> None:
        """Forget requests of an event loop that is gone."""
        self._driver.drain()
        with torch.inference_mode():
            self.lanes.drop(lambda r: r.future.get_loop() is not loop)
        for session in self.sessions.values():
            if session.request is not None and session.request.future.get_loop() is not loop:
                session.request = None

    # ------------------------------------------------------------------ the task

    async def _serve(self) -> None:
        try:
            while await self._ready():
                self._urgent = False
                await self._driver.drive(partial(self._compute, self._waiting()), _resolve)
        except BaseException as fault:
            self._fail(fault)
            if not isinstance(fault, Exception):
                raise

    async def _ready(self) -> bool:
        """Wait until the next batch is decided. False: nothing is left to do."""
        while True:
            await settle()
            self._wake.clear()
            self._housekeeping()
            await self._update()
            if self._updates or self._closed:
                continue
            if not (self.lanes.running or self._waiting()):
                return False
            missing = [s for s in self.sessions.values() if not (s.asking or s.parked)]
            if not (self.deterministic and missing):
                return True
            try:
                await asyncio.wait_for(self._wake.wait(), self.patience)
            except TimeoutError:
                self._without(missing)

    def _without(self, missing: Sequence[LocalSession]) -> None:
        """Park sessions that kept everyone waiting too long, rather than hang."""
        self.lanes.count["impatience"] += 1
        text = "%d open sessions neither asked nor closed for %.0f s; going on, but a repeated run may differ. "
        log.warning(text + "park() or close() sessions that rest", len(missing), self.patience)
        for session in missing:
            session.parked = True

    def _waiting(self) -> list[Request]:
        """Requests in session order, as many as there are rows left."""
        room = self.network.slots.rows - len(self.lanes.running)
        running = {id(r) for r in self.lanes.running}
        line = [s.request for s in self.sessions.values() if s.asking and id(s.request) not in running]
        return [request for request in line[:room] if request is not None]

    def _housekeeping(self) -> None:
        """Answer cancelled requests with what they have; release the rows of closed sessions."""
        closed, self._closed = self._closed, []
        with torch.inference_mode():
            self.lanes.drop(lambda r: r.cancelled)
        for session in (*self.sessions.values(), *closed):
            if session.asking and session.request is not None and session.request.cancelled:
                session.request.stop = Stop.CANCELLED
                _resolve(session.request)
        for session in closed:
            self.network.slots.release(session.seat)

    async def _update(self) -> None:
        """Load published weights, and read running requests again under them."""
        while self._updates:
            weights, version, future = self._updates.pop(0)
            try:
                await self._driver.call(self._load, weights, version)
            except BaseException as fault:
                if not future.done():
                    future.set_exception(fault)
                if not isinstance(fault, SettingError):  # that one is raised before anything is copied
                    raise
            if not future.done():
                future.set_result(None)

    def _fail(self, fault: BaseException) -> None:
        """The engine broke: every caller learns why, and nothing of the broken state is kept."""
        futures = [s.request.future for s in (*self.sessions.values(), *self._closed) if s.request is not None]
        futures += [future for _, _, future in self._updates]
        for future in futures:
            if not future.done():
                future.set_exception(fault) if isinstance(fault, Exception) else future.cancel()
        self._updates, self.lanes.running = [], []
        for seat in self.network.slots.owner:
            if seat is not None:
                self.network.slots.release(seat)
        self.network.slots.forget()

    # ------------------------------------------------------------------ computing

    @torch.inference_mode()
    def _compute(self, waiting: Sequence[Request], report: Callable[[Request], None]) -> Iterator[None]:
        if waiting:
            self.lanes.admit(waiting)
        yield from self.lanes.run(self.tick, report, self._interrupted)

    def _interrupted(self, steps: int) -> bool:
        """Something changed: at once where anybody may come at any time, otherwise after a tick."""
        return self._urgent and (not self.deterministic or steps >= self.tick)

    @torch.inference_mode()
    def _load(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.network.load(weights)
        self.lanes.reread(version)


def _resolve(request: Request) -> None:
    if not request.future.done():
        request.future.set_result(None)
