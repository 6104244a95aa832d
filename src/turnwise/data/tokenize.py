"""Rows as expert trajectories: every assistant turn to learn becomes tokens, everything else context.

Rendered by the run's own renderer, turn by turn, as an episode would be. Nobody knows with which probability these tokens
were said, so none is recorded. Knows no environment and no file format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from turnwise.core.records import Group, Message, Origin, Task, Trajectory, Turn
from turnwise.data.dataset import Row, Rows, Script, Wrong
from turnwise.data.files import Faults
from turnwise.errors import RenderError
from turnwise.rollout.renderer import Dialogue, Renderer


class TooLong(Wrong):
    """More ids than the context holds."""

    def __init__(self, ids: int, context: int) -> None:
        super().__init__(f"{ids} ids, and the context holds {context}; shorten it, or write --context {ids}")
        self.ids = ids


@dataclass(frozen=True)
class Speaker:
    """How a run reads dialogues: its renderer, how many ids it can hold, how many observations it sees, which tools are
    shown where a row names none, and at which temperature its policy is judged."""

    renderer: Renderer
    context: int
    history: int = 0
    tools: tuple[dict[str, Any], ...] = ()
    temperature: float = 1.0

    def trajectory(self, script: Script, key: str, task: Task) -> Trajectory:
        """One script, word for word; its reward stands on the last turn, and is 1 where nobody told another."""
        try:
            turns, messages = self._turns(script)
        except RenderError as fault:
            raise Wrong(str(fault)) from fault
        reward = paid(script)
        return Trajectory(
            id=key,
            task=task,
            turns=(*turns[:-1], replace(turns[-1], reward=reward)),
            origin=Origin.EXPERT,
            success=reward > 0 if script.success is None else script.success,
            facts=script.facts,
            rewards=script.rewards,
            answer=tuple(self.renderer.encode(script.answer)) if script.answer else (),
            messages=messages,
        )

    def _turns(self, script: Script) -> tuple[list[Turn], tuple[Message, ...]]:
        dialogue = self._opened(list(script.before), script.tools or self.tools)
        turns: list[Turn] = []
        waiting: list[Message] = []
        longest = 0
        for message in script.said:
            if message["role"] != "assistant":
                waiting.append(message)
                continue
            if turns:
                self.renderer.tell(dialogue, waiting)
                waiting = []
            context, restart = tuple(dialogue.fresh), dialogue.restarted
            tokens = self._tokens(message["content"])
            action = self.renderer.hear(dialogue, tokens)
            longest = max(longest, len(dialogue.ids))
            calls, faults = len(action.calls), len(action.faults)
            turn = Turn(context, tuple(tokens), restart=restart, temperature=self.temperature)
            turns.append(replace(turn, tool_calls=calls + faults, tool_errors=faults))
        if longest > self.context:
            raise TooLong(longest, self.context)
        return turns, (*dialogue.messages, *waiting)

    def _opened(self, before: list[Message], tools: tuple[dict[str, Any], ...]) -> Dialogue:
        """The prompt as an episode would show it by now: with a short history, not all of it."""
        dialogue = self.renderer.open(before, tools, self.history)
        if dialogue.visible != before:
            dialogue = self.renderer.open(dialogue.visible, tools, self.history)
            dialogue.messages = list(before)
        return dialogue

    def _tokens(self, text: str) -> list[int]:
        tokens = self.renderer.encode_turn(text)
        if self.renderer.decode(tokens[:-1]) != text:
            raise Wrong(f"the tokenizer does not give back what the assistant says: {text[:40]!r}")
        if set(tokens[:-1]) & set(self.renderer.stop_ids):
            raise Wrong(f"the assistant says the token that ends a turn inside one: {text[:40]!r}; leave it out")
        return tokens


def paid(script: Script) -> float:
    """What a script is worth when nobody said: 1, and the worse one of a pair 0."""
    if script.reward is not None:
        return script.reward
    return float(script.facts.get("chosen", 1.0))


def task_of(rows: Rows, row: Row) -> Task:
    """Its own, or one that names file and line."""
    return row.task or Task(rows.path.stem, row.line, "data")


def groups_of(rows: Rows, speaker: Speaker, together: bool = True) -> list[Group]:
    """Pairs as groups of two, the better one first; other rows of one task, or of one prompt, ``together`` or each alone."""
    faults, long, found = Faults(rows.path), dict[int, int](), dict[str, list[Trajectory]]()
    for row in rows.rows:
        key = f"{rows.path.stem}:{row.line}" + (f"+{row.copy}" if row.copy else "")
        peers = _peers(row) if together and not row.pair else key
        for i, script in enumerate(row.scripts):
            try:
                made = speaker.trajectory(script, f"{key}.{i}", task_of(rows, row))
            except TooLong as fault:
                long[row.line] = max(fault.ids, long.get(row.line, 0))
            except Wrong as wrong:
                faults.add(row.line, str(wrong))
            else:
                found.setdefault(peers, []).append(made)
    for line in long:
        most = max(long.values())
        faults.add(line, f"longer than the context of {speaker.context} ids; shorten it, or write --context {most}")
    faults.refuse(len(rows))
    return [_group(members) for members in found.values()]


def _peers(row: Row) -> str:
    return row.task.key if row.task else json.dumps(row.scripts[0].before, sort_keys=True)


def _group(members: list[Trajectory]) -> Group:
    task = members[0].task
    return Group(members[0].id.rsplit(".", 1)[0], task, tuple(replace(t, task=task) for t in members))


def tasks_of(rows: Rows) -> Mapping[str, list[Row]]:
    """The dialogues of each task that is named, by its key."""
    found: dict[str, list[Row]] = {}
    for row in rows.rows:
        if row.task is not None and not row.pair:
            found.setdefault(row.task.key, []).append(row)
    return found
