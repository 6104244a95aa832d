"""SIGTERM and SIGINT as a request to stop: after the current step with a checkpoint, or at once where there is no step.

Does not know what a step does, nor how a checkpoint is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar

from turnwise.engines.remote.http import in_daemon_thread

GRACE_SECONDS = 60.0  # for the current step to finish; then the run stops without a new checkpoint
SIGNALS = (signal.SIGTERM, signal.SIGINT)
Result = TypeVar("Result")
_computing: set[threading.Thread] = set()  # threads of ``in_background`` that have not ended


class RunStopped(KeyboardInterrupt):
    """A signal stopped the run. Derives from KeyboardInterrupt so that no ``except Exception`` of an environment swallows it."""

    def __init__(self, number: int = signal.SIGINT, text: str = "") -> None:
        super().__init__(text)
        self.number = number
        self.exit_code = 128 + number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.number, str(self))  # from the process of an actor to its driver


class StopSignals:
    """While entered, the first signal requests a stop, and a second one stops at once."""

    def __init__(self, grace: float = GRACE_SECONDS) -> None:
        self.grace = grace
        self.received = 0  # the signal's number
        self._deferred = False
        self._timer: threading.Timer | None = None
        self._worker: threading.Thread | None = None  # computes while this thread only handles signals

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Install the handlers. Only the main thread may: elsewhere, such as in a notebook's worker, nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            if self._timer is not None:
                self._timer.cancel()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a signal only sets ``received``, and stops the run when ``grace`` seconds have passed."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def run_loop(self, work: Coroutine[Any, Any, Result]) -> Result:
        """``asyncio.run``; after a signal, without asyncio's reports of the tasks that the stop left unfinished."""
        return run_async(work, lambda: bool(self.received))

    def request(self, number: int) -> None:
        """As if the signal had come, for a run in ``run_in_thread``; another process allows it time and ends it."""
        if self.received or not self._deferred:
            self._stop_now(self.received or number)
        self.received = number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received or not self._deferred:
            self._stop_now(self.received or number)
            return
        self.received = number
        # to the main thread itself: raised in the timer's thread, the signal would not interrupt what the main thread waits for
        self._timer = threading.Timer(self.grace, signal.pthread_kill, (threading.main_thread().ident, number))
        self._timer.daemon = True
        self._timer.start()

    def _stop_now(self, number: int) -> None:
        """Raise here, or in the worker: at its next line of Python."""
        self.received = number
        if self._worker is None:
            raise RunStopped(number)
        # only the C interface of the interpreter raises in another thread
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._worker.ident or 0), ctypes.py_object(RunStopped)
        )

    def run_in_thread(self, work: Callable[[], Result]) -> Result:
        """Call ``work`` in a thread of its own and wait for it; meanwhile this thread handles the signals for it.

        For callers inside a running event loop, such as a cell of a notebook: a second loop cannot run in their thread."""
        outcome: Future[Result] = Future()

        def call() -> None:
            try:
                outcome.set_result(work())
            except BaseException as fault:
                outcome.set_exception(fault)

        self._worker = threading.Thread(target=call, name="turnwise")
        try:
            with self.handled():
                self._worker.start()
                while self._worker.is_alive():
                    self._worker.join(0.1)  # short, so that this thread receives signals
        finally:
            self._worker = None
        if not outcome.done():  # interrupted before it began
            raise RunStopped(self.received)
        return outcome.result()


def run_async(work: Coroutine[Any, Any, Result], stopped: Callable[[], bool] = lambda: False) -> Result:
    """``asyncio.run`` for everything that a signal may stop. The signal's error is raised in whichever task runs at that moment;
    asyncio keeps it there too, and would report it as lost when the task is collected."""
    ended = False

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not (ended or stopped() or isinstance(context.get("exception"), RunStopped)):
            loop.default_exception_handler(context)

    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(report)
        try:
            return runner.run(work)
        except RunStopped:
            ended = True
            raise


async def in_background(work: Callable[[], Result]) -> Result:
    """The result of ``work``, which a stop does not wait for: asyncio waits for threads of its own, however long they compute."""

    def call() -> Result:
        thread = threading.current_thread()
        _computing.add(thread)
        try:
            return work()
        finally:
            _computing.discard(thread)

    return await in_daemon_thread(call)


def leave(code: int) -> int:
    """The exit code; where a thread still computes, end the process with it here. The interpreter would end under that thread,
    which can crash in the library that it computes with."""
    if not _computing:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def in_event_loop() -> bool:
    """Whether the calling thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
