"""How reward functions are called: the names of a function's parameters decide.

    f(prompts, completions, completion_ids=None, **columns) -> list          one call for the answers of a group; lists
    f(data_sources, solution_strs, ground_truths, extra_infos) -> list       one call for the answers of a group; lists
    f(data_source, solution_str, ground_truth, extra_info=None) -> number    one call for each answer
    f(completion, answer=None, **columns) -> number                          one call for each answer

Each may be ``async``. A function returns a number, a bool (which is also a verdict: success or not), None (does not apply), or a
dict with ``score`` and further numbers. Prompts and completions are message lists where the row's prompt is one, else texts.
This module runs in the process of the function and in ours. Knows no process.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.errors import HostFault, SettingError, scarcity

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class AnswerSample:
    """One answer to be scored."""

    text: str  # of the last assistant message
    messages: Messages = field(default_factory=list)  # everything after the prompt
    ids: list[int] = field(default_factory=list)  # sampled token ids


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """Several answers to one prompt."""

    prompt: str | Messages
    answers: tuple[AnswerSample, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)

    def only(self, *indices: int) -> AnswerGroup:
        return replace(self, answers=tuple(self.answers[i] for i in indices))


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """What a function says of one answer: a score (None: the function does not apply to this row), or why there is none."""

    score: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)  # further numbers by name; they have no weight
    success: bool | None = None
    fault: str = ""
    lost: bool = False  # the fault is the machine's


GROUP_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
PLURALS = {"data_sources": "data_source", "ground_truths": "ground_truth", "extra_infos": "extra_info"}
"""Arguments of a function of ``solution_strs``, and the column that each lists."""
PROVIDED = {
    "completions": GROUP_ARGUMENTS,
    "solution_strs": ("solution_strs", "completion_ids"),
    "solution_str": ("solution_str", "completion_ids", "messages"),
    "completion": ("completion", "completion_ids", "messages"),
}
"""Arguments that come from no column, by the parameter that holds the answers. The first that a function has decides."""
ABSENT = {"data_source": "", "extra_info": {}}
"""What functions of ``solution_str`` are given where a row has no such column: they name these arguments whether they read them
or not."""
LISTED = ("completions", "solution_strs")  # these hold all answers of a group
REQUIRED = (
    "completions (all answers of a prompt), completion (the text of one), "
    "or solution_str with ground_truth (solution_strs with ground_truths for all)"
)
SHOWN = 60  # characters of a wrong value in a message


class RewardFailure(Exception):
    """A function raised, or returned what is no list of scores."""


@dataclass(frozen=True)
class Signature:
    """What of a reward function's signature matters."""

    parameters: tuple[str, ...]
    required: tuple[str, ...]  # those without a default
    takes_any: bool  # has **columns
    is_async: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        return cls(
            tuple(p.name for p in named),
            tuple(p.name for p in named if p.default is p.empty),
            any(p.kind is p.VAR_KEYWORD for p in parameters),
            inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)),  # noqa: B004
        )

    @property
    def style(self) -> str:
        """The parameter that holds the answers; empty if none does."""
        return next((name for name in PROVIDED if name in self.parameters), "")

    @property
    def whole_group(self) -> bool:
        """Whether one call scores all answers: lists, or coroutines that run at the same time."""
        return self.style in LISTED or self.is_async

    def check(self, what: str, columns: Iterable[str], renamed: Mapping[str, str], options: Iterable[str] = ()) -> None:
        """Refuse a function that cannot be called, or that requires a column no row has. ``options`` are given already."""
        if not self.style:
            taken = ", ".join(self.parameters) or "no arguments"
            raise SettingError(f"{what} takes {taken}; a reward function takes {REQUIRED}")
        provided = {*PROVIDED[self.style], *columns, *options, "prompt"}
        if self.style.startswith("solution_str"):
            provided |= ABSENT.keys()
        shown = ", ".join(sorted(columns)) or "none"
        for name in self.required:
            plural = PLURALS.get(name, name) if self.style == "solution_strs" else name
            column = renamed.get(name, plural)
            if column not in provided:
                raise SettingError(f"{what} requires {column!r}, and no row has such a column; columns: {shown}")
        absent = [column for column in renamed.values() if column not in provided]
        if absent:
            raise SettingError(f"{what} reads the column {absent[0]!r}, which no row has; columns: {shown}")

    def select(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return dict(arguments) if self.takes_any else {k: v for k, v in arguments.items() if k in self.parameters}

    def describe(self) -> str:
        styles = {
            "completions": "called with all answers to a prompt",
            "solution_strs": "called with all answers to a prompt as solution_strs",
            "solution_str": "called with each answer as solution_str",
            "completion": "called with the text of each answer",
        }
        return styles[self.style] + (", async" if self.is_async else "")


@dataclass(frozen=True)
class RewardCall:
    """A function with its options, ready to score groups."""

    function: Callable[..., Any]
    options: Mapping[str, Any]
    columns: Mapping[str, str]
    signature: Signature

    def score(self, group: AnswerGroup) -> list[RewardOutcome]:
        """Score every answer. Raises ``RewardFailure`` if one call for all of them fails; else a fault is one answer's."""
        listed, answers = self.signature.style in LISTED, group.answers
        calls = [self._for_group(group)] if listed else [self._for_answer(group, answer) for answer in answers]
        if self.signature.is_async:
            values = asyncio.run(self._gather(calls))
        else:  # outside an event loop: a function may start one of its own
            values = [self._value(arguments) for arguments in calls]
        for value in values:
            if isinstance(value, BaseException) and (words := scarcity(value, of_call=True)):
                raise HostFault(words) from value  # says nothing about the answer
        faults = {n: describe_fault(v) for n, v in enumerate(values) if isinstance(v, BaseException)}
        if not listed:
            return [RewardOutcome(fault=faults[n]) if n in faults else read_outcome(v) for n, v in enumerate(values)]
        if faults:
            raise RewardFailure(faults[0])
        scores = values[0].tolist() if hasattr(values[0], "tolist") else values[0]
        if not isinstance(scores, Sequence) or isinstance(scores, str) or len(scores) != len(answers):
            size = f"{len(scores)} values" if isinstance(scores, list | tuple) else f"{scores!r:.{SHOWN}}"
            raise RewardFailure(f"returned {size} for {len(answers)} answers; return a list with one number for each")
        return [read_outcome(score) for score in scores]

    async def _gather(self, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
        async def one(arguments: Mapping[str, Any]) -> Any:
            return await self.function(**arguments)

        return list(await asyncio.gather(*map(one, calls), return_exceptions=True))

    def _value(self, arguments: Mapping[str, Any]) -> Any:
        try:
            return self.function(**arguments)
        except (Exception, SystemExit) as fault:
            return fault

    def _for_group(self, group: AnswerGroup) -> dict[str, Any]:
        n, text = len(group.answers), isinstance(group.prompt, str)
        lists = {name: [value] * n for name, value in self._renamed(group.columns).items()}
        if self.signature.style == "solution_strs":
            provided: dict[str, Any] = {"solution_strs": [a.text for a in group.answers]}
        else:
            completions = [a.text if text else a.messages for a in group.answers]
            provided = {"prompts": [group.prompt] * n, "completions": completions, "trainer_state": None}
        provided["completion_ids"] = [a.ids for a in group.answers]
        return self.signature.select({**lists, **provided, **self.options})

    def _for_answer(self, group: AnswerGroup, answer: AnswerSample) -> dict[str, Any]:
        provided = {self.signature.style: answer.text, "completion_ids": answer.ids, "messages": answer.messages}
        arguments = {"prompt": group.prompt, **self._renamed(group.columns), **provided, **self.options}
        return self.signature.select(arguments)

    def _renamed(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns, those that an option names under the argument they are for; absent ones that are required as None."""
        named = {argument: columns.get(column) for argument, column in self.columns.items()}
        absent = {name: ABSENT.get(name) for name in self.signature.required if name not in columns}
        plural = {
            name: columns.get(column, ABSENT.get(column))
            for name, column in PLURALS.items()
            if name in self.signature.parameters
        }
        return {**absent, **plural, **columns, **named}


# -------------------------------------------------------------------- results


def read_outcome(value: Any) -> RewardOutcome:
    """The outcome that a function's return value stands for."""
    if not isinstance(value, Mapping):
        score, fault = read_number(value)
        return RewardOutcome(score, success=value if isinstance(value, bool) else None, fault=fault)
    if "score" not in value and "reward" not in value:
        keys = ", ".join(map(str, list(value)[:6]))
        return RewardOutcome(fault=f"returned a dict with {keys or 'no keys'}; return one with 'score'")
    key = "score" if "score" in value else "reward"
    score, fault = read_number(value[key])
    success = value.get("success")
    verdict = bool(success) if success is not None else value[key] if isinstance(value[key], bool) else None
    extra = {str(k): read_number(v)[0] for k, v in value.items() if k not in (key, "success")}
    numbers = {k: v for k, v in extra.items() if v is not None and math.isfinite(v)}
    return RewardOutcome(score, numbers, verdict, fault)


def read_number(value: Any) -> tuple[float | None, str]:
    """A number, also NumPy's or a tensor's, and why it is none. None is no number and no fault."""
    if value is None:
        return None, ""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool | int | float):
        try:
            number = float(value)
        except OverflowError:
            return None, "returned an integer beyond the range of floats"
        return (number, "") if math.isfinite(number) else (None, f"returned {number}; return a finite number")
    return None, f"returned {value!r:.{SHOWN}}; return a number, a bool, None or a dict with 'score'"


def describe_fault(fault: BaseException) -> str:
    """``KeyError: 'x' (my.py line 12)``: the exception and the last line it passed."""
    frames = traceback.extract_tb(fault.__traceback__)
    where = f" ({frames[-1].filename.rpartition('/')[2]} line {frames[-1].lineno})" if frames else ""
    try:
        text = str(fault)
    except Exception:  # an exception whose own __str__ raises
        text = ""
    return f"{type(fault).__name__}{': ' * bool(text)}{text:.300}{where}"
