"""Formats in which agents call the policy: Chat Completions and Responses of OpenAI, Messages of Anthropic. Pure functions.

Each is a ``Wire``. A field that would change the meaning of a call and is not supported is refused. A reply is sampled whole
before it is sent, so each part of a streamed one is a single delta.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from turnwise.core.records import Message
from turnwise.core.stateful import remember
from turnwise.rollout.agent_client import (
    completion_body,
    overruled_fields,
    read_message,
    read_most_calls,
    read_stop,
    refuse_unknown,
    typed_fields,
)
from turnwise.rollout.agent_client import read_request as read_chat
from turnwise.rollout.agent_episode import CallRefused, CallReply, CallRequest

STATUS = {  # of a refusal, by its code; every other is 400
    "invalid_api_key": 401, "not_found": 404, "episode_ended": 409, "no_reward_expected": 409, "no_environment": 409,
    "abandoned": 409, "turn_limit": 409, "token_limit": 409, "not_owner": 409, "out_of_order": 409,
    "not_paused": 409, "no_update": 409, "no_base": 409, "in_use": 409, "body_too_large": 413,
    "busy": 429, "cancelled": 499, "stuck": 503, "foreign_page": 403, "unsupported_media_type": 415, "wrong_host": 421,
}  # fmt: skip
Body = dict[str, Any]
Replies = Sequence[CallReply]


class Wire(NamedTuple):
    """A format: reads a call; writes replies as one body or as events, with the number of the turn and the body of the call; and
    writes a refusal of some code and message."""

    read_request: Callable[[Mapping[str, Any]], CallRequest]
    whole_body: Callable[[Replies, int, Mapping[str, Any]], Body]
    events: Callable[[Replies, int, Mapping[str, Any]], Iterator[str]]
    error_body: Callable[[str, str], Body]


# ------------------------------------------------------- what all formats share


def check(holds: object, text: str, *seen: Any, code: str = "invalid_request") -> None:
    """Refuse a call with ``text`` about what was ``seen``, unless a condition holds."""
    if not holds:
        # formatted only now: a body of megabytes is not written out for each of its checks
        raise CallRefused(code, text.format(*seen))


def _read_options(
    messages: list[Message],
    body: Mapping[str, Any],
    choice: Any,
    limit_name: str,
    read_tool: Callable[[Any], Body],
    stop: tuple[str, ...] = (),
    response_format: Any = None,
) -> CallRequest:
    """A call with what it says beside its messages."""
    grammar, forced = typed_fields({"response_format": response_format}, choice)
    tools, limit = body.get("tools") or (), body.get(limit_name) or 0
    check(isinstance(tools, list | tuple), "'tools' is {!r:.80}; write a list", tools)
    check(type(limit) is int and limit >= 0, "{!r} is {!r:.60}; write a whole number", limit_name, limit)
    read = () if choice == "none" else tuple(map(read_tool, tools))
    most_calls = read_most_calls(choice, body)
    limits: dict[str, Any] = {"stop": stop, "most_calls": most_calls, "overruled": overruled_fields(body)}
    return CallRequest(messages, read, limit, **limits, grammar=grammar, forced=forced)


def _text(content: Any, where: str, kinds: Sequence[str]) -> str:
    """A text, or parts of these ``kinds``, which hold one each, as one text."""
    if isinstance(content, str):
        return content
    texts = isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") in kinds for p in content)
    check(texts, "{} holds something that is not text: {!r:.80}", where, content, code="invalid_messages")
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)


def _tool(name: str, description: Any, parameters: Any) -> Body:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _call(identity: Any, name: str, arguments: str) -> Body:
    return {"id": str(identity), "type": "function", "function": {"name": name, "arguments": arguments}}


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def _error_kind(code: str) -> str:
    return "authentication_error" if code == "invalid_api_key" else "invalid_request_error"


# ------------------------------------------------------------ Chat Completions


def error_body(code: str, message: str) -> Body:
    """A refusal as clients of OpenAI's protocols read it."""
    return {"error": {"message": message, "type": _error_kind(code), "code": code, "param": None}}


def read_assistant(value: Any) -> Message:
    """An assistant message that acts in an environment."""
    message, wrong = read_message(value), "'message' has the role {}; write the assistant's message"
    check(message["role"] == "assistant", wrong, message["role"], code="invalid_messages")
    return message


def _chat_body(replies: Replies, number: int, body: Mapping[str, Any]) -> Body:
    return completion_body(replies, number, bool(body.get("logprobs")), bool(body.get("return_token_ids")))


def _chat_events(replies: Replies, number: int, body: Mapping[str, Any]) -> Iterator[str]:
    options, whole = body.get("stream_options"), _chat_body(replies, number, body)
    head = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def chunk(choices: list[Body], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    for choice in whole["choices"]:
        message, begun = choice["message"], {"index": choice["index"], "finish_reason": None}
        calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls", ()))]
        parts = {**{key: message.get(key) for key in ("reasoning_content", "content")}, "tool_calls": calls}
        deltas = [{"role": "assistant", "content": ""}, *({key: part} for key, part in parts.items() if part)]
        for delta in deltas:
            yield chunk([{**begun, "delta": delta}])
        scores = {key: choice[key] for key in ("logprobs", "token_ids") if key in choice}
        yield chunk([{**begun, "delta": {}, "finish_reason": choice["finish_reason"], **scores}])
    if isinstance(options, Mapping) and options.get("include_usage"):
        yield chunk([], usage=whole["usage"])
    yield "data: [DONE]\n\n"


CHAT = Wire(read_chat, _chat_body, _chat_events, error_body)


# ------------------------------------------------------------------- Responses

RESPONSE_FIELDS = frozenset(
    {
        "input", "instructions", "tools", "tool_choice", "max_output_tokens", "previous_response_id", "text",
        # accepted and overruled: the run says how its policy is sampled
        "model", "temperature", "top_p", "user", "metadata", "store", "parallel_tool_calls", "include", "reasoning",
        "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "stream_options", "stream",
        "max_tool_calls", "prompt_cache_options",
    }
)  # fmt: skip
NO_EFFECT: Mapping[str, Sequence[Any]] = {  # values that ask for what is done anyway
    "truncation": ("disabled",),
    "background": (False,),
    "top_logprobs": (0,),
    "context_management": ([],),
}
RESPONSE_TEXTS = ("input_text", "output_text", "text", "refusal")
DIALOGUES = 64  # that ``previous_response_id`` may name: the latest


def _read_response_request(body: Mapping[str, Any]) -> CallRequest:
    refuse_unknown(body, RESPONSE_FIELDS, NO_EFFECT)
    instructions, given = body.get("instructions"), body.get("input")
    text = isinstance(instructions, str | None)
    check(text, "'instructions' is {!r:.80}; write a text", instructions)
    readable = isinstance(given, str | list)
    check(readable, "'input' is {!r:.80}; write a text or a list of items", given, code="invalid_messages")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    messages += [{"role": "user", "content": given}] if isinstance(given, str) else _read_items(given or [])
    check(messages, "'input' is empty; write at least one item", code="invalid_messages")
    form = body.get("text") or {}
    check(isinstance(form, Mapping), "'text' is {!r:.80}; write an object with format", form)
    choice, wanted = body.get("tool_choice"), form.get("format")
    return _read_options(messages, body, choice, "max_output_tokens", _read_response_tool, response_format=wanted)


def _read_items(items: Sequence[Any]) -> list[Message]:
    # items as messages. The text and the calls of one turn are separate items here, and one message of ours
    messages: list[Message] = []
    open_turn = False  # the last message is an assistant's, and calls that follow belong to it
    for item in items:
        check(isinstance(item, Mapping), "an item is {!r:.80}; write an object", item, code="invalid_messages")
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "reasoning":
            continue
        if kind == "function_call":
            name, arguments = item.get("name"), item.get("arguments")
            texts = isinstance(name, str) and isinstance(arguments, str)
            wrong = "a function_call is {!r:.80}; write name and arguments as text"
            check(texts, wrong, dict(item), code="invalid_messages")
            if not open_turn:
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_call(item.get("call_id", ""), name, arguments))
            open_turn = True
        elif kind == "function_call_output":
            content = _text(item.get("output"), "function_call_output", RESPONSE_TEXTS)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": content})
            open_turn = False
        else:
            role, wrong = item.get("role"), "an item has the type {!r:.60}, which is not supported"
            readable = kind == "message" and role in ("user", "system", "developer", "assistant")
            check(readable, wrong, kind, code="invalid_messages")
            messages.append({"role": role, "content": _text(item.get("content"), "a message", RESPONSE_TEXTS)})
            open_turn = role == "assistant"
    return messages


def _read_response_tool(tool: Any) -> Body:
    usable = isinstance(tool, Mapping) and tool.get("type") == "function" and isinstance(tool.get("name"), str)
    wrong = "'tools' holds {!r:.80}; only tools of the type function are supported"
    check(usable, wrong, tool, code="unsupported_parameter")
    return _tool(tool["name"], tool.get("description") or "", tool.get("parameters") or {})


def behind(call: CallRequest, previous: Any, dialogues: Mapping[str, Sequence[Message]]) -> CallRequest:
    """The call behind the messages that ``previous_response_id`` stands for. Instructions stay in front."""
    wrong = "no response {!r:.60} in this session; at most the latest {} are kept"
    check(isinstance(previous, str) and previous in dialogues, wrong, previous, DIALOGUES, code="not_found")
    first = _instructions(call.messages)
    return replace(call, messages=[*call.messages[:first], *dialogues[previous], *call.messages[first:]])


def keep_history(dialogues: dict[str, list[Message]], number: int, call: CallRequest, replies: Replies) -> None:
    """Remember what a later ``previous_response_id`` stands for."""
    dialogue = [*call.messages[_instructions(call.messages) :], replies[0].message]
    remember(dialogues, f"resp_{number}", dialogue, DIALOGUES)


def _instructions(messages: Sequence[Message]) -> int:
    # how many messages in front are instructions: they are sent anew with every request
    return int(bool(messages) and messages[0]["role"] == "system")


def _response_body(replies: Replies, number: int, body: Mapping[str, Any]) -> Body:
    (reply,) = replies
    cut, sampled = reply.finish_reason == "length", len(reply.tokens)
    usage: Body = {"input_tokens": reply.prompt_tokens, "input_tokens_details": {"cached_tokens": 0}}
    usage |= {"output_tokens": sampled, "output_tokens_details": {"reasoning_tokens": 0}}
    usage["total_tokens"] = reply.prompt_tokens + sampled
    message, items = reply.message, list[Body]()
    if thinking := message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": thinking}]
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": summary})
    calls = message.get("tool_calls", ())
    if message.get("content") or not calls:  # a reply of nothing is an empty text
        part: Body = {"type": "output_text", "text": message.get("content") or "", "annotations": [], "logprobs": []}
        head = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed"}
        items.append({**head, "content": [part]})
    for n, call in enumerate(calls):
        head = {"type": "function_call", "id": f"fc_{number}_{n}", "call_id": call["id"], "status": "completed"}
        items.append({**head, **call["function"]})
    ended: Body = {"status": "incomplete" if cut else "completed", "output": items, "usage": usage}
    ended["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    return _response_head(number, body) | ended


def _response_head(number: int, body: Mapping[str, Any]) -> Body:
    return {
        "id": f"resp_{number}", "object": "response", "created_at": int(time.time()), "model": "policy",
        "status": "in_progress", "error": None, "incomplete_details": None, "instructions": body.get("instructions"),
        "metadata": {}, "output": [], "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"), "temperature": None, "top_p": None,
        "tool_choice": body.get("tool_choice") or "auto", "tools": body.get("tools") or [], "usage": None,
    }  # fmt: skip


def _response_events(replies: Replies, number: int, body: Mapping[str, Any]) -> Iterator[str]:
    whole, sequence = _response_body(replies, number, body), itertools.count()
    event = lambda kind, **fields: _event(kind, sequence_number=next(sequence), **fields)  # noqa: E731
    empty: dict[str, Body] = {"message": {"content": []}, "function_call": {"arguments": ""}}
    begun = _response_head(number, body)
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        kind, where = item["type"], {"item_id": item["id"], "output_index": index}
        opened = {**item, **empty.get(kind, {}), **({"status": "in_progress"} if "status" in item else {})}
        yield event("response.output_item.added", output_index=index, item=opened)
        if kind == "message":
            (part,) = item["content"]
            inside = {**where, "content_index": 0}
            yield event("response.content_part.added", part={**part, "text": ""}, **inside)
            yield event("response.output_text.delta", delta=part["text"], logprobs=[], **inside)
            yield event("response.output_text.done", text=part["text"], logprobs=[], **inside)
            yield event("response.content_part.done", part=part, **inside)
        elif kind == "function_call":
            arguments, done = item["arguments"], "response.function_call_arguments.done"
            yield event("response.function_call_arguments.delta", delta=arguments, **where)
            yield event(done, arguments=arguments, name=item["name"], **where)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.incomplete" if whole["status"] == "incomplete" else "response.completed", response=whole)


RESPONSES = Wire(_read_response_request, _response_body, _response_events, error_body)


# -------------------------------------------------------------------- Messages

MESSAGE_FIELDS = frozenset(
    {
        "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "output_format", "output_config",
        # accepted and overruled
        "model", "temperature", "top_p", "top_k", "metadata", "stream", "thinking", "service_tier", "betas",
    }
)  # fmt: skip
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {"thinking": "thinking_delta", "text": "text_delta"}  # of a block, whose type names its text, too


def _message_error(code: str, message: str) -> Body:
    return {"type": "error", "error": {"type": _error_kind(code), "message": f"{message} ({code})"}}


def _read_message_request(body: Mapping[str, Any]) -> CallRequest:
    refuse_unknown(body, MESSAGE_FIELDS, {})
    chosen, given = body.get("tool_choice") or {}, body.get("messages")
    system = [{"role": "system", "content": _text(body["system"], "system", ("text",))}] if body.get("system") else []
    missing = "'messages' is missing or empty; write a list of messages"
    check(isinstance(given, list) and given, missing, code="invalid_messages")
    messages: list[Message] = [*system, *itertools.chain.from_iterable(map(_read_blocks, given or ()))]
    choice = "none" if isinstance(chosen, Mapping) and chosen.get("type") == "none" else chosen or None
    configured = body.get("output_config") or {}
    check(isinstance(configured, Mapping), "'output_config' is {!r:.80}; write an object with format", configured)
    wanted = body.get("output_format") or configured.get("format")
    stop = read_stop(body.get("stop_sequences") or (), "stop_sequences")
    alone = isinstance(chosen, Mapping) and chosen.get("disable_parallel_tool_use") is True
    options = {**body, "parallel_tool_calls": not alone}
    return _read_options(messages, options, choice, "max_tokens", _read_message_tool, stop, wanted)


def _read_blocks(message: Any) -> list[Message]:
    # A message of theirs is one or several of ours: results of tools stand inside a user message there
    usable = isinstance(message, Mapping) and message.get("role") in ("user", "assistant")
    wrong = "a message is {!r:.80}; write role (user or assistant) and content"
    check(usable, wrong, message, code="invalid_messages")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    usable = isinstance(blocks, list) and all(isinstance(block, Mapping) for block in blocks)
    wrong = "a message has the content {!r:.80}; write text or a list of blocks"
    check(usable, wrong, content, code="invalid_messages")
    by_type = lambda *types: [block for block in blocks if block.get("type") in types]  # noqa: E731
    rest = lambda *types: [block for block in blocks if block.get("type") not in types]  # noqa: E731
    if message["role"] == "assistant":
        uses = [
            (b.get("id", ""), str(b.get("name", "")), json.dumps(b.get("input") or {})) for b in by_type("tool_use")
        ]
        text = _text(rest("tool_use", "thinking"), "an assistant message", ("text",))
        return [{"role": "assistant", "content": text, **({"tool_calls": [_call(*u) for u in uses]} if uses else {})}]
    results = [(b.get("tool_use_id", ""), b.get("content") or "") for b in by_type("tool_result")]
    messages = [
        {"role": "tool", "tool_call_id": str(identity), "content": _text(result, "tool_result", ("text",))}
        for identity, result in results
    ]
    said = rest("tool_result")
    return messages + ([{"role": "user", "content": _text(said, "a user message", ("text",))}] if said else [])


def _read_message_tool(tool: Any) -> Body:
    usable = isinstance(tool, Mapping) and "input_schema" in tool and isinstance(tool.get("name"), str)
    check(usable, "a tool is {!r:.80}; write name, description and input_schema", tool)
    return _tool(tool["name"], tool.get("description", ""), tool["input_schema"])


def _message_body(replies: Replies, number: int, body: Mapping[str, Any]) -> Body:
    (reply,) = replies
    blocks: list[Body] = []
    if thinking := reply.message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if text := reply.message.get("content"):
        blocks.append({"type": "text", "text": text})
    for call in reply.message.get("tool_calls", ()):
        use = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
        blocks.append({**use, "input": json.loads(call["function"]["arguments"])})
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.tokens)}
    whole = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": "policy", "content": blocks}
    return {**whole, "stop_reason": STOP_REASONS[reply.finish_reason], "stop_sequence": None, "usage": usage}


def _message_events(replies: Replies, number: int, body: Mapping[str, Any]) -> Iterator[str]:
    whole = _message_body(replies, number, body)
    yield _event("message_start", message={**whole, "content": [], "stop_reason": None})
    for index, block in enumerate(whole["content"]):
        kind = block["type"]  # a block opens empty, and one delta fills it
        empty: Body = {"input": {}} if kind == "tool_use" else {kind: ""}
        if kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            delta = {"type": DELTAS[kind], kind: block[kind]}
        yield _event("content_block_start", index=index, content_block={**block, **empty})
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ending = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=ending, usage={"output_tokens": whole["usage"]["output_tokens"]})
    yield _event("message_stop")


MESSAGES = Wire(_read_message_request, _message_body, _message_events, _message_error)
