"""What a well-formed message, step and tool schema look like: each function says in words what is wrong, or nothing.

It looks at one answer at a time and does not know which environment gave it, nor why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


def finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def message_fault(messages: Any) -> str:
    """What is wrong with a list of messages, or nothing."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return f"messages are a {type(messages).__name__}; return a list of dicts with role and content"
    for message in messages:
        if not isinstance(message, Mapping):
            return f"a message is a {type(message).__name__}; it must be a dict with role and content"
        if message.get("role") not in ROLES:
            return f"a message has the role {message.get('role')!r}; write one of {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"a message has content {message.get('content')!r:.40}; it must be a str"
    return ""


def step_fault(step: Any) -> str:
    """What is wrong with the parts of a step that are not messages, or nothing."""
    missing = [name for name in ("messages", "reward", "terminated", "truncated", "info") if not hasattr(step, name)]
    if missing:
        return f"returned a {type(step).__name__} without {', '.join(missing)}; return turnwise.ports.Step(...)"
    if not finite(step.reward):
        return f"reward is {step.reward!r}; it must be a finite number"
    for name in ("terminated", "truncated"):
        if not isinstance(getattr(step, name), bool):
            return f"{name} is {getattr(step, name)!r}; it must be True or False"
    if not isinstance(step.info, Mapping) or not isinstance(step.info.get("rewards", {}), Mapping):
        return "info, and info['rewards'] if there, must be a dict"
    return ""


def tool_fault(tools: Any) -> str:
    """What is wrong with a list of OpenAI tool schemas, or nothing."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        return f"tools is a {type(tools).__name__}; it must be a list of OpenAI tool schemas"
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            return f"a tool is {tool!r:.60}; write {{'type': 'function', 'function': {{...}}}}"
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name.isidentifier():
            return f"a tool has the name {name!r}; it must be a plain word"
        if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
            return f"parameters of tool {name!r} must be a JSON schema of type 'object'"
        unknown = set(parameters.get("required", ())) - set(parameters.get("properties", ()))
        if unknown:
            return f"tool {name!r} requires {sorted(unknown)}, which are not among its properties"
    return ""
