"""The program of a process in which isolated environments play, and what it says in JSON.

A request names an episode, a method and its arguments. Several episodes play at the same time, each call under its limit.
Whatever an environment prints goes to standard error. Does not know who asks, nor why.
"""

from __future__ import annotations

import contextlib
import json
import random
from multiprocessing.connection import Connection
from typing import Any

from turnwise import environments
from turnwise.config.named_object import import_from_current_folder
from turnwise.core.protocols import Action, ToolCall
from turnwise.environments.calls import call_environment
from turnwise.environments.contract import read_messages, read_step
from turnwise.errors import EnvironmentFault
from turnwise.workers.child import end_with_parent, serve_concurrently


class HostLost(EnvironmentFault):
    """The process that plays an episode is gone. ``suspect``: during a call of this episode, which may have ended it."""

    def __init__(self, reason: str, suspect: bool = False) -> None:
        super().__init__(reason)
        self.suspect = suspect


READY = b"ready"  # the first request, answered when the environment is imported


def encode_action(action: Action) -> dict[str, Any]:
    """An action as JSON data; an argument that JSON cannot hold becomes its text."""
    calls = [{"name": c.name, "arguments": c.arguments, "id": c.id} for c in action.calls]
    return {"text": action.text, "calls": calls, "faults": list(action.faults)}


def decode_action(data: dict[str, Any]) -> Action:
    return Action(data["text"], tuple(ToolCall(**call) for call in data["calls"]), tuple(data["faults"]))


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
        if request["method"] != "make" and request["episode"] not in self.episodes:
            return json.dumps({"lost": "the process that played the episode was started again"})
        try:
            value = await self._perform(**request)
            agent = str(getattr(self.episodes.get(request["episode"]), "agent", "agent"))
            return json.dumps({"value": value, "agent": agent}, default=plain)
        except Exception as fault:
            return json.dumps({"fault": f"{type(fault).__name__}: {fault}"})

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
        if method != "step":
            return value
        step = read_step(value)
        return {
            "messages": list(step.messages),
            "reward": float(step.reward),
            "terminated": bool(step.terminated),
            "truncated": bool(step.truncated),
            "info": dict(step.info),
            "context": None if step.context is None else list(step.context),
        }


def main(descriptor: int, name: str) -> None:
    end_with_parent()
    import_from_current_folder()
    # an import may take long and counts for no call; the first episode reports a fault
    with contextlib.suppress(Exception):
        environments.load(name)
    worker = EpisodeWorker()

    async def answer(payload: bytes) -> bytes:
        return b"{}" if payload == READY else (await worker.answer(payload)).encode()

    serve_concurrently(Connection(descriptor), answer)
