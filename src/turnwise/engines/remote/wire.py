"""OpenAI's chat protocol as data: the body of a request, and what a reply says. Sends nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.core.chat import ChatReply
from turnwise.core.protocols import ToolCall
from turnwise.core.records import Message, Sampling, Stop
from turnwise.core.text import clean
from turnwise.errors import ServerFault

OVERFLOW = re.compile(
    r"context[ _](length|window|size)|maximum context|too many tokens|(prompt|input) is too long|exceeds? .{0,20}context",
    re.IGNORECASE,
)
NO_MODEL = re.compile(
    r"model.{0,80}(not found|not exist|does not exist|unknown|invalid)|no (such )?model", re.IGNORECASE
)


def request_body(
    model: str,
    messages: Sequence[Message],
    sampling: Sampling,
    seed: int,
    tools: Sequence[Mapping[str, Any]],
    schema: Mapping[str, Any] | None,
    limit_name: str,
) -> dict[str, Any]:
    """``limit_name``: ``max_tokens``, or ``max_completion_tokens`` for servers that want that."""
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "temperature": sampling.temperature,
        limit_name: sampling.max_tokens,
        "seed": seed % 2**31,
    }
    unless_default = {"top_p": (sampling.top_p, 1.0), "top_k": (sampling.top_k, 0), "min_p": (sampling.min_p, 0.0)}
    body |= {name: value for name, (value, default) in unless_default.items() if value != default}
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if tools:
        body["tools"] = list(tools)
    if schema:
        named = {"name": "reply", "strict": True, "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    return body


def read_reply(value: Any, seconds: float = 0.0) -> ChatReply:
    """A reply from the JSON of a server. A malformed tool call is the model's mistake; a malformed reply is the server's."""
    choices = value.get("choices") if isinstance(value, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or not isinstance(message, Mapping):
        raise ServerFault(f"the reply holds no choices[0].message: {json.dumps(value)[:200]}")
    calls, faults = _read_calls(message.get("tool_calls"))
    usage = value.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, Mapping) else 0
    thinking = message.get("reasoning_content") or message.get("reasoning")
    return ChatReply(
        text=_text(message.get("content")),
        calls=calls,
        faults=faults,
        thinking=clean(thinking) if isinstance(thinking, str) else "",
        stop=Stop.LENGTH if choice.get("finish_reason") == "length" else Stop.TOKEN,
        tokens=tokens if type(tokens) is int and tokens > 0 else 0,
        seconds=seconds,
    )


def _text(content: Any) -> str:
    """The text of a message, which may be a list of parts."""
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return clean("".join(part for part in parts if isinstance(part, str)))
    if not isinstance(content, str):
        raise ServerFault(f"the content of the reply is {type(content).__name__}, not text")
    return clean(content)


def _read_calls(value: Any) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    if value is None:
        return (), ()
    if not isinstance(value, list):
        raise ServerFault(f"tool_calls of the reply is {type(value).__name__}, not a list")
    calls: list[ToolCall] = []
    faults: list[str] = []
    for n, item in enumerate(value):
        function = item.get("function") if isinstance(item, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise ServerFault(f"tool_calls[{n}] of the reply has no function with a name")
        identity = item.get("id")
        try:
            arguments = _arguments(function.get("arguments"))
            calls.append(ToolCall(name, arguments, identity if isinstance(identity, str) and identity else f"call_{n}"))
        except (ValueError, RecursionError):
            faults.append(f"error: the arguments of {name:.100} are no JSON object: {function.get('arguments')!r:.200}")
    return tuple(calls), tuple(faults)


def _arguments(value: Any) -> dict[str, Any]:
    """The arguments of a call: a JSON text by the protocol; some servers send the object itself, or nothing for none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    parsed = json.loads(value) if isinstance(value, str) else value
    if not isinstance(parsed, dict):
        raise ValueError
    return parsed


def error_text(value: Any, fallback: str) -> str:
    """What a server says is wrong, on one line."""
    error = value.get("error", value) if isinstance(value, Mapping) else value
    message = error.get("message", error.get("detail")) if isinstance(error, Mapping) else error
    text = message if isinstance(message, str) and message.strip() else fallback
    return " ".join(text.split())[:300]


def is_overflow(status: int, value: Any, text: str) -> bool:
    error = value.get("error") if isinstance(value, Mapping) else None
    code = error.get("code") if isinstance(error, Mapping) else None
    return code == "context_length_exceeded" or (status in (400, 413, 422) and bool(OVERFLOW.search(text)))
