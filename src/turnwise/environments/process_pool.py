"""Processes of this machine that play episodes of isolated environments: up to ``EPISODES_PER_PROCESS`` at once in each.

An episode whose process died in the middle of its call may have ended it: it gets a process of its own for its next attempt, so
that it cannot end those of others again. Knows processes and pipes; neither actions nor episodes.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from turnwise.environments.calls import call_environment
from turnwise.environments.worker import READY, HostLost, plain
from turnwise.errors import EnvironmentFault

EPISODES_PER_PROCESS = 8
START_SECONDS = 120


@dataclass(eq=False)
class WorkerProcess:
    """One process, the requests it has not answered, and how many episodes it plays."""

    process: subprocess.Popen[bytes]
    name: str
    episodes: int = 0
    alone: bool = False  # whether its episode must not share it
    ended: str = ""  # why it is dead
    killed: bool = False  # by us, for a call that never ends: no other call of it is to blame
    pending: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], str]] = field(default_factory=dict)
    outbox: SimpleQueue[bytes] = field(default_factory=SimpleQueue)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    ready: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def start(cls, name: str) -> WorkerProcess:
        command = [sys.executable, "-m", "turnwise.environments.worker", name]
        worker = cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE), name)
        for target in (worker._read, worker._write):
            threading.Thread(target=target, daemon=True).start()
        return worker

    async def started(self) -> None:
        """Wait until the process has imported the environment: no call's limit should count that."""
        if self.ready.is_set():
            return
        if not await call_environment(self.ready.wait, START_SECONDS, seconds=START_SECONDS + 10, inline=False):
            self.kill(f"the import of {self.name} took longer than {START_SECONDS} s")
            raise EnvironmentFault(self.ended)

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """A process takes as many calls as its episodes have."""
        return contextlib.nullcontext()

    async def request(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a call. Raises ``HostLost`` where the process dies first."""
        if self.ended:
            raise HostLost(self.ended)
        number, loop = next(self.numbers), asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self.pending[number] = (loop, future, request["method"])
        self.outbox.put(json.dumps({**request, "id": number}, default=plain).encode() + b"\n")
        if self.ended:  # it died meanwhile, and nobody will answer
            self._fail(number)
        try:
            reply: dict[str, Any] = await future
        except asyncio.CancelledError:  # the limit has passed, or the run stops
            method, self.killed = request["method"], True
            self.kill(f"its process was killed, because {method} neither answered nor could be interrupted")
            raise
        finally:
            self.pending.pop(number, None)
        if "lost" in reply:
            raise HostLost(reply["lost"], suspect=not self.killed)
        return reply

    def kill(self, reason: str) -> None:
        self.ended = self.ended or reason
        self.process.kill()

    def _write(self) -> None:
        """In a thread: a pipe whose reader is stuck would block the event loop."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            while True:
                self.process.stdin.write(self.outbox.get())
                self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            reply = json.loads(line)
            if reply["id"] == READY:
                self.ready.set()
            loop, future, _ = self.pending.get(reply["id"], (None, None, ""))
            if loop is not None and future is not None:
                _resolve(loop, future, reply)
        code = self.process.wait()
        methods = ", ".join(sorted({method for _, _, method in tuple(self.pending.values())})) or "no call"
        self.ended = self.ended or f"the environment ended its process ({_exit_text(code)}) during {methods}"
        self.ready.set()
        self.outbox.put(b"")  # wakes the writer, which then meets the closed pipe
        for number in tuple(self.pending):
            self._fail(number)

    def _fail(self, number: int) -> None:
        loop, future, _ = self.pending.get(number, (None, None, ""))
        if loop is not None and future is not None:
            _resolve(loop, future, {"lost": self.ended})


def _resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], reply: dict[str, Any]) -> None:
    def set_result() -> None:
        if not future.done():
            future.set_result(reply)

    with contextlib.suppress(RuntimeError):  # the loop was closed: nothing waits for the reply
        loop.call_soon_threadsafe(set_result)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


class ProcessPool:
    """As many processes as the episodes need."""

    moves = 2  # of an episode, to a process of its own: then it is to blame

    def __init__(self) -> None:
        self.workers: list[WorkerProcess] = []

    async def place(self, name: str, alone: bool) -> WorkerProcess:
        """A living process with room for an episode; a new one if there is none."""
        self.workers[:] = [worker for worker in self.workers if not worker.ended]
        most = 1 if alone else EPISODES_PER_PROCESS
        worker = next((w for w in self.workers if w.episodes < most and not w.alone), None)
        if worker is None:
            worker = WorkerProcess.start(name)
            self.workers.append(worker)
        worker.episodes += 1
        worker.alone = alone
        try:
            await worker.started()
        except BaseException:
            self.leave(worker)
            raise
        return worker

    def leave(self, worker: WorkerProcess) -> None:
        """The episode has ended, or plays elsewhere."""
        worker.episodes -= 1
        worker.alone = worker.alone and worker.episodes > 0

    def stop(self) -> None:
        """Kill all processes."""
        for worker in self.workers:
            worker.kill("the program ends")
        self.workers.clear()


PROCESSES = ProcessPool()
"""Those of this process."""
atexit.register(PROCESSES.stop)
