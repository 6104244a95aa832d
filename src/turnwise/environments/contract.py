"""What an environment may answer: one reading for the episode loop and for the check, so that neither takes what the other
refuses. Anything else is an ``EnvironmentFault`` in words. Does not know who asked, nor what is done about a fault."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from turnwise.core.protocols import Step
from turnwise.core.records import Message
from turnwise.errors import EnvironmentFault

COUNTS = ("tool_calls", "tool_errors")
BOOKS = {"rewards": "a dict of names and numbers", "paid": "a dict of agents and what they earn"}


@dataclass(frozen=True)
class Wrong:
    """The words of a fault. Two of the same ``what`` and ``wanted`` are one mistake, whatever was seen each time."""

    what: str
    seen: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.what} {self.seen}; expected {self.wanted}"


def refusal(what: str, value: Any, wanted: str) -> EnvironmentFault:
    return EnvironmentFault(Wrong(what, f"{value!r:.120}", wanted))


def read_messages(value: Any, what: str) -> list[Message]:
    good = isinstance(value, Sequence) and not isinstance(value, str)
    if not good or not all(isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in value):
        raise refusal(f"{what} returned", value, "a list of messages with role and content")
    return list(value)


def read_step(value: Any) -> Step:
    """A ``Step``, also from the tuple of five that Gymnasium's environments return."""
    if isinstance(value, tuple) and len(value) == 5:
        value = Step(*value)
    if not isinstance(value, Step):
        raise refusal("step returned", value, "a Step or (messages, reward, terminated, truncated, info)")
    if not finite(value.reward):
        raise refusal("step returned the reward", value.reward, "a finite number")
    for name in ("terminated", "truncated"):
        _read_flag(name, getattr(value, name))
    _read_info(value.info)
    read_messages(value.messages, "step")
    return value


def read_state_key(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise refusal("state_key returned", value, "a str or None")
    return value


def finite(value: Any) -> bool:
    """A number, NumPy's included; not a bool, NaN or infinity."""
    plain = type(value) in (int, float)  # asked of every step, and an abstract class takes five times as long to answer
    return (plain or (isinstance(value, Real) and not isinstance(value, bool))) and math.isfinite(value)


def _read_flag(name: str, value: Any) -> None:
    try:
        bool(value)
    except Exception:  # the array of a vector environment has no one truth
        raise refusal(f"step returned {name}", value, "True or False") from None


def read_answer(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise refusal("answer returned", value, "a string, or None where there is none")
    return value


def read_hint(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise refusal("hint returned", value, "a string, or None where there is none")
    return value


def read_facts(info: Mapping[str, Any]) -> dict[str, float | str]:
    """What the environment says of a turn: a number or a label under each name."""
    facts = info.get("facts", {})
    if not isinstance(facts, Mapping):
        raise refusal("step returned info['facts']", facts, "a dict of names and numbers or labels")
    for name, value in facts.items():
        if not isinstance(name, str) or not (isinstance(value, str) or finite(value)):
            raise refusal(f"step returned info['facts'][{name!r}]", value, "a finite number or a label, under a name")
    return {name: value if isinstance(value, str) else float(value) for name, value in facts.items()}


def _read_info(info: Any) -> None:
    if not isinstance(info, Mapping):
        raise refusal("step returned the info", info, "a dict")
    read_facts(info)
    _read_flag("info['success']", info.get("success"))
    for book, wanted in BOOKS.items():
        said = info.get(book, {})
        if not isinstance(said, Mapping):
            raise refusal(f"step returned info[{book!r}]", said, wanted)
        for name, value in said.items():
            if not finite(value):
                raise refusal(f"step returned info[{book!r}][{name!r}]", value, "a finite number")
    for name in COUNTS:
        if not finite(info.get(name, 0)):
            raise refusal(f"step returned info[{name!r}]", info[name], "a finite number")
