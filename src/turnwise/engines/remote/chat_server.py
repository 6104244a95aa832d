"""A model behind an OpenAI-compatible address, as a ``ChatModel``: retries, limits, and errors in words.

What is retried: a busy server (408, 409, 425, 429), one that fails (5xx), a broken connection, no reply in time, a reply that is
no reply; after growing pauses, and a bounded number of times. What ends everything at once: a wrong key, a wrong address, a model
that does not exist, a server that cannot be reached any more, or several requests in a row that failed for good. Knows no
episode and no environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.core.chat import ChatReply
from turnwise.core.protocols import Listener, ToolCall
from turnwise.core.records import Message, Sampling, Stop
from turnwise.core.seeds import stable_seed
from turnwise.core.text import clean
from turnwise.engines.remote.http import HttpPool, HttpReply, ServerAddress, error_text, expect, is_overflow
from turnwise.errors import ContextOverflow, RequestRefused, ServerFault, SettingError, nearest

BUSY = (408, 409, 425, 429)
LONGEST_PAUSE = 30.0  # seconds; also of what a server asks for
FAILED_IN_A_ROW = 8  # requests that failed for good before the server counts as broken
PROBE_SECONDS = 10.0
NO_MODEL = re.compile(r"model.{0,80}(not found|not exist|does not exist|unknown|invalid)|no (such )?model", re.I)


@dataclass(frozen=True)
class RetryPolicy:
    """``seconds``: for one reply. ``attempts``: of one request. ``pause``: before the second attempt; it doubles each time."""

    seconds: float = 120.0
    attempts: int = 5
    pause: float = 0.5

    def wait(self, attempt: int, seed: int, asked_for: str = "") -> float:
        """Seconds before the next attempt: what the server asks for, else growing, and different for each request."""
        try:
            return min(LONGEST_PAUSE, max(0.0, float(asked_for)))
        except ValueError:
            spread = 1 + stable_seed(seed, attempt) % 1000 / 2000
            return min(LONGEST_PAUSE, self.pause * 2 ** (attempt - 1) * spread)


class _Transient(ServerFault):
    """Worth another attempt. ``asked_for``: the pause that the server asks for, in seconds."""

    def __init__(self, text: str, asked_for: str = "") -> None:
        super().__init__(text)
        self.asked_for = asked_for


@dataclass
class ChatServer:
    """``reply`` may be called from many coroutines at once; at most ``parallel`` requests are under way."""

    address: ServerAddress
    name: str  # of the model
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    parallel: int = 16
    tell: Callable[[str], None] = lambda text: None  # hears of the first retry of each kind
    requests: int = 0
    retries: int = 0
    fatal: ServerFault | None = None  # why nothing more is sent
    limit_name: str = "max_tokens"
    schemas: bool = True  # whether the server has not refused a schema yet
    failed_in_a_row: int = 0
    _told: set[str] = field(default_factory=set)

    @classmethod
    async def reached(
        cls,
        who: str,
        url: str,
        key_variable: str,
        model: str,
        seconds: float,
        parallel: int,
        listen: Listener,
        flags: str = "",
    ) -> ChatServer:
        """A server after it was reached, with the model to ask. ``key_variable`` names what holds its key; ``flags`` begins the
        names of what says more about it."""
        address = ServerAddress.read(url, key_variable, who, ", policy, or FILE.py:FUNCTION")
        name = await find_model(address, model, who, flags)
        tell = lambda text: listen("message", {"level": "warning", "text": text})  # noqa: E731
        return cls(address, name, RetryPolicy(seconds), parallel, tell)

    def __post_init__(self) -> None:
        self._slots, self._pool = asyncio.Semaphore(self.parallel), HttpPool(self.address, foreign=True)

    async def reply(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        seed: int,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
    ) -> ChatReply:
        body = request_body(self.name, messages, sampling, seed, tools)
        async with self._slots:
            began = time.perf_counter()
            try:
                reply = await self._send(body, sampling.max_tokens, schema, seed)
            except ContextOverflow:
                raise
            except ServerFault as fault:
                self.failed_in_a_row += 1
                if self.failed_in_a_row >= FAILED_IN_A_ROW and self.fatal is None:
                    self.fatal = ServerFault(f"{self.failed_in_a_row} requests in a row failed; the last: {fault}")
                raise
            self.failed_in_a_row = 0
            return read_reply(reply, time.perf_counter() - began)

    def close(self) -> None:
        self._pool.interrupt()

    async def _send(self, request: Mapping[str, Any], limit: int, schema: Mapping[str, Any] | None, seed: int) -> Any:
        named = {"name": "reply", "strict": True, "schema": schema}
        attempt = 1
        while True:
            if self.fatal is not None:
                raise self.fatal
            # other requests may have found out meanwhile what the server cannot do
            body = {**request, self.limit_name: limit}
            if schema and self.schemas:
                body["response_format"] = {"type": "json_schema", "json_schema": named}
            try:
                self.requests += 1
                try:
                    reply = await self._pool.call("/chat/completions", body, self.retry.seconds)
                except ServerFault as fault:
                    raise _Transient(str(fault)) from None
                if self._adapt(reply, body):
                    continue
                return await self._checked(reply)
            except _Transient as fault:
                if attempt >= self.retry.attempts:
                    given_up = ServerFault(f"{self.address.url}: {fault} ({attempt} attempts)")
                    if "no connection" in str(fault):  # nobody listens there any more
                        self.fatal = given_up
                    raise given_up from None
                pause, kind = self.retry.wait(attempt, seed, fault.asked_for), str(fault)[:40]
                self.retries += 1
                if kind not in self._told:
                    self._told.add(kind)
                    again = f"trying again in {pause:.1f} s (at most {self.retry.attempts} times)"
                    self.tell(f"{self.address.url}: {fault}; {again}")
                await asyncio.sleep(pause)
            attempt += 1

    def _adapt(self, reply: HttpReply, body: Mapping[str, Any]) -> bool:
        """Whether the server refused a field that it can do without, and the next attempt leaves it out."""
        text = reply.text(2000) if reply.status in (400, 422) else ""
        # ``body`` is that of this request: others may have changed the attributes meanwhile
        if "max_tokens" in body and "max_completion_tokens" in text:
            self.limit_name = "max_completion_tokens"
        elif "response_format" in body and ("response_format" in text or "json_schema" in text):
            self.schemas = False
        else:
            return False
        return True

    async def _checked(self, reply: HttpReply) -> Any:
        """The JSON of a good reply; every other is raised."""
        value, status = reply.json(), reply.status
        text = self.address.hide(error_text(value, reply.text()))
        if status == 200:
            try:
                expect(value is not None, "the reply is not JSON: {!r}", text)
                read_reply(value)
            except ServerFault as fault:
                raise _Transient(self.address.hide(str(fault))) from None
            return value
        if status in BUSY or status >= 500:
            raise _Transient(f"status {status}: {text}", reply.headers.get("retry-after", ""))
        if is_overflow(status, value, text):
            raise ContextOverflow(f"the server's context window: {text}")
        if status == 404 or (status == 400 and NO_MODEL.search(text)):
            try:
                names = await list_models(self.address)
            except ServerFault:
                names = ()
            remedy = f"; no model {self.name!r}: {nearest(self.name, names)}"
            remedy = remedy if names else f"; the model was {self.name!r}"
        elif status in (401, 403) or 300 <= status < 400:
            remedy = _remedy(reply)
        else:
            raise RequestRefused(f"{self.address.url} refused a request with status {status}: {text}")
        # no other request would fare better
        self.fatal = self.fatal or ServerFault(f"{self.address.url} replied {status}: {text}{remedy}")
        raise self.fatal


def _remedy(reply: HttpReply) -> str:
    """What to do about a refusal that no other request would change."""
    if reply.status in (401, 403):
        return "; name the environment variable that holds the key with --policy-key-env (of a judge or helper: --judge-key-env)"
    return f"; it sends us to {reply.headers.get('location', '?')}: write that address"


async def list_models(address: ServerAddress) -> tuple[str, ...]:
    """The models that a server names; empty if it names none."""
    reply = await HttpPool(address, foreign=True).call("/models", None, PROBE_SECONDS)
    value = reply.json()
    rows = value.get("data") if isinstance(value, Mapping) else None
    if reply.status in (401, 403):
        text = address.hide(error_text(value, reply.text()))
        raise ServerFault(f"{address.url} replied {reply.status}: {text}{_remedy(reply)}")
    if reply.status != 200 or not isinstance(rows, list):
        return ()
    return tuple(str(row["id"]) for row in rows if isinstance(row, Mapping) and "id" in row)


async def find_model(address: ServerAddress, model: str, flag: str, prefix: str = "") -> str:
    """The model to ask: the one that the user names, or the only one that the server has. ``flag`` gave the address, and
    ``prefix`` begins the flags that say more about it."""
    try:
        names = await list_models(address)
    except ServerFault as fault:
        where = "" if address.url in str(fault) else f"{address.url} (--{flag}): "
        raise SettingError(f"{where}{fault}") from None
    if model or len(names) == 1:
        return model or names[0]
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    several = f" serves {len(names)} models; write --{prefix or flag}-model NAME with one of: {shown}"
    none = f"/models names no model; write --{prefix or flag}-model NAME, or another address (most servers want /v1 at its end)"
    raise SettingError(f"{address.url}{several if names else none}")


# ------------------------------------------------------- OpenAI's chat protocol as data


def request_body(
    model: str, messages: Sequence[Message], sampling: Sampling, seed: int, tools: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "messages": list(messages), "temperature": sampling.temperature}
    body["seed"] = seed % 2**31  # some servers read 32 bits with a sign
    unless_default = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # not every server knows these
    body |= {name: value for name, usual in unless_default.items() if (value := getattr(sampling, name)) != usual}
    lists = {"stop": sampling.stop, "tools": tools}
    return body | {name: list(values) for name, values in lists.items() if values}


def read_reply(value: Any, seconds: float = 0.0) -> ChatReply:
    """A reply from the JSON of a server. A malformed tool call is the model's mistake; a malformed reply is the server's."""
    choices = value.get("choices") if isinstance(value, Mapping) else None
    choice: Any = choices[0] if isinstance(choices, list) and choices else None
    message: Any = choice.get("message") if isinstance(choice, Mapping) else None
    expect(isinstance(message, Mapping), "the reply holds no choices[0].message: {:.200}", json.dumps(value))
    calls, faults = _read_calls(message.get("tool_calls"))
    content, usage = message.get("content"), value.get("usage")
    if isinstance(content, list):  # parts, of which some hold text
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "".join(part for part in parts if isinstance(part, str))
    plain = content is None or isinstance(content, str)
    expect(plain, "the content of the reply is {}, not text", type(content).__name__)
    tokens = usage.get("completion_tokens") if isinstance(usage, Mapping) else 0
    thinking = message.get("reasoning_content") or message.get("reasoning")
    return ChatReply(
        text=clean(content or ""),
        calls=calls,
        faults=faults,
        thinking=clean(thinking) if isinstance(thinking, str) else "",
        stop=Stop.LENGTH if choice.get("finish_reason") == "length" else Stop.TOKEN,
        tokens=tokens if type(tokens) is int and tokens > 0 else 0,
        seconds=seconds,
    )


def _read_calls(value: Any) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    """The calls of a reply, and what is wrong with those that cannot be read."""
    rows: Any = [] if value is None else value
    expect(isinstance(rows, list), "tool_calls of the reply is {}, not a list", type(rows).__name__)
    calls: list[ToolCall] = []
    faults: list[str] = []
    for n, item in enumerate(rows):
        function: Any = item.get("function") if isinstance(item, Mapping) else None
        name: Any = function.get("name") if isinstance(function, Mapping) else None
        expect(isinstance(name, str), "tool_calls[{}] of the reply has no function with a name", n)
        # a JSON text by the protocol; some servers send the object itself, or nothing for none
        arguments = given = function.get("arguments")
        if given is None or (isinstance(given, str) and not given.strip()):
            arguments = {}
        elif isinstance(given, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(given)
        if isinstance(arguments, dict):
            identity = item.get("id")
            calls.append(ToolCall(name, arguments, identity if isinstance(identity, str) and identity else f"call_{n}"))
        else:
            faults.append(f"error: the arguments of {name:.100} are no JSON object: {given!r:.200}")
    return tuple(calls), tuple(faults)
