"""What the rules read of a run: its settings, the metrics of its steps, what became of its groups, its evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.inspector.queries import RunReader
from turnwise.observe.metric_names import finite_number
from turnwise.observe.run_health import HealthView, RunHealth, RunLimits

TREND_STEPS = 8  # steps below which first and last quarter are no trend
DROPPED = "dropped/"


@dataclass(frozen=True)
class RunFacts:
    """One run, read once. ``rows``: the metrics of each step of training, evaluations merged into them."""

    name: str
    settings: Settings
    rows: Sequence[Mapping[str, float | None]]
    drops: Mapping[str, int] = field(default_factory=dict)  # dropped groups by reason
    trained_groups: int = 0
    tasks: int = 0  # distinct tasks that were trained on
    before: Mapping[str, Any] = field(default_factory=dict)  # summaries of the evaluations
    after: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = True
    device: str = "cpu"

    @classmethod
    def read(cls, path: str | Path) -> RunFacts:
        with RunReader(path) as reader:
            merged: dict[int, dict[str, float | None]] = {}
            for row in reader.metrics():
                merged.setdefault(row.step, {}).update(row.values)
            rows = [merged[step] for step in sorted(merged) if "groups" in merged[step]]
            counts = reader.counts() if reader.has_ledger else None
            trained = reader.groups(state="trained") if reader.has_ledger else []
            evaluations = [(reader.evaluation(when) or {}).get("summary", {}) for when in ("before", "after")]
            return cls(
                name=str(path),
                settings=Settings.of(dict(reader.settings)),
                rows=rows,
                drops=dict(counts.reasons) if counts else {},
                trained_groups=len(trained),
                tasks=len({row.task.key for row in trained}),
                before=evaluations[0],
                after=evaluations[1],
                finished=reader.summary is not None,
                device=str((reader.summary or {}).get("device", "cpu")),
            )

    # ------------------------------------------------------------------ series

    def series(self, name: str) -> list[float]:
        """The finite values of a metric, in order."""
        return [value for row in self.rows if (value := finite_number(row.get(name))) is not None]

    def first(self, name: str) -> float:
        """The mean over the first quarter of the run; NaN for a run that is too short or has no such metric."""
        return _mean(self._quarter(name, slice(None, max(2, len(self.rows) // 4))))

    def last(self, name: str) -> float:
        """The mean over the last quarter."""
        return _mean(self._quarter(name, slice(-max(2, len(self.rows) // 4), None)))

    def _quarter(self, name: str, part: slice) -> list[float]:
        if len(self.rows) < TREND_STEPS:
            return []
        return [value for row in self.rows[part] if (value := finite_number(row.get(name))) is not None]

    def mean(self, name: str) -> float:
        return _mean(self.series(name))

    def share(self, name: str, above: float) -> float:
        """The share of steps in which a metric is above a bound; NaN where it was never measured."""
        values = self.series(name)
        return _mean([float(value > above) for value in values])

    def best(self, name: str) -> float:
        """The highest mean over a quarter of the run."""
        values, width = self.series(name), max(2, len(self.rows) // 4)
        if len(values) < TREND_STEPS:
            return math.nan
        return max(_mean(values[n : n + width]) for n in range(len(values) - width + 1))

    def evidence(self, names: Sequence[str]) -> dict[str, tuple[float, float]]:
        """First and last value of each metric that was measured."""
        found = {name: self.series(name) for name in names}
        return {name: (values[0], values[-1]) for name, values in found.items() if values}

    # --------------------------------------------------- the running conditions

    @property
    def group_size(self) -> int:
        pairs = [(finite_number(r.get("trajectories")), finite_number(r.get("groups"))) for r in self.rows]
        sizes = [t / g for t, g in pairs if t and g]
        return self.settings.group_size or round(_mean(sizes) if sizes else 0)

    @cached_property
    def views(self) -> list[HealthView]:
        """What the conditions of a running run read, step by step."""
        s, dropped = self.settings, dict[str, int]()
        limits = RunLimits(s.max_tokens, s.context, self.group_size, s.temperature, s.lr, self._tolerance())
        health, views = RunHealth(limits), list[HealthView]()
        for row in self.rows:
            dropped = {
                name.removeprefix(DROPPED): round(n) for name, n in row.items() if name.startswith(DROPPED) and n
            }
            health.dropped = dropped
            views.append(health.view({name: math.nan if v is None else v for name, v in row.items()}))
        return views

    def _tolerance(self) -> float:
        if self.settings.mismatch_tolerance:
            return self.settings.mismatch_tolerance
        from turnwise.engines.learner.policy_check import TOLERANCE, TOLERANCE_BF16

        reduced = {self.settings.dtype, self.settings.rollout_dtype} & {"bfloat16", "float16", "fp8"}
        return TOLERANCE_BF16 if reduced or self.device.startswith("cuda") else TOLERANCE


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
