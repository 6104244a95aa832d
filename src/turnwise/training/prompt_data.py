"""Rows of ``--data`` with ``--reward`` as the tasks of a run: split, numbered, played as an environment, scored by columns.

A row's number is its position in the training file; rows of ``--eval-data`` follow. Knows no model and no method.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from turnwise import environments
from turnwise.core.records import Task
from turnwise.data.files import digest
from turnwise.data.prompts import PromptFile, PromptRow, read_prompts, split_rows
from turnwise.environments import prompts
from turnwise.environments.prompts import tool_prompts
from turnwise.errors import SettingError
from turnwise.rewards.spec import parse_rewards


@dataclass(frozen=True)
class PromptData:
    """The rows of a run that answers prompts."""

    file: PromptFile
    eval_file: PromptFile | None
    rows: Mapping[int, PromptRow]  # by number
    env_class: type

    @classmethod
    def of(cls, file: PromptFile, eval_file: PromptFile | None, share: float, verdict: bool) -> PromptData:
        train, held_out = split_rows(file, share, eval_file)
        rows = dict(enumerate([*file.rows, *(eval_file.rows if eval_file else ())]))
        numbers = {id(row): n for n, row in rows.items()}
        parts = {"train": train, "held_out": held_out}
        problems = {s: {numbers[id(r)]: _problem(r) for r in some} for s, some in parts.items()}
        return cls(file, eval_file, rows, prompts.prompt_class(problems, verdict))

    @property
    def columns(self) -> frozenset[str]:
        return self.file.columns | (self.eval_file.columns if self.eval_file else frozenset())

    def row(self, task: Task) -> PromptRow:
        return self.rows[task.seed]

    def digests(self) -> dict[str, str]:
        return {file.path: digest(file.path) for file in (self.file, self.eval_file) if file is not None}

    def messages(self) -> list[str]:
        """What was read, for the log."""
        seeds = self.env_class.seeds  # type: ignore[attr-defined]
        files = [file.describe() for file in (self.file, self.eval_file) if file is not None]
        left_out = len(self.file.rows) - len(seeds["train"]) if self.eval_file else 0
        also = f"; {left_out} rows are also in the held-out file and not trained on" if left_out else ""
        return [*files, f"{len(seeds['train'])} rows to train on, {len(seeds['held_out'])} held out{also}"]


def _problem(row: PromptRow) -> prompts.PromptProblem:
    return prompts.PromptProblem(tuple(row.messages), row.answer, row.tools)


def uses_prompts(values: Mapping[str, Any]) -> bool:
    """Whether these settings make the rows of ``--data`` the tasks: where rewards score answers to them, or an agent plays."""
    return bool(values.get("data")) and bool(values.get("reward") or values.get("judge") or values.get("agent"))


def prompt_data(values: Mapping[str, Any]) -> PromptData:
    """The rows that these settings name. A file is read once, until it changes."""
    data, eval_data = str(values["data"]), str(values.get("eval_data") or "")
    reward = values.get("reward") or ()
    specs = parse_rewards([reward] if isinstance(reward, str) else reward)
    verdict = any(spec.gives_verdict or not spec.built_in for spec in specs)
    share = float(values.get("held_out_share", 0.1))
    found = _read(data, _stamp(data), eval_data, _stamp(eval_data), share, verdict)
    names = _tool_names(values)
    return replace(found, env_class=_with_tools(found.env_class, names)) if names else found


def _tool_names(values: Mapping[str, Any]) -> tuple[str, ...]:
    named = values.get("tools") or ()
    return tuple(named.split(",")) if isinstance(named, str) else tuple(named)


@lru_cache(maxsize=4)
def _with_tools(env_class: type, names: tuple[str, ...]) -> type:
    return tool_prompts(env_class, names)


@lru_cache(maxsize=4)
def _read(data: str, stamp: object, eval_data: str, eval_stamp: object, share: float, verdict: bool) -> PromptData:
    return PromptData.of(read_prompts(data), read_prompts(eval_data) if eval_data else None, share, verdict)


def _stamp(path: str) -> object:
    """Changes when the file does."""
    if not os.path.isfile(path):
        return None
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size


def environment_class(values: Mapping[str, Any], default: str) -> type:
    """The class that these settings play: the one of ``--env``, or the prompts of ``--data`` where rewards score answers."""
    env = values.get("env")
    if _tool_names(values) and not uses_prompts(values):
        raise SettingError("--tools are for the prompts of a file; write --data FILE --reward FUNCTION beside it")
    if uses_prompts(values):
        if env not in (None, prompts.NAME):
            raise SettingError(
                f"with --reward the prompts of --data {values['data']} are the environment; leave --env {env} out, or leave "
                "--data out to reward the episodes of that environment"
            )
        return prompt_data(values).env_class
    if env == prompts.NAME:
        raise SettingError("the environment prompts is made of a file; write --data FILE and --reward FUNCTION")
    return environments.load(env or default)
