"""Rows of prompts: which column holds the prompt, which the reference answer, and what a reward function may read by name.

    {"prompt": ..., "answer": ...}                           prompt as text or messages
    {"question": ..., "answer": "... #### 72"}               also problem, query, instruction; solution, ground_truth, target ...
    {"prompt": [...], "data_source": ..., "reward_model": {"ground_truth": ...}, "extra_info": {...}}
    {"messages": [...]}                                      a last assistant message is the reference answer
    {"conversations": [{"from": "human", "value": ...}]}     the same as ShareGPT writes it

Help for hard tasks: ``hint`` (a text) or ``hints`` (a list, from abstract to concrete), and the way to the answer:
``solution`` (a text) or ``steps`` (a list).

Knows no environment and no reward.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.core.records import Message
from turnwise.data.dataset import InvalidRow, parse_messages, parse_tools, role_of
from turnwise.data.files import LineErrors, Stored, parse_cell, parse_row, read_table, scan_table
from turnwise.errors import SettingError

PROMPT_COLUMNS = ("prompt", "messages", "conversations", "question", "problem", "query", "instruction")
ANSWER_COLUMNS = (
    "answer", "ground_truth", "solution", "target", "final_answer", "expected_answer", "label", "completion", "response",
)  # fmt: skip
GROUND_TRUTH = "reward_model.ground_truth"
ANSWER, HINTS, SOLUTION = 1, 2, 4  # what a row offers
CANONICAL = json.JSONEncoder(sort_keys=True)


@dataclass(frozen=True)
class PromptRow:
    """One line of a file of prompts."""

    line: int
    prompt: str | tuple[Message, ...]  # as it was written: reward functions read it in this form
    columns: Mapping[str, Any]  # all columns by name, and ``answer`` and ``ground_truth`` wherever they were found
    answer: str | None = None  # the reference as text
    tools: tuple[dict[str, Any], ...] = ()
    hints: tuple[str, ...] = ()
    solution: tuple[str, ...] = ()  # its steps

    @property
    def offers(self) -> int:
        """What the row has beside its prompt, as bits."""
        return ANSWER * (self.answer is not None) | HINTS * bool(self.hints) | SOLUTION * bool(self.solution)

    @property
    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else list(self.prompt)

    @property
    def position(self) -> float:
        """A number in [0, 1) that depends on the content of the prompt alone: equal prompts are on one side of a split."""
        content = CANONICAL.encode(self.messages)
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") / 2**64


@dataclass(frozen=True)
class PromptRows(Sequence[PromptRow]):
    """Rows that are parsed when they are read: a million of them take little more memory than their text."""

    lines: array[int] = field(default_factory=lambda: array("q"))
    stored: list[Stored] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, n: Any) -> Any:
        return prompt_row(self.lines[n], parse_row(self.stored[n]))[0]

    def __add__(self, other: PromptRows) -> PromptRows:
        return PromptRows(self.lines + other.lines, self.stored + other.stored)


@dataclass(frozen=True)
class PromptFile:
    """The rows of a file of prompts, and what one pass over them shows."""

    path: str
    rows: PromptRows = field(default_factory=PromptRows)
    sources: Counter[str] = field(default_factory=Counter)  # "prompt: question" → number of rows
    columns: set[str] = field(default_factory=set)
    positions: array[float] = field(default_factory=lambda: array("d"))  # of each row
    offers: bytearray = field(default_factory=bytearray)  # of each row

    def add(self, line: int, columns: Mapping[str, Any], stored: Stored) -> None:
        """Take one more row while the file is read. Raises ``InvalidRow``."""
        row, sources = prompt_row(line, columns)
        self.rows.lines.append(line)
        self.rows.stored.append(stored)
        for source in sources:
            self.sources[source] += 1
        self.columns.update(row.columns)
        self.positions.append(row.position)
        self.offers.append(row.offers)

    def describe(self) -> str:
        """Which columns were taken, for the log."""
        prompts, answers = (
            " and ".join(source.removeprefix(kind) for source in self.sources if source.startswith(kind))
            for kind in ("prompt: ", "answer: ")
        )
        from_ = f"answers from {answers}" if answers else "no answers"
        return f"{len(self.rows)} rows of {self.path}: prompts from {prompts}, {from_}"


def read_prompts(path: str | Path) -> PromptFile:
    """The prompts of a file. All bad rows raise one error, which names every line and quotes the first few faults."""
    file, errors = PromptFile(str(path)), LineErrors(Path(path))
    for line, columns, stored in scan_table(path):
        try:
            file.add(line, columns, stored)
        except InvalidRow as fault:
            errors.add(line, str(fault))
    errors.raise_if_any(len(file.rows) + len(errors.errors))
    return file


def prompt_row(line: int, columns: Mapping[str, Any]) -> tuple[PromptRow, list[str]]:
    """The row that these columns make, and which of them it was read from."""
    values = {name: value for name, value in columns.items() if value is not None}
    column = next((name for name in PROMPT_COLUMNS if values.get(name)), "")
    if not column:
        if empty := [name for name in PROMPT_COLUMNS if name in columns]:
            raise InvalidRow(f"{empty[0]} is empty")
        names = ", ".join(map(str, list(columns)[:8])) or "none"
        raise InvalidRow(f"columns {names}; write prompt (or one of {', '.join(PROMPT_COLUMNS[1:])})")
    prompt, spoken = _prompt(values[column], column)
    source, reference = _reference(values, column, spoken)
    named = {} if reference is None else {"answer": reference, "ground_truth": reference}
    help_ = _texts(values, "hint", "hints"), _texts(values, "solution", "steps", strict=False)
    help_ = (help_[0], () if column == "solution" else help_[1])
    row = PromptRow(line, prompt, {**named, **values}, _as_text(reference), parse_tools(values.get("tools")), *help_)
    return row, [f"prompt: {column}", *([f"answer: {source}"] if source else [])]


def _texts(values: Mapping[str, Any], one: str, many: str, strict: bool = True) -> tuple[str, ...]:
    """The texts of column ``many``, a list, or of column ``one``, a text. Without ``strict`` columns that hold anything else mean
    something else: others' files call much a solution."""
    listed, single = parse_cell(values.get(many)), values.get(one)
    if isinstance(listed, list) and listed and all(isinstance(text, str) for text in listed):
        return tuple(listed)
    if isinstance(single, str) and (listed is None or not strict):
        return (single,) if single else ()
    if strict and (listed or single):
        name, value = (many, listed) if listed else (one, single)
        raise InvalidRow(f"{name} is {value!r:.60}; write a text in {one}, or a list of texts in {many}")
    return ()


def _prompt(value: Any, column: str) -> tuple[str | tuple[Message, ...], str | None]:
    """The prompt, and the text of a last assistant message, which is an answer and not part of the prompt."""
    if isinstance(value, str):
        return value, None
    messages = parse_messages(value, column)
    spoken = messages[-1]["content"] if messages[-1]["role"] == "assistant" else None
    messages = messages if spoken is None else messages[:-1]
    if not messages:
        raise InvalidRow(f"{column} holds only an answer; write a user message before it")
    return tuple(messages), spoken


def _reference(values: Mapping[str, Any], prompt_column: str, spoken: str | None) -> tuple[str, Any]:
    """The column of the reference answer, and the answer."""
    model = values.get("reward_model")
    if isinstance(model, Mapping) and model.get("ground_truth") is not None:
        return GROUND_TRUTH, model["ground_truth"]
    for name in ANSWER_COLUMNS:
        if name in values and name != prompt_column:
            return name, values[name]
    return (prompt_column, spoken) if spoken is not None else ("", None)


def _as_text(reference: Any) -> str | None:
    if reference is None or isinstance(reference, str):
        return reference
    if isinstance(reference, list) and reference:  # a list of messages, or of accepted answers
        first = (
            reference[-1]["content"] if isinstance(reference[-1], dict) and "content" in reference[-1] else reference[0]
        )
        return first if isinstance(first, str) else json.dumps(first, default=str)
    return json.dumps(reference, default=str)


def holds_prompts_only(path: str | Path) -> str:
    """What a file lacks for learning from it alone, if it holds prompts and nothing else; empty if it holds more."""
    table = read_table(path)
    names = {name for _, columns in table for name, value in columns.items() if value is not None}
    if names & {"completion", "response", "chosen", "rejected"} or not names & set(PROMPT_COLUMNS):
        return ""
    dialogues = (columns.get("messages") or columns.get("conversations") or () for _, columns in table)
    for message in (m for dialogue in dialogues for m in dialogue):
        if isinstance(message, dict) and role_of(message) == "assistant":
            return ""  # dialogues that hold an answer
    return (
        f"{path} holds prompts ({len(table)} rows with {', '.join(sorted(names)[:6])}), neither completions nor pairs"
    )


def split_rows(file: PromptFile, share: float, held_out: PromptFile | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of the training rows and of the held-out rows, which follow the training file's where they have a file of
    their own. Else the held-out part is ``share`` of the prompts, by content."""
    if held_out is not None:
        out = set(held_out.positions)
        train = tuple(n for n, position in enumerate(file.positions) if position not in out)
        if not train:
            raise SettingError(
                f"every prompt of {file.path} is also in {held_out.path}; give files that share no prompt, or leave "
                "--eval-data out"
            )
        return train, tuple(range(len(file.rows), len(file.rows) + len(held_out.rows)))
    if share == 0:
        return tuple(range(len(file.rows))), ()
    first, last = min(file.positions), max(file.positions)
    if first == last:
        raise SettingError(
            f"{file.path} holds one prompt, so none can be held out; give another file with --eval-data, or write "
            "--held-out-share 0 --eval-tasks 0"
        )
    # at least one prompt is held out, and at least one is trained on
    bound = max(share, first)
    parts: tuple[list[int], list[int]] = ([], [])
    for n, position in enumerate(file.positions):
        parts[position <= bound and position < last].append(n)
    return tuple(parts[0]), tuple(parts[1])
