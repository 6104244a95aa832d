"""What a comparison reads of each run: its seed, its tokens, and its outcome at a given number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import SettingError
from turnwise.inspector.queries import RunReader


@dataclass(frozen=True)
class RunOutcome:
    """One run. ``curve``: sampled tokens and held-out outcome, from the evaluation before training to the one after."""

    path: str
    label: str
    seed: int
    tasks: int
    measure: str  # success, or reward where the environment reports no success
    curve: tuple[tuple[float, float], ...]

    @property
    def tokens(self) -> float:
        return self.curve[-1][0]

    def at(self, tokens: float) -> float:
        """The outcome after so many tokens, by interpolation between evaluations."""
        xs = [x for x, _ in self.curve]
        n = bisect_left(xs, tokens)
        if n == 0 or n == len(xs):
            return self.curve[min(n, len(xs) - 1)][1]
        (x0, y0), (x1, y1) = self.curve[n - 1], self.curve[n]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


def read_outcome(path: str | Path, label: str = "") -> RunOutcome:
    """The outcome of a finished run; refuses one without a held-out evaluation."""
    with RunReader(path) as reader:
        before, after = ((reader.evaluation(when) or {}).get("summary", {}) for when in ("before", "after"))
        settings, rows = reader.settings, reader.metrics()
    if not after.get("tasks"):
        raise SettingError(
            f"{path} has no evaluation after training, so there is nothing to compare; finish it, or train with --eval-tasks"
        )
    measure = "success" if after.get("success") is not None else "reward"
    title = f"{settings.get('method')}+{settings['credit']}" if settings.get("credit") else str(settings.get("method"))
    curve = _curve(before, after, [row.values for row in rows], measure)
    return RunOutcome(str(path), label or title, int(settings.get("seed", 0)), int(after["tasks"]), measure, curve)


def _curve(
    before: Mapping[str, Any], after: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], measure: str
) -> tuple[tuple[float, float], ...]:
    points, tokens = [(0.0, float(before.get(measure) or 0.0))], 0.0
    for row in rows:
        tokens += float(row.get("tokens") or 0.0)
        value = row.get(f"eval/{measure}")
        if value is not None and tokens > points[-1][0]:
            points.append((tokens, float(value)))
    end = (max(tokens, 1.0), float(after[measure]))
    return (*(point for point in points if point[0] < end[0]), end)


def common_tokens(outcomes: Sequence[RunOutcome]) -> float:
    """The token budget that every run reached."""
    return min(outcome.tokens for outcome in outcomes)
