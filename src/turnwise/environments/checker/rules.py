"""Rules of the checker beyond those an episode enforces (``environments.contract``), and rules for tool schemas. Each function
returns what is wrong, or nothing.

Looks at one returned value at a time; does not know which environment returned it, nor why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

from turnwise.core.protocols import Step
from turnwise.core.records import Message
from turnwise.core.text import clean
from turnwise.environments.contract import COUNTS

LONG_OBSERVATION = 100_000  # characters
ROLES = ("system", "user", "assistant", "tool")


def role_fault(messages: Sequence[Message]) -> str:
    """The fault of a role that chat templates do not know; empty if there is none."""
    for message in messages:
        if message["role"] not in ROLES:
            return f"a message has the role {message['role']!r}; write one of {', '.join(ROLES)}"
    return ""


def text_faults(messages: Sequence[Message]) -> Iterator[str]:
    """Texts that training does not show as they are."""
    for message in messages:
        content = message["content"]
        if clean(content) != content:
            yield "a message holds half of a surrogate pair; training shows U+FFFD in its place"
        if len(content) > LONG_OBSERVATION:
            yield f"an observation has {len(content):,} characters; no context window holds it, shorten it"


def is_flag(value: Any) -> bool:
    """Whether a value is a bool, including NumPy's."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"


def implicit_conversions(step: Step) -> Iterator[str]:
    """Values that an episode accepts, but converts."""
    for name in ("terminated", "truncated"):
        value = getattr(step, name)
        if not is_flag(value):
            yield f"step: {name} is {value!r:.40}, taken as {bool(value)}; write True or False"
    for name in COUNTS:
        count = step.info.get(name, 0)
        if not isinstance(count, Integral):
            yield f"step: info[{name!r}] is {count!r}, taken as {int(count)}; write a whole number"


def undeclared_facts(step: Step, facts: Sequence[str]) -> Iterator[str]:
    """Facts that the class does not declare: a method that requires them could not find out that they exist."""
    for name in step.info.get("facts", {}):
        if name not in facts:
            yield f"step returns the fact {name!r}, which the class does not declare; write facts = ({name!r}, ...)"


def tool_fault(tools: Any) -> str:
    """What is wrong with a list of OpenAI tool schemas; empty if nothing is."""
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
