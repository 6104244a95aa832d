"""Overview: curves with intervals, what changed lately, warnings in words, and the way into each step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from turnwise.inspector.page.blocks import DataTable, FactList, Note, ViewPage
from turnwise.inspector.page.view_query import ViewQuery
from turnwise.inspector.queries import RunReader, StepMetrics
from turnwise.maths.statistics import wilson
from turnwise.observe.charts import LineChart, Link, Series

CURVES = (
    ("entropy", "Entropy", "of the policy at the sampled tokens, in nats"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("kl/behaviour", "KL of the sampler", "from the learner, by the k3 estimator"),
    ("clip_share", "Share of clipped tokens", ""),
    ("groups/zero_variance", "Groups without spread", "share of groups whose rewards are all equal"),
    ("tokens_per_turn", "Tokens per turn", ""),
    ("seconds", "Seconds per step", ""),
)
RECENT, STEPS = 10, 60
CHANGED = 3.0  # standard errors
EXPECTED = ("seconds", "tokens_per_second", "lr", "tasks_drawn")  # metrics that change by the clock or by themselves


def overview(run: RunReader, query: ViewQuery) -> ViewPage:
    """Success and reward with 95 % intervals, other curves, what changed, warnings, steps."""
    rows = [row for row in run.metrics() if row["seconds"] is not None]
    blocks: list[Any] = [_facts(run, rows)]
    blocks += [Note(f"step {m.step}: {m.text}", "warning") for m in run.messages() if m.level != "info"][-12:]
    blocks += _outcomes(run)
    for name, title, about in CURVES:
        points = [(row.step, value) for row in rows if (value := row[name]) is not None]
        if len(points) > 1:
            blocks.append(LineChart(title, (Series(title, *_split(points)),), about))
    blocks += [_changes(rows)] if len(rows) >= 6 else []
    blocks.append(_steps(run, rows))
    if not rows:
        blocks.insert(1, Note("This run has not finished a step yet.", "info"))
    return ViewPage("overview", "Overview", "How the run goes, and where to look.", blocks)


def _split(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    return [float(x) for x, _ in points], [y for _, y in points]


def _facts(run: RunReader, rows: Sequence[StepMetrics]) -> FactList:
    settings, summary = run.settings, run.summary
    trajectories, tokens = run.count_trajectories() if run.has_ledger else (0, 0)
    state = "finished" if summary is not None else "going on, or stopped"
    facts: list[tuple[str, Any]] = [
        ("method", str(settings.get("method", ""))),
        ("environment", str(settings.get("env", ""))),
        ("model", str(settings.get("model", ""))),
        ("state", f"{state}: {rows[-1].step if rows else 0} of {settings.get('steps', '?')} steps"),
        ("trajectories", trajectories),
        ("sampled tokens", tokens),
    ]
    for when in ("before", "after"):
        evaluation = run.evaluation(when)
        success = (evaluation or {}).get("summary", {}).get("success")
        if isinstance(success, int | float):
            facts.append((f"held-out success {when}", f"{100 * success:.1f} %"))
    return FactList("Run", facts)


def _outcomes(run: RunReader) -> list[LineChart]:
    if not run.has_ledger:
        return []
    steps = run.step_outcomes()
    judged = [s for s in steps if s.judged]
    charts = []
    if len(judged) > 1:
        bounds = [wilson(s.successes, s.judged) for s in judged]
        x, y = [float(s.step) for s in judged], [s.successes / s.judged for s in judged]
        series = Series("success", x, y, [b.low for b in bounds], [b.high for b in bounds])
        charts.append(LineChart("Success", (series,), "share of trajectories, with Wilson's 95 % interval"))
    if len(steps) > 1:
        half = [1.96 * s.deviation / math.sqrt(max(1, s.trajectories)) for s in steps]
        x, y = [float(s.step) for s in steps], [s.reward for s in steps]
        low, high = [a - b for a, b in zip(y, half)], [a + b for a, b in zip(y, half)]
        about = "mean of the trajectories ± 1.96 standard errors (siblings share a task, so the interval is too narrow)"
        charts.append(LineChart("Reward", (Series("reward", x, y, low, high),), about))
    return charts


def _changes(rows: Sequence[StepMetrics]) -> DataTable:
    """Metrics whose mean over the last steps is far from that of the steps before, in standard errors."""
    size = min(RECENT, len(rows) // 2)
    late, early = rows[-size:], rows[-3 * size : -size]
    found = []
    for name in rows[-1].values:
        a, b = ([v for row in part if (v := row[name]) is not None] for part in (early, late))
        if len(a) < 2 or len(b) < 2 or name.startswith(EXPECTED):
            continue
        error = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
        distance = (statistics.fmean(b) - statistics.fmean(a)) / error if error > 0 else 0.0
        if abs(distance) >= CHANGED:
            found.append((abs(distance), name, statistics.fmean(a), statistics.fmean(b), distance))
    found.sort(reverse=True)
    about = f"mean of the last {size} steps against the {len(early)} before; difference in standard errors, at least {CHANGED:g}"
    return DataTable(
        "What changed lately", ("metric", "before", "now", "difference"), [row[1:] for row in found[:12]], about
    )


def _steps(run: RunReader, rows: Sequence[StepMetrics]) -> DataTable:
    kept = set(run.kept_steps()) if run.has_ledger else set()
    table = []
    for row in reversed(rows[-STEPS:]):
        tokens = Link("factors", "gradient", {"step": row.step}) if row.step in kept else None
        success, reward, entropy, norm = (row[name] for name in ("success", "reward", "entropy", "grad_norm"))
        table.append(
            (
                Link(str(row.step), "step", {"step": row.step}),
                success,
                reward,
                entropy,
                norm,
                row["seconds"],
                tokens,
            )
        )
    columns = ("step", "success", "reward", "entropy", "gradient norm", "seconds", "tokens")
    return DataTable("Steps", columns, table, f"newest first, at most {STEPS}")
