"""What an agent function gets: its task, and a client. And how the function is called.

    async def solve(task, client):
        messages = list(task.messages)
        while not task.done:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=task.tools)
            messages += [reply.choices[0].message, *await task.step(reply.choices[0].message)]

An agent with tools of its own needs only ``task.messages`` or ``task.row`` and returns a reward. One that plays an environment of
this project lets ``task.step`` act, and returns nothing: the environment has said what each step was worth.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnwise.core.protocols import Action, ToolCall
from turnwise.core.records import Message, Task
from turnwise.environments.calls import call_environment
from turnwise.environments.contract import read_messages, read_step
from turnwise.errors import EnvironmentFault
from turnwise.rollout.agent_client import AgentClient, plain
from turnwise.rollout.agent_episode import AgentEpisode, AgentOutcome, Result, read_outcome, within
from turnwise.rollout.lineage import canonical, message_text

FOREVER = 1e7  # seconds: the episode's own limit ends the call


@dataclass
class AgentTask:
    """One task, for one episode."""

    task: Task
    messages: list[Message]  # the first ones of the environment or of the row
    tools: tuple[dict[str, Any], ...] = ()
    row: Mapping[str, Any] = field(default_factory=dict)  # columns of a file of tasks
    done: bool = False
    environment: Any = None
    episode: AgentEpisode | None = None
    seconds: float = 30.0  # per call into the environment
    loop: asyncio.AbstractEventLoop | None = None  # that the episode runs in

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``task.step(...)`` or ``task.call_tool(...)`` for a function that is not ``async``."""
        if self.loop is None:
            raise EnvironmentFault("task.wait works in an agent function that is not async; in an async one use await")
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    @property
    def seed(self) -> int:
        return self.task.seed

    @property
    def prompt(self) -> str:
        """The text of the first messages, for agents that take one string."""
        return "\n\n".join(message_text(message) for message in self.messages)

    async def call_tool(self, name: str, **arguments: Any) -> str:
        """Call a tool of the environment; returns its reply. For agents whose framework runs the tools."""
        call = {"id": "", "function": {"name": name, "arguments": json.dumps(arguments)}}
        replies = await self.step({"role": "assistant", "content": None, "tool_calls": [call]})
        return "\n".join(message_text(reply) for reply in replies)

    async def answer(self, text: str) -> None:
        """Give the environment the agent's last words, unless its episode is over."""
        if self.done:
            return
        await self.step({"role": "assistant", "content": text})
        if not self.done and self.episode is not None and self.episode.success is None:
            self.episode.success = False  # these words end the agent's work, and the environment expects more

    async def step(self, message: Any) -> list[Message]:
        """Let an assistant message act in the environment; returns its reply. The reward goes to the turn that was sampled."""
        if self.done:
            raise EnvironmentFault("the environment's episode is over; check task.done before task.step")
        assert self.episode is not None
        message = plain(message)
        action = self.episode.actions.get(canonical(message)) or read_assistant(message)
        inline = bool(getattr(type(self.environment), "inline", False))
        reply = await call_environment(self.environment.step, action, seconds=self.seconds, inline=inline)
        step = read_step(await reply if inspect.isawaitable(reply) else reply)
        self.done = bool(step.terminated or step.truncated)
        self.episode.add_reward(float(step.reward))
        if "success" in step.info:
            self.episode.success = bool(step.info["success"])
        for name, value in dict(step.info.get("rewards", {})).items():
            self.episode.rewards[name] = self.episode.rewards.get(name, 0.0) + float(value)
        ids = [str(call.get("id", "")) for call in message.get("tool_calls") or ()]
        return [_answering(m, ids[n : n + 1]) for n, m in enumerate(step.messages)]


def _answering(message: Message, ids: Sequence[str]) -> Message:
    """A tool reply with the id of the call it answers, which clients of the OpenAI protocol want."""
    replies = message.get("role") == "tool" and "tool_call_id" not in message
    return {**message, "tool_call_id": ids[0]} if replies and ids else dict(message)


def read_assistant(message: Message) -> Action:
    """An assistant message of the wire as an action."""
    calls, faults, written = [], [], []
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        try:
            arguments = json.loads(function.get("arguments") or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("not an object")
            calls.append(ToolCall(str(function.get("name")), arguments, str(call.get("id", ""))))
            written.append(json.dumps({"name": function.get("name"), "arguments": arguments}))
        except ValueError as fault:
            faults.append(f"error: the arguments of a tool call are not JSON: {fault}")
    text = message_text(message) + "".join(f"<tool_call>{body}</tool_call>" for body in written)
    return Action(text, tuple(calls), tuple(faults))


class EpisodeHost(Protocol):
    """Lets clients of other packages reach an episode over HTTP."""

    def offered(self, episode: AgentEpisode) -> AbstractContextManager[Callable[[AgentEpisode], tuple[str, str]]]:
        """While the context lasts, a function that opens the episode and returns its URL and its key."""
        ...


@dataclass(frozen=True)
class FunctionAgent:
    """An agent that is a Python function of (task, client), ``async`` or not."""

    function: Callable[..., Any]
    host: EpisodeHost | None = None  # gives stock clients of other packages a way in

    async def play(self, task: AgentTask, episode: AgentEpisode, seconds: float = math.inf) -> AgentOutcome:
        task.episode = episode
        if self.host is None:
            return await self._run(task, AgentClient(episode), seconds)
        with self.host.offered(episode) as connect:
            return await self._run(task, AgentClient(episode, connect), seconds)

    async def _run(self, task: AgentTask, client: AgentClient, seconds: float) -> AgentOutcome:
        """An ``async`` function runs in this event loop, another one in a thread of its own, as it may block."""
        assert task.episode is not None
        task.loop = asyncio.get_running_loop()
        if is_async(self.function):
            return read_outcome(await within(seconds, self.function(task, client)))
        task.episode.session.park()  # a thread starts and calls when it likes: the generator must not wait for it
        work = call_environment(self.function, task, client, seconds=FOREVER, inline=False)
        return read_outcome(await within(seconds, work))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling this function, or this object, gives something to await."""
    called = type(function).__call__  # of an object with such a method
    return inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(called)


async def open_task(task: Task, environment: Any, seconds: float, row: Mapping[str, Any] | None = None) -> AgentTask:
    """The task of an environment that was just made."""
    inline = bool(getattr(type(environment), "inline", False))
    first = await call_environment(environment.reset, task.seed, seconds=seconds, inline=inline)
    messages: Sequence[Message] = read_messages(await first if inspect.isawaitable(first) else first, "reset")
    tools = tuple(getattr(environment, "tools", ()))
    return AgentTask(task, list(messages), tools, row or {}, environment=environment, seconds=seconds)
