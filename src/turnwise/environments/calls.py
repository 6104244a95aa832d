"""How an environment is called, in training and by the checker: in the calling thread, in a thread of a pool, or as a coroutine,
each under a time limit. Whatever goes wrong is raised as an ``Exception``; a limit that passes as an ``EnvironmentFault``.

What a limit can do: a coroutine is cancelled, and abandoned if it does not end; an endless loop is interrupted, in the main
thread by a signal, which also ends a system call such as ``time.sleep``, in another thread by an exception at the next bytecode;
a plain call that blocks in another thread is abandoned with its thread. Code that never lets Python run (one huge
multiplication, one regular expression) cannot be ended inside a process; an isolated environment has a process of its own.

Time is counted in small ticks, and a tick counts at most ``LONGEST_TICK``: while the whole process is stopped (SIGSTOP, a
suspended laptop) no time passes, so that a call that did nothing wrong does not fail. Knows nothing of what is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import CodeType, FrameType
from typing import Any

from turnwise.errors import EnvironmentFault

PERIOD = 0.05  # seconds between ticks
LONGEST_TICK = 0.5  # what a tick may count, however late it comes
INTERRUPT_EVERY = 1.0  # seconds between interrupts of a call that ignores them
INTERRUPTS = 10  # before a call that holds the main thread ends the process
SIGNAL = getattr(signal, "SIGURG", None)  # ignored by default and used by nobody; absent on Windows
EXIT_CODE = 70
GRACE = 1.0  # seconds that a cancelled coroutine has to end
# a future cannot hold a StopIteration, and a SystemExit would end the run: both are raised as RuntimeError
UNSAFE_EXCEPTIONS = (StopIteration, SystemExit)
# code that waits on behalf of an environment: its lines say nothing about it
CARRIERS = (
    os.path.dirname(asyncio.__file__),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "workers"),
    *(os.path.join(os.path.dirname(__file__), name) for name in ("isolated.py", "calls.py")),
)


class CallInterrupted(BaseException):
    """Raised inside a call that ran past its limit. Not an ``Exception``: code that catches those must not swallow it."""


class CallTimeout(EnvironmentFault):
    """A call did not end within its limit."""


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

    def too_slow(self, words: str = "no answer within {} s{}") -> CallTimeout:
        return CallTimeout(words.format(f"{self.seconds:g}", f" (at {self.where})" if self.where else ""))


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
            with self.lock:
                if self.thread is None:  # another thread may have been faster
                    self.thread = threading.Thread(target=self._watch, name="turnwise-watchdog", daemon=True)
                    self.thread.start()
        if call.thread and SIGNAL is not None and not self.handles_signal:
            # only the main thread may install a handler; elsewhere calls are interrupted at the next bytecode
            if threading.current_thread() is threading.main_thread():
                if signal.getsignal(SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN, None):  # a handler of the user's stays
                    signal.signal(SIGNAL, _on_signal)
                self.handles_signal = True
        call.deadline = self.now + PERIOD + call.seconds  # the clock may be one tick behind
        self.calls[id(call)] = call
        if not self.wake.is_set():
            self.wake.set()

    def remove(self, call: WatchedCall) -> None:
        """The call has ended. Under the lock, so that it is not interrupted after this."""
        with self.lock:
            self.calls.pop(id(call), None)
            self.ended += 1

    def _watch(self) -> None:
        while True:
            self.wake.wait()
            last = time.monotonic()
            while self.calls:
                time.sleep(PERIOD)
                tick = time.monotonic()
                # a process that was stopped did not run: no call pays for that time
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
            # the first look counts: a call that ignores interrupts may be anywhere later
            call.where = call.where or line_of(call)
            if call.thread:
                call.deadline = self.now + INTERRUPT_EVERY
                call.interrupts += 1
                main = threading.main_thread().ident
                if call.thread != main or SIGNAL is None or signal.getsignal(SIGNAL) is not _on_signal:
                    thread, interrupt = ctypes.c_ulong(call.thread), ctypes.py_object(CallInterrupted)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, interrupt)
                elif call.interrupts <= INTERRUPTS:
                    signal.pthread_kill(main, SIGNAL)
                else:
                    where = f" at {call.where}" if call.where else ""
                    text = f"turnwise: an environment holds the main thread{where} and ignores every interrupt"
                    sys.stderr.write(f"\n{text}\n")
                    os._exit(EXIT_CODE)
            else:
                del self.calls[id(call)]
        if call.expire is not None and call.interrupts <= 1:
            call.expire()


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


def _on_signal(number: int, frame: FrameType | None) -> None:
    """In the main thread: raise if a call that runs there is overdue."""
    main = threading.main_thread().ident
    if any(call.thread == main and call.interrupts for call in tuple(WATCHDOG.calls.values())):
        raise CallInterrupted


WATCHDOG = Watchdog()  # the only one: time limits of all calls of a process
# threads do not survive a fork
os.register_at_fork(after_in_child=lambda: WATCHDOG.__init__())  # type: ignore[misc]


async def call_environment(
    function: Callable[..., Any], *args: Any, seconds: float, inline: bool, new_thread: bool = False
) -> Any:
    """Call into an environment. An awaitable result is awaited; both parts have the limit. An environment with ``patience`` keeps
    the limit of a call itself, and may take so much longer for what is not the call. ``new_thread``: not in one of the pool."""
    seconds += getattr(getattr(function, "__self__", None), "patience", 0.0)
    if inspect.iscoroutinefunction(function):
        return await with_timeout(function(*args), seconds, _code(function), call_name(function))
    if inline:
        with _as_runtime_errors():
            value = call_here(function, *args, seconds=seconds)
    else:
        value = await _call_in_thread(function, args, seconds, new_thread)
    if not inspect.isawaitable(value):
        return value
    return await with_timeout(value, seconds, _code(function), call_name(function))


def call_here(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """Call in this thread, and interrupt the call at the limit."""
    call = WatchedCall(seconds, code=_code(function), name=call_name(function))
    return _run_watched(call, function, *args)


def _run_watched(call: WatchedCall, function: Callable[..., Any], *args: Any) -> Any:
    """Run in this thread under the watch; a ``CallTimeout`` if the watch interrupts it."""
    call.thread = threading.get_ident()
    try:
        WATCHDOG.add(call)
        try:
            return function(*args)
        finally:
            WATCHDOG.remove(call)
    except CallInterrupted:
        WATCHDOG.remove(call)  # the interrupt may have come before the first removal
        raise call.too_slow() from None


async def with_timeout(
    awaitable: Awaitable[Any], seconds: float, code: types.CodeType | None = None, name: str = ""
) -> Any:
    """The result of ``awaitable``; an ``EnvironmentFault`` if it takes longer than ``seconds`` or blocks the event loop."""
    loop = asyncio.get_running_loop()

    async def watched() -> Any:
        with _as_runtime_errors():
            return await _Watched(awaitable, seconds, code)

    task = loop.create_task(watched())
    ended: asyncio.Future[None] = loop.create_future()

    def end(_: object = None) -> None:
        if not ended.done():
            ended.set_result(None)

    def expire() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(end)

    task.add_done_callback(end)
    call = WatchedCall(seconds, expire, name=name, awaited=awaitable)
    WATCHDOG.add(call)
    try:
        await ended
    finally:  # also when the caller is cancelled
        WATCHDOG.remove(call)
        late = not task.done()
        if late:
            task.cancel()
            _, running = await asyncio.wait({task}, timeout=GRACE)  # for its clean-up, but not for ever
            if running:
                asyncio._unregister_task(task)  # asyncio.run would wait for it at its end
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody reads its exception
            elif not task.cancelled():
                task.exception()
        if task.done() and inspect.iscoroutine(awaitable):
            awaitable.close()  # cancelled before its first step, it would warn that nobody awaited it
    if late:
        raise call.too_slow()
    if task.cancelled():
        raise EnvironmentFault("the method raised CancelledError, although nobody cancelled it")
    return task.result()


class _Watched:
    """An awaitable whose every step, from one ``await`` to the next, has the limit: a step that blocks would hold up the
    event loop, and with it every episode."""

    def __init__(self, awaitable: Awaitable[Any], seconds: float, code: types.CodeType | None) -> None:
        self.awaitable, self.seconds, self.code = awaitable, seconds, code

    def __await__(self) -> Generator[Any, Any, Any]:
        awaitable: Any = self.awaitable
        inner = awaitable.__await__() if hasattr(awaitable, "__await__") else iter(awaitable)
        resume: Callable[[], Any] = partial(next, inner)
        while True:
            call = WatchedCall(self.seconds, code=self.code)
            try:
                waits_for = _run_watched(call, resume)
            except StopIteration as end:
                return end.value
            except CallTimeout:
                if not call.interrupts:  # of the environment's own
                    raise
                raise call.too_slow(
                    "an async method blocked the event loop for {} s{}; "
                    "await what takes long, or write the method without async"
                ) from None
            try:
                value = yield waits_for
                resume = partial(next, inner) if value is None else partial(inner.send, value)
            except GeneratorExit:  # abandoned, and now collected
                getattr(inner, "close", lambda: None)()
                raise
            except BaseException as fault:  # a cancellation
                if not hasattr(inner, "throw"):
                    raise
                resume = partial(inner.throw, fault)


Work = Callable[[], None]  # must not raise: nothing would catch it
# idle threads wait here for work: starting one waits until the operating system schedules it, which over a hundred calls
# per step costs more than the calls
_idle: list[SimpleQueue[Work]] = []  # append and pop are atomic
os.register_at_fork(after_in_child=_idle.clear)


def run_in_thread(work: Work, new: bool = False) -> None:
    """Run ``work`` in an idle thread of the pool, or in a new one."""
    try:
        inbox = SimpleQueue() if new else _idle.pop()
    except IndexError:
        new, inbox = True, SimpleQueue()

    def serve() -> None:
        while True:
            task = inbox.get()
            task()
            del task  # otherwise an idle thread keeps an environment alive
            _idle.append(inbox)

    if new:
        threading.Thread(target=serve, daemon=True).start()
    inbox.put(work)


async def _call_in_thread(function: Callable[..., Any], args: tuple[Any, ...], seconds: float, new: bool) -> Any:
    """A plain function that may block: in a daemon thread, which does not delay the end of the program."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    call = WatchedCall(seconds, code=_code(function), name=call_name(function))

    def resolve(value: Any, fault: BaseException | None) -> None:
        if not done.done():
            done.set_exception(fault) if fault else done.set_result(value)

    def answer(value: Any, fault: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nothing awaits the result
            loop.call_soon_threadsafe(resolve, value, fault)

    call.expire = lambda: answer(None, call.too_slow())

    def work() -> None:
        value: Any = None
        fault: Exception | None = None
        try:
            with _as_runtime_errors():
                value = _run_watched(call, function, *args)
        except BaseException as caught:
            fault = caught if isinstance(caught, Exception) else RuntimeError(repr(caught))
        answer(value, fault)

    run_in_thread(work, new)
    return await done


@contextlib.contextmanager
def _as_runtime_errors() -> Iterator[None]:
    try:
        yield
    except UNSAFE_EXCEPTIONS as fault:
        raise RuntimeError(repr(fault)) from None  # with a StopIteration as cause, contextlib would re-raise that


def call_name(function: Callable[..., Any]) -> str:
    """``Shop.step``, for a call that is listed while it runs."""
    return getattr(function, "__qualname__", "") or type(function).__name__


def _code(function: Callable[..., Any]) -> types.CodeType | None:
    return getattr(function, "__code__", None) or getattr(getattr(function, "__func__", None), "__code__", None)
