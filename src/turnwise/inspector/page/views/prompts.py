"""Where every prompt went: issued, finished, trained or dropped with the reason; groups without spread."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from turnwise.inspector.page.blocks import BarChart, DataTable, FactList, Note, ViewPage
from turnwise.inspector.page.view_query import ViewQuery
from turnwise.inspector.queries import RunReader
from turnwise.observe.charts import Cell, LineChart, Link, Series

ABOUT = "Every group that was issued, and what became of it: nothing is lost without a reason."
STEPS = 60


def prompts(run: RunReader, query: ViewQuery) -> ViewPage:
    """Counts over the run, drops by reason, and each step's groups."""
    title = "Where every prompt went"
    if not run.has_ledger:
        return ViewPage("prompts", title, ABOUT, [Note("This run has no ledger yet.")])
    counts, flow = run.counts(), run.flow()
    flat = sum(row.without_spread for row in flow)
    states = [
        ("issued", counts.issued),
        ("in flight", counts.in_flight),
        ("finished, not yet trained", counts.finished),
    ]
    states += [("trained on", counts.trained), ("dropped", counts.dropped), ("without spread of rewards", flat)]
    blocks: list[Any] = [FactList("Groups", states)]
    blocks.append(BarChart("Groups by state", [name for name, _ in states[1:5]], [float(n) for _, n in states[1:5]]))
    if counts.reasons:
        reasons = list(counts.reasons.items())[:20]
        labels, values = [str(r) for r, _ in reasons], [float(n) for _, n in reasons]
        blocks.append(BarChart("Dropped groups by reason", labels, values))
    failures = run.failures()
    if failures:
        rows = [(reason, n) for reason, n in list(failures.items())[:20]]
        blocks.append(DataTable("Failed trajectories by reason", ("reason", "trajectories"), rows))
    by_step = defaultdict[int, dict[str, int]](lambda: defaultdict(int))
    for row in flow:
        by_step[row.step][row.state] += row.groups
        by_step[row.step]["flat"] += row.without_spread
    steps = sorted(by_step)
    if len(steps) > 1:
        series = [
            Series(name, [float(s) for s in steps], [float(by_step[s][key]) for s in steps])
            for name, key in (("trained", "trained"), ("dropped", "dropped"), ("without spread", "flat"))
        ]
        blocks.append(LineChart("Groups by step", series))
    table: list[tuple[Cell, ...]] = [
        (
            Link(str(s), "step", {"step": s}),
            *(by_step[s][k] for k in ("trained", "dropped", "finished", "in_flight", "flat")),
        )
        for s in reversed(steps[-STEPS:])
    ]
    columns = ("step", "trained", "dropped", "finished", "in flight", "without spread")
    blocks.append(DataTable("Steps", columns, table, f"newest first, at most {STEPS}"))
    return ViewPage("prompts", title, ABOUT, blocks)
