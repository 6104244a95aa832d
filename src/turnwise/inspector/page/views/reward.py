"""Is the reward gamed?: components, saturation, duplicates, drift of length, and the best-paid oddities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from turnwise.core.records import Trajectory
from turnwise.inspector.page.blocks import Choice, DataTable, FactList, Note, ViewPage
from turnwise.inspector.page.token_text import token_texts
from turnwise.inspector.page.view_query import ViewQuery
from turnwise.inspector.queries import RunReader, TrajectoryRow
from turnwise.observe.charts import LineChart, Link, Series

ABOUT = "Signs that the policy serves the reward and not the task."
SAMPLE, ODD, TEXT = 400, 12, 80
FEW_TOKENS = 0.25  # of the median length: an answer this short that is paid in full is worth a look


def reward(run: RunReader, query: ViewQuery) -> ViewPage:
    """Curves over the run, and the trajectories of one step."""
    title = "Is the reward gamed?"
    outcomes = run.step_outcomes() if run.has_ledger else []
    if not outcomes:
        return ViewPage("reward", title, ABOUT, [Note("No trajectory has finished yet.")])
    steps = [o.step for o in outcomes]
    step = query.step if query.step > 0 else steps[-1]
    x = [float(s) for s in steps]
    blocks: list[Any] = [Choice("step", "step", str(step), [str(s) for s in steps])]
    if len(steps) > 1:
        top = max(o.best for o in outcomes)
        saturated = [o.at_best / max(1, o.trajectories) for o in outcomes]
        series = (Series(f"reward {top:g}", x, saturated),)
        blocks.append(
            LineChart(
                "Share of trajectories with the highest reward", series, "near 1: nothing is left to learn from it"
            )
        )
        length = [o.tokens / max(1, o.trajectories) for o in outcomes]
        blocks.append(
            LineChart(
                "Tokens per trajectory", (Series("tokens", x, length),), "drift of length without drift of success"
            )
        )
        blocks += _components(run)
        blocks += _duplicates_curve(run)
    blocks += _step(run, step)
    return ViewPage("reward", title, ABOUT, blocks)


def _components(run: RunReader) -> list[LineChart]:
    metrics = run.metrics()
    names = sorted(
        {name for row in metrics for name in row.values if name.startswith("reward/") and name != "reward/mean"}
    )
    series = []
    for name in names[:8]:
        points = [(row.step, value) for row in metrics if (value := row[name]) is not None]
        series.append(Series(name.removeprefix("reward/"), [float(s) for s, _ in points], [y for _, y in points]))
    return [LineChart("Components of the reward", series, "mean of each named component")] if series else []


def _duplicates_curve(run: RunReader) -> list[LineChart]:
    points = run.series("answers/distinct")
    if len(points) < 2:
        return []
    series = Series("distinct", [float(s) for s, _ in points], [y for _, y in points])
    return [LineChart("Distinct answers", (series,), "share of trajectories whose tokens differ from every sibling's")]


def _step(run: RunReader, step: int) -> list[Any]:
    rows = [r for r in run.trajectories(step=step, order="t.reward DESC", limit=SAMPLE) if r.status != "failed"]
    if not rows:
        return [Note(f"Step {step} has no finished trajectory.")]
    rewards, lengths = np.array([r.reward or 0.0 for r in rows]), np.array([r.tokens for r in rows], float)
    both = rewards.std() > 0 and lengths.std() > 0
    correlation = float(np.corrcoef(rewards, lengths)[0, 1]) if both else float("nan")
    judged = [r for r in rows if r.success is not None]
    paid = [r for r in judged if not r.success and (r.reward or 0.0) >= float(rewards.max()) and rewards.max() > 0]
    facts: list[tuple[str, Any]] = [
        ("trajectories", len(rows)),
        ("highest reward", float(rewards.max())),
        ("share with the highest reward", float((rewards == rewards.max()).mean())),
        ("correlation of reward and length", correlation),
        ("paid the highest reward without success", len(paid)),
    ]
    blocks: list[Any] = [FactList(f"Step {step}", facts)]
    if paid:
        text = f"{len(paid)} trajectories got the highest reward although the environment does not call them a success."
        blocks.append(Note(text, "warning"))
    members = {r.id: run.trajectory(r.id) for r in rows}
    return [*blocks, _oddities(run, rows, members), _repeated(run, rows, members)]


def _oddities(run: RunReader, rows: Sequence[TrajectoryRow], members: dict[str, Trajectory]) -> DataTable:
    """Well-paid trajectories that are unusual in one of a few ways."""
    median = float(np.median([r.tokens for r in rows]))
    best = max(r.reward or 0.0 for r in rows)
    found = []
    for row in rows:
        t, reasons = members[row.id], list[str]()
        if (row.reward or 0.0) < 0.9 * best or best <= 0:
            continue
        reasons += ["no success"] if row.success is False else []
        reasons += ["very short"] if row.tokens < FEW_TOKENS * median else []
        reasons += ["very long"] if row.tokens > 4 * median else []
        reasons += ["truncated"] if row.status == "truncated" else []
        reasons += ["tool errors"] if any(turn.tool_errors for turn in t.turns) else []
        if reasons:
            link = Link(row.id, "why", {"trajectory": row.id})
            found.append((link, row.reward, ", ".join(reasons), row.tokens, _answer(run, t)))
    columns = ("trajectory", "reward", "odd", "tokens", "last words")
    return DataTable("Best-paid oddities", columns, found[:ODD], "paid at least 90 % of the highest reward of the step")


def _answer(run: RunReader, trajectory: Trajectory) -> str:
    last = trajectory.turns[-1].tokens if trajectory.turns else ()
    return "".join(token_texts(run.path, list(last[-24:])))[-TEXT:]


def _repeated(run: RunReader, rows: Sequence[TrajectoryRow], members: dict[str, Trajectory]) -> DataTable:
    answers = Counter[tuple[int, ...]]()
    sample, rewards = dict[tuple[int, ...], str](), dict[tuple[int, ...], float]()
    for row in rows:
        key = tuple(members[row.id].turns[-1].tokens) if members[row.id].turns else ()
        answers[key] += 1
        sample.setdefault(key, row.id)
        rewards[key] = rewards.get(key, 0.0) + (row.reward or 0.0)
    common = [(key, n) for key, n in answers.most_common(ODD) if n > 1 and key]
    cells = [
        (Link(sample[key], "why", {"trajectory": sample[key]}), n, rewards[key] / n, _answer(run, members[sample[key]]))
        for key, n in common
    ]
    about = "the same last turn, token by token, in several trajectories of the step"
    return DataTable("Repeated answers", ("for example", "times", "mean reward", "last words"), cells, about)
