"""What the check asks of an answer beyond what an episode needs (``environments.contract``), and of a tool schema: each function
says in words what is wrong, or nothing.

It looks at one answer at a time and does not know which environment gave it, nor why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

from turnwise.core.protocols import Step
from turnwise.core.records import Message
from turnwise.environments.contract import COUNTS

ROLES = ("system", "user", "assistant", "tool")


def role_fault(messages: Sequence[Message]) -> str:
    """A role that chat templates do not know, or nothing."""
    for message in messages:
        if message["role"] not in ROLES:
            return f"a message has the role {message['role']!r}; write one of {', '.join(ROLES)}"
    return ""


def is_flag(value: Any) -> bool:
    """A bool, NumPy's included."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"


def oddities(step: Step) -> Iterator[str]:
    """What an episode reads all the same, but perhaps not as it was meant."""
    for name in ("terminated", "truncated"):
        value = getattr(step, name)
        if not is_flag(value):
            yield f"step: {name} is {value!r:.40}, taken as {bool(value)}; write True or False"
    for name in COUNTS:
        count = step.info.get(name, 0)
        if not isinstance(count, Integral):
            yield f"step: info[{name!r}] is {count!r}, taken as {int(count)}; write a whole number"


def unlisted(step: Step, facts: Sequence[str]) -> Iterator[str]:
    """Facts that are told but not listed: a method that asks for them could not know of them."""
    for name in step.info.get("facts", {}):
        if name not in facts:
            yield f"step tells the fact {name!r}, which the class does not list; write facts = ({name!r}, ...)"


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
