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
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Message
from turnwise.environments.base import Environment, read_json_lines, split_by_content
from turnwise.environments.equivalence import check_rule, equivalent
from turnwise.environments.families.adapter import member_class, split_options
from turnwise.errors import SettingError


class DemonstratedTurn(Environment):
    """One assistant turn of a recorded dialogue. Subclasses hold the turns of a file."""

    expert_turns: ClassVar[bool] = True
    max_turns = 1
    turns: ClassVar[
        Mapping[str, Sequence[tuple[str, list[Message], Action]]]
    ] = {}  # by split: dialogue, history, action
    seeds: ClassVar[Mapping[str, Sequence[int]]] = {}
    rule: ClassVar[str] = "arguments"
    likeness: ClassVar[float] = 0.8
    expected: Action

    def reset(self, seed: int) -> Sequence[Message]:
        listed = self.turns[self.split]
        _, history, self.expected = listed[seed % len(listed)]
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
        content = json.dumps(messages, sort_keys=True)
        at = [k for k, message in enumerate(messages) if k and message.get("role") == "assistant"]
        turns += [(content, messages[:k], _action(messages[k], where)) for k in at]
        tools |= {tool["function"]["name"]: tool for tool in row.get("tools") or ()}
    if not turns:
        raise SettingError(f"{path} holds no assistant turn that follows another message")
    splits = split_by_content(turns, lambda turn: turn[0])
    seeds = {split: range(len(listed)) for split, listed in splits.items()}
    body = {"turns": splits, "seeds": seeds, "tools": tuple(tools.values()), "rule": rule, "likeness": likeness}
    return member_class("demonstrated", member, DemonstratedTurn, f"Turns of {path}.", **body)


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
