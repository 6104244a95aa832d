"""The process in which isolated environments play: reads one request per line, answers with one line (``python -m`` this module).

A request names an episode, a method and its arguments. Several episodes play at the same time, each call under its limit.
Whatever an environment prints goes to standard error. Does not know who asks, nor why.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import threading
from typing import Any, TextIO

from turnwise import environments
from turnwise.config.named_object import import_from_current_folder
from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.environments.calls import call_environment
from turnwise.environments.contract import read_messages, read_step
from turnwise.errors import EnvironmentFault


class HostLost(EnvironmentFault):
    """The process that plays an episode is gone. ``suspect``: during a call of this episode, which may have ended it."""

    def __init__(self, reason: str, suspect: bool = False) -> None:
        super().__init__(reason)
        self.suspect = suspect


READY = -1  # id of the first line, written when the environment is imported
PARENT_DEATH_SIGNAL = 1  # prctl(PR_SET_PDEATHSIG)


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

    async def answer(self, request: dict[str, Any]) -> str:
        """The reply to a request, as one line of JSON."""
        reply: dict[str, Any] = {"id": request.pop("id", 0)}
        if request["method"] != "make" and request["episode"] not in self.episodes:
            return json.dumps({**reply, "lost": "the process that played the episode was started again"})
        try:
            reply["value"] = await self._perform(**request)
            reply["agent"] = str(getattr(self.episodes.get(request["episode"]), "agent", "agent"))
            return json.dumps(reply, default=plain)
        except Exception as fault:
            return json.dumps({"id": reply["id"], "fault": f"{type(fault).__name__}: {fault}"})

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
            return self._act(env, episode, *args)
        function = getattr(env, method, None)
        if function is None:
            return None
        args = [decode_action(args[0])] if method == "step" else args
        value = await call_environment(
            function, *args, seconds=seconds, inline=bool(getattr(type(env), "inline", False))
        )
        if method == "reset":
            return {"messages": read_messages(value, "reset"), "tools": list(getattr(env, "tools", ()))}
        return encode_step(read_step(value)) if method == "step" else value

    def _act(self, env: Any, episode: str, policy: str, seed: int) -> dict[str, Any]:
        """The next action of a scripted policy; its random numbers belong to the episode."""
        rng = self.rngs.setdefault(episode, random.Random(seed))
        action: Action = getattr(env, policy)(*(() if policy == "oracle" else (rng,)))
        return encode_action(action)


def _write(replies: TextIO, line: str) -> None:
    replies.write(line + "\n")
    replies.flush()


def main() -> None:
    with contextlib.suppress(Exception):  # Linux: do not outlive the parent, even in a call that never lets Python run
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    import_from_current_folder()
    with contextlib.suppress(
        Exception
    ):  # imports may take long and count for no call; the first episode reports a fault
        environments.load(sys.argv[1])
    loop, worker = asyncio.new_event_loop(), EpisodeWorker()
    _write(replies, json.dumps({"id": READY}))

    async def handle(request: dict[str, Any]) -> None:
        _write(replies, await worker.answer(request))

    def read() -> None:
        for line in sys.stdin.buffer:
            asyncio.run_coroutine_threadsafe(handle(json.loads(line)), loop)
        os._exit(0)  # the parent is gone: wait for no thread

    threading.Thread(target=read, daemon=True).start()
    loop.run_forever()


if __name__ == "__main__":
    main()
