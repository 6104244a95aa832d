"""Processes that score answers and can be killed: a pool of them for each function.

A call that hangs, crashes its process or takes too much memory costs one process; the next call gets a new one. Blocking and
thread-safe: use it from a thread. Knows nothing of what a function computes.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.errors import HostFault, SettingError
from turnwise.workers.process import SharedWorkers, Worker, WorkerLost

MIB = 1 << 20
START_SECONDS = 120.0  # to import a user's module on a loaded machine
GUEST = "turnwise.rewards.guest"


class CallFailed(Exception):
    """A call did not return: the message says why. ``lost`` if its process is gone."""

    def __init__(self, message: str, lost: bool = False) -> None:
        super().__init__(message)
        self.lost = lost


@dataclass(frozen=True)
class ProcessSettings:
    """What is loaded into a process, and its limits."""

    target: str  # module:function
    what: str  # begins messages: "reward 'my.py:score'"
    is_factory: bool = False  # the target is called once with ``options`` and returns the function
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments, of every call or of the factory
    memory_bytes: int = 4096 * MIB
    seconds: float = 10.0  # of one call


class ScoringProcess(Worker):
    """One process with one function, which is loaded before its first call."""

    def __init__(self, settings: ProcessSettings) -> None:
        super().__init__(GUEST)
        self.settings, self.signature = settings, dict[str, Any]()
        self._prepared: set[tuple[Any, ...]] = set()

    def load(self) -> None:
        """Load the function."""
        if self.signature:
            return
        s = self.settings
        names = ("target", "what", "is_factory", "options", "memory_bytes")
        try:
            reply = self.request({name: getattr(s, name) for name in names}, START_SECONDS)
        except CallFailed as fault:
            raise SettingError(f"{s.what} could not be loaded: {fault}") from None
        if "refused" in reply:
            self.kill("could not load its function")
            raise SettingError(reply["refused"])
        self.signature = reply["signature"]

    def prepare(self, arguments: tuple[Any, ...]) -> None:
        """Let the function prepare for calls of one kind, once."""
        if arguments and arguments not in self._prepared:
            reply = self.request({"prepare": arguments, "seconds": START_SECONDS}, START_SECONDS)
            if "fault" in reply:
                raise SettingError(f"{self.settings.what}: {reply['fault']}")
            self._prepared.add(arguments)

    def request(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The reply, or ``CallFailed`` with the reason."""
        try:
            data = pickle.dumps(dict(message))
        except Exception as fault:
            raise CallFailed(
                f"a column cannot be sent to the reward process: {type(fault).__name__}: {fault}"
            ) from None
        try:
            reply = dict(json.loads(self.call(data, seconds)))
        except TimeoutError:
            raise CallFailed(f"no answer within {seconds:g} s", lost=True) from None
        except WorkerLost as lost:
            # a death that says nothing about the function: the answer is scored again
            if lost.by_host and (self.proven or self.answered):
                raise HostFault(f"{self.settings.what}: its process {lost}") from None
            raise CallFailed(f"its process {lost}", lost=True) from None
        except ValueError as fault:  # text that a model wrote may have made it say anything
            self.kill("sent no valid reply")
            raise CallFailed(f"its process sent no valid reply ({fault})", lost=True) from None
        if "host" in reply:
            raise HostFault(f"{self.settings.what}: {reply['host']}")
        return reply


class ScoringPool:
    """Up to ``size`` processes with one function, started on demand."""

    def __init__(self, settings: ProcessSettings, size: int = 0) -> None:
        self.settings = settings
        self.processes: SharedWorkers[ScoringProcess] = SharedWorkers(lambda: ScoringProcess(settings))
        self._free = threading.Semaphore(size or max(1, min(4, os.cpu_count() or 1)))

    @property
    def signature(self) -> dict[str, Any]:
        """The signature of the function; loads it if no process has."""
        return self._with(lambda process: process.signature)

    def call(self, prepare: tuple[Any, ...] = (), **message: Any) -> dict[str, Any]:
        """One call; raises ``CallFailed`` with the reason if it raises, hangs or ends its process.

        ``prepare``: arguments of the function's method ``prepare``, which runs once in each process, without the limit."""
        seconds = self.settings.seconds

        def use(process: ScoringProcess) -> dict[str, Any]:
            process.prepare(prepare)
            return process.request({**message, "seconds": seconds}, seconds)

        reply: dict[str, Any] = self._with(use)
        if "fault" in reply:
            raise CallFailed(reply["fault"])
        return reply

    def _with(self, use: Callable[[ScoringProcess], Any]) -> Any:
        with self._free:
            process = self.processes.take()
            try:
                process.load()
                return use(process)
            finally:
                self.processes.leave(process)

    def close(self) -> None:
        """End the processes. A later call starts new ones, which end with the program."""
        self.processes.stop()
