"""Limits the time of calls into code that may never return: a daemon thread that counts time and interrupts what is overdue.

Time is counted in small ticks, and a tick counts at most ``LONGEST_TICK``: while the whole process is stopped (SIGSTOP, a
suspended laptop) no time passes, so that a call that did nothing wrong does not fail.

A call that *waits* (a coroutine, a result from another thread) is told by a callback. A call that *runs* in a thread is
interrupted there: in the main thread by a signal, which also ends a system call such as ``time.sleep``; in another thread by an
exception at the next bytecode, so that an endless loop ends and a blocked system call stays. Knows nothing of environments.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

PERIOD = 0.05  # seconds between ticks
LONGEST_TICK = 0.5  # what a tick may count, however late it comes
INTERRUPT_EVERY = 1.0  # seconds between interrupts of a call that ignores them
INTERRUPTS = 10  # before a call that holds the main thread ends the process
SIGNAL = getattr(signal, "SIGURG", None)  # ignored by default and used by nobody; absent on Windows
EXIT_CODE = 70
CARRIERS = (
    os.path.dirname(asyncio.__file__),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "workers"),
    *(os.path.join(os.path.dirname(__file__), name) for name in ("isolated.py", "calls.py")),
)
"""Code that waits on behalf of an environment: its lines say nothing about it."""


class CallInterrupted(BaseException):
    """Raised inside a call that ran past its limit. Not an ``Exception``: code that catches those must not swallow it."""


@dataclass(slots=True, eq=False)
class WatchedCall:
    """One call under a limit."""

    seconds: float  # limit
    expire: Callable[[], None] | None = None  # for a call that waits: runs in the watchdog's thread
    thread: int = 0  # for a call that runs: the thread to interrupt
    code: CodeType | None = None  # of the called function, to say in which of its lines the call was
    name: str = ""  # of the called function; empty for a part of a call that has another entry
    awaited: Any = None  # the coroutine of a call that waits
    began: float = field(default_factory=time.monotonic)
    deadline: float = 0.0
    interrupts: int = 0
    where: str = ""  # the line at which it was found overdue


@dataclass
class Watchdog:
    """The clock, the calls under a limit, and the thread that watches them."""

    now: float = 0.0  # seconds in which this process ran
    calls: dict[int, WatchedCall] = field(default_factory=dict)  # by id: insertion and removal are atomic
    lock: threading.Lock = field(default_factory=threading.Lock)
    wake: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    ended: int = 0  # calls so far
    handles_signal: bool = False

    def add(self, call: WatchedCall) -> None:
        """Start the limit of a call."""
        if self.thread is None:
            self._start()
        if call.thread and not self.handles_signal:
            self.handles_signal = _install_handler()
        call.deadline = self.now + PERIOD + call.seconds  # the clock may be one tick behind
        self.calls[id(call)] = call
        if not self.wake.is_set():
            self.wake.set()

    def remove(self, call: WatchedCall) -> None:
        """The call has ended. Under the lock, so that it is not interrupted after this."""
        with self.lock:
            self.calls.pop(id(call), None)
            self.ended += 1

    def _start(self) -> None:
        with self.lock:
            if self.thread is None:
                self.thread = threading.Thread(target=self._watch, name="turnwise-watchdog", daemon=True)
                self.thread.start()

    def _watch(self) -> None:
        while True:
            self.wake.wait()
            last = time.monotonic()
            while self.calls:
                time.sleep(PERIOD)
                tick = time.monotonic()
                self.now += min(tick - last, LONGEST_TICK)
                last = tick
                for call in tuple(self.calls.values()):
                    if self.now >= call.deadline:
                        self._overdue(call)
            self.wake.clear()
            if self.calls:  # one was added between the last look and the clear
                self.wake.set()

    def _overdue(self, call: WatchedCall) -> None:
        with self.lock:
            if id(call) not in self.calls:
                return
            call.where = call.where or line_of(call)
            if call.thread:
                call.deadline = self.now + INTERRUPT_EVERY
                call.interrupts += 1
                self._interrupt(call)
            else:
                del self.calls[id(call)]
        if call.expire is not None and call.interrupts <= 1:
            call.expire()

    def _interrupt(self, call: WatchedCall) -> None:
        main = threading.main_thread().ident
        if call.thread != main or SIGNAL is None or signal.getsignal(SIGNAL) is not _on_signal:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(call.thread), ctypes.py_object(CallInterrupted))
            return
        if call.interrupts > INTERRUPTS:
            where = f" at {call.where}" if call.where else ""
            sys.stderr.write(f"\nturnwise: an environment holds the main thread{where} and ignores every interrupt\n")
            os._exit(EXIT_CODE)
        signal.pthread_kill(main, SIGNAL)


def line_of(call: WatchedCall) -> str:
    """The line of the called function's file at which a running call is, else the innermost one."""
    frame = sys._current_frames().get(call.thread) if call.thread else None
    innermost = frame
    while frame is not None and (call.code is None or frame.f_code.co_filename != call.code.co_filename):
        frame = frame.f_back
    return describe_line(frame or innermost)


def line_awaited(awaited: Any) -> str:
    """The line at which a coroutine waits; empty where only code of ours waits, for another process."""
    line = ""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None)
        if frame is not None and not frame.f_code.co_filename.startswith(CARRIERS):
            line = describe_line(frame)
        awaited = getattr(awaited, "cr_await", None)
    return line


def describe_line(frame: FrameType | None) -> str:
    """A frame as a file, a line and a function; empty without one."""
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}, in {frame.f_code.co_name}"


def _install_handler() -> bool:
    """Only the main thread may; elsewhere calls are interrupted at the next bytecode. A handler of the user's stays."""
    if SIGNAL is None or threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN, None):
        signal.signal(SIGNAL, _on_signal)
    return True


def _on_signal(number: int, frame: FrameType | None) -> None:
    """In the main thread: raise if a call that runs there is overdue."""
    main = threading.main_thread().ident
    if any(call.thread == main and call.interrupts for call in tuple(WATCHDOG.calls.values())):
        raise CallInterrupted


WATCHDOG = Watchdog()
"""The only one: time limits of all calls of a process."""

os.register_at_fork(after_in_child=lambda: WATCHDOG.__init__())  # type: ignore[misc]  # threads do not survive a fork
