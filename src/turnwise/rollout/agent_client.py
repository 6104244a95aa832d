"""A client in the manner of the OpenAI package, for agents that run in this process: no socket, no copy, and the same random
numbers every time.

    reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
    reply.choices[0].message.tool_calls

Replies can be read by attribute and by key, and sent back as they are. Knows one episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from turnwise.core.protocols import Action, ToolCall
from turnwise.core.records import Limit, Message, Task
from turnwise.environments.calls import call_environment
from turnwise.environments.contract import read_messages, read_step
from turnwise.errors import EnvironmentFault, GrammarError, SettingError
from turnwise.rollout.agent_episode import (
    AgentEpisode,
    AgentOutcome,
    CallRefused,
    CallReply,
    CallRequest,
    Misused,
    Result,
    read_outcome,
    within,
)
from turnwise.rollout.lineage import canonical, message_text
from turnwise.rollout.typed_output import FIELDS as TYPED_FIELDS
from turnwise.rollout.typed_output import read_grammar, read_tool_choice

OVERRULED: Mapping[str, Sequence[Any]] = {
    "temperature": (), "top_p": (), "top_k": (), "seed": (), "max_tool_calls": (),
    "presence_penalty": (0,), "frequency_penalty": (0,), "reasoning_effort": (), "reasoning": ({},),
    "thinking": ({"type": "disabled"},), "extra_body": ({},), "extra_query": ({},),
}  # fmt: skip
"""Fields of any format that are accepted and overruled, since the run says how its policy is sampled; and values that ask for
what is done anyway. A call that names one is counted, and the log lists them once."""
IGNORED = frozenset(
    {
        "model", "user", "stream_options", "metadata", "store", "timeout", "extra_headers", "service_tier",
        "prompt_cache_key", "safety_identifier",
    }
)  # fmt: skip
"""Accepted: they do not say how to sample."""
CHAT_OVERRULED = frozenset(OVERRULED) - {"top_k", "max_tool_calls", "reasoning", "thinking"}
READ = frozenset(
    {
        "messages", "tools", "max_tokens", "max_completion_tokens", "n", "stop", "logprobs", "tool_choice", "stream",
        "return_token_ids", "parallel_tool_calls", *TYPED_FIELDS,
    }
)  # fmt: skip
NO_EFFECT = {
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
}
"""Values of fields that are otherwise refused: with these they ask for what is done anyway."""
MAX_CHOICES = 128
ROLES = ("system", "developer", "user", "assistant", "tool")


class Attributes(dict):
    """A dict whose keys are attributes, too, as in the replies of the OpenAI package."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith("__"):
            raise AttributeError(name)
        return None  # a field that this reply does not have

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return plain(self)


def plain(value: Any) -> Any:
    """A reply, or a message of another package's class, as plain dicts and lists."""
    if hasattr(value, "model_dump") and not isinstance(value, dict):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def attributes(value: Any) -> Any:
    """A body with its keys as attributes, at every depth."""
    if isinstance(value, Mapping):
        return Attributes({key: attributes(item) for key, item in value.items()})
    return [attributes(item) for item in value] if isinstance(value, list) else value


def read_request(body: Mapping[str, Any]) -> CallRequest:
    """A request of the chat completions protocol. A field that would change the meaning and is not supported is refused."""
    refuse_unknown(body, READ | IGNORED | CHAT_OVERRULED, NO_EFFECT)
    messages = [read_message(message) for message in _sequence(body, "messages")]
    if not messages:
        raise CallRefused("invalid_messages", "'messages' is empty; write at least one")
    tools = [] if body.get("tool_choice") == "none" else [read_tool(tool) for tool in _sequence(body, "tools")]
    most, count = _count(body, "max_completion_tokens", 0) or _count(body, "max_tokens", 0), _count(body, "n", 1) or 1
    if count > MAX_CHOICES:
        raise CallRefused("invalid_request", f"'n' is {count}; write at most {MAX_CHOICES}")
    stop = read_stop(body.get("stop") or (), "stop")
    pieces, most_calls = bool(body.get("logprobs")), read_most_calls(body.get("tool_choice"), body)
    overruled, typed = overruled_fields(body), typed_fields(body, body.get("tool_choice"))
    return CallRequest(messages, tuple(tools), most, count, stop, pieces, most_calls, overruled, *typed)


def typed_fields(body: Mapping[str, Any], tool_choice: Any) -> tuple[str, str | None]:
    """What the answer must match, and the tool that must be called."""
    try:
        return read_grammar(body), read_tool_choice(tool_choice)
    except (GrammarError, ValueError, TypeError) as fault:
        raise CallRefused("invalid_request", str(fault)) from fault


def read_most_calls(choice: Any, body: Mapping[str, Any]) -> int | None:
    """How many tools one reply may call."""
    return 0 if choice == "none" else 1 if body.get("parallel_tool_calls") is False else None


def overruled_fields(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of a call that ask for another way of sampling than the run's."""
    return tuple(name for name, as_done in OVERRULED.items() if body.get(name) not in (None, *as_done))


def refuse_unknown(body: Mapping[str, Any], fields: Set[str], no_effect: Mapping[str, Sequence[Any]]) -> None:
    """Refuse the first field that is not among ``fields``: it might change the meaning of the call."""
    for key, value in body.items():
        if key not in fields and value is not None and value not in no_effect.get(key, ()):
            raise CallRefused("unsupported_parameter", f"{key!r} is not supported; leave it out")


def read_stop(stop: Any, name: str) -> tuple[str, ...]:
    """Words that end a turn."""
    words = [stop] if isinstance(stop, str) else stop
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise CallRefused("invalid_request", f"{name!r} is {stop!r:.80}; write a text or a list of texts")
    return tuple(word for word in words if word)


def _sequence(body: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = body.get(key) or ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise CallRefused("invalid_request", f"{key!r} is {value!r:.80}; write a list")
    return value


def _count(body: Mapping[str, Any], key: str, default: int) -> int:
    value = body.get(key, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CallRefused("invalid_request", f"{key!r} is {value!r:.80}; write a whole number")
    return value


def read_tool(value: Any) -> dict[str, Any]:
    """One tool of a request, checked."""
    tool = plain(value)
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise CallRefused("invalid_request", f"a tool is {value!r:.80}; write type function, with name and parameters")
    return dict(tool)


def read_message(value: Any) -> Message:
    """One message of a request, checked."""
    message = plain(value)
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise CallRefused(
            "invalid_messages", f"a message is {value!r:.80}; write role ({', '.join(ROLES)}) and content"
        )
    content = message.get("content")
    if isinstance(content, list) and any(not isinstance(part, dict) or "text" not in part for part in content):
        raise CallRefused("invalid_messages", "a message holds a part that is not text; only text is supported")
    if content is not None and not isinstance(content, str | list):
        raise CallRefused("invalid_messages", f"a message has the content {content!r:.80}; write text")
    calls = message.get("tool_calls") or []
    named = isinstance(calls, list) and all(
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("name"), str)
        for call in calls
    )
    if not named:
        raise CallRefused(
            "invalid_messages", f"a message has the tool_calls {calls!r:.80}; write id, type and function"
        )
    return message


def completion_body(
    replies: Sequence[CallReply], number: int, logprobs: bool = False, token_ids: bool = False
) -> dict[str, Any]:
    """Replies as the body of a chat completion. ``token_ids``: with the ids that were read and sampled."""
    choices: list[dict[str, Any]] = []
    for n, reply in enumerate(replies):
        choice = {"index": n, "message": reply.message, "finish_reason": reply.finish_reason}
        tokens: dict[str, Any] = {"token_ids": list(reply.tokens)} if token_ids else {}
        if logprobs:
            tokens["logprobs"] = {
                "content": [
                    {"token": t, "logprob": p, "bytes": list(t.encode("utf-8", "replace")), "top_logprobs": []}
                    for t, p in zip(reply.pieces, reply.logp)
                ],
                "refusal": None,
            }
        choices.append({**choice, **tokens})
    sampled, prompt = sum(len(reply.tokens) for reply in replies), replies[0].prompt_tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": choices,
        "usage": usage,
        **({"prompt_token_ids": list(replies[0].prompt_ids)} if token_ids else {}),
    }


class Completions:
    """``client.chat.completions``"""

    def __init__(self, episode: AgentEpisode) -> None:
        self._episode = episode

    async def create(self, **body: Any) -> Attributes:
        """One chat completion of the policy."""
        with self._episode.counting_refusals():
            if body.get("stream"):
                raise CallRefused("unsupported_parameter", "'stream' needs the HTTP endpoint; here replies come whole")
            request = read_request(body)
        replies = await self._episode.call(request)
        logprobs, token_ids = bool(body.get("logprobs")), bool(body.get("return_token_ids"))
        return attributes(completion_body(replies, len(self._episode.turns), logprobs, token_ids))


class AgentClient:
    """The client that an agent function gets: one episode's policy.

    ``base_url`` and ``api_key`` open the same episode to clients of other packages, over HTTP on this machine. The endpoint is
    started when they are first read. ``connect`` opens the episode there and returns both."""

    def __init__(self, episode: AgentEpisode, connect: Callable[[AgentEpisode], tuple[str, str]] | None = None) -> None:
        self.chat = SimpleNamespace(completions=Completions(episode))
        self._episode, self._connect = episode, connect
        self._address: tuple[str, str] | None = None

    def _connected(self) -> tuple[str, str]:
        if self._connect is None:
            raise SettingError("this client has no HTTP endpoint; call client.chat.completions.create")
        self._address = self._address or self._connect(self._episode)
        return self._address

    @property
    def base_url(self) -> str:
        return self._connected()[0]

    @property
    def api_key(self) -> str:
        return self._connected()[1]


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

    def __getattr__(self, name: str) -> Any:
        there = "messages, prompt, tools, row, seed, done, step and call_tool"
        cure = f"write task.row[{name!r}]" if name in self.__dict__.get("row", ()) else f"it has {there}"
        raise Misused(f"a task has no {name!r}; {cure}")

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
        episode = self.episode
        if episode is not None and episode.success is None and (not self.done or episode.limit == Limit.TURNS):
            episode.success = False  # these words end the agent's work, and the environment expects more

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
        self.episode.steps += 1
        if not self.done and self.episode.steps >= self.episode.limits.turns:
            # the environment's own limit, which counts what acts in it; how often the agent calls its policy is not its matter
            self.done = True
            self.episode.cut(Limit.TURNS, f"turn limit of {self.episode.limits.turns} (--max-turns)")
        self.episode.add_reward(float(step.reward))
        if "success" in step.info:
            self.episode.success = bool(step.info["success"])
        for name, value in dict(step.info.get("rewards", {})).items():
            self.episode.rewards[name] = self.episode.rewards.get(name, 0.0) + float(value)
        ids = [str(call.get("id", "")) for call in message.get("tool_calls") or ()]
        replies = [dict(m) for m in step.messages]
        for reply, call_id in zip(
            replies, ids
        ):  # clients of the OpenAI protocol want the id of the call that is answered
            if reply.get("role") == "tool":
                reply.setdefault("tool_call_id", call_id)
        return replies


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

    def __post_init__(self) -> None:
        """Refuse what cannot be called as an agent, or answers with something else than an outcome."""
        function = self.function
        name, instead = getattr(function, "__name__", type(function).__name__), "write async def agent(task, client)"
        if isinstance(function, type):
            raise SettingError(f"the agent {name} is a class; {instead}, or give an object with such a __call__")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise SettingError(f"the agent {name} yields values, which nobody reads; return the reward instead")
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return  # of a function in C nothing is known
        try:
            signature.bind(None, None)
        except TypeError:
            raise SettingError(
                f"the agent {name} takes {signature}, and is called with a task and a client; {instead}"
            ) from None

    async def play(self, task: AgentTask, episode: AgentEpisode) -> AgentOutcome:
        task.episode, task.loop = episode, asyncio.get_running_loop()
        with self.host.offered(episode) if self.host is not None else nullcontext() as connect:
            client = AgentClient(episode, connect)
            if is_async(self.function):
                return read_outcome(await within(episode.limits.seconds, self.function(task, client)))
            # Another function runs in a thread of its own, as it may block. A thread starts and calls when it likes: the
            # generator must not wait for it.
            episode.session.park()
            work = call_environment(self.function, task, client, seconds=FOREVER, inline=False)
            return read_outcome(await within(episode.limits.seconds, work))


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
