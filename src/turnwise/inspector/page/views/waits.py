"""Who waits for whom: where the seconds of each step go, and the time lines of its episodes."""

from __future__ import annotations

from typing import Any

from turnwise.inspector.page.blocks import BarChart, Choice, Note, ViewPage
from turnwise.inspector.page.view_query import ViewQuery
from turnwise.inspector.queries import RunReader
from turnwise.observe.charts import LineChart, Link, Series, Timeline

ABOUT = "Seconds of a step in collecting, learning and publishing; seconds of a turn in sampling and in its tools."
PHASES = (("seconds/rollout", "collect"), ("seconds/learn", "learn"), ("seconds/publish", "publish"))
EPISODES = 40


def waits(run: RunReader, query: ViewQuery) -> ViewPage:
    """All steps, and one step's episodes, slowest first."""
    rows = [row for row in run.metrics() if row["seconds"] is not None]
    if not rows:
        return ViewPage("waits", "Who waits for whom", ABOUT, [Note("This run has not finished a step yet.")])
    blocks: list[Any] = []
    totals = {name: sum(row[key] or 0.0 for row in rows) for key, name in PHASES}
    whole = sum(row["seconds"] or 0.0 for row in rows)
    about = "with staleness, collecting goes on while the learner works, and only the waiting for it is counted"
    shares = [value / max(whole, 1e-9) for value in totals.values()]
    blocks.append(BarChart("All steps", list(totals), shares, about, percent=True))
    if len(rows) > 1:
        x = [float(row.step) for row in rows]
        series = [Series(name, x, [row[key] or 0.0 for row in rows]) for key, name in PHASES]
        blocks.append(LineChart("Seconds per step", series))
        speed = [row["tokens_per_second"] or 0.0 for row in rows]
        blocks.append(LineChart("Sampled tokens per second", (Series("tokens per second", x, speed),)))
    steps = sorted({row.step for row in rows})
    step = query.step if query.step > 0 else steps[-1]
    blocks.append(Choice("step", "episodes of step", str(step), [str(s) for s in steps]))
    blocks.append(_episodes(run, step))
    return ViewPage("waits", "Who waits for whom", ABOUT, blocks)


def _episodes(run: RunReader, step: int) -> Any:
    lines = []
    for row in run.trajectories(step=step, order="t.sampled DESC", limit=EPISODES):
        at, segments = 0.0, list[tuple[float, float, str]]()
        for turn in run.trajectory(row.id).turns:
            for seconds, kind in ((turn.seconds_generating, "sampling"), (turn.seconds_acting, "tools")):
                if seconds > 0:
                    segments.append((at, seconds, kind))
                    at += seconds
        lines.append((Link(row.id, "why", {"trajectory": row.id}), segments))
    lines.sort(key=lambda line: -sum(s[1] for s in line[1]))
    about = (
        f"turns laid end to end, at most {EPISODES} episodes, slowest first; waiting for a slot counts as sampling, waiting for "
        "the tools of other episodes is left out"
    )
    return Timeline(f"Episodes of step {step}", lines, about)
