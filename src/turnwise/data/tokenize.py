"""Dataset rows as expert trajectories: the assistant turns to learn become tokens, everything else context.

The run's own renderer renders them turn by turn, as it does in an episode. The behaviour policy of these tokens is unknown,
so no log-probability is recorded. Knows no environment and no file format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from turnwise.core.records import Group, Message, Origin, Task, Trajectory, Turn
from turnwise.data.dataset import Dataset, DatasetRow, Example, InvalidRow
from turnwise.data.files import LineErrors
from turnwise.errors import RenderError
from turnwise.rollout.renderer import Renderer


class ExampleTooLong(InvalidRow):
    """More ids than the context holds."""

    def __init__(self, ids: int, context: int) -> None:
        super().__init__(f"{ids} ids, and the context holds {context}; shorten it, or write --context {ids}")
        self.ids = ids


@dataclass(frozen=True)
class DialogueTokenizer:
    """How a run tokenizes dialogues: its renderer, its context length in ids, how many observations are visible, which tools
    are shown where a row names none, and the temperature at which its policy is scored."""

    renderer: Renderer
    context: int
    history: int = 0
    tools: tuple[dict[str, Any], ...] = ()
    temperature: float = 1.0

    def trajectory(self, example: Example, key: str, task: Task) -> Trajectory:
        """One example, word for word; its reward stands on the last turn, and is 1 where none is given."""
        try:
            turns, messages = self._turns(example)
        except RenderError as fault:
            raise InvalidRow(str(fault)) from fault
        # 1 by default, and 0 for the rejected one of a pair
        reward = float(example.facts.get("chosen", 1.0)) if example.reward is None else example.reward
        return Trajectory(
            id=key,
            task=task,
            turns=(*turns[:-1], replace(turns[-1], reward=reward)),
            origin=Origin.EXPERT,
            success=reward > 0 if example.success is None else example.success,
            facts=example.facts,
            rewards=example.rewards,
            answer=tuple(self.renderer.encode(example.answer)) if example.answer else (),
            messages=messages,
        )

    def _turns(self, example: Example) -> tuple[list[Turn], tuple[Message, ...]]:
        tools = example.tools or self.tools
        prompt = [self._own_syntax(message, tools) for message in example.prompt]
        dialogue = self.renderer.open(prompt, tools, self.history)
        if dialogue.visible != prompt:  # a short history hides part of it, as it does in an episode at this point
            dialogue = self.renderer.open(dialogue.visible, tools, self.history)
            dialogue.messages = list(prompt)
        turns: list[Turn] = []
        observations: list[Message] = []
        longest = 0
        for message in example.completion:
            if message["role"] != "assistant":
                observations.append(message)
                continue
            if turns:
                self.renderer.append_observation(dialogue, observations)
                observations = []
            context, restart = tuple(dialogue.new_ids), dialogue.restarted
            text = self._own_syntax(message, tools)["content"]
            tokens = self.renderer.encode_turn(text)
            if self.renderer.decode(tokens[:-1]) != text:
                raise InvalidRow(f"the tokenizer does not give back what the assistant says: {text[:40]!r}")
            if set(tokens[:-1]) & set(self.renderer.stop_ids):
                raise InvalidRow(
                    f"the assistant says the token that ends a turn inside one: {text[:40]!r}; leave it out"
                )
            action = self.renderer.append_sampled(dialogue, tokens)
            longest = max(longest, len(dialogue.ids))
            calls, faults = len(action.calls), len(action.faults)
            turn = Turn(context, tuple(tokens), restart=restart, temperature=self.temperature)
            turns.append(replace(turn, tool_calls=calls + faults, tool_errors=faults))
        if longest > self.context:
            raise ExampleTooLong(longest, self.context)
        return turns, (*dialogue.messages, *observations)

    def _own_syntax(self, message: Message, tools: tuple[dict[str, Any], ...]) -> Message:
        """An assistant message as this model would write it."""
        if message["role"] != "assistant":
            return message
        return {**message, "content": self.renderer.turn_text(message["content"], tools)}


def build_groups(dataset: Dataset, tokenizer: DialogueTokenizer, together: bool = True) -> list[Group]:
    """Pairs as groups of two, the chosen one first. Other rows of one task, or of one prompt, form one group if ``together``
    is set, otherwise each row is a group."""
    errors, too_long = LineErrors(dataset.path), dict[int, int]()
    members = dict[str, list[Trajectory]]()
    for row in dataset.rows:
        key = f"{dataset.path.stem}:{row.line}" + (f"+{row.copy}" if row.copy else "")
        same_prompt = row.task.key if row.task else json.dumps(row.examples[0].prompt, sort_keys=True)
        group_key = same_prompt if together and not row.is_pair else key
        task = row.task or Task(dataset.path.stem, row.line, "data")  # the row's own, or one that names file and line
        for i, example in enumerate(row.examples):
            try:
                trajectory = tokenizer.trajectory(example, f"{key}.{i}", task)
            except ExampleTooLong as fault:
                too_long[row.line] = max(fault.ids, too_long.get(row.line, 0))
            except InvalidRow as fault:
                errors.add(row.line, str(fault))
            else:
                members.setdefault(group_key, []).append(trajectory)
    # one message for all of them, which names the context that fits the longest
    room = f"longer than the context of {tokenizer.context} ids; shorten it, or write --context"
    for line in too_long:
        errors.add(line, f"{room} {max(too_long.values())}")
    errors.raise_if_any(len(dataset))
    groups = []
    for trajectories in members.values():  # rows of one prompt may name several tasks: the group has the first
        task, key = trajectories[0].task, trajectories[0].id.rsplit(".", 1)[0]
        groups.append(Group(key, task, tuple(replace(t, task=task) for t in trajectories)))
    return groups


def rows_by_task(dataset: Dataset) -> Mapping[str, list[DatasetRow]]:
    """The dialogues of each task that rows name, by task key."""
    by_task: dict[str, list[DatasetRow]] = {}
    for row in dataset.rows:
        if row.task is not None and not row.is_pair:
            by_task.setdefault(row.task.key, []).append(row)
    return by_task
