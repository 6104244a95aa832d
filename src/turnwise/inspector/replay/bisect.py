"""``turnwise bisect A B``: the first difference of two runs, and what they were started with that may explain it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.inspector.replay.divergence import Divergence, RunRecord, first_divergence
from turnwise.store.rundir import RunDir

NO_CAUSE = ("out", "name", "trackers", "profile", "checkpoint_every", "keep_checkpoints", "eval_every", "eval_tasks")
STARTED = "started.json"


@dataclass(frozen=True)
class Bisection:
    """``causes``: settings, packages and machine facts that differ, as name → both values."""

    left: str
    right: str
    steps: int  # compared, up to the first difference
    divergence: Divergence | None
    causes: Mapping[str, tuple[Any, Any]]

    def text(self) -> str:
        lines = [self._verdict()]
        if self.causes:
            lines.append("what the runs were started with differs in:")
            lines += [f"  {name}: {a!r} and {b!r}" for name, (a, b) in self.causes.items()]
        elif self.divergence is not None:
            lines.append(
                "settings, packages, device and threads are the same; the environment's code, its files or a tool may differ"
            )
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.divergence is not None:
            return f"{self.left} and {self.right} part at {self.divergence.text()}"
        return f"{self.left} and {self.right} are the same in all {self.steps} steps"

    def as_dict(self) -> dict[str, Any]:
        first = None if self.divergence is None else self.divergence.as_dict()
        causes = {name: list(pair) for name, pair in self.causes.items()}
        return {
            "left": self.left, "right": self.right, "steps": self.steps, "divergence": first, "causes": causes,
        }  # fmt: skip


def bisect_runs(left: str | Path, right: str | Path) -> Bisection:
    """Compare two runs from their start."""
    a, b = RunRecord.read(left), RunRecord.read(right)
    first = _initial_difference(a.path, b.path) or first_divergence(a, b)
    steps = len({*a.metrics, *b.metrics}) if first is None else first.step
    return Bisection(str(left), str(right), steps, first, _causes(a.path, b.path))


def _initial_difference(a: Path, b: Path) -> Divergence | None:
    """The weights that both begin with; a difference there is a difference before the first step."""
    digests = [_digest(path / "initial" / "model.safetensors") for path in (a, b)]
    return None if digests[0] == digests[1] else Divergence(0, "initial weights", digests[0], digests[1])


def _digest(path: Path) -> str:
    if not path.is_file():
        return "none"
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:12]


def _causes(a: Path, b: Path) -> dict[str, tuple[Any, Any]]:
    settings = [RunDir(path).metadata()["settings"] for path in (a, b)]
    facts = [_started(path) for path in (a, b)]
    out = _differing(*settings)
    for part in ("machine", "versions"):
        out |= {f"{part}: {name}": pair for name, pair in _differing(*(f.get(part, {}) for f in facts)).items()}
    return out


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [name for name in {**a, **b} if name not in NO_CAUSE]
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def _started(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((path / STARTED).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
