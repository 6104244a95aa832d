"""One episode's conversation with one worker: ask, wait no longer than allowed, and say in words what went wrong.

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

from turnwise.errors import ToolFault
from turnwise.tools.limits import Limits
from turnwise.tools.zygote import START_SECONDS, Exit, Garbled, Gone, Hung, Worker

RESTARTED = "the interpreter was restarted, its names are gone"


@dataclass(frozen=True, slots=True)
class Result:
    """What one call answered. ``ok`` is False when the code raised, or had to be stopped."""

    output: str
    ok: bool
    seconds: float


class Source(Protocol):
    """Where a session gets its workers from."""

    @property
    def limits(self) -> Limits: ...

    def worker(self) -> Worker: ...

    def abandon(self, worker: Worker) -> None: ...


class Session:
    """One episode's interpreter. Calls are taken one after another, from whichever thread they come."""

    def __init__(self, source: Source, worker: Worker) -> None:
        self._source = source
        self._worker: Worker | None = worker
        self._lock = threading.Lock()
        self._closed = False

    def run(self, code: str) -> Result:
        """Execute ``code``; what it printed, and the value of a last bare expression."""
        began = time.perf_counter()
        if refusal := self._refusal(code):
            return Result(refusal, False, 0.0)
        self._lock.acquire()
        try:
            return exchange(self._ready(), code, self._source.limits.wall_seconds)
        except (Hung, Gone, Garbled) as trouble:
            return Result(self._stop(trouble), False, time.perf_counter() - began)
        except BaseException:  # interrupted halfway: an answer may still come that nobody asked for
            self._drop()
            raise
        finally:
            self._release()

    async def arun(self, code: str) -> Result:
        """The same without blocking the event loop."""
        began = time.perf_counter()
        if refusal := self._refusal(code):
            return Result(refusal, False, 0.0)
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(0.001)
        try:
            worker = self._live()
            if worker is None:
                worker = await asyncio.to_thread(self._ready)
            return await aexchange(worker, code, self._source.limits.wall_seconds)
        except (Hung, Gone, Garbled) as trouble:
            words = await asyncio.to_thread(self._stop, trouble)
            return Result(words, False, time.perf_counter() - began)
        except BaseException:
            self._drop()
            raise
        finally:
            self._release()

    def close(self) -> None:
        """Kill the interpreter and everything it started. Safe to call twice, and while a call is running."""
        self._closed = True
        if (worker := self._worker) is not None:
            worker.interrupt()  # a call that is running ends now, and cleans up itself
        if self._lock.acquire(blocking=False):
            self._release()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            self._source.abandon(worker)

    # ---- the worker behind it
    def _live(self) -> Worker | None:
        worker = self._worker
        if worker is None or not worker.ready:
            return None
        if not worker.zygote.alive:  # the model must hear that its names are gone
            raise Gone
        return worker

    def _ready(self) -> Worker:
        """A worker that has said it is ready; a fresh one if the last was killed."""
        if worker := self._live():
            return worker
        fault = ""
        for _ in range(3):  # one may have been lost with a dead pool, one with a machine out of processes
            if self._closed:
                raise ToolFault("this Python session is closed")
            if self._worker is not None and not self._worker.zygote.check():
                self._drop()  # with its socket
            worker = self._worker = self._worker or self._source.worker()
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
        size, limit = len(code.encode("utf-8", "surrogatepass")), self._source.limits.source_bytes
        return f"error: the code has {size} bytes, the limit is {limit}" if size > limit else ""

    def _stop(self, trouble: Exception) -> str:
        """End the worker and say why."""
        worker, self._worker = self._worker, None
        if worker is None or self._closed:
            if worker is not None:
                worker.end()
            raise ToolFault("this Python session was closed during a call") from trouble
        ended = worker.end(wait=True, grace=isinstance(trouble, Gone))
        return f"error: {_words(trouble, ended, self._source.limits)} ({RESTARTED})"


def _words(trouble: Exception, ended: Exit | None, limits: Limits) -> str:
    if ended is not None and (ended.cpu_seconds >= limits.cpu_seconds or ended.code == -signal.SIGXCPU):
        return f"CPU time limit of {limits.cpu_seconds} s"
    if isinstance(trouble, Hung):
        return f"time limit of {limits.wall_seconds:g} s"
    if isinstance(trouble, Garbled):
        return "the answer could not be read"
    if ended is None or ended.code is None:
        return "the interpreter stopped answering"
    if ended.code < 0:
        return f"the interpreter was killed by {_signal_name(-ended.code)}"
    return f"the interpreter exited with code {ended.code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --------------------------------------------------------------- the protocol


def _result(message: dict[str, Any], asked: str, began: float) -> Result:
    """The untrusted side wrote this message: take two fields of the right type, or nothing."""
    output, ok = message.get("output"), message.get("ok")
    if message.get("id") != asked or not isinstance(output, str) or not isinstance(ok, bool):
        raise Garbled("not the answer to this call")
    return Result(output.encode("utf-8", "replace").decode(), ok, time.perf_counter() - began)


def _receive(worker: Worker, deadline: float) -> dict[str, Any]:
    while (message := worker.answer()) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Hung
        worker.channel.settimeout(left)
        worker.feed(worker.channel.recv(65536))
    return message


def _wait_ready(worker: Worker) -> None:
    """Its first frame, sent before any untrusted code ran."""
    if worker.ready:
        return
    try:
        message = _receive(worker, time.monotonic() + START_SECONDS)
    except OSError as error:
        raise Gone(str(error)) from error
    if "fault" in message:
        raise ToolFault(f"a session could not be confined: {message['fault']}")
    worker.ready = True


def exchange(worker: Worker, code: str, seconds: float) -> Result:
    """One call, blocking; raises Hung, Gone or Garbled."""
    _wait_ready(worker)
    asked, began = secrets.token_hex(8), time.perf_counter()
    deadline = time.monotonic() + seconds
    try:
        worker.channel.settimeout(seconds)
        worker.channel.sendall(worker.frame({"id": asked, "code": code}))
        message = _receive(worker, deadline)
    except TimeoutError as error:
        raise Hung from error
    except OSError as error:
        raise Gone from error
    return _result(message, asked, began)


async def aexchange(worker: Worker, code: str, seconds: float) -> Result:
    """One call on the running event loop; the worker is ready."""
    asked, began = secrets.token_hex(8), time.perf_counter()
    loop = asyncio.get_running_loop()
    worker.channel.setblocking(False)
    try:
        async with asyncio.timeout(seconds):
            await loop.sock_sendall(worker.channel, worker.frame({"id": asked, "code": code}))
            while (message := worker.answer()) is None:
                worker.feed(await loop.sock_recv(worker.channel, 65536))
    except TimeoutError as error:
        raise Hung from error
    except OSError as error:
        raise Gone from error
    return _result(message, asked, began)
