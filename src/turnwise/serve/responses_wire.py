"""The Responses protocol of OpenAI: bodies and streamed events, to and from our records. Pure functions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.core.records import Message
from turnwise.rollout.agent_client import refuse_unknown
from turnwise.rollout.agent_episode import CallRefused, CallReply, CallRequest
from turnwise.serve import openai_wire

error_body = openai_wire.error_body
IGNORED = frozenset(
    {
        "model", "temperature", "top_p", "user", "metadata", "store", "parallel_tool_calls", "include", "reasoning",
        "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "stream_options", "stream",
        "max_tool_calls", "prompt_cache_options",
    }
)  # fmt: skip
READ = frozenset({"input", "instructions", "tools", "tool_choice", "max_output_tokens", "previous_response_id"})
NO_EFFECT: Mapping[str, Sequence[Any]] = {
    "text": ({"format": {"type": "text"}}, {}, {"format": {"type": "text"}, "verbosity": "medium"}),
    "truncation": ("disabled",),
    "background": (False,),
    "top_logprobs": (0,),
    "context_management": ([],),
}
TEXTS = ("input_text", "output_text", "text", "refusal")
KEPT = 64  # dialogues that ``previous_response_id`` may name: the latest


# ------------------------------------------------------------------- requests


def read_request(body: Mapping[str, Any]) -> CallRequest:
    """A request of the Responses protocol. A field that would change the meaning and is not supported is refused."""
    refuse_unknown(body, READ | IGNORED, NO_EFFECT)
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise CallRefused(
            "unsupported_parameter", "'tool_choice' can be auto or none: the policy is not forced to a tool"
        )
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise CallRefused("invalid_request", f"'instructions' is {instructions!r:.80}; write a text")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        messages += read_items(given)
    else:
        raise CallRefused("invalid_messages", f"'input' is {given!r:.80}; write a text or a list of items")
    if not messages:
        raise CallRefused("invalid_messages", "'input' is empty; write at least one item")
    limit = body.get("max_output_tokens") or 0
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise CallRefused("invalid_request", f"'max_output_tokens' is {limit!r:.60}; write a whole number")
    tools = body.get("tools") or ()
    if not isinstance(tools, list | tuple):
        raise CallRefused("invalid_request", f"'tools' is {tools!r:.80}; write a list")
    return CallRequest(messages, () if body.get("tool_choice") == "none" else tuple(map(_tool, tools)), limit)


def read_items(items: Sequence[Any]) -> list[Message]:
    """Items as messages. The text and the calls of one turn are separate items here, and one message of ours."""
    messages: list[Message] = []
    open_turn = False  # the last message is an assistant's, and calls that follow belong to it
    for item in items:
        if not isinstance(item, Mapping):
            raise CallRefused("invalid_messages", f"an item is {item!r:.80}; write an object")
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "reasoning":
            continue
        if kind == "function_call":
            if not open_turn:
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_call(item))
            open_turn = True
        elif kind == "function_call_output":
            content = _text(item.get("output"), "function_call_output")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": content})
            open_turn = False
        elif kind == "message" and item.get("role") in ("user", "system", "developer", "assistant"):
            messages.append({"role": item["role"], "content": _text(item.get("content"), "a message")})
            open_turn = item["role"] == "assistant"
        else:
            raise CallRefused("invalid_messages", f"an item has the type {kind!r:.60}, which is not supported")
    return messages


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise CallRefused(
            "invalid_messages", f"a function_call is {dict(item)!r:.80}; write name and arguments as text"
        )
    return {"id": str(item.get("call_id", "")), "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") in TEXTS for p in content):
        return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)
    raise CallRefused("invalid_messages", f"{where} holds something that is not text: {content!r:.80}")


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise CallRefused(
            "unsupported_parameter", f"'tools' holds {tool!r:.80}; only tools of the type function are supported"
        )
    function: dict[str, Any] = {
        key: tool.get(key) or empty for key, empty in (("name", ""), ("description", ""), ("parameters", {}))
    }
    return {"type": "function", "function": function}


# ---------------------------------------------------- previous_response_id


def behind(call: CallRequest, previous: Any, dialogues: Mapping[str, Sequence[Message]]) -> CallRequest:
    """The call behind the messages that ``previous_response_id`` stands for. Instructions stay in front."""
    if not isinstance(previous, str) or previous not in dialogues:
        raise CallRefused(
            "not_found", f"no response {previous!r:.60} in this session; at most the latest {KEPT} are kept"
        )
    first = _instructions(call.messages)
    return replace(call, messages=[*call.messages[:first], *dialogues[previous], *call.messages[first:]])


def _instructions(messages: Sequence[Message]) -> int:
    """How many messages in front are instructions: they are sent anew with every request."""
    return int(bool(messages) and messages[0]["role"] == "system")


def keep_history(
    dialogues: dict[str, list[Message]], number: int, call: CallRequest, replies: Sequence[CallReply]
) -> None:
    """Remember what a later ``previous_response_id`` stands for. Instructions are sent anew with every request."""
    dialogues[f"resp_{number}"] = [*call.messages[_instructions(call.messages) :], replies[0].message]
    while len(dialogues) > KEPT:
        dialogues.pop(next(iter(dialogues)))


# --------------------------------------------------------------------- replies


def whole_body(replies: Sequence[CallReply], number: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """A reply as the body of a response."""
    (reply,) = replies
    cut, sampled = reply.finish_reason == "length", len(reply.tokens)
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + sampled,
    }
    return {
        **_head(number, body),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(reply, number),
        "usage": usage,
    }


def _head(number: int, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": "policy",
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": None,
        "top_p": None,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": None,
    }


def _items(reply: CallReply, number: int) -> list[dict[str, Any]]:
    """Thinking, text and calls of a reply as items."""
    message, items = reply.message, []
    if message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": message["reasoning_content"]}]
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": summary})
    calls = message.get("tool_calls", ())
    if message.get("content") or not calls:
        part: dict[str, Any] = {
            "type": "output_text",
            "text": message.get("content") or "",
            "annotations": [],
            "logprobs": [],
        }
        head = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed"}
        items.append({**head, "content": [part]})
    for n, call in enumerate(calls):
        head = {"type": "function_call", "id": f"fc_{number}_{n}", "call_id": call["id"], "status": "completed"}
        items.append({**head, **call["function"]})
    return items


def events(replies: Sequence[CallReply], number: int, body: Mapping[str, Any]) -> Iterator[str]:
    """The events of a streamed response. A reply is sampled whole before it is sent, so each part is one delta."""
    whole, sequence = whole_body(replies, number, body), iter(range(10**9))

    def event(kind: str, **fields: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': next(sequence), **fields})}\n\n"

    begun = _head(number, body)
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        where = {"item_id": item["id"], "output_index": index}
        yield event("response.output_item.added", output_index=index, item=_opened(item))
        if item["type"] == "message":
            (part,) = item["content"]
            inside = {**where, "content_index": 0}
            yield event("response.content_part.added", part={**part, "text": ""}, **inside)
            yield event("response.output_text.delta", delta=part["text"], logprobs=[], **inside)
            yield event("response.output_text.done", text=part["text"], logprobs=[], **inside)
            yield event("response.content_part.done", part=part, **inside)
        elif item["type"] == "function_call":
            yield event("response.function_call_arguments.delta", delta=item["arguments"], **where)
            yield event(
                "response.function_call_arguments.done", arguments=item["arguments"], name=item["name"], **where
            )
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.incomplete" if whole["status"] == "incomplete" else "response.completed", response=whole)


def _opened(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item as it opens, empty."""
    empty: dict[str, dict[str, Any]] = {"message": {"content": []}, "function_call": {"arguments": ""}}
    return {**item, **empty.get(item["type"], {}), **({"status": "in_progress"} if "status" in item else {})}
