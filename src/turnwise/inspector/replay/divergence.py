"""Where two runs part: the first step, task, token and field that differ. Exact comparison, no tolerance.

The order inside a step is the order in which a run computes: tasks, what the policy read and sampled, its log-probabilities,
rewards, then the metrics of the update. Times and rates of time are left out. Does not know why a value is what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from turnwise.core.records import Group, Trajectory, Turn
from turnwise.inspector.queries import RunReader

TOKEN_FIELDS = ("tokens", "logp", "mass", "version")
TURN_FIELDS = ("reward", "agent", "state", "stop", "tool_calls", "tool_errors")
TRAJECTORY_FIELDS = ("status", "reason", "success", "rewards", "origin")
NOT_COMPARED = ("step", "time", "seconds", "tokens_per_second", "judge/")  # prefixes of metrics that measure time


@dataclass(frozen=True)
class Divergence:
    """The first difference. ``turn`` and ``token`` are None where the field belongs to more than one token."""

    step: int
    field: str
    left: Any
    right: Any
    task: str = ""
    trajectory: str = ""
    turn: int | None = None
    token: int | None = None

    def text(self) -> str:
        place = [f"step {self.step}"]
        place += [f"task {self.task}"] if self.task else []
        place += [f"trajectory {self.trajectory}"] if self.trajectory else []
        place += [f"turn {self.turn}"] if self.turn is not None else []
        place += [f"token {self.token}"] if self.token is not None else []
        return f"{', '.join(place)}: {self.field} is {_shown(self.left)} and {_shown(self.right)}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "left": _shown(self.left), "right": _shown(self.right)}


@dataclass(frozen=True)
class RunRecord:
    """What a run recorded: metrics by step, read once, and groups by step on demand."""

    path: Path
    metrics: Mapping[int, Mapping[str, Any]]

    @classmethod
    def read(cls, path: str | Path) -> RunRecord:
        rows: dict[int, dict[str, Any]] = {}
        with RunReader(path) as reader:
            for row in reader.metrics():  # an evaluation logs a row of its own for a step
                rows.setdefault(row.step, {}).update(row.values)
        return cls(Path(path), rows)

    def groups(self, step: int) -> list[Group]:
        """The groups that a step trained on or dropped, in the order they were drawn."""
        with RunReader(self.path) as reader:
            if not reader.has_ledger:
                return []
            rows = [row for row in reader.groups(step=step) if row.trajectories]
            return sorted((reader.group(row.id) for row in rows), key=lambda group: _number(group.id))


def first_divergence(left: RunRecord, right: RunRecord, steps: Sequence[int] | None = None) -> Divergence | None:
    """The first difference over ``steps``; over all steps that either run took if none are given."""
    for step in steps if steps is not None else sorted({*left.metrics, *right.metrics}):
        taken = [step in record.metrics for record in (left, right)]
        if not all(taken):
            return Divergence(step, "step taken", taken[0], taken[1])
        for divergence in step_divergences(left, right, step):
            return divergence
    return None


def step_divergences(left: RunRecord, right: RunRecord, step: int) -> Iterator[Divergence]:
    """All differences of one step, in the order of computation; for each turn only the first."""
    pairs = zip_longest(left.groups(step), right.groups(step))
    for a, b in pairs:
        if a is None or b is None or a.task != b.task:
            yield Divergence(step, "task", _task(a), _task(b), task=_task(a or b))
            break  # what follows are other tasks
        yield from _group(step, a, b)
    yield from _metrics(step, left.metrics[step], right.metrics[step])


def _group(step: int, a: Group, b: Group) -> Iterator[Divergence]:
    for x, y in zip_longest(a.trajectories, b.trajectories):
        if x is None or y is None:
            yield Divergence(step, "trajectories", len(a.trajectories), len(b.trajectories), task=a.task.key)
            return
        yield from _trajectory(step, a.task.key, x, y)


def _trajectory(step: int, task: str, x: Trajectory, y: Trajectory) -> Iterator[Divergence]:
    place: dict[str, Any] = {"task": task, "trajectory": x.id}
    for n, (s, t) in enumerate(zip_longest(x.turns, y.turns)):
        if s is None or t is None:
            yield Divergence(step, "turns", len(x.turns), len(y.turns), turn=n, **place)
            return
        difference = _turn(s, t)
        if difference is not None:
            field, token, left, right = difference
            yield Divergence(step, field, left, right, turn=n, token=token, **place)
            return  # later turns of this episode follow from it
    for name in TRAJECTORY_FIELDS:
        if getattr(x, name) != getattr(y, name):
            yield Divergence(step, name, getattr(x, name), getattr(y, name), **place)
            return


def _turn(s: Turn, t: Turn) -> tuple[str, int | None, Any, Any] | None:
    """Field, position and both values of the first difference: what was read, then token by token, then what followed."""
    for n, (a, b) in enumerate(zip_longest(s.context, t.context)):
        if a != b:
            return "context", n, a, b
    for n in range(max(len(s.tokens), len(t.tokens))):
        for name in TOKEN_FIELDS:
            a, b = (_at(getattr(turn, name), n) for turn in (s, t))
            if not _same(a, b):
                return name, n, a, b
    for name in TURN_FIELDS:
        a, b = getattr(s, name), getattr(t, name)
        if not _same(a, b):
            return name, None, a, b
    return None


def _metrics(step: int, left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[Divergence]:
    shared_order = [*left, *(name for name in right if name not in left)]
    for name in shared_order:
        if name.startswith(NOT_COMPARED) or name.startswith("eval/"):
            continue
        if not _same(left.get(name), right.get(name)):
            yield Divergence(step, name, left.get(name), right.get(name))


def _at(values: Sequence[Any], n: int) -> Any:
    return values[n] if n < len(values) else None


def _same(a: Any, b: Any) -> bool:
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or a == b


def _task(group: Group | None) -> str:
    return "none" if group is None else group.task.key


def _number(group_id: str) -> tuple[int, str]:
    head = group_id.split("~")[0]
    return (int(head) if head.isdigit() else 0, group_id)


def _shown(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value!r}"
    return value if isinstance(value, bool | int | str) or value is None else str(value)
