"""The scorers of a run: reward functions over the rows of a file or over the episodes of an environment.

Imports no torch: functions are loaded and checked before anything else is. Knows no method.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.protocols import GroupScorer
from turnwise.core.records import Group
from turnwise.environments.base import overrides
from turnwise.rewards.functions import RewardFunction, RewardLimits, check_rewards, open_rewards
from turnwise.rewards.spec import parse_rewards
from turnwise.rollout.reward_scorer import Columns, FunctionScorer
from turnwise.training.prompt_data import prompt_data, uses_prompts

Decode = Callable[[Sequence[int]], str]
TASK_COLUMNS = ("difficulty", "seed", "split")


def open_functions(settings: Settings, objects: Mapping[str, Callable[..., Any]]) -> tuple[RewardFunction, ...]:
    limits = RewardLimits(settings.reward_seconds, settings.reward_memory)
    return open_rewards(parse_rewards(settings.reward), limits, objects)


def check_reward_functions(settings: Settings, env_class: type, objects: Mapping[str, Callable[..., Any]]) -> None:
    """Load every reward function once, and refuse what cannot be called with the columns there are."""
    functions = open_functions(settings, objects)
    try:
        check_rewards(functions, _column_names(settings, env_class))
    finally:
        for function in functions:
            function.close()


def make_scorer(
    settings: Settings, env_class: type, objects: Mapping[str, Callable[..., Any]], decode: Decode
) -> GroupScorer | None:
    """What scores the groups of a run besides its environment; None if nothing does."""
    rows = uses_prompts(settings.as_dict())
    if not settings.reward and (rows or not settings.judge):
        return None  # beside a judge alone, the environment's own reward is still weighed
    return FunctionScorer(
        open_functions(settings, objects),
        _row_columns(settings) if rows else _task_columns(decode),
        settings.reward_seconds,
        None if rows else settings.env_reward_weight,
        None if settings.reward_failure == "fail" else float(settings.reward_failure),
    )


@contextlib.contextmanager
def open_scorer(
    settings: Settings, env_class: type, objects: Mapping[str, Callable[..., Any]], decode: Decode
) -> Iterator[GroupScorer | None]:
    """``make_scorer``, closed at the end."""
    scorer = make_scorer(settings, env_class, objects, decode)
    try:
        yield scorer
    finally:
        if scorer is not None:
            scorer.close()


def describe(scorer: GroupScorer | None) -> list[str]:
    """How each reward function is called, for the log."""
    functions = scorer.functions if isinstance(scorer, FunctionScorer) else ()
    where = "in this process, where a call that hangs cannot be killed", "in a process of its own"
    return [
        f"reward {f.spec.name}, weight {f.spec.weight:g}: {f.signature.describe()}, {where[not f.runs_here]}"
        for f in functions
    ]


def _column_names(settings: Settings, env_class: type) -> frozenset[str]:
    if uses_prompts(settings.as_dict()):
        return prompt_data(settings.as_dict()).columns
    answered = ("answer", "ground_truth") if overrides(env_class, "answer") else ()
    return frozenset((*TASK_COLUMNS, *answered))


def _row_columns(settings: Settings) -> Columns:
    data = prompt_data(settings.as_dict())

    def columns(group: Group) -> tuple[Any, Mapping[str, Any]]:
        row = data.row(group.task)
        return (row.prompt if isinstance(row.prompt, str) else list(row.prompt)), row.columns

    return columns


def _task_columns(decode: Decode) -> Columns:
    def columns(group: Group) -> tuple[None, Mapping[str, Any]]:
        task = group.task
        answer = next((decode(t.answer) for t in group.trajectories if t.answer), None)
        named = {} if answer is None else {"answer": answer, "ground_truth": answer}
        return None, {**named, **{name: getattr(task, name) for name in TASK_COLUMNS}}

    return columns
