"""Messages of the Anthropic protocol: bodies and streamed events, to and from our records. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.core.records import Message
from turnwise.rollout.agent_client import read_stop, refuse_unknown
from turnwise.rollout.agent_episode import CallRefused, CallReply, CallRequest

IGNORED = frozenset(
    {"model", "temperature", "top_p", "top_k", "metadata", "stream", "thinking", "service_tier", "betas"}
)
READ = frozenset({"messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences"})
STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def error_body(code: str, message: str) -> dict[str, Any]:
    """A refusal as clients of this protocol read it."""
    kind = "authentication_error" if code == "invalid_api_key" else "invalid_request_error"
    return {"type": "error", "error": {"type": kind, "message": f"{message} ({code})"}}


def read_request(body: Mapping[str, Any]) -> CallRequest:
    """A request of the Messages protocol. A field that would change the meaning and is not supported is refused."""
    refuse_unknown(body, READ | IGNORED, {})
    chosen = body.get("tool_choice") or {}
    choice = chosen.get("type", "auto") if isinstance(chosen, Mapping) else chosen
    if choice not in ("auto", "none"):
        raise CallRefused(
            "unsupported_parameter", "'tool_choice' can be auto or none: the policy is not forced to a tool"
        )
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"], "system")})
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise CallRefused("invalid_messages", "'messages' is missing or empty; write a list of messages")
    for message in body["messages"]:
        messages += _read_message(message)
    given = body.get("tools") or ()
    if not isinstance(given, list | tuple):
        raise CallRefused("invalid_request", f"'tools' is {given!r:.80}; write a list")
    tools = () if choice == "none" else tuple(_tool(tool) for tool in given)
    limit = body.get("max_tokens") or 0
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise CallRefused("invalid_request", f"'max_tokens' is {limit!r:.60}; write a whole number")
    return CallRequest(messages, tools, limit, 1, read_stop(body.get("stop_sequences") or (), "stop_sequences"))


def _read_message(message: Any) -> list[Message]:
    """A message of theirs is one or several of ours: results of tools stand inside a user message there."""
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
        raise CallRefused(
            "invalid_messages", f"a message is {message!r:.80}; write role (user or assistant) and content"
        )
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise CallRefused(
            "invalid_messages", f"a message has the content {content!r:.80}; write text or a list of blocks"
        )
    if message["role"] == "assistant":
        return [_assistant(blocks)]
    results = [_result(block) for block in blocks if block.get("type") == "tool_result"]
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    return results + ([{"role": "user", "content": _text(rest, "a user message")}] if rest else [])


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> Message:
    calls = [
        {
            "id": str(block.get("id", "")),
            "type": "function",
            "function": {"name": str(block.get("name", "")), "arguments": json.dumps(block.get("input") or {})},
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    text = _text([b for b in blocks if b.get("type") not in ("tool_use", "thinking")], "an assistant message")
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def _result(block: Mapping[str, Any]) -> Message:
    return {
        "role": "tool",
        "tool_call_id": str(block.get("tool_use_id", "")),
        "content": _text(block.get("content") or "", "tool_result"),
    }


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(b, Mapping) and b.get("type") == "text" for b in content):
        return "".join(str(block.get("text", "")) for block in content)
    raise CallRefused("invalid_messages", f"{where} holds something that is not text: {content!r:.80}")


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or "input_schema" not in tool or not isinstance(tool.get("name"), str):
        raise CallRefused("invalid_request", f"a tool is {tool!r:.80}; write name, description and input_schema")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description", ""),
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def whole_body(replies: Sequence[CallReply], number: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """A reply as the body of a message."""
    (reply,) = replies
    blocks: list[dict[str, Any]] = []
    if reply.message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reply.message["reasoning_content"], "signature": ""})
    if reply.message.get("content"):
        blocks.append({"type": "text", "text": reply.message["content"]})
    for call in reply.message.get("tool_calls", ()):
        function = call["function"]
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        )
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": blocks,
        "stop_reason": STOP[reply.finish_reason],
        "stop_sequence": None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.tokens)},
    }


def events(replies: Sequence[CallReply], number: int, body: Mapping[str, Any]) -> Iterator[str]:
    """The events of a streamed message. A reply is sampled whole before it is sent, so each block is one delta."""
    whole = whole_body(replies, number, body)
    yield _event("message_start", {"message": {**whole, "content": [], "stop_reason": None}})
    for index, block in enumerate(whole["content"]):
        empty, delta = _opened(block)
        yield _event("content_block_start", {"index": index, "content_block": empty})
        yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    ending = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", {"delta": ending, "usage": {"output_tokens": whole["usage"]["output_tokens"]}})
    yield _event("message_stop", {})


def _opened(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A block as it opens, empty, and the delta that fills it."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    if block["type"] == "thinking":
        return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}


def _event(name: str, body: Mapping[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **body})}\n\n"
