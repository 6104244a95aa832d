"""One episode's session with one worker: send code, wait at most the time limit, and report failures as text.

Knows the protocol and the limits; does not know how workers are made or confined.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.core.text import clean
from turnwise.errors import ToolFault
from turnwise.tools.isolation import SandboxLimits
from turnwise.tools.zygote import START_SECONDS, Garbled, Gone, Hung, SandboxWorker, WorkerExit

RESTARTED = "the interpreter was restarted, its names are gone"


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The result of one call. ``ok`` is False when the code raised or was stopped."""

    output: str
    ok: bool
    seconds: float


class WorkerPool(Protocol):
    """What a session needs of the pool that owns its workers."""

    @property
    def limits(self) -> SandboxLimits: ...

    def take_worker(self) -> SandboxWorker: ...

    def end_later(self, worker: SandboxWorker) -> None: ...


class SandboxSession:
    """One episode's interpreter. Calls from several threads run one after another."""

    def __init__(self, pool: WorkerPool, worker: SandboxWorker) -> None:
        self._pool = pool
        self._worker: SandboxWorker | None = worker
        self._lock = threading.Lock()
        self._closed = False

    def run(self, code: str) -> ExecutionResult:
        """Execute ``code``; the output is what it printed and the value of a final expression statement."""
        began = time.perf_counter()
        if refusal := self._refusal(code):
            return ExecutionResult(refusal, False, 0.0)
        self._lock.acquire()
        try:
            return execute(self._ready(), code, self._pool.limits.wall_seconds)
        except (Hung, Gone, Garbled) as failure:
            return ExecutionResult(self._stop(failure), False, time.perf_counter() - began)
        except BaseException:  # interrupted mid-call: a late result would be taken for that of the next call
            self._drop()
            raise
        finally:
            self._release()

    async def arun(self, code: str) -> ExecutionResult:
        """Like :meth:`run`, without blocking the event loop."""
        began = time.perf_counter()
        if refusal := self._refusal(code):
            return ExecutionResult(refusal, False, 0.0)
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(0.001)
        try:
            worker = self._live()
            if worker is None:
                worker = await asyncio.to_thread(self._ready)
            return await aexecute(worker, code, self._pool.limits.wall_seconds)
        except (Hung, Gone, Garbled) as failure:
            text = await asyncio.to_thread(self._stop, failure)
            return ExecutionResult(text, False, time.perf_counter() - began)
        except BaseException:
            self._drop()
            raise
        finally:
            self._release()

    def close(self) -> None:
        """Kill the interpreter and everything it started. Safe to call twice, and while a call is running."""
        self._closed = True
        if (worker := self._worker) is not None:
            worker.interrupt()  # a running call ends now and cleans up by itself
        if self._lock.acquire(blocking=False):
            self._release()

    def __enter__(self) -> SandboxSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            self._pool.end_later(worker)

    # ---- the worker
    def _live(self) -> SandboxWorker | None:
        worker = self._worker
        if worker is None or not worker.ready:
            return None
        if not worker.zygote.alive:  # report it: the model must learn that its names are lost
            raise Gone
        return worker

    def _ready(self) -> SandboxWorker:
        """A worker that has reported ready; a new one if the last was killed."""
        if worker := self._live():
            return worker
        fault = ""
        for _ in range(3):  # one attempt may fail with a dead pool, one because the machine is out of processes
            if self._closed:
                raise ToolFault("this Python session is closed")
            if self._worker is not None and not self._worker.zygote.check():
                self._drop()  # with its socket
            worker = self._worker = self._worker or self._pool.take_worker()
            try:
                _wait_ready(worker)
                return worker
            except (Hung, Gone, Garbled, ToolFault) as error:
                fault = str(error) or type(error).__name__
                self._drop()
        raise ToolFault(f"no Python session could be started: {fault}")

    def _release(self) -> None:
        self._lock.release()
        if self._closed:
            self._drop()

    def _drop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def _refusal(self, code: str) -> str:
        if self._closed:
            raise ToolFault("this Python session is closed")
        size, limit = len(code.encode("utf-8", "surrogatepass")), self._pool.limits.source_bytes
        return f"error: the code has {size} bytes, the limit is {limit}" if size > limit else ""

    def _stop(self, failure: Exception) -> str:
        """End the worker and return the reason as text for the model."""
        worker, self._worker = self._worker, None
        if worker is None or self._closed:
            if worker is not None:
                worker.end()
            raise ToolFault("this Python session was closed during a call") from failure
        exit_status = worker.end(wait=True, grace=isinstance(failure, Gone))
        return f"error: {_failure_text(failure, exit_status, self._pool.limits)} ({RESTARTED})"


def _failure_text(failure: Exception, exit_status: WorkerExit | None, limits: SandboxLimits) -> str:
    if exit_status is not None and (
        exit_status.cpu_seconds >= limits.cpu_seconds or exit_status.code == -signal.SIGXCPU
    ):
        return f"CPU time limit of {limits.cpu_seconds} s"
    if exit_status is not None and exit_status.limit:
        return exit_status.limit
    if isinstance(failure, Hung):
        return f"time limit of {limits.wall_seconds:g} s"
    if isinstance(failure, Garbled):
        return "the answer could not be read"
    if exit_status is None or exit_status.code is None:
        return "the interpreter stopped answering"
    if exit_status.code < 0:
        return f"the interpreter was killed by {_signal_name(-exit_status.code)}"
    return f"the interpreter exited with code {exit_status.code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --------------------------------------------------------------- the protocol


def _result(message: dict[str, Any], request_id: str, began: float) -> ExecutionResult:
    """Validate a message from the untrusted side: take two fields of the right type, or raise."""
    output, ok = message.get("output"), message.get("ok")
    if message.get("id") != request_id or not isinstance(output, str) or not isinstance(ok, bool):
        raise Garbled("not the answer to this call")
    return ExecutionResult(clean(output), ok, time.perf_counter() - began)


def _receive(worker: SandboxWorker, deadline: float) -> dict[str, Any]:
    while (message := worker.next_message()) is None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise Hung
        worker.channel.settimeout(remaining)
        worker.feed(worker.channel.recv(65536))
    return message


def _wait_ready(worker: SandboxWorker) -> None:
    """Wait for the worker's first frame, sent before any untrusted code ran."""
    if worker.ready:
        return
    try:
        message = _receive(worker, time.monotonic() + START_SECONDS)
    except OSError as error:
        raise Gone(str(error)) from error
    if "fault" in message:
        raise ToolFault(f"a session could not be confined: {message['fault']}")
    worker.ready = True


def execute(worker: SandboxWorker, code: str, seconds: float) -> ExecutionResult:
    """One call, blocking; raises Hung, Gone or Garbled."""
    _wait_ready(worker)
    request_id, began = secrets.token_hex(8), time.perf_counter()
    deadline = time.monotonic() + seconds
    try:
        worker.channel.settimeout(seconds)
        worker.channel.sendall(worker.frame({"id": request_id, "code": code}))
        message = _receive(worker, deadline)
    except TimeoutError as error:
        raise Hung from error
    except OSError as error:
        raise Gone from error
    return _result(message, request_id, began)


async def aexecute(worker: SandboxWorker, code: str, seconds: float) -> ExecutionResult:
    """One call on the running event loop, with a worker that is ready."""
    request_id, began = secrets.token_hex(8), time.perf_counter()
    loop = asyncio.get_running_loop()
    worker.channel.setblocking(False)
    try:
        async with asyncio.timeout(seconds):
            await loop.sock_sendall(worker.channel, worker.frame({"id": request_id, "code": code}))
            while (message := worker.next_message()) is None:
                worker.feed(await loop.sock_recv(worker.channel, 65536))
    except TimeoutError as error:
        raise Hung from error
    except OSError as error:
        raise Gone from error
    return _result(message, request_id, began)
