"""Tasks: learned, forgotten, flipping; success by task and step, and by difficulty with intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from turnwise.inspector.page.blocks import DataTable, Note, ViewPage
from turnwise.inspector.page.view_query import ViewQuery
from turnwise.inspector.queries import RunReader, TaskRow
from turnwise.maths.statistics import wilson
from turnwise.observe.charts import HeatMap, LineChart, Series

ABOUT = "Which tasks the policy learned, forgot, or solves only sometimes."
SHOWN, BINS = 60, 30
HIGH, LOW = 0.75, 0.25


def tasks(run: RunReader, query: ViewQuery) -> ViewPage:
    """Tasks that were visited more than once, and success by difficulty over the steps."""
    rows = run.task_rows() if run.has_ledger else []
    judged = [row for row in rows if row.successes is not None]
    if not judged:
        return ViewPage("tasks", "Tasks", ABOUT, [Note("No trajectory has a verdict (success) yet.")])
    visits = defaultdict[str, list[TaskRow]](list)
    for row in judged:
        visits[row.task].append(row)
    kinds = {name: classify(history) for name, history in visits.items()}
    counts = {kind: sum(k == kind for k in kinds.values()) for kind in sorted(set(kinds.values()))}
    about = f"first and last third of a task's visits: low is at most {LOW:.0%}, high at least {HIGH:.0%}"
    blocks: list[Any] = [
        DataTable("Tasks by history", ("history", "tasks"), list(counts.items()), about),
        _by_difficulty(judged),
    ]
    often = sorted(visits.items(), key=lambda item: (kinds[item[0]] == "seen once", -len(item[1]), item[0]))[:SHOWN]
    blocks.append(_heat(often))
    columns = ("task", "history", "visits", "first", "last", "reward")
    table = [
        (name, kinds[name], len(rows_), _rate(rows_[:1]), _rate(rows_[-1:]), rows_[-1].reward) for name, rows_ in often
    ]
    blocks.append(DataTable("Tasks", columns, table, f"most visited first, at most {SHOWN}"))
    return ViewPage("tasks", "Tasks", ABOUT, blocks)


def _rate(rows: Sequence[TaskRow]) -> float:
    return sum(r.successes or 0 for r in rows) / max(1, sum(r.trajectories for r in rows))


def classify(history: Sequence[TaskRow]) -> str:
    """One word for a task's visits, in order of steps."""
    if len(history) < 2:
        return "seen once"
    size = max(1, len(history) // 3)
    first, last = _rate(history[:size]), _rate(history[-size:])
    rates = [_rate([row]) >= 0.5 for row in history]
    flips = sum(a != b for a, b in pairwise(rates))
    if first <= LOW and last >= HIGH:
        return "learned"
    if first >= HIGH and last <= LOW:
        return "forgotten"
    if flips >= 2:
        return "flipping"
    return "solved" if last >= HIGH else "unsolved" if last <= LOW else "sometimes"


def _by_difficulty(rows: Sequence[TaskRow]) -> LineChart:
    last = max(row.step for row in rows)
    width = max(1, -(-last // BINS))
    cells = defaultdict[tuple[str, int], list[TaskRow]](list)
    for row in rows:
        cells[row.task.rsplit("/", 2)[1], (row.step - 1) // width].append(row)
    series = []
    for difficulty in sorted({d for d, _ in cells})[:6]:
        bins = sorted(b for d, b in cells if d == difficulty)
        counts = [_count(cells[difficulty, b]) for b in bins]
        bounds = [wilson(good, n) for good, n in counts]
        x = [float(b * width + 1) for b in bins]
        y = [good / max(1, n) for good, n in counts]
        series.append(Series(f"difficulty {difficulty}", x, y, [b.low for b in bounds], [b.high for b in bounds]))
    about = f"share of trajectories in bins of {width} steps, with Wilson's 95 % interval"
    return LineChart("Success by difficulty", series, about)


def _count(rows: Sequence[TaskRow]) -> tuple[int, int]:
    return sum(r.successes or 0 for r in rows), sum(r.trajectories for r in rows)


def _heat(tasks_: Sequence[tuple[str, list[TaskRow]]]) -> HeatMap:
    steps = sorted({row.step for _, rows in tasks_ for row in rows})
    width = max(1, -(-len(steps) // BINS))
    bins = [steps[i : i + width] for i in range(0, len(steps), width)]
    values = []
    for _, rows in tasks_:
        by_step = {row.step: row for row in rows}
        inside = [[by_step[s] for s in each if s in by_step] for each in bins]
        values.append([_rate(found) if found else None for found in inside])
    about = "success of each task over the steps; empty: the task was not drawn"
    return HeatMap("Success by task and step", [name for name, _ in tasks_], [str(b[0]) for b in bins], values, about)
