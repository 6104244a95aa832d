"""How an environment is called, in training and by the checker: in the calling thread, in a thread of a pool, or as a coroutine,
each under a time limit. Whatever goes wrong is raised as an ``Exception``; a limit that passes as an ``EnvironmentFault``.

What a limit can do: a coroutine is cancelled, and abandoned if it does not end; an endless loop is interrupted; a plain call that
blocks in another thread is abandoned with its thread. Code that never lets Python run (one huge multiplication, one regular
expression) cannot be ended inside a process; an isolated environment has a process of its own.

Idle threads are reused: starting one waits until the operating system schedules it, which over a hundred calls per step costs
more than the calls. Knows nothing of what is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
import types
from collections.abc import Awaitable, Callable, Generator, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

from turnwise.environments.watchdog import WATCHDOG, CallInterrupted, WatchedCall
from turnwise.errors import EnvironmentFault

GRACE = 1.0  # seconds that a cancelled coroutine has to end
UNSAFE_EXCEPTIONS = (StopIteration, SystemExit)
"""A future cannot hold a ``StopIteration``, and a ``SystemExit`` would end the run: both are raised as ``RuntimeError``."""


class CallTimeout(EnvironmentFault):
    """A call did not end within its limit."""


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
        raise _too_slow(call) from None


async def with_timeout(
    awaitable: Awaitable[Any], seconds: float, code: types.CodeType | None = None, name: str = ""
) -> Any:
    """The result of ``awaitable``; an ``EnvironmentFault`` if it takes longer than ``seconds`` or blocks the event loop."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(_watched(awaitable, seconds, code))
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
            await _cancel(task)
        if task.done() and inspect.iscoroutine(awaitable):
            awaitable.close()  # cancelled before its first step, it would warn that nobody awaited it
    if late:
        raise _too_slow(call)
    if task.cancelled():
        raise EnvironmentFault("the method raised CancelledError, although nobody cancelled it")
    return task.result()


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its clean-up, but not for ever: a task that does not end is abandoned."""
    task.cancel()
    _, running = await asyncio.wait({task}, timeout=GRACE)
    if running:
        asyncio._unregister_task(task)  # asyncio.run would wait for it at its end
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody reads its exception
    elif not task.cancelled():
        task.exception()


async def _watched(awaitable: Awaitable[Any], seconds: float, code: types.CodeType | None) -> Any:
    with _as_runtime_errors():
        return await _Watched(awaitable, seconds, code)


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
                raise CallTimeout(
                    f"an async method blocked the event loop for {self.seconds:g} s{_at(call)}; "
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


# ------------------------------------------------------------------- threads

Work = Callable[[], None]
"""Must not raise: nothing would catch it."""

_idle: list[SimpleQueue[Work]] = []  # append and pop are atomic
os.register_at_fork(after_in_child=_idle.clear)  # threads do not survive a fork


def run_in_thread(work: Work, new: bool = False) -> None:
    """Run ``work`` in an idle thread of the pool, or in a new one."""
    try:
        inbox = SimpleQueue() if new else _idle.pop()
    except IndexError:
        new, inbox = True, SimpleQueue()
    if new:
        threading.Thread(target=_serve, args=(inbox,), daemon=True).start()
    inbox.put(work)


def _serve(inbox: SimpleQueue[Work]) -> None:
    while True:
        work = inbox.get()
        work()
        del work  # otherwise an idle thread keeps an environment alive
        _idle.append(inbox)


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

    call.expire = lambda: answer(None, _too_slow(call))

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


def _too_slow(call: WatchedCall) -> CallTimeout:
    return CallTimeout(f"no answer within {call.seconds:g} s{_at(call)}")


def _at(call: WatchedCall) -> str:
    return f" (at {call.where})" if call.where else ""


def call_name(function: Callable[..., Any]) -> str:
    """``Shop.step``, for a call that is listed while it runs."""
    return getattr(function, "__qualname__", "") or type(function).__name__


def _code(function: Callable[..., Any]) -> types.CodeType | None:
    return getattr(function, "__code__", None) or getattr(getattr(function, "__func__", None), "__code__", None)
