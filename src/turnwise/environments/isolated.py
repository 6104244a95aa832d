"""Environments in processes of their own. An environment that ends its process (``os._exit``, a segmentation fault) or never lets
Python run costs its episode, not the run: the process is killed at the limit and the next episode gets a new one.

``IsolatedEnvironment`` has the methods of an environment as coroutines. A process plays up to ``EPISODES_PER_PROCESS``
episodes at once; if it dies, all of them fail with the reason.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.worker import READY, decode_action, encode_action, plain
from turnwise.errors import EnvironmentFault

EPISODES_PER_PROCESS = 8
START_SECONDS = 120
INNER_LIMIT = 0.8  # of the limit: the process itself interrupts a call first, and is killed only if it cannot


@dataclass(eq=False)
class WorkerProcess:
    """One process, the requests it has not answered, and how many episodes it plays."""

    process: subprocess.Popen[bytes]
    episodes: int = 0
    ended: str = ""  # why it is dead
    pending: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], str]] = field(default_factory=dict)
    outbox: SimpleQueue[bytes] = field(default_factory=SimpleQueue)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    ready: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def start(cls, name: str) -> WorkerProcess:
        """Start a process and wait until it has imported the environment: no call's limit should count that."""
        command = [sys.executable, "-m", "turnwise.environments.worker", name]
        worker = cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        for target in (worker._read, worker._write):
            threading.Thread(target=target, daemon=True).start()
        if not worker.ready.wait(START_SECONDS):
            worker.kill(f"the import of {name} took longer than {START_SECONDS} s")
        return worker

    async def request(self, episode: str, method: str, args: list[Any], seconds: float) -> dict[str, Any]:
        if self.ended:
            raise EnvironmentFault(self.ended)
        number, loop = next(self.numbers), asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self.pending[number] = (loop, future, method)
        request = {"id": number, "episode": episode, "method": method, "args": args, "seconds": INNER_LIMIT * seconds}
        self.outbox.put(json.dumps(request, default=plain).encode() + b"\n")
        if self.ended:  # it died meanwhile, and nobody will answer
            self._fail(number)
        try:
            reply: dict[str, Any] = await future
        except asyncio.CancelledError:  # the limit has passed, or the run stops
            self.kill(f"its process was killed, because {method} neither answered nor could be interrupted")
            raise
        finally:
            self.pending.pop(number, None)
        if "fault" in reply:
            raise EnvironmentFault(reply["fault"].removeprefix("EnvironmentFault: ").removeprefix("CallTimeout: "))
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
            _resolve(loop, future, {"fault": self.ended})


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


_workers: list[WorkerProcess] = []
_keys = itertools.count()


def _free_worker(name: str) -> WorkerProcess:
    """A living process with room for an episode; a new one if there is none."""
    _workers[:] = [worker for worker in _workers if not worker.ended]
    for worker in _workers:
        if worker.episodes < EPISODES_PER_PROCESS:
            return worker
    _workers.append(WorkerProcess.start(name))
    return _workers[-1]


@atexit.register
def stop_workers() -> None:
    """Kill all processes."""
    for worker in _workers:
        worker.kill("the program ends")
    _workers.clear()


class IsolatedEnvironment:
    """One episode in another process, as an environment: ``IsolatedEnvironment("shop:Shop", {"difficulty": 1}, seconds=30)``."""

    def __init__(
        self, name: str, arguments: dict[str, Any], seconds: float, tools: Sequence[dict[str, Any]] = ()
    ) -> None:
        """``name`` is one that ``environments.load`` finds in a new process; ``seconds`` limits each call; ``tools`` are those
        of the class, until ``reset`` has told those of the episode."""
        self.name, self.arguments, self.seconds = name, arguments, seconds
        self.agent, self.tools = "agent", list(tools)
        self._key, self._worker = f"episode {next(_keys)}", _free_worker(name)
        self._worker.episodes += 1

    async def reset(self, seed: int) -> list[Message]:
        await self._ask("make", self.name, self.arguments)
        value = await self._ask("reset", seed)
        self.tools = value["tools"]
        return list(value["messages"])

    async def step(self, action: Action) -> Step:
        return Step(**await self._ask("step", encode_action(action)))

    async def state_key(self) -> Any:
        return await self._ask("state_key")

    async def snapshot(self) -> Any:
        return await self._ask("snapshot")

    async def restore(self, snapshot: Any) -> None:
        await self._ask("restore", snapshot)

    async def answer(self) -> Any:
        return await self._ask("answer")

    async def hint(self) -> Any:
        return await self._ask("hint")

    async def scripted_action(self, policy: str, seed: int) -> Action:
        """The next action of the environment's ``oracle``, ``random_action`` or ``demonstrate``."""
        return decode_action(await self._ask("scripted_action", policy, seed))

    async def close(self) -> None:
        self._worker.episodes -= 1
        if not self._worker.ended:
            await self._ask("close")

    async def _ask(self, method: str, *args: Any) -> Any:
        reply = await self._worker.request(self._key, method, list(args), self.seconds)
        self.agent = reply.get("agent", self.agent)
        return reply["value"]
