"""The local generator: continuous batching over a KV cache. One asyncio task decides which requests are admitted and when
weights are updated; a ``GeneratorExecutor`` runs the computation. A ``LocalSession`` is one dialogue: ids in, ids out. It
stores no ids itself: the KV cache knows which ids have been processed.

With ``deterministic=True`` requests are admitted only every ``tick`` decode steps, and only once every open session is running,
waiting or closed. Then batches, and with them every float, do not depend on how long tools take. Close or park sessions that
submit no request for a while, or the others wait for them.

Knows token ids; no text (except for stop strings), rewards or turns.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.core.records import Completion, Sampling, Stop
from turnwise.engines.capture import using_gpu
from turnwise.engines.generator.kv_cache import CacheChoice, CacheSlot
from turnwise.engines.generator.logit_shift import LogitShift, Steering, Tempering
from turnwise.engines.generator.model_runner import MIN_CONTEXT, make_runner
from turnwise.engines.generator.scheduler import Request, Scheduler
from turnwise.engines.grammar import Grammars
from turnwise.engines.kernels.sampling import signed
from turnwise.errors import GrammarError, SettingError

log = logging.getLogger(__name__)

TICK, TICK_WITH_GRAPHS = 8, 64
LOOP_ROUNDS = 8  # rounds of the event loop in which resumed callers may submit their next request
_END = object()


class LocalGenerator:
    """Implements ``core.protocols.Generator`` for any Hugging Face causal LM. Owns a copy of ``model``.

    ``tokenizer`` (or its decode function) is needed for stop strings only. ``slots``: rows of the KV cache. ``patience``: seconds
    for which a deterministic generator waits for sessions that neither submit a request nor close; then it goes on without them
    and logs a warning. ``fast=False`` keeps the stock forward. ``dtype``: of weights and KV cache (default: the model's);
    float8_e4m3fn for fp8 weights. ``tick``: decode steps between two admissions at most; by default 8, and 64 with CUDA graphs,
    which stop by themselves once a quarter of the lanes have finished. ``threads``: CPU threads of decoding; 1 is nearly as fast
    as 2 for a small model, and beside a running learner two thread teams on the same cores slow each other down tenfold.
    ``share_weights``: use the memory of ``model`` where device and dtype are the same, for a caller that publishes after every
    change of it and samples nothing in between. ``cache``: rows or pages of the KV cache, and its memory. ``grammars``: what
    reads the grammars of requests; None: they are refused."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, *, slots: int, context: int, stop_ids: tuple[int, ...],
        tick: int | None = None, deterministic: bool = True, device: torch.device | str | None = None, patience: float = 60.0,
        fast: bool = True, dtype: torch.dtype | None = None, threads: int | None = None, share_weights: bool = False,
        cache: CacheChoice | None = None, grammars: Grammars | None = None,
    ) -> None:  # fmt: skip
        if min(slots, 1 + context - MIN_CONTEXT, 1 if tick is None else tick) < 1:
            raise SettingError(f"slots={slots}, context={context}, tick={tick}; write at least 1, {MIN_CONTEXT} and 1")
        decode: Callable[[list[int]], str] | None = getattr(tokenizer, "decode", tokenizer)
        self.context, self.deterministic, self.patience, self.cache = context, deterministic, patience, cache
        self.grammars = grammars
        where = torch.device(device or model.device)
        self.model_runner = make_runner(model, slots, context, where, fast, dtype, share_weights, cache)
        self.tick = tick or (TICK if self.model_runner.graphs is None else TICK_WITH_GRAPHS)
        self.scheduler = Scheduler(self.model_runner, stop_ids, decode)
        self.sessions: dict[int, LocalSession] = {}  # open ones, by order
        self.closed_sessions: list[LocalSession] = []  # rows to release between two runs
        self._updates: list[tuple[Mapping[str, Tensor], int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._interrupt_requested, self._opened = False, 0
        self._held, self._held_since = 0.0, math.inf  # seconds that it waited for sessions, and since when it does
        self.computing = False
        self.on_change: Callable[[], None] = lambda: None  # for a generator that takes turns with this one
        self._executor = GeneratorExecutor(not deterministic, threads, self.model_runner.device)

    # ------------------------------------------------------------------ generator protocol

    @property
    def version(self) -> int:
        return self.scheduler.version

    @version.setter
    def version(self, value: int) -> None:
        self.scheduler.version = value

    def open(self, seed: int, draft: bool = False) -> LocalSession:
        """Open a session. ``draft`` is ignored: ``DraftingGenerator`` routes drafts to a cheaper generator."""
        session = LocalSession(self, seed, self._opened)
        self.sessions[self._opened] = session
        self._opened += 1
        return session

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Update the weights between two decode steps (between two ticks when deterministic). The KV of running requests is
        recomputed at once, that of idle sessions at their next request: no later token mixes two policies."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._updates.append((weights, version, future))
        self.wake()
        await future

    @property
    def applies_adapters(self) -> bool:
        """Whether adapters are applied beside the weights; else they are merged, for which their base is needed each time."""
        return self.model_runner.applies_adapters

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype in which each weight is kept; published weights are rounded to it. Decoders in CUDA graphs keep norms and
        embeddings in float32."""
        exact = self.model_runner.graphs is not None
        keeps = lambda name, p: exact and (p.dim() < 2 or name == "model.embed_tokens.weight")  # noqa: E731
        named = self.model_runner.model.named_parameters()
        return {name: torch.float32 if keeps(name, p) else p.dtype for name, p in named}

    def stats(self) -> dict[str, float]:
        """Counts since the start. ``decoder`` is 1 with the hand-written forward, 0 with the stock one. ``seconds_held``: a
        deterministic generator had requests, but waited for sessions without one."""
        return {**self.scheduler.stats(), "open": float(len(self.sessions)), "seconds_held": self.seconds_held}

    @property
    def seconds_held(self) -> float:
        return self._held + max(0.0, time.perf_counter() - self._held_since)

    def describe(self) -> str:
        """The decode path in use, its precision, why no faster one is, and the layout of the KV cache."""
        return self.model_runner.describe()

    # ------------------------------------------------------------------ called by sessions

    def wake(self) -> None:
        """Wake the serving task after a change, or start one."""
        self._interrupt_requested = True
        self._woken.set()
        self.on_change()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # without an event loop no request can be waiting
            return
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            # requests of an event loop that has ended are dropped, once the worker computes nothing for it any more
            self._executor.drain()
            with torch.inference_mode():
                self.scheduler.remove(lambda r: r.future.get_loop() is not loop)
            for session in self.sessions.values():
                if session.request is not None and session.request.future.get_loop() is not loop:
                    session.request = None
            self._woken = asyncio.Event()
            self._task = loop.create_task(self._serve())

    # ------------------------------------------------------------------ serving task

    async def _serve(self) -> None:
        try:
            while await self._next_batch_ready():
                self._interrupt_requested, self.computing = False, True
                await self._executor.run(partial(self._compute, self._waiting()), _resolve)
                self.computing = False
                self.on_change()
        except BaseException as fault:
            self.computing = False
            self._fail(fault)
            if not isinstance(fault, Exception):
                raise

    async def _next_batch_ready(self) -> bool:
        """Wait until the next batch can be composed. False: no request is left."""
        while True:
            await run_callbacks()
            self._woken.clear()
            self._reap()
            await self._update()
            if self._updates or self.closed_sessions:
                continue
            if not (self.scheduler.running or self._waiting()):
                return False
            missing = self._missing()
            if not (self.deterministic and missing):
                return True
            self._held_since = time.perf_counter()
            try:
                await asyncio.wait_for(self._woken.wait(), self.patience)
            except TimeoutError:  # park them, rather than hang
                self.scheduler.count["patience_timeouts"] += 1
                log.warning(
                    "open sessions that submitted no request and did not close for %.0f s: %d; going on without them, so a "
                    "repeated run may differ. Call park() or close() on idle sessions", self.patience, len(missing),
                )  # fmt: skip
                for session in missing:
                    session.parked = True
            finally:
                self._held, self._held_since = self.seconds_held, math.inf

    def _missing(self) -> list[LocalSession]:
        """Sessions that may submit a request before the next batch is composed."""
        return [s for s in self.sessions.values() if not (s.pending or s.parked)]

    def _waiting(self) -> list[Request]:
        """Waiting requests in session order, at most as many as there are free rows."""
        free_rows = self.model_runner.kv_cache.rows - len(self.scheduler.running)
        running = {id(r) for r in self.scheduler.running}
        waiting = [s.request for s in self.sessions.values() if s.pending and id(s.request) not in running]
        return [request for request in waiting[:free_rows] if request is not None]

    def _reap(self) -> None:
        """Resolve cancelled requests with the tokens they have; release the rows of closed sessions."""
        closed, self.closed_sessions = self.closed_sessions, []
        with torch.inference_mode():
            self.scheduler.remove(lambda r: r.cancelled)
        for session in (*self.sessions.values(), *closed):
            if session.pending and session.request is not None and session.request.cancelled:
                session.request.stop = Stop.CANCELLED
                _resolve(session.request)
        for session in closed:
            self.model_runner.kv_cache.release(session.cache_slot)

    async def _update(self) -> None:
        """Load published weights and recompute the KV of running requests."""
        while self._updates:
            weights, version, future = self._updates.pop(0)
            try:
                await self._executor.call(self._load, weights, version)
            except BaseException as fault:
                if not future.done():
                    future.set_exception(fault)
                if not isinstance(fault, SettingError):  # raised before any weight is copied
                    raise
            if not future.done():
                future.set_result(None)

    def _fail(self, fault: BaseException) -> None:
        """Pass an engine failure to every caller and discard the state."""
        futures = [s.request.future for s in (*self.sessions.values(), *self.closed_sessions) if s.request is not None]
        futures += [future for _, _, future in self._updates]
        for future in futures:
            if not future.done():
                future.set_exception(fault) if isinstance(fault, Exception) else future.cancel()
        self._updates, self.scheduler.running = [], []
        kv_cache = self.model_runner.kv_cache
        kv_cache.assign_rows([])
        for slot in kv_cache.owner:
            kv_cache.release(slot)
        kv_cache.invalidate()

    # ------------------------------------------------------------------ computation

    @torch.inference_mode()
    def _compute(self, waiting: Sequence[Request], report: Callable[[Request], None]) -> Iterator[None]:
        if waiting:
            self.scheduler.admit(waiting)
        # interrupted at once, or when deterministic after a tick
        interrupted = lambda steps: self._interrupt_requested and (not self.deterministic or steps >= self.tick)  # noqa: E731
        yield from self.scheduler.run(self.tick, report, interrupted)

    @torch.inference_mode()
    def _load(self, weights: Mapping[str, Tensor], version: int) -> None:
        with self._executor.reading_learner():
            self.model_runner.load_weights(weights)
        self.scheduler.recompute(version)


def _resolve(request: Request) -> None:
    if not request.future.done():
        request.future.set_result(None)


# ---------------------------------------------------------------------- one dialogue


class LocalSession:
    """One dialogue. Implements ``core.protocols.Session``. Random numbers depend only on (seed, position) and on how often the
    dialogue was restarted: without the latter, a policy that rewrites its history would draw the same numbers at the same
    positions and repeat every mistake."""

    def __init__(self, owner: LocalGenerator, seed: int, order: int) -> None:
        self.seed = signed(seed)
        self.cache_slot = CacheSlot(order)
        self.parked = False
        self.closed = False
        self.request: Request | None = None
        self.shift: LogitShift | Steering | Tempering | None = (
            None  # what is added to the log-probabilities of its tokens
        )
        self._owner = owner
        self._sampled_until = 0  # positions for which a random number was drawn

    @property
    def pending(self) -> bool:
        """A request of this session is waiting or running."""
        return self.request is not None and self.request.stop is None

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue ``ids``, the whole sequence so far. A prefix that the cache holds is not prefilled again."""
        if self.closed:
            raise SettingError("this session was closed; open a new one")
        if self.request is not None:
            raise SettingError("this session is already generating; await it, or fork the session")
        if not ids:
            raise SettingError("generate was given no ids; a model needs at least one token to continue")
        owner = self._owner
        if sampling.stop and owner.scheduler.decode is None:
            raise SettingError("stop strings need a tokenizer; give one to the generator")
        if len(ids) < self._sampled_until:  # the history was rewritten or shortened
            self.seed, self._sampled_until = signed(self.seed + 1), 0
        grammar = None
        if sampling.grammar:
            if owner.grammars is None:
                raise GrammarError(
                    "a grammar needs a tokenizer; make the generator with grammars=Grammars(tokenizer, stop_ids)"
                )
            grammar = owner.grammars.start(sampling.grammar, ids[len(ids) - sampling.begun :])
        budget, future = min(sampling.max_tokens, owner.context - len(ids)), asyncio.get_running_loop().create_future()
        request = Request(self.cache_slot, self.seed, list(ids), len(ids), sampling, budget, future)
        request.held_before, request.grammar = owner.seconds_held, grammar
        if budget < 1:  # the context is full before the first token
            request.stop = Stop.LENGTH
            return completion(request, owner.seconds_held)
        self.request, self.parked, request.shift = request, False, self.shift
        owner.wake()
        try:
            await request.future
        finally:
            request.cancelled = True  # if the caller was cancelled, nobody needs the remaining tokens
            self.request, self._sampled_until = None, len(request.sequence)
        return completion(request, owner.seconds_held)

    def fork(self, seed: int) -> LocalSession:
        """Open another dialogue with the same history; its first request copies the cached prefix from this one's row."""
        return self._owner.open(seed)

    def park(self) -> None:
        """Tell a deterministic generator not to wait for this session. The next ``generate`` unparks it."""
        self.parked = True
        self._owner.wake()

    def unpark(self) -> None:
        """Make a deterministic generator wait for this session before its next request is known."""
        self.parked = False

    def cancel(self) -> None:
        """Make an unfinished ``generate`` return the tokens it has. Its KV stays cached."""
        if self.request is not None:
            self.request.cancelled = True
            self._owner.wake()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.cancel()
            self._owner.sessions.pop(self.cache_slot.order, None)
            self._owner.closed_sessions.append(self)
            self._owner.wake()


def completion(request: Request, held: float) -> Completion:
    """``held``: seconds so far in which the generator waited for other sessions; they are not this request's."""
    assert request.stop is not None
    tokens = request.sequence[request.prompt_length :]
    seconds = time.perf_counter() - request.started - (held - request.held_before)
    measured = len(request.entropy) == len(tokens)
    entropy, confidence = (request.entropy, request.confidence) if measured else ((), ())
    routes = request.routes if len(request.routes) == len(request.sequence) - 1 else ()
    sampled = (tokens, request.logp, request.mass, request.version)
    measures = (entropy, confidence, routes, request.kept_sets)
    obeyed = (request.sampling.grammar, request.sampling.begun)
    return Completion(*sampled, request.stop, seconds, *measures, *obeyed)


# ---------------------------------------------------------------------- where it computes


async def run_callbacks() -> None:
    """Let the event loop run ready callbacks before the next batch is composed."""
    for _ in range(LOOP_ROUNDS):
        await asyncio.sleep(0)


class GeneratorExecutor:
    """Where a generator computes: in the event loop's thread, or in a worker thread beside it. Does not know what is computed.

    A worker thread brings a second OpenMP thread team, and two teams on the same cores wake each other up at every matrix
    product: that costs a tenth of a whole training step. So a deterministic generator, for which everything else waits anyway,
    computes in the event loop's thread and lets the loop run whenever a request finishes, so that tools run in between. A
    generator that runs concurrently with other work gets a worker, and the loop stays free. On a GPU the worker launches on a
    stream of its own: on the default stream its steps would queue behind the learner's."""

    def __init__(self, in_worker: bool, threads: int | None, device: torch.device) -> None:
        """``threads``: CPU threads of the computation. They can be set only for a worker, so a number implies one."""
        self._worker: ThreadPoolExecutor | None = None
        self.stream: Any = None  # of the worker, where ``device`` is a GPU
        if not in_worker and threads is None:
            return
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="turnwise-generator")
        if threads is not None:
            main_threads = torch.get_num_threads()
            self._worker.submit(torch.set_num_threads, threads).result()
            torch.set_num_threads(main_threads)  # the setting is per thread, but also the default of later threads
        if device.type == "cuda":
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

        def compute() -> None:
            report: Callable[..., Any] = lambda request: loop.call_soon_threadsafe(resolve, request)  # noqa: E731
            remaining, more = steps(report), True
            while more:
                with using_gpu():  # released between steps, where a learner may capture
                    more = next(remaining, _END) is not _END

        await loop.run_in_executor(self._worker, compute)
