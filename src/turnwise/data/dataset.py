"""Datasets as users write them: dialogues, prompts with completions, prompts with a chosen and a rejected answer.

    {"messages": [...]}                                    every assistant turn is a training target; also ShareGPT's
                                                           ``conversations`` of ``from`` and ``value``
    {"prompt": ..., "completion": ...}                     text or messages; the assistant turns of the completion (also
                                                           called ``response``) are training targets
    {"prompt": ..., "completion": ..., "label": true}      the same with a verdict: a good answer (true) or a bad one (false)
    {"prompt": ..., "chosen": ..., "rejected": ...}        text or messages; or two dialogues with a common prefix; or,
                                                           for ``prompt``, ``prompt_chosen`` and ``prompt_rejected``

Other columns: ``task`` (a key) or ``seed`` with ``difficulty`` and ``split``; ``reward``, ``success``, ``answer``, ``tools``;
any other column that holds a number or a short text becomes a fact. In a pair, ``NAME_chosen`` and ``NAME_rejected`` belong to
one side. Knows no tokens and no environment.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from turnwise.core.protocols import ToolCall
from turnwise.core.records import Message, Task
from turnwise.data.files import LineErrors, is_finite_number, parse_cell, read_table
from turnwise.rollout.parsers.table import HERMES

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}  # its roles, and ours
COLUMNS = {
    "messages", "prompt", "completion", "chosen", "rejected", "task", "seed", "difficulty", "split", "reward", "success",
    "answer", "tools",
}  # fmt: skip
REASONING = ("reasoning_content", "reasoning", "thinking")  # names that files give to an assistant's reasoning
MAX_LABEL = 200  # characters: a longer text is no fact


class InvalidRow(Exception):
    """Why one row cannot be used."""


@dataclass(frozen=True)
class Example:
    """One dialogue: its prompt, the messages from the first training target on, and its labels."""

    prompt: tuple[Message, ...]  # context only, whatever the roles
    completion: tuple[Message, ...]  # assistant messages are training targets, the others context
    tools: tuple[dict[str, Any], ...] = ()
    reward: float | None = None
    success: bool | None = None
    answer: str | None = None
    facts: Mapping[str, float | str] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)  # by name

    @property
    def turns(self) -> list[str]:
        """The assistant's texts, turn by turn."""
        return [m["content"] for m in self.completion if m["role"] == "assistant"]


@dataclass(frozen=True)
class DatasetRow:
    """A line of a file: one example, or the chosen one and the rejected one."""

    line: int
    examples: tuple[Example, ...]
    task: Task | None = None
    copy: int = 0  # number among the rows made from one line

    @property
    def is_pair(self) -> bool:
        return len(self.examples) > 1


@dataclass(frozen=True)
class Dataset:
    """The usable rows of a file."""

    path: Path
    rows: tuple[DatasetRow, ...]
    unused_columns: Mapping[str, int]  # columns that are neither known, nor numbers, nor short texts: in how many rows

    def __len__(self) -> int:
        return len(self.rows)


def read_dataset(
    path: str | Path, environment: str = "", table: Sequence[tuple[int, Mapping[str, Any]]] | None = None
) -> Dataset:
    """The rows of a file, or those of ``table``. All bad rows raise one error, which names every line and quotes the first few
    faults."""
    path, table = Path(path), read_table(path) if table is None else table
    errors, rows, unused = LineErrors(path), [], Counter[str]()
    for line, columns in table:
        try:
            rows.append(_row(line, columns, environment, unused))
        except InvalidRow as fault:
            errors.add(line, str(fault))
    errors.raise_if_any(len(table))
    return Dataset(path, tuple(rows), dict(unused))


def _row(line: int, columns: Mapping[str, Any], environment: str, unused: Counter[str]) -> DatasetRow:
    values = {name: value for name, value in columns.items() if value is not None}
    if "conversations" in values and "messages" not in values:
        values["messages"] = values.pop("conversations")
    if "response" in values and "prompt" in values and "completion" not in values:
        values["completion"] = values.pop("response")
    if "chosen" in values or "rejected" in values:
        _require(values, "chosen", "rejected")
        examples = _pair(values)
    elif "completion" in values:
        _require(values, "prompt", "completion")
        examples = [_completion(values["prompt"], values["completion"])]
    elif "messages" in values:
        messages = parse_messages(values["messages"], "messages")
        turns = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
        if not turns:
            raise InvalidRow("messages holds no assistant message, so there is nothing to learn")
        if turns[0] == 0:
            raise InvalidRow("messages begins with the assistant; write a user or system message before it")
        # every assistant turn is a training target; the messages before the first are the prompt
        examples = [Example(tuple(messages[: turns[0]]), tuple(messages[turns[0] :]))]
    else:
        names = ", ".join(map(str, list(columns)[:6])) or "none"
        raise InvalidRow(f"columns {names}; write messages, or prompt and completion, or prompt, chosen and rejected")
    sides = ("chosen", "rejected") if len(examples) == 2 else ("",)
    labelled = [_labelled(example, values, side, unused) for example, side in zip(examples, sides)]
    return DatasetRow(line, tuple(labelled), _task(values, environment))


def _require(values: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if name not in values:
            raise InvalidRow(f"no column {name}; write {' and '.join(names)}")


# -------------------------------------------------------------------- dialogues


def parse_messages(value: Any, name: str) -> list[Message]:
    """A list of chat messages, their contents as text."""
    if not isinstance(value, list) or not value:
        raise InvalidRow(f'{name} is {_shown(value)}; write a list of {{"role": ..., "content": ...}}')
    return [_message(m, name) for m in value]


def role_of(message: Mapping[str, Any]) -> Any:
    """Who speaks: ``role``, or ``from`` as ShareGPT writes it."""
    speaker = message.get("role", message.get("from"))
    return SHAREGPT.get(speaker, speaker) if isinstance(speaker, str) else speaker


def _message(value: Any, name: str) -> Message:
    if isinstance(value, dict) and "from" in value:
        value = {"content": value.get("value"), **value, "role": role_of(value)}
    if not isinstance(value, dict) or "role" not in value:
        raise InvalidRow(f'{name} holds {_shown(value)}; write {{"role": ..., "content": ...}}')
    role = value["role"]
    if role not in ROLES:
        raise InvalidRow(f"{name} has the role {_shown(role)}; write one of {', '.join(ROLES)}")
    optional = {k: v for k, v in value.items() if k in ("name", "tool_call_id") and isinstance(v, str)}
    content, calls = value.get("content"), value.get("tool_calls") or []
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(p["text"] for p in content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise InvalidRow(f"a {value['role']} message of {name} has the content {_shown(content)}; write text")
    if calls and value["role"] != "assistant":
        raise InvalidRow(f"a {value['role']} message of {name} calls tools; only the assistant can")
    if not isinstance(calls, list):
        raise InvalidRow(f"tool_calls of {name} is {_shown(calls)}; write a list")
    # reasoning stands in front of what is said, and calls behind it, in one syntax: the renderer writes both as the model does
    reasoning = next((value[key] for key in REASONING if isinstance(value.get(key), str)), "")
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning and role == "assistant" else ""
    return {"role": role, "content": thought + content + HERMES.write([_call(c, name) for c in calls]), **optional}


def _call(value: Any, name: str) -> ToolCall:
    function: Any = value.get("function", value) if isinstance(value, dict) else None
    try:
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(function["name"], str) or not isinstance(arguments, dict):
            raise TypeError
        return ToolCall(function["name"], arguments)
    except (KeyError, TypeError, ValueError, RecursionError):
        raise InvalidRow(
            f'a tool call of {name} is {_shown(value)}; write {{"function": {{"name": ..., "arguments": {{...}}}}}}'
        ) from None


def _completion(prompt: Any, completion: Any, name: str = "completion") -> Example:
    before, after = (
        [{"role": role, "content": value}] if isinstance(value, str) else parse_messages(value, column)
        for value, column, role in ((prompt, "prompt", "user"), (completion, name, "assistant"))
    )
    if after[0]["role"] != "assistant":
        raise InvalidRow(
            f"{name} begins with a {after[0]['role']} message; what comes before the assistant is the prompt"
        )
    return Example(tuple(before), tuple(after))


def _pair(values: Mapping[str, Any]) -> list[Example]:
    chosen, rejected = values["chosen"], values["rejected"]
    first = lambda v: v[0].get("role") if isinstance(v[0], dict) else None  # noqa: E731
    is_dialogue = [isinstance(v, list) and bool(v) and first(v) != "assistant" for v in (chosen, rejected)]
    separate = [name for name in ("prompt_chosen", "prompt_rejected") if name in values]
    if separate:
        _require(values, "prompt_chosen", "prompt_rejected")
        examples = [_completion(values[f"prompt_{name}"], values[name], name) for name in ("chosen", "rejected")]
    elif all(is_dialogue):
        examples = _pair_of_dialogues(
            parse_messages(chosen, "chosen"), parse_messages(rejected, "rejected"), values.get("prompt")
        )
    elif "prompt" not in values:
        raise InvalidRow(
            "no column prompt, and chosen and rejected are not both dialogues that begin alike; write a prompt"
        )
    elif any(is_dialogue):
        raise InvalidRow("one of chosen and rejected is a whole dialogue, the other an answer; write both alike")
    else:
        examples = [_completion(values["prompt"], values[name], name) for name in ("chosen", "rejected")]
    if (examples[0].prompt, examples[0].completion) == (examples[1].prompt, examples[1].completion):
        raise InvalidRow("chosen and rejected are the same; there is nothing to prefer")
    return examples


def _pair_of_dialogues(chosen: list[Message], rejected: list[Message], prompt: Any) -> list[Example]:
    """Two dialogues; their common prefix is the prompt."""
    shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
    sides = {"chosen": chosen[shared:], "rejected": rejected[shared:]}
    if not shared:
        raise InvalidRow("chosen and rejected begin differently; write the common beginning in both, or a prompt")
    if not all(sides.values()):
        same = "the same" if len(chosen) == len(rejected) else "one a part of the other"
        raise InvalidRow(f"chosen and rejected are {same}; there is nothing to prefer")
    for name, side in sides.items():
        if side[0]["role"] != "assistant":
            raise InvalidRow(
                f"chosen and rejected differ first at a {side[0]['role']} message of {name}, not at an assistant's"
            )
    before = chosen[:shared]
    if isinstance(prompt, str):
        is_prefix = any(m["content"] == prompt for m in before)
    else:
        is_prefix = prompt is None or parse_messages(prompt, "prompt") == before
    if not is_prefix:
        raise InvalidRow("prompt is not what chosen and rejected begin with; leave it out, or write the answers alone")
    return [Example(tuple(before), tuple(side)) for side in sides.values()]


# --------------------------------------------------------------- other columns


def _labelled(example: Example, values: Mapping[str, Any], side: str, unused: Counter[str]) -> Example:
    """The example with the labels of the other columns."""
    columns = dict(values)
    if side:  # of a pair, score_chosen or chosen_score is the score of one side, and none of the other
        other = "rejected" if side == "chosen" else "chosen"
        ends, starts = (f"_{side}", f"_{other}"), (f"{side}_", f"{other}_")
        columns = {k: v for k, v in values.items() if not k.endswith(ends) and k not in (side, other)}
        columns = {k: v for k, v in columns.items() if not k.startswith(starts)}
        columns |= {k.removesuffix(ends[0]): v for k, v in values.items() if k.endswith(ends[0])}
        columns |= {k.removeprefix(starts[0]): v for k, v in values.items() if k.startswith(starts[0])}
    facts: dict[str, float | str] = {}
    for name, value in columns.items():
        if name in COLUMNS:
            continue
        if is_finite_number(value):
            facts[name] = float(value)
        elif isinstance(value, str) and len(value) <= MAX_LABEL:
            facts[name] = value
        elif isinstance(value, float):
            raise InvalidRow(f"{name} is {value}; write a finite number")
        else:
            unused[name] += 1
    if side:
        facts["chosen"] = float(side == "chosen")
    elif isinstance(columns.get("label"), bool):
        facts["chosen"] = facts.pop("label")
    reward, success, answer = columns.get("reward"), columns.get("success"), columns.get("answer")
    if reward is not None and not is_finite_number(reward):
        raise InvalidRow(f"reward is {_shown(reward)}; write a finite number")
    if success is not None and (not is_finite_number(success) or success not in (0, 1)):
        raise InvalidRow(f"success is {_shown(success)}; write true or false")
    if answer is not None and not isinstance(answer, str):
        raise InvalidRow(f"answer is {_shown(answer)}; write text")
    return Example(
        example.prompt,
        example.completion,
        parse_tools(columns.get("tools")),
        None if reward is None else float(reward),
        None if success is None else bool(success),
        answer,
        facts,
    )


def parse_tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    value = parse_cell(value.strip() if isinstance(value, str) else value)
    if not isinstance(value, Sequence) or not all(isinstance(tool, dict) for tool in value):
        raise InvalidRow(f"tools is {_shown(value)}; write a list of tool schemas")
    return tuple(value)


def _task(values: Mapping[str, Any], environment: str) -> Task | None:
    """``task``: a key, ``calculator/train/2/17``; or ``seed`` with ``difficulty`` and ``split``, of the run's environment."""
    if "task" in values:
        parts = values["task"].rsplit("/", 3) if isinstance(values["task"], str) else ()
        if len(parts) != 4 or not parts[2].isdigit() or not parts[3].isdigit():
            raise InvalidRow(
                f"task is {_shown(values['task'])}; write environment/split/difficulty/seed: calculator/train/2/17"
            )
        return Task(parts[0], int(parts[3]), parts[1], int(parts[2]))
    if "seed" not in values:
        return None
    seed, split, difficulty = values["seed"], values.get("split", "train"), values.get("difficulty", 1)
    for name, value, kind in (("seed", seed, int), ("difficulty", difficulty, int), ("split", split, str)):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidRow(f"{name} is {_shown(value)}; write {'a whole number' if kind is int else 'a name'}")
    return Task(environment, seed, split, difficulty)


def _shown(value: Any) -> str:
    """A value as an error shows it: short, on one line."""
    shown = " ".join(repr(value).split())
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


REVISE: Message = {"role": "user", "content": "Write a better answer."}
DIRECTIONS = 4  # per prompt
MAX_ANGLE = math.pi / 4  # between a direction and the first rating
DIRECTION_PREFIX = "toward_"


def with_revisions(dataset: Dataset) -> Dataset:
    """Each pair as six examples: both answers alone (fact ``revises`` 0), after the rejected one (1), after the chosen one
    (2)."""
    rows = []
    for row in dataset.rows:
        chosen, rejected = row.examples
        earlier = {0.0: (), 1.0: (*rejected.completion, REVISE), 2.0: (*chosen.completion, REVISE)}
        examples = [
            replace(example, prompt=(*example.prompt, *messages), facts={**example.facts, "revises": code})
            for code, messages in earlier.items()
            for example in (chosen, rejected)
        ]
        rows.append(replace(row, examples=tuple(examples)))
    return replace(dataset, rows=tuple(rows))


def with_directions(dataset: Dataset, names: Sequence[str], seed: int) -> Dataset:
    """Each rated answer in ``DIRECTIONS`` directions: a unit vector v over the ratings ``names``, sampled per prompt, stated at
    the start of the prompt in whole hundredths and recorded as the facts ``toward_NAME``. The ratings become named rewards.

    v = cos φ · first + sin φ · u, φ at most 45°, u a unit vector over the others. A row that gives its direction keeps it: its
    prompt already states it. Rows of one prompt and direction form one group, whatever task they name."""
    errors, rows = LineErrors(dataset.path), list[DatasetRow]()
    for row in dataset.rows:
        example = row.examples[0]
        missing = [name for name in names if not isinstance(example.facts.get(name), float)]
        if missing:
            errors.add(row.line, f"no rating {', '.join(missing)}; write a number in a column of that name")
            continue
        rated = replace(example, rewards={name: float(example.facts[name]) for name in names})
        if all(f"{DIRECTION_PREFIX}{name}" in example.facts for name in names):
            rows.append(replace(row, examples=(rated,), task=None))
            continue
        rng = random.Random(f"{seed}/{json.dumps(example.prompt, sort_keys=True)}")  # equal prompts, equal directions
        for copy in range(DIRECTIONS):
            angle, others = rng.uniform(0, MAX_ANGLE), [rng.gauss(0, 1) for _ in names[1:]]
            length = math.hypot(*others) or 1.0
            exact = [math.cos(angle), *(math.sin(angle) * x / length for x in others)]
            # rounded as the prompt states it: what is trained must be what was read
            direction = {name: round(x, 2) for name, x in zip(names, exact)}
            stated = " + ".join(f"{name}*{round(100 * x)}" for name, x in direction.items())
            first, *later = rated.prompt
            prompt = ({**first, "content": f"[{stated}]\n{first['content']}"}, *later)
            facts = {**rated.facts, **{f"{DIRECTION_PREFIX}{n}": x for n, x in direction.items()}}
            rows.append(replace(row, examples=(replace(rated, prompt=prompt, facts=facts),), task=None, copy=copy))
    errors.raise_if_any(len(dataset))
    return replace(dataset, rows=tuple(rows))
