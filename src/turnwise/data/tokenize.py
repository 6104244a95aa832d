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
from turnwise.rollout.renderer import Dialogue, Renderer


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
        reward = example_reward(example)
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
        dialogue = self._open([self._own_syntax(message, tools) for message in example.prompt], tools)
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
            tokens = self._turn_tokens(self._own_syntax(message, tools)["content"])
            action = self.renderer.append_sampled(dialogue, tokens)
            longest = max(longest, len(dialogue.ids))
            calls, faults = len(action.calls), len(action.faults)
            turn = Turn(context, tuple(tokens), restart=restart, temperature=self.temperature)
            turns.append(replace(turn, tool_calls=calls + faults, tool_errors=faults))
        if longest > self.context:
            raise ExampleTooLong(longest, self.context)
        return turns, (*dialogue.messages, *observations)

    def _open(self, prompt: list[Message], tools: tuple[dict[str, Any], ...]) -> Dialogue:
        """The prompt as an episode shows it at this point: a short history hides part of it."""
        dialogue = self.renderer.open(prompt, tools, self.history)
        if dialogue.visible != prompt:
            dialogue = self.renderer.open(dialogue.visible, tools, self.history)
            dialogue.messages = list(prompt)
        return dialogue

    def _own_syntax(self, message: Message, tools: tuple[dict[str, Any], ...]) -> Message:
        """An assistant message as this model would write it."""
        if message["role"] != "assistant":
            return message
        return {**message, "content": self.renderer.turn_text(message["content"], tools)}

    def _turn_tokens(self, text: str) -> list[int]:
        tokens = self.renderer.encode_turn(text)
        if self.renderer.decode(tokens[:-1]) != text:
            raise InvalidRow(f"the tokenizer does not give back what the assistant says: {text[:40]!r}")
        if set(tokens[:-1]) & set(self.renderer.stop_ids):
            raise InvalidRow(f"the assistant says the token that ends a turn inside one: {text[:40]!r}; leave it out")
        return tokens


def example_reward(example: Example) -> float:
    """The reward of an example; by default 1, and 0 for the rejected one of a pair."""
    if example.reward is not None:
        return example.reward
    return float(example.facts.get("chosen", 1.0))


def build_groups(dataset: Dataset, tokenizer: DialogueTokenizer, together: bool = True) -> list[Group]:
    """Pairs as groups of two, the chosen one first. Other rows of one task, or of one prompt, form one group if ``together``
    is set, otherwise each row is a group."""
    errors, too_long = LineErrors(dataset.path), dict[int, int]()
    members = dict[str, list[Trajectory]]()
    for row in dataset.rows:
        key = f"{dataset.path.stem}:{row.line}" + (f"+{row.copy}" if row.copy else "")
        group_key = (
            (row.task.key if row.task else json.dumps(row.examples[0].prompt, sort_keys=True))
            if together and not row.is_pair
            else key
        )
        for i, example in enumerate(row.examples):
            try:
                # the row's own task, or one that names file and line
                trajectory = tokenizer.trajectory(
                    example, f"{key}.{i}", (row.task or Task(dataset.path.stem, row.line, "data"))
                )
            except ExampleTooLong as fault:
                too_long[row.line] = max(fault.ids, too_long.get(row.line, 0))
            except InvalidRow as fault:
                errors.add(row.line, str(fault))
            else:
                members.setdefault(group_key, []).append(trajectory)
    for line in too_long:
        longest = max(too_long.values())
        errors.add(
            line, f"longer than the context of {tokenizer.context} ids; shorten it, or write --context {longest}"
        )
    errors.raise_if_any(len(dataset))
    return [_group(trajectories) for trajectories in members.values()]


def _group(members: list[Trajectory]) -> Group:
    task = members[0].task
    return Group(members[0].id.rsplit(".", 1)[0], task, tuple(replace(t, task=task) for t in members))


def rows_by_task(dataset: Dataset) -> Mapping[str, list[DatasetRow]]:
    """The dialogues of each task that rows name, by task key."""
    by_task: dict[str, list[DatasetRow]] = {}
    for row in dataset.rows:
        if row.task is not None and not row.is_pair:
            by_task.setdefault(row.task.key, []).append(row)
    return by_task
