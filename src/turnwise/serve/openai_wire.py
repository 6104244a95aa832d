"""Chat completions of the OpenAI protocol: bodies and streamed chunks, to and from our records. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.core.records import Message
from turnwise.rollout.agent_client import completion_body, read_message
from turnwise.rollout.agent_client import read_request as read_request
from turnwise.rollout.agent_episode import CallRefused, CallReply

STATUS = {  # of a refusal, by its code
    "invalid_api_key": 401,
    "episode_ended": 409,
    "no_reward_expected": 409,
    "no_environment": 409,
    "abandoned": 409,
    "turn_limit": 409,
    "cancelled": 499,
    "body_too_large": 413,
    "busy": 429,
    "not_found": 404,
}


def error_body(code: str, message: str) -> dict[str, Any]:
    """A refusal as clients of this protocol read it."""
    kind = "authentication_error" if code == "invalid_api_key" else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


def status_of(code: str) -> int:
    return STATUS.get(code, 400)


def read_assistant(value: Any) -> Message:
    """An assistant message that acts in an environment."""
    message = read_message(value)
    if message["role"] != "assistant":
        raise CallRefused(
            "invalid_messages", f"'message' has the role {message['role']}; write the assistant's message"
        )
    return message


def whole_body(replies: Sequence[CallReply], number: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Replies as the body of a chat completion."""
    return completion_body(replies, number, bool(body.get("logprobs")), bool(body.get("return_token_ids")))


def events(replies: Sequence[CallReply], number: int, body: Mapping[str, Any]) -> Iterator[str]:
    """The events of a streamed completion. A reply is sampled whole before it is sent, so each part is one chunk."""
    options = body.get("stream_options")
    usage = bool(options.get("include_usage")) if isinstance(options, Mapping) else False
    whole = whole_body(replies, number, body)
    head = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in whole["choices"]:
        yield _event({**head, "choices": [_delta(choice, {"role": "assistant", "content": ""})]})
        message = choice["message"]
        if message.get("reasoning_content"):
            yield _event({**head, "choices": [_delta(choice, {"reasoning_content": message["reasoning_content"]})]})
        if message.get("content"):
            yield _event({**head, "choices": [_delta(choice, {"content": message["content"]})]})
        calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls", ()))]
        if calls:
            yield _event({**head, "choices": [_delta(choice, {"tool_calls": calls})]})
        scores = {key: choice[key] for key in ("logprobs", "token_ids") if key in choice}
        last = {**_delta(choice, {}), "finish_reason": choice["finish_reason"], **scores}
        yield _event({**head, "choices": [last]})
    if usage:
        yield _event({**head, "choices": [], "usage": whole["usage"]})
    yield "data: [DONE]\n\n"


def _delta(choice: Mapping[str, Any], delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": choice["index"], "delta": dict(delta), "finish_reason": None}


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
