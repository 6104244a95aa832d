"""Untrusted Python for an episode: names persist between calls, nothing gets out, every misdeed has an answer in words.

    tool = PythonTool(Limits(wall_seconds=2.0))
    with tool.open() as session:
        session.run("x = 20")
        session.run("x + 1")        # Result(output='21', ok=True, ...)

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
from turnwise.tools.isolation import Interpreter, Isolation, interpreters, rungs
from turnwise.tools.limits import Limits
from turnwise.tools.session import Garbled, Gone, Hung, Result, Session, exchange
from turnwise.tools.zygote import START_SECONDS, Worker, Zygote

__all__ = ["Limits", "PythonTool", "Result", "Session", "python_tool"]

# Runs once in every fresh isolation. A rung that lets any of this through is not the rung it says it is.
CHECK = """
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

    def __init__(self, limits: Limits | None = None, *, isolation: str = "auto", spare: int = 2) -> None:
        self.limits = limits or Limits()
        self._rungs = rungs(isolation)
        self._spare = spare
        self._lock = threading.RLock()
        self._zygote: Zygote | None = None
        self._isolation: Isolation | None = None
        self._waiting: deque[Worker] = deque()
        self._orphans: deque[Worker] = deque()  # of sessions dropped without close; ended at the next open
        self._owner = os.getpid()
        _pools.add(self)

    def open(self) -> Session:
        """A session of its own for one episode."""
        return Session(self, self.worker())

    def worker(self) -> Worker:
        """A worker nobody has used; its successor is being forked meanwhile."""
        with self._lock:
            while self._orphans:
                self._orphans.popleft().end()
            zygote = self._running()
            try:
                while len(self._waiting) <= self._spare:
                    self._waiting.append(zygote.spawn())
            except ToolFault:  # it died since the last call; a second failure is the caller's to hear
                while len(self._waiting) <= self._spare:
                    self._waiting.append(self._running().spawn())
            return self._waiting.popleft()

    def describe(self) -> str:
        """Which isolation is used, what it stops and what it does not, in one sentence."""
        with self._lock:
            zygote = self._running()
            assert self._isolation is not None
            if not self._isolation.seccomp:
                return self._isolation.describe()
            return f"{self._isolation.describe()} (with seccomp{' and Landlock' if zygote.landlock else ''})"

    @property
    def isolation(self) -> str:
        with self._lock:
            self._running()
            assert self._isolation is not None
            return self._isolation.name

    def close(self) -> None:
        """End every session and the pool; a later ``open`` starts afresh."""
        with self._lock:
            self._discard()
            self._orphans.clear()
            if self._zygote is not None:
                self._zygote.close()
            self._zygote = None

    def __enter__(self) -> PythonTool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> Zygote:
        if self._zygote is None or not self._zygote.check():
            self._discard()
            self._zygote, self._isolation = _start(self._rungs, self.limits)
        return self._zygote

    def _discard(self) -> None:
        """Let go of the spare workers: their parent is gone, or about to be."""
        while self._waiting:
            self._waiting.popleft().channel.close()

    def abandon(self, worker: Worker) -> None:
        """Called while garbage is collected, when no lock may be taken."""
        worker.channel.close()
        self._orphans.append(worker)

    def _leave(self) -> None:
        """At the end of the process. A forked copy only closes its own ends: the lock may have been held while forking."""
        self.close() if os.getpid() == self._owner else self._discard()


_pools: weakref.WeakSet[PythonTool] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    for pool in list(_pools):
        pool._leave()


def _start(candidates: tuple[Isolation, ...], limits: Limits) -> tuple[Zygote, Isolation]:
    """The first rung that starts and holds."""
    faults = []
    for isolation in candidates:
        if missing := isolation.missing():
            faults.append(f"{isolation.name}: {missing}")
            continue
        for interpreter, keep_user in _attempts(isolation):
            try:
                zygote = Zygote(isolation, interpreter, limits, keep_user=keep_user)
                _check(zygote, isolation)
            except ToolFault as fault:
                faults.append(f"{isolation.name}: {fault}")
                continue
            if not isolation.seccomp:
                why = f" ({'; '.join(faults)})" if faults else ""
                warnings.warn(f"untrusted code is NOT isolated. {isolation.describe()}{why}", stacklevel=4)
            return zygote, isolation
    raise ToolFault(f"no isolation for untrusted Python could be started: {'; '.join(faults)}")


def _attempts(isolation: Isolation) -> list[tuple[Interpreter, bool]]:
    """Interpreters to try; only where nothing is promised anyway may a session stay root, and then as a last resort."""
    found = [(interpreter, False) for interpreter in interpreters()]
    return found if isolation.seccomp else [*found, (found[0][0], True)]


def _check(zygote: Zygote, isolation: Isolation) -> None:
    worker = zygote.spawn()
    try:
        answer = exchange(worker, CHECK, START_SECONDS)
    except (Hung, Gone, Garbled, ToolFault) as error:
        worker.channel.close()
        zygote.close()
        raise ToolFault(f"a first session did not answer: {error!r}") from error
    worker.end()
    if not answer.ok or (isolation.seccomp and "False" in answer.output):
        zygote.close()
        raise ToolFault(f"it does not hold: {answer.output}")


@functools.cache
def python_tool(limits: Limits | None = None, isolation: str = "auto") -> PythonTool:
    """The pool every environment of this process shares for these settings."""
    return PythonTool(limits, isolation=isolation)
