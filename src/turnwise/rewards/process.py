"""Processes that score answers and can be killed: a pool of them for each function.

A call that hangs, crashes its process or takes too much memory costs one process; the next call gets a new one. Blocking and
thread-safe: use it from a thread. Knows nothing of what a function computes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.errors import SettingError

MIB = 1 << 20
START_SECONDS = 120.0  # to import a user's module on a loaded machine
MAX_REPLY = 64 * MIB
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from turnwise.rewards.guest import main; main()"


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


class ScoringProcess:
    """One process with one function."""

    def __init__(self, settings: ProcessSettings) -> None:
        self.settings = settings
        self._prepared: set[tuple[Any, ...]] = set()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps(sys.path)], stdin=theirs.fileno(), start_new_session=True
            )
        names = ("target", "what", "is_factory", "options", "memory_bytes")
        try:
            reply = self.request({name: getattr(settings, name) for name in names}, START_SECONDS)
        except CallFailed as fault:
            raise SettingError(f"{settings.what} could not be loaded: {fault}") from None
        if "refused" in reply:
            self.kill()
            raise SettingError(reply["refused"])
        self.signature: dict[str, Any] = reply["signature"]

    def prepare(self, arguments: tuple[Any, ...]) -> None:
        """Let the function prepare for calls of one kind, once."""
        if arguments and arguments not in self._prepared:
            reply = self.request({"prepare": arguments, "seconds": START_SECONDS}, START_SECONDS)
            if "fault" in reply:
                raise SettingError(f"{self.settings.what}: {reply['fault']}")
            self._prepared.add(arguments)

    def request(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send one message and wait for its reply; kills the process if none comes."""
        try:
            data = pickle.dumps(dict(message))
        except Exception as fault:
            raise CallFailed(f"an argument cannot be sent to another process: {fault}") from fault
        deadline = time.monotonic() + seconds
        try:
            self._channel.settimeout(seconds)
            self._channel.sendall(struct.pack(">I", len(data)) + data)
            size = struct.unpack(">I", self._receive(4, deadline))[0]
            if size > MAX_REPLY:
                raise OSError(f"a reply of {size} bytes")
            return dict(json.loads(self._receive(size, deadline)))
        except TimeoutError:
            self.kill()
            raise CallFailed(f"no answer within {seconds:g} s", lost=True) from None
        except (OSError, ValueError) as fault:
            raise CallFailed(self._last_words(fault), lost=True) from None
        except BaseException:  # interrupted: the reply of this call must not be taken for the next one's
            self.kill()
            raise

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._channel.settimeout(left)
            part = self._channel.recv(size - len(data))
            if not part:
                raise OSError("closed")
            data += part
        return bytes(data)

    def _last_words(self, fault: Exception) -> str:
        """How the process ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=2)
            self.kill()
            if code < 0:
                return f"its process was ended by {signal.Signals(-code).name}"
            return f"its process exited with code {code}"
        self.kill()
        return f"its process sent no valid reply ({fault})"

    def kill(self) -> None:
        """End the process and everything it started."""
        self._channel.close()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


class ScoringPool:
    """Up to ``size`` processes with one function, started on demand."""

    def __init__(self, settings: ProcessSettings, size: int = 0) -> None:
        self.settings = settings
        self._free = threading.Semaphore(size or max(1, min(4, os.cpu_count() or 1)))
        self._lock, self._idle = threading.Lock(), list[ScoringProcess]()
        self._owner = os.getpid()
        _pools.add(self)

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
            process = self._take()
            try:
                return use(process)
            finally:
                self._give(process)

    def _take(self) -> ScoringProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    return process
                process.kill()
        return ScoringProcess(self.settings)

    def _give(self, process: ScoringProcess) -> None:
        with self._lock:
            if process.alive:
                self._idle.append(process)
                return
        process.kill()

    def close(self) -> None:
        """End the processes. A later call starts new ones, which end with the program."""
        with self._lock:
            idle, self._idle = self._idle, []
        if os.getpid() == self._owner:
            for process in idle:
                process.kill()


_pools: weakref.WeakSet[ScoringPool] = weakref.WeakSet()


@atexit.register
def _close_pools_at_exit() -> None:
    for pool in list(_pools):
        pool.close()
