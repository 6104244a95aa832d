"""Environments in other processes. An environment that ends its process (``os._exit``, a segmentation fault) or never lets
Python run costs its own episode, not the run: a process that does not answer within the limit is killed.

``IsolatedEnvironment`` has the methods of an environment as coroutines; ``EpisodeWorker`` answers them in the other process, in
JSON. If the process of an episode dies, the episode goes on in another one: the calls so far are repeated there, and must give
the same replies. An episode that has moved as often as its pool allows fails with the last reason.

Processes of this machine play up to ``EPISODES_PER_PROCESS`` episodes each. An episode whose process died in the middle of its
call may have ended it: it gets a process of its own for its next attempt, so that it cannot end those of others again. Actors of
a cluster (``training.cluster``) are another pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

from turnwise import environments
from turnwise.config.named_object import import_from_current_folder
from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Message
from turnwise.environments.calls import call_environment, with_timeout
from turnwise.environments.contract import read_messages, read_step
from turnwise.errors import EnvironmentFault, HostFault, host_fault
from turnwise.workers.child import end_with_parent, serve_concurrently
from turnwise.workers.process import FROZEN, SharedWorkers, Worker, WorkerLost


class HostLost(EnvironmentFault):
    """The process that plays an episode is gone. ``suspect``: during a call of this episode, which may have ended it.
    ``by_host``: the machine ended it."""

    def __init__(self, reason: str, suspect: bool = False, by_host: bool = False) -> None:
        super().__init__(reason)
        self.suspect, self.by_host = suspect, by_host


READY = b"ready"  # the first request, answered when the environment is imported


def encode_action(action: Action) -> dict[str, Any]:
    """An action as JSON data; an argument that JSON cannot hold becomes its text."""
    calls = [{"name": c.name, "arguments": c.arguments, "id": c.id} for c in action.calls]
    return {"text": action.text, "calls": calls, "faults": list(action.faults)}


def decode_action(data: dict[str, Any]) -> Action:
    return Action(data["text"], tuple(ToolCall(**call) for call in data["calls"]), tuple(data["faults"]))


def encode_step(step: Step) -> dict[str, Any]:
    return {
        "messages": list(step.messages),
        "reward": float(step.reward),
        "terminated": bool(step.terminated),
        "truncated": bool(step.truncated),
        "info": dict(step.info),
        "context": None if step.context is None else list(step.context),
    }


def plain(value: Any) -> Any:
    """For values that JSON does not know: a NumPy scalar as a number, anything else as its text."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "size", 1) == 1 else repr(value)


class EpisodeWorker:
    """The episodes of this process."""

    def __init__(self) -> None:
        self.episodes: dict[str, Any] = {}
        self.rngs: dict[str, random.Random] = {}

    async def answer(self, line: str | bytes) -> str:
        """The reply to a request; both are JSON."""
        request: dict[str, Any] = json.loads(line)
        # a new process under an old name: the host was started again by its cluster
        if request["method"] != "make" and request["episode"] not in self.episodes:
            return json.dumps({"lost": "the process that played the episode was started again"})
        try:
            value = await self._perform(**request)
            agent = str(getattr(self.episodes.get(request["episode"]), "agent", "agent"))
            return json.dumps({"value": value, "agent": agent}, default=plain)
        except Exception as fault:
            words = host_fault(fault)
            return json.dumps({"host": words} if words else {"fault": f"{type(fault).__name__}: {fault}"})

    async def _perform(self, episode: str, method: str, args: list[Any], seconds: float) -> Any:
        if method == "make":
            name, arguments = args
            cls = environments.load(name)
            make = lambda: cls(**arguments)  # noqa: E731
            self.episodes[episode] = await call_environment(make, seconds=seconds, inline=True)
            return None
        env = self.episodes[episode]
        if method == "close":
            self.episodes.pop(episode), self.rngs.pop(episode, None)
        if method == "scripted_action":
            policy, seed = args
            rng = self.rngs.setdefault(episode, random.Random(seed))  # its random numbers belong to the episode
            return encode_action(getattr(env, policy)(*(() if policy == "oracle" else (rng,))))
        function = getattr(env, method, None)
        if function is None:
            return None
        args = [decode_action(args[0])] if method == "step" else args
        inline = bool(getattr(type(env), "inline", False))
        value = await call_environment(function, *args, seconds=seconds, inline=inline)
        if method == "reset":
            return {"messages": read_messages(value, "reset"), "tools": list(getattr(env, "tools", ()))}
        return encode_step(read_step(value)) if method == "step" else value


def serve_episodes(
    descriptor: int, name: str, respond: Callable[[bytes], Awaitable[bytes]], gather_seconds: float = 0.0
) -> None:
    """What a process that plays episodes does: import the environment ``name``, then ``respond`` until its socket closes."""
    end_with_parent()
    import_from_current_folder()
    # an import may take long and counts for no call; the first episode reports a fault
    with contextlib.suppress(Exception):
        environments.load(name)

    async def answer(payload: bytes) -> bytes:
        return b"{}" if payload == READY else await respond(payload)

    serve_concurrently(Connection(descriptor), answer, gather_seconds)


def main(descriptor: int, name: str) -> None:
    worker = EpisodeWorker()

    async def respond(payload: bytes) -> bytes:
        return (await worker.answer(payload)).encode()

    serve_episodes(descriptor, name, respond)


EPISODES_PER_PROCESS = 8
START_SECONDS = 120.0  # to import an environment: no call's limit counts that
INNER_LIMIT = 0.8  # of the limit: the process itself interrupts a call first, and is killed only if it cannot
MOVE_SECONDS = 300.0  # beside the limit of a call: to wait for a place, and to repeat the calls so far
REPEATED = ("reset", "step", "restore", "scripted_action")  # what changes the state of an episode
COMPARED = ("messages", "reward", "terminated", "truncated")


class HostPool(Protocol):
    """Gives episodes a place: a process of this machine, or an actor of a cluster, which has ``turn``, ``request`` and ``ended``
    of ``EnvironmentProcess``. ``alone``: one that no other episode has, where that can be had."""

    moves: int  # how often an episode that lost its place gets another one

    async def place(self, name: str, alone: bool) -> Any: ...

    def leave(self, host: Any) -> None: ...


class EnvironmentProcess(Worker):
    """A process that plays episodes, any number at a time: their environments' calls, or with another ``module`` all of them."""

    def __init__(self, name: str, module: str = __name__) -> None:
        super().__init__(module, name)
        self.name, self._ready = name, self.ask(READY)
        self.prepared = set[int]()  # kinds of whole episodes that it has the parts for
        self.watch: asyncio.Task[None] | None = (
            None  # whether its interpreter still runs, while it plays whole episodes
        )
        self.watched = 0  # whole episodes in it

    async def started(self) -> None:
        """Wait until the process has imported the environment."""
        if self._ready.done():
            return  # where the process is gone, the first call says how
        try:
            # shielded: other episodes wait for the same answer
            await with_timeout(asyncio.shield(asyncio.wrap_future(self._ready)), START_SECONDS)
        except WorkerLost as lost:
            words = f"the environment's process {lost} during the import of {self.name}"
            raise HostLost(words, suspect=True, by_host=lost.by_host) from None
        except EnvironmentFault:
            self.kill(f"was killed, because the import of {self.name} took longer than {START_SECONDS:g} s")
            raise EnvironmentFault(f"the import of {self.name} took longer than {START_SECONDS:g} s") from None

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def request(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a call. Raises ``HostLost`` where the process dies first."""
        method, payload = request["method"], json.dumps(request, default=plain).encode()
        try:
            reply: dict[str, Any] = json.loads(await self.deliver(payload, method))
        # the process cannot be asked to stop: it did not even answer
        except asyncio.CancelledError:  # the limit has passed, or the run stops
            self.kill(f"was killed, because {method} neither answered nor could be interrupted")
            raise
        if "lost" in reply:
            raise HostLost(reply["lost"])
        return reply

    async def deliver(self, payload: bytes, what: str) -> bytes:
        """The answer to a payload. Raises ``HostLost`` where the process dies first."""
        # a process that another episode ended before this call tells nothing against this one
        was_lost = bool(self.ended)
        try:
            return await self.exchange(payload)
        except WorkerLost as lost:
            suspect = not (was_lost or self.killed)  # one that we killed ended for a call that never ends
            raise HostLost(f"the environment's process {lost} during {what}", suspect, lost.by_host) from None


class ProcessPool(SharedWorkers[EnvironmentProcess]):
    """Processes of this machine, as many as the episodes need."""

    moves = 2  # of an episode, to a process of its own: then it is to blame

    async def place(self, name: str, alone: bool, least: int = 0) -> EnvironmentProcess:
        """A living process with room for an episode; a new one if there is none, or if fewer than ``least`` run."""
        process = self.take(name, alone=alone, least=least)
        try:
            await process.started()
        except BaseException:
            self.leave(process)
            raise
        return process


PROCESSES = ProcessPool(EnvironmentProcess, EPISODES_PER_PROCESS)  # those of this process
_keys = itertools.count()
# hosts that outlive this process tell its episodes from those of an earlier one
_life = uuid.uuid4().hex[:12]
moved: deque[str] = deque(maxlen=1000)  # why episodes of this process moved, for whoever tells it


def _asked(method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """A method that the environment in the other process answers."""

    async def ask(self: IsolatedEnvironment, *args: Any) -> Any:
        return await self._ask(method, *args)

    ask.__qualname__ = f"IsolatedEnvironment.{method}"  # a call that takes long is listed by this name
    return ask


class IsolatedEnvironment:
    """One episode in another process, as an environment: ``IsolatedEnvironment("shop:Shop", {"difficulty": 1}, seconds=30)``."""

    patience = MOVE_SECONDS  # beside the limit of a call, which this class keeps itself

    def __init__(
        self,
        name: str,
        arguments: dict[str, Any],
        seconds: float,
        tools: Sequence[dict[str, Any]] = (),
        pool: HostPool = PROCESSES,
    ) -> None:
        """``name`` is one that ``environments.load`` finds in a new process; ``seconds`` limits each call; ``tools`` are those
        of the class, until ``reset`` has told those of the episode."""
        self.name, self.arguments, self.seconds, self.pool = name, arguments, seconds, pool
        self.agent, self.tools, self.moves = "agent", list(tools), 0
        self._key = f"{_life} {next(_keys)}"
        self._host: Any = None
        self._calls: list[tuple[str, list[Any], str]] = []  # method, arguments and reply of what is repeated elsewhere
        self._suspect = False  # whether its call may have ended the process

    async def reset(self, seed: int) -> list[Message]:
        value = await self._ask("reset", seed)
        self.tools = value["tools"]
        return list(value["messages"])

    async def step(self, action: Action) -> Step:
        before = self.moves
        step = Step(**await self._ask("step", encode_action(action)))
        if self.moves == before:
            return step
        facts = {**dict(step.info.get("facts", {})), "process_deaths": float(self.moves - before)}
        return replace(step, info={**step.info, "facts": facts})

    state_key, snapshot, restore, answer = map(_asked, ("state_key", "snapshot", "restore", "answer"))
    hint, hints, solution, turns_to_solve = map(_asked, ("hint", "hints", "solution", "turns_to_solve"))

    async def scripted_action(self, policy: str, seed: int) -> Action:
        """The next action of the environment's ``oracle``, ``random_action`` or ``demonstrate``."""
        return decode_action(await self._ask("scripted_action", policy, seed))

    async def close(self) -> None:
        host, self._host = self._host, None
        if host is None:
            return
        self.pool.leave(host)
        # a dead process has nothing to close
        if not host.ended:
            await self._call(host, "close", [])

    # -------------------------------------------------------------------- calls

    async def _ask(self, method: str, *args: Any) -> Any:
        """The reply of the environment; from another process where its own dies."""
        while True:
            try:
                if self._host is None:  # make the environment in a process, and repeat there what was done so far
                    self._host = await self.pool.place(self.name, self._suspect)
                    await self._call(self._host, "make", [self.name, self.arguments])
                    for earlier, given, reply in self._calls:
                        if _digest(await self._call(self._host, earlier, given)) != reply:
                            raise EnvironmentFault(
                                "its process died, and the environment is not deterministic: "
                                f"{earlier} replied otherwise when it was repeated"
                            )
                value = await self._call(self._host, method, list(args))
                break
            except HostLost as lost:
                if self._host is not None:
                    self.pool.leave(self._host)
                self._host, self._suspect = None, self._suspect or lost.suspect
                if self.moves >= self.pool.moves:
                    kind = HostFault if lost.by_host else EnvironmentFault
                    raise kind(f"{lost}; it was tried {self.moves + 1} times") from None
                self.moves += 1
                moved.append(str(lost))
        if method in REPEATED:
            self._calls.append((method, list(args), _digest(value)))
        return value

    async def _call(self, host: Any, method: str, args: list[Any]) -> Any:
        request = {"episode": self._key, "method": method, "args": args, "seconds": INNER_LIMIT * self.seconds}
        async with host.turn():
            try:
                reply = await with_timeout(host.request(request), self.seconds)
            except EnvironmentFault:
                if getattr(host, "frozen", False):  # its time passed without it: the call goes on elsewhere
                    raise HostLost(f"the environment's process {FROZEN} during {method}", by_host=True) from None
                raise
        if "host" in reply:
            raise HostFault(reply["host"])
        if "fault" in reply:
            raise EnvironmentFault(reply["fault"].removeprefix("EnvironmentFault: ").removeprefix("CallTimeout: "))
        self.agent = reply.get("agent", self.agent)
        return reply["value"]


def _digest(value: Any) -> str:
    """What must be the same when a call is repeated. Facts of a step may hold times, and are not compared."""
    compared = {name: value[name] for name in COMPARED if name in value} if isinstance(value, dict) else value
    return json.dumps(compared, sort_keys=True, default=plain)
