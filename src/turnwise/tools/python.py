"""Untrusted Python for an episode: names persist between calls, the code is isolated, every violation is reported as text.

    tool = PythonTool(SandboxLimits(wall_seconds=2.0))
    with tool.open() as session:
        session.run("x = 20")
        session.run("x + 1")        # ExecutionResult(output='21', ok=True, ...)

Knows nothing of models, environments or rewards.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import warnings
import weakref
from collections import deque

from turnwise.errors import ToolFault
from turnwise.tools.isolation import Isolation, SandboxLimits, interpreters, isolation_candidates
from turnwise.tools.session import SandboxSession, execute
from turnwise.tools.zygote import START_SECONDS, Garbled, Gone, Hung, SandboxWorker, ZygoteHandle

# Runs once in every new isolation: a mechanism that allows any of this does not isolate and is not used.
ISOLATION_TEST = """
import decimal, json, os, subprocess, socket
def refused(act, *a):
    try: act(*a)
    except OSError: return True
    return False
open("probe", "w").close()
os.remove("probe")
[refused(open, "/etc/passwd"), refused(open, "/proc/self/maps"), refused(open, "/usr/lib/probe", "w"),
 refused(lambda: socket.socket().connect(("127.0.0.1", 9)))]
"""


class PythonTool:
    """A pool of isolated interpreters. Safe to share between threads; starts on first use."""

    def __init__(self, limits: SandboxLimits | None = None, *, isolation: str = "auto", spare: int = 2) -> None:
        self.limits = limits or SandboxLimits()
        self._candidates = isolation_candidates(isolation)
        self._spare = spare
        self._lock = threading.RLock()
        self._zygote: ZygoteHandle | None = None
        self._isolation: Isolation | None = None
        self._idle_workers: deque[SandboxWorker] = deque()
        # of sessions garbage-collected without close(); ended at the next open()
        self._workers_to_end: deque[SandboxWorker] = deque()
        self._owner = os.getpid()
        _pools.add(self)

    def open(self) -> SandboxSession:
        """A new session for one episode."""
        return SandboxSession(self, self.take_worker())

    def take_worker(self) -> SandboxWorker:
        """An unused worker. Refills the pool first, so that the next worker forks in the background."""
        with self._lock:
            while self._workers_to_end:
                self._workers_to_end.popleft().end()
            try:
                self._refill()
            except ToolFault:  # the zygote died since the last call; a second failure propagates
                self._refill()
            return self._idle_workers.popleft()

    def _refill(self) -> None:
        zygote = self._running_zygote()
        while len(self._idle_workers) <= self._spare:
            self._idle_workers.append(zygote.spawn())

    def describe(self) -> str:
        """The isolation in use, what it blocks and what it does not block, in one sentence."""
        with self._lock:
            zygote = self._running_zygote()
            assert self._isolation is not None
            if not self._isolation.seccomp:
                return self._isolation.describe()
            return f"{self._isolation.describe()} (with seccomp{' and Landlock' if zygote.landlock else ''})"

    @property
    def isolation(self) -> str:
        with self._lock:
            self._running_zygote()
            assert self._isolation is not None
            return self._isolation.name

    def close(self) -> None:
        """End every session and the pool; a later ``open`` starts a new one."""
        with self._lock:
            self._discard_idle_workers()
            self._workers_to_end.clear()
            if self._zygote is not None:
                self._zygote.close()
            self._zygote = None

    def __enter__(self) -> PythonTool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running_zygote(self) -> ZygoteHandle:
        if self._zygote is None or not self._zygote.check():
            self._discard_idle_workers()
            self._zygote, self._isolation = _start(self._candidates, self.limits)
        return self._zygote

    def _discard_idle_workers(self) -> None:
        """Close the idle workers: their parent process has ended, or is about to."""
        while self._idle_workers:
            self._idle_workers.popleft().channel.close()

    def end_later(self, worker: SandboxWorker) -> None:
        """End a worker at the next ``open``. Called by the garbage collector, where taking a lock could deadlock."""
        worker.channel.close()
        self._workers_to_end.append(worker)

    def _close_at_exit(self) -> None:
        """At interpreter exit. A forked child only closes its own descriptors: the lock may have been held at the fork."""
        self.close() if os.getpid() == self._owner else self._discard_idle_workers()


_pools: weakref.WeakSet[PythonTool] = weakref.WeakSet()


@atexit.register
def _close_pools_at_exit() -> None:
    for pool in list(_pools):
        pool._close_at_exit()


def _start(candidates: tuple[Isolation, ...], limits: SandboxLimits) -> tuple[ZygoteHandle, Isolation]:
    """The first mechanism that starts and passes the isolation test."""
    faults = []
    for isolation in candidates:
        if reason := isolation.unavailable():
            faults.append(f"{isolation.name}: {reason}")
            continue
        attempts = [(interpreter, False) for interpreter in interpreters()]
        if not isolation.seccomp:  # a session may stay root only without isolation, and then only as the last attempt
            attempts.append((attempts[0][0], True))
        for interpreter, keep_user in attempts:
            try:
                zygote = ZygoteHandle(isolation, interpreter, limits, keep_user=keep_user)
                _check(zygote, isolation)
            except ToolFault as fault:
                faults.append(f"{isolation.name}: {fault}")
                continue
            if not isolation.seccomp:
                why = f" ({'; '.join(faults)})" if faults else ""
                warnings.warn(f"untrusted code is NOT isolated. {isolation.describe()}{why}", stacklevel=4)
            return zygote, isolation
    raise ToolFault(f"no isolation for untrusted Python could be started: {'; '.join(faults)}")


def _check(zygote: ZygoteHandle, isolation: Isolation) -> None:
    """Refuse, and end, a zygote whose first session does not answer or can do what it must not."""
    worker = zygote.spawn()
    try:
        result = execute(worker, ISOLATION_TEST, START_SECONDS)
    except (Hung, Gone, Garbled, ToolFault) as error:
        worker.channel.close()
        zygote.close()
        raise ToolFault(f"a first session did not answer: {error!r}") from error
    worker.end()
    if not result.ok or (isolation.seccomp and "False" in result.output):
        zygote.close()
        raise ToolFault(f"it does not isolate: {result.output}")


@functools.cache
def python_tool(limits: SandboxLimits | None = None, isolation: str = "auto") -> PythonTool:
    """The pool that all environments of this process share for these settings."""
    return PythonTool(limits, isolation=isolation)
