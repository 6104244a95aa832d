"""Where two runs part: the first step, task, token and field that differ. Exact comparison, no tolerance.

The order inside a step is the order in which a run computes: tasks, what the policy read and sampled, its log-probabilities,
rewards, then the metrics of the update. Times and rates of time are left out. ``turnwise bisect A B`` adds what the two runs
were started with that may explain the difference.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from turnwise.core.records import Group, Trajectory
from turnwise.inspector.queries import RunReader
from turnwise.store.rundir import RunDir

TOKEN_FIELDS = ("tokens", "logp", "mass", "version")
TURN_FIELDS = ("reward", "agent", "state", "stop", "tool_calls", "tool_errors")
TRAJECTORY_FIELDS = ("status", "reason", "success", "rewards", "origin")
# prefixes of metrics that measure time, and of evaluations, which another run may take at other steps
NOT_COMPARED = ("step", "time", "seconds", "tokens_per_second", "judge/", "helper/", "eval/")
PLACE = ("step", "task", "trajectory", "turn", "token")
# settings that change no step
NO_CAUSE = ("out", "name", "trackers", "profile", "checkpoint_every", "keep_checkpoints", "eval_every", "eval_tasks")
STARTED = "started.json"


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
        place = [f"{name} {value}" for name in PLACE if (value := getattr(self, name)) not in ("", None)]
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
            groups = [reader.group(row.id) for row in rows]
        head = lambda group: group.id.split("~")[0]  # noqa: E731
        return sorted(groups, key=lambda group: (int(head(group)) if head(group).isdigit() else 0, group.id))


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
    """All differences of one step, in the order of computation; for each trajectory only the first."""
    for a, b in zip_longest(left.groups(step), right.groups(step)):
        if a is None or b is None or a.task != b.task:
            tasks = ["none" if group is None else group.task.key for group in (a, b)]
            yield Divergence(step, "task", tasks[0], tasks[1], task=(a or b).task.key)
            break  # what follows are other tasks
        for x, y in zip_longest(a.trajectories, b.trajectories):
            if x is None or y is None:
                yield Divergence(step, "trajectories", len(a.trajectories), len(b.trajectories), task=a.task.key)
                break
            difference = _trajectory(x, y)
            if difference is not None:
                field, turn, token, one, other = difference
                yield Divergence(step, field, one, other, a.task.key, x.id, turn, token)
    metrics = (left.metrics[step], right.metrics[step])
    for name in dict.fromkeys([*metrics[0], *metrics[1]]):
        one, other = (values.get(name) for values in metrics)
        if not name.startswith(NOT_COMPARED) and not _same(one, other):
            yield Divergence(step, name, one, other)


def _trajectory(x: Trajectory, y: Trajectory) -> tuple[str, int | None, int | None, Any, Any] | None:
    """Field, turn, token and both values of the first difference: later turns of the episode follow from it."""
    for n, (s, t) in enumerate(zip_longest(x.turns, y.turns)):
        if s is None or t is None:
            return "turns", n, None, len(x.turns), len(y.turns)
        # what was read, then token by token, then what followed
        for k, (a, b) in enumerate(zip_longest(s.context, t.context)):
            if a != b:
                return "context", n, k, a, b
        for k in range(max(len(s.tokens), len(t.tokens))):
            # log-probabilities before the next token: they differ first where arithmetic does
            for name in TOKEN_FIELDS:
                a, b = (values[k] if k < len(values := getattr(turn, name)) else None for turn in (s, t))
                if not _same(a, b):
                    return name, n, k, a, b
        for name in TURN_FIELDS:
            if not _same(getattr(s, name), getattr(t, name)):
                return name, n, None, getattr(s, name), getattr(t, name)
    for name in TRAJECTORY_FIELDS:
        if getattr(x, name) != getattr(y, name):
            return name, None, None, getattr(x, name), getattr(y, name)
    return None


def _same(a: Any, b: Any) -> bool:
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or a == b


def _shown(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value!r}"
    return value if isinstance(value, bool | int | str) or value is None else str(value)


# --------------------------------------------------------------------- bisect


@dataclass(frozen=True)
class Bisection:
    """``causes``: settings, packages and machine facts that differ, as name → both values."""

    left: str
    right: str
    steps: int  # compared, up to the first difference
    divergence: Divergence | None
    causes: Mapping[str, tuple[Any, Any]]

    def text(self) -> str:
        if self.divergence is not None:
            lines = [f"{self.left} and {self.right} part at {self.divergence.text()}"]
        else:
            lines = [f"{self.left} and {self.right} are the same in all {self.steps} steps"]
        if self.causes:
            lines.append("what the runs were started with differs in:")
            lines += [f"  {name}: {a!r} and {b!r}" for name, (a, b) in self.causes.items()]
        elif self.divergence is not None:
            lines.append(
                "settings, packages, device and threads are the same; the environment's code, its files or a tool may differ"
            )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        first = None if self.divergence is None else self.divergence.as_dict()
        causes = {name: list(pair) for name, pair in self.causes.items()}
        return {
            "left": self.left, "right": self.right, "steps": self.steps, "divergence": first, "causes": causes,
        }  # fmt: skip


def bisect_runs(left: str | Path, right: str | Path) -> Bisection:
    """Compare two runs from their start: the weights that both begin with, then step by step."""
    a, b = RunRecord.read(left), RunRecord.read(right)
    digests = [_digest(record.path / "initial" / "model.safetensors") for record in (a, b)]
    first = Divergence(0, "initial weights", digests[0], digests[1]) if digests[0] != digests[1] else None
    first = first or first_divergence(a, b)
    steps = len({*a.metrics, *b.metrics}) if first is None else first.step
    causes = _differing(*(RunDir(record.path).metadata()["settings"] for record in (a, b)))
    started = [_started(record.path) for record in (a, b)]
    for part in ("machine", "versions"):
        facts = _differing(*(values.get(part, {}) for values in started))
        causes |= {f"{part}: {name}": pair for name, pair in facts.items()}
    return Bisection(str(left), str(right), steps, first, causes)


def _digest(path: Path) -> str:
    if not path.is_file():
        return "none"
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:12]


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [name for name in {**a, **b} if name not in NO_CAUSE]
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def _started(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((path / STARTED).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
