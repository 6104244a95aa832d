"""Single turns of the dialogues of a file: the policy takes one assistant turn, and is paid if it does what the file's does.

    load("demonstrated:dialogues.jsonl")
    load("demonstrated:dialogues.jsonl,rule=names,likeness=0.7")

Each line holds ``messages`` as a chat API writes them, with ``tool_calls`` where an assistant calls tools, and optionally
``tools``. Every assistant turn is a task; a tenth of the dialogues is held out. No environment is played: a turn is compared with
the recorded one by a ``rule``, each of which accepts what those before it accept:

    exact      the same calls with equal arguments, or the same text but for case, spaces and a final dot
    arguments  the same decision to call or to talk, the same tools in order, arguments equal up to type and spelling; without
               calls, texts that are alike
    names      the same decision and the same tools; without calls, any text
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Message
from turnwise.environments.base import Environment, listed_task, plain_words, read_json_lines, split_by_content
from turnwise.environments.families.adapter import member_class, split_options
from turnwise.errors import SettingError, nearest

RULES = ("exact", "arguments", "names")


def equivalent(action: Action, expected: Action, rule: str = "arguments", likeness: float = 0.8) -> bool:
    """Whether ``action`` is accepted in the place of ``expected``. ``likeness``: how similar two texts must be, 0 to 1."""
    if action.faults or len(action.calls) != len(expected.calls):
        return False
    if [call.name for call in action.calls] != [call.name for call in expected.calls]:
        return False
    if rule == "names":
        return True
    if not expected.calls:
        exact, other = (" ".join(plain_words(text).split()) for text in (expected.text, action.text))
        return exact == other or (rule == "arguments" and alike(action.text, expected.text, likeness))
    pairs = [(a.arguments, b.arguments) for a, b in zip(action.calls, expected.calls)]
    return all(a == b if rule == "exact" else same_value(a, b, likeness) for a, b in pairs)


def check_rule(rule: str, likeness: Any) -> None:
    """Refuse an unknown rule, and a likeness that no text has."""
    if rule not in RULES:
        raise SettingError(f"rule is {rule!r}; {nearest(rule, RULES)}")
    if not isinstance(likeness, int | float) or not 0 < likeness <= 1:
        raise SettingError(f"likeness is {likeness}; write a number in (0, 1]")


def same_value(a: Any, b: Any, likeness: float = 0.8) -> bool:
    """Whether two arguments mean the same. Numbers and truth values may be written as text; a key that holds nothing may be
    missing; texts may differ a little."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = {key for side in (a, b) for key, value in side.items() if value is not None}
        return all(key in a and key in b and same_value(a[key], b[key], likeness) for key in keys)
    if _is_list(a) and _is_list(b):
        return len(a) == len(b) and all(same_value(x, y, likeness) for x, y in zip(a, b))
    numbers = (_number(a), _number(b))
    if None not in numbers:
        return math.isclose(*numbers, rel_tol=1e-6, abs_tol=1e-9)  # type: ignore[arg-type]
    # a number and a text, or values that are neither
    if numbers != (None, None) or not (isinstance(a, str) and isinstance(b, str)):
        return bool(a == b)
    return alike(a, b, likeness)


def alike(a: str, b: str, likeness: float) -> bool:
    """Whether two texts are equal but for case, spaces and punctuation, or similar enough."""
    a, b = (" ".join(re.sub(r"[^\w\s]", " ", text.lower()).split()) for text in (a, b))
    return a == b or difflib.SequenceMatcher(None, a, b, autojunk=False).ratio() >= likeness


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _number(value: Any) -> float | None:
    """A number or a truth value, also where it is written as text; None: it is neither."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in ("true", "false"):
            return float(word == "true")
        value = word if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", word) else None
    return None if value is None or isinstance(value, Mapping) or _is_list(value) else float(value)


class DemonstratedTurn(Environment):
    """One assistant turn of a recorded dialogue. Subclasses hold the turns of a file."""

    expert_turns: ClassVar[bool] = True
    max_turns = 1
    # by split: the whole dialogue, the messages before the turn, the turn
    turns: ClassVar[Mapping[str, Sequence[tuple[str, list[Message], Action]]]] = {}
    seeds: ClassVar[Mapping[str, Sequence[int]]] = {}
    rule: ClassVar[str] = "arguments"
    likeness: ClassVar[float] = 0.8

    def reset(self, seed: int) -> Sequence[Message]:
        _, history, self.expected = listed_task(self.turns, self.split, seed)
        return list(history)

    def step(self, action: Action) -> Step:
        good = equivalent(action, self.expected, self.rule, self.likeness)
        return Step([], float(good), terminated=True, info={"success": good})

    def oracle(self) -> Action:
        return self.expected


@cache
def environment(member: str) -> type[DemonstratedTurn]:
    """The class of a file, with options after commas."""
    path, options = split_options("demonstrated", member, ("rule", "likeness"))
    rule, likeness = str(options.get("rule", "arguments")), options.get("likeness", 0.8)
    check_rule(rule, likeness)
    tools: dict[str, dict[str, Any]] = {}
    turns: list[tuple[str, list[Message], Action]] = []  # the whole dialogue, the messages before the turn, the turn
    for where, row in read_json_lines(path, '{"messages": [...]}'):
        messages = row.get("messages")
        if not isinstance(messages, list):
            raise SettingError(f"{where}: no messages; write a list of chat messages")
        # splits are by dialogue: turns of one dialogue share most of their words
        content = json.dumps(messages, sort_keys=True)
        at = [k for k, message in enumerate(messages) if k and message.get("role") == "assistant"]
        for k in at:
            calls = []
            for call in messages[k].get("tool_calls") or ():
                function = call.get("function", call)
                arguments = function.get("arguments", {})
                try:
                    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                except ValueError:
                    raise SettingError(f"{where}: arguments of {function.get('name')!r} are not JSON") from None
                calls.append(ToolCall(str(function.get("name")), dict(arguments)))
            turns.append((content, messages[:k], Action(str(messages[k].get("content") or ""), tuple(calls))))
        tools |= {tool["function"]["name"]: tool for tool in row.get("tools") or ()}
    if not turns:
        raise SettingError(f"{path} holds no assistant turn that follows another message")
    splits = split_by_content(turns, lambda turn: turn[0])
    seeds = {split: range(len(listed)) for split, listed in splits.items()}
    body = {"turns": splits, "seeds": seeds, "tools": tuple(tools.values()), "rule": rule, "likeness": likeness}
    return member_class("demonstrated", member, DemonstratedTurn, f"Turns of {path}.", **body)
