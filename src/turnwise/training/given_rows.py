"""Rows and reward functions that the caller of ``train`` gave as objects: replaced by names that the settings can hold.

Rows are written to a file beside the runs, named by their content, so that a run can be resumed. A function that another process
can import becomes ``module:name`` and runs in a process that can be killed; any other stays an object of this process.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from turnwise.config.named_object import GIVEN_OBJECT, importable_name
from turnwise.config.settings import Settings
from turnwise.errors import SettingError

DEFAULT_OUT = Settings.__dataclass_fields__["out"].default


def name_rewards(values: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Replace functions under ``reward`` by names; returns those that have none, by the name recorded for them."""
    given = values.get("reward")
    if given is None or isinstance(given, str):
        return {}
    listed = list(given) if isinstance(given, list | tuple) else [given]
    objects: dict[str, Callable[..., Any]] = {}
    values["reward"] = tuple(_name_reward(item, objects) for item in listed)
    return objects


def _name_reward(item: Any, objects: dict[str, Callable[..., Any]]) -> str:
    """``f``, ``(0.5, f)`` or a name, as the settings write it."""
    weight, function = item if isinstance(item, tuple) and len(item) == 2 else (1.0, item)
    prefix = f"{float(weight)!r}*" if weight != 1 else ""
    if isinstance(function, str):
        return prefix + function
    if not callable(function):
        raise SettingError(f"reward is {function!r}; write a function, (weight, function), or a name such as 'exact'")
    name = importable_name(function)
    if not name:
        title = re.sub(r"\W", "_", getattr(function, "__name__", type(function).__name__))
        name, n = f"{GIVEN_OBJECT}{title}", 2
        while name in objects:
            name, n = f"{GIVEN_OBJECT}{title}_{n}", n + 1
        objects[name] = function
    return prefix + name


def name_rows(values: dict[str, Any]) -> None:
    """Replace rows under ``data`` and ``eval_data`` (a list of dicts, or a data set) by the path of a file that holds them."""
    for name in ("data", "eval_data"):
        given = values.get(name)
        if isinstance(given, Path):
            values[name] = str(given)
        elif given is not None and not isinstance(given, str):
            values[name] = str(_write_rows(name, given, Path(values.get("out", DEFAULT_OUT))))


def _write_rows(name: str, rows: Any, out: Path) -> Path:
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        what = "several splits; give one of them" if isinstance(rows, Mapping) else "write a path or a list of dicts"
        raise SettingError(f"{name} is a {type(rows).__name__}: {what}")
    lines = [_line(name, n, row) for n, row in enumerate(rows)]
    text = "".join(f"{line}\n" for line in lines)
    path = out / f"rows-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _line(name: str, n: int, row: Any) -> str:
    if not isinstance(row, Mapping):
        raise SettingError(f"row {n} of {name} is {row!r:.60}; write a dict with the columns of the row")
    try:
        return json.dumps(dict(row))
    except (TypeError, ValueError) as fault:
        raise SettingError(
            f"row {n} of {name} holds what JSON cannot ({fault}); give texts, numbers, lists and dicts"
        ) from None
