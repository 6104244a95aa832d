"""Validation of the values that an environment returns, shared by the episode loop and the checker, so that both accept the
same. Any other value raises an ``EnvironmentFault``. Does not know the caller, nor how it handles a fault."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from typing import Any

from turnwise.core.protocols import Step
from turnwise.core.records import Message
from turnwise.core.text import MAX_DEPTH, clean, clean_tree, cut
from turnwise.errors import EnvironmentFault, SettingError

DEFAULT_TURNS = 8  # of a class without max_turns
STATE_CHARACTERS = 1000  # of an observation that names its state
COUNTS = ("tool_calls", "tool_errors")
NAMED_REWARDS = {"rewards": "a dict of names and numbers", "paid": "a dict of agents and what they earn"}


@dataclass(frozen=True)
class ContractViolation:
    """The parts of an error message. Two with the same ``what`` and ``expected`` are one mistake, whatever the value."""

    what: str
    value: str
    expected: str

    def __str__(self) -> str:
        return f"{self.what} {self.value}; expected {self.expected}"


def expect(holds: object, what: str, value: Any, expected: str) -> None:
    """Refuse a returned value that breaks the contract."""
    if not holds:
        raise EnvironmentFault(ContractViolation(what, f"{value!r:.120}", expected))


def read_messages(value: Any, what: str) -> list[Message]:
    """A list of messages with role and content; ``what`` names the method that returned it.

    The texts are made valid Unicode, and a content longer than ``core.text.MAX_CHARACTERS`` is cut with a note."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    valid = is_list and all(isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in value)
    expect(valid, f"{what} returned", value, "a list of messages with role and content")
    try:
        return [{**clean_tree(message), "content": cut(clean(message["content"]))} for message in value]
    except RecursionError as fault:
        deep = ContractViolation(f"{what} returned a message", f"{fault!r:.120}", f"at most {MAX_DEPTH} levels")
        raise EnvironmentFault(deep) from None


def read_step(value: Any) -> Step:
    """A ``Step``, or the equivalent 5-tuple of Gymnasium."""
    if isinstance(value, tuple) and len(value) == 5:
        value = Step(*value)
    expected = "a Step or (messages, reward, terminated, truncated, info)"
    expect(isinstance(value, Step), "step returned", value, expected)
    info = value.info
    expect(isinstance(info, Mapping), "step returned the info", info, "a dict")
    flags = {"terminated": value.terminated, "truncated": value.truncated, "info['success']": info.get("success")}
    for name, flag in flags.items():
        try:
            is_flag = bool(flag) in (True, False)
        except Exception:  # for example the array of a vector environment
            is_flag = False
        expect(is_flag, f"step returned {name}", flag, "True or False")
    read_facts(info)
    numbers = {"the reward": value.reward, **{f"info[{name!r}]": info.get(name, 0) for name in COUNTS}}
    for key, expected in NAMED_REWARDS.items():
        named = info.get(key, {})
        expect(isinstance(named, Mapping), f"step returned info[{key!r}]", named, expected)
        numbers |= {f"info[{key!r}][{name!r}]": number for name, number in named.items()}
    for name, number in numbers.items():
        expect(is_finite(number), f"step returned {name}", number, "a finite number")
    named = {key: info[key] for key in NAMED_REWARDS if info.get(key)}
    messages, info = read_messages(value.messages, "step"), {**info, **clean_tree(named)} if named else info
    if value.context is None:
        return replace(value, messages=messages, info=info)
    context = read_messages(value.context, "step: context")
    goes_on = context or messages or value.terminated or value.truncated
    expect(goes_on, "step returned the context", value.context, "at least one message there or in messages")
    return replace(value, messages=messages, info=info, context=context)


def _read_text(method: str, value: Any) -> str | None:
    """The text that an optional method returned, or None."""
    expect(value is None or isinstance(value, str), f"{method} returned", value, "a str, or None where there is none")
    return None if value is None else clean(value)


read_state_key, read_answer, read_hint = (partial(_read_text, method) for method in ("state_key", "answer", "hint"))


def comparable(messages: Any, step: Step | None = None) -> str:
    """Messages and the outcome of a step as one line, equal where an environment replies the same."""
    text = json.dumps([dict(message) for message in messages], sort_keys=True, default=repr)
    return text if step is None else f"{text} {float(step.reward)!r} {bool(step.terminated)} {bool(step.truncated)}"


def observed_state(messages: Sequence[Message]) -> str:
    """The key of a state that its environment does not name: what was observed there. Of a long text the beginning and a digest
    of all of it, so that equal keys are equal texts and similar ones can still be compared."""
    text = "\n".join(message["content"] for message in messages)
    if len(text) <= STATE_CHARACTERS:
        return text
    return f"{text[:STATE_CHARACTERS]} #{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number, including NumPy's; a bool is not."""
    # checked in every step, and isinstance with an abstract class takes five times as long
    plain = type(value) in (int, float)
    return (plain or (isinstance(value, Real) and not isinstance(value, bool))) and math.isfinite(value)


def read_facts(info: Mapping[str, Any]) -> dict[str, float | str]:
    """The facts of a turn: a number or a label under each name."""
    facts = info.get("facts", {})
    expect(isinstance(facts, Mapping), "step returned info['facts']", facts, "a dict of names and numbers or labels")
    for name, value in facts.items():
        valid = isinstance(name, str) and (isinstance(value, str) or is_finite(value))
        expect(valid, f"step returned info['facts'][{name!r}]", value, "a finite number or a label, under a name")
    return {clean(n): clean(value) if isinstance(value, str) else float(value) for n, value in facts.items()}


def turn_limit(cls: type[Any]) -> int:
    """The ``max_turns`` of a class; refuses what is no number of turns."""
    turns = getattr(cls, "max_turns", DEFAULT_TURNS)
    if isinstance(turns, bool) or not isinstance(turns, Integral) or turns < 1:
        raise SettingError(f"max_turns of {cls.__name__} is {turns!r}; write a whole number of at least 1")
    return int(turns)


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
