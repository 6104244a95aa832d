"""Single turns of the dialogues of a file: the policy takes one assistant turn, and is paid if it does what the file's does.

    load("demonstrated:dialogues.jsonl")
    load("demonstrated:dialogues.jsonl,rule=names,likeness=0.7")

Each line holds ``messages`` as a chat API writes them, with ``tool_calls`` where an assistant calls tools, and optionally
``tools``. Every assistant turn is a task; a tenth of the dialogues is held out. No environment is played: a turn is compared with
the recorded one (``environments/equivalence.py``). Knows no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Message
from turnwise.environments.base import Environment, is_held_out
from turnwise.environments.equivalence import check_rule, equivalent
from turnwise.errors import SettingError, nearest

OPTIONS = ("rule", "likeness")


class DemonstratedTurn(Environment):
    """One assistant turn of a recorded dialogue. Subclasses hold the turns of a file."""

    expert_turns: ClassVar[bool] = True
    max_turns = 1
    turns: ClassVar[Mapping[str, Sequence[tuple[list[Message], Action]]]] = {}  # by split: history, recorded action
    seeds: ClassVar[Mapping[str, Sequence[int]]] = {}
    rule: ClassVar[str] = "arguments"
    likeness: ClassVar[float] = 0.8
    expected: Action

    def reset(self, seed: int) -> Sequence[Message]:
        listed = self.turns[self.split]
        history, self.expected = listed[seed % len(listed)]
        return list(history)

    def step(self, action: Action) -> Step:
        good = equivalent(action, self.expected, self.rule, self.likeness)
        return Step([], float(good), terminated=True, info={"success": good})

    def oracle(self) -> Action:
        return self.expected


@cache
def environment(member: str) -> type[DemonstratedTurn]:
    """The class of a file, with options after commas."""
    path, *words = member.split(",")
    options = dict(word.partition("=")[::2] for word in words)
    for key in options:
        if key not in OPTIONS:
            raise SettingError(f"demonstrated:{path} has no option {key!r}; {nearest(key, OPTIONS)}")
    try:
        rule, likeness = options.get("rule", "arguments"), float(options.get("likeness", 0.8))
    except ValueError:
        raise SettingError(f"likeness is {options['likeness']!r}; write a number in (0, 1]") from None
    check_rule(rule, likeness)
    tools: dict[str, dict[str, Any]] = {}
    turns: dict[str, list[tuple[list[Message], Action]]] = {"train": [], "held_out": []}
    for line, row in enumerate(_rows(path), start=1):
        messages = row.get("messages")
        if not isinstance(messages, list):
            raise SettingError(f"{path}, line {line}: no messages; write a list of chat messages")
        split = "held_out" if is_held_out(json.dumps(messages, sort_keys=True)) else "train"
        at = [k for k, message in enumerate(messages) if k and message.get("role") == "assistant"]
        turns[split] += [(messages[:k], _action(messages[k], f"{path}, line {line}")) for k in at]
        tools |= {tool["function"]["name"]: tool for tool in row.get("tools") or ()}
    if not any(turns.values()):
        raise SettingError(f"{path} holds no assistant turn that follows another message")
    for split, other in (("train", "held_out"), ("held_out", "train")):  # a file of few dialogues may leave one empty
        turns[split] = turns[split] or turns[other]
    seeds = {split: range(len(listed)) for split, listed in turns.items()}
    body = {"turns": turns, "seeds": seeds, "tools": tuple(tools.values()), "rule": rule, "likeness": likeness}
    return type(
        "DemonstratedTurn", (DemonstratedTurn,), {**body, "__module__": __name__, "__doc__": f"Turns of {path}."}
    )


def _rows(path: str) -> list[dict[str, Any]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise SettingError(f"demonstrated:{path} cannot be read: {fault}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise SettingError(f"{path}, line {number}: not JSON; write one dialogue in each line") from None
        if not isinstance(rows[-1], dict):
            raise SettingError(f"{path}, line {number}: not an object; write {{'messages': [...]}}")
    return rows


def _action(message: Message, where: str) -> Action:
    """A recorded assistant message as an action."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            raise SettingError(f"{where}: arguments of {function.get('name')!r} are not JSON") from None
        calls.append(ToolCall(str(function.get("name")), dict(arguments)))
    return Action(text=str(message.get("content") or ""), calls=tuple(calls))


__all__ = ["DemonstratedTurn", "environment"]
