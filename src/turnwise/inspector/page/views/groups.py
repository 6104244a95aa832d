"""Views of groups and their tasks: where every prompt went, which tasks are learned, whether the reward is gamed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from turnwise.core.records import Trajectory
from turnwise.inspector.page.blocks import BarChart, DataTable, FactList, Note, ViewQuery, points
from turnwise.inspector.page.views.opening import opened_step, step_header
from turnwise.inspector.page.views.transcripts import token_texts
from turnwise.inspector.queries import RunReader, TaskRow, TrajectoryRow
from turnwise.maths.statistics import wilson
from turnwise.observe.charts import Cell, HeatMap, LineChart, Link, Series

STEPS, TASKS, BINS, REASONS = 60, 60, 30, 20
HIGH, LOW = 0.75, 0.25
ONCE = "seen once"  # a task without a history
SAMPLE, ODD, TEXT = 400, 12, 80
FEW_TOKENS = 0.25  # of the median length: an answer this short that is paid in full is worth a look


def prompts(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """Every group that was issued, and what became of it: nothing is lost without a reason."""
    counts, flow = run.database.group_counts(), run.flow()
    states = {
        "in flight": counts.in_flight, "finished, not yet trained": counts.finished, "trained on": counts.trained,
        "dropped": counts.dropped,
    }  # fmt: skip
    flat = sum(row.without_spread for row in flow)
    yield FactList("Groups", [("issued", counts.issued), *states.items(), ("with equal rewards", flat)])
    if counts.reasons:
        reasons = dict(list(counts.reasons.items())[:REASONS])
        yield BarChart("Dropped groups by reason", list(map(str, reasons)), [float(n) for n in reasons.values()])
    failures = list(run.database.failures().items())
    if failures:
        yield DataTable("Failed trajectories by reason", ("reason", "trajectories"), failures[:REASONS])
    by_step = defaultdict[int, Counter[str]](Counter)
    for row in flow:
        by_step[row.step] += Counter({row.state: row.groups, "flat": row.without_spread})
    steps = sorted(by_step)
    if len(steps) > 1:
        lines = {"trained": "trained", "dropped": "dropped", "equal rewards": "flat"}
        x = [float(s) for s in steps]
        series = [Series(name, x, [float(by_step[s][key]) for s in steps]) for name, key in lines.items()]
        yield LineChart("Groups by step", series)
    if len(steps) > 1 and counts.trained == counts.issued and len({by_step[s]["trained"] for s in steps}) == 1:
        yield Note(f"Every step trained on all of its {by_step[steps[0]]['trained']} groups; none was dropped.", "good")
        return
    keys = ("trained", "dropped", "finished", "in_flight", "flat")
    table: list[tuple[Cell, ...]] = [
        (Link(str(s), "step", {"step": s}), *(by_step[s][key] for key in keys)) for s in reversed(steps[-STEPS:])
    ]
    columns = ("step", "trained", "dropped", "finished", "in flight", "equal rewards")
    yield DataTable("Steps", columns, table, f"newest first, at most {STEPS}")


# ---------------------------------------------------------------------- tasks


def tasks(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """Which tasks the policy learned, forgot, or solves only sometimes."""
    judged = [row for row in run.task_rows() if row.successes is not None]
    if not judged:
        yield Note("No trajectory has a verdict (success) yet.")
        return
    visits = defaultdict[str, list[TaskRow]](list)
    for row in judged:
        visits[row.task].append(row)
    kinds = {name: classify(history) for name, history in visits.items()}
    if set(kinds.values()) == {ONCE}:
        yield Note(f"Every task was seen once ({len(kinds)} tasks), so none has a history.")
        yield _by_difficulty(judged)
        return
    about = f"first and last third of a task's visits: low is at most {LOW:.0%}, high at least {HIGH:.0%}"
    yield DataTable("Tasks by history", ("history", "tasks"), sorted(Counter(kinds.values()).items()), about)
    yield _by_difficulty(judged)
    often = sorted(visits.items(), key=lambda item: (-len(item[1]), _rate(item[1][-1:]), item[0]))[:TASKS]
    # a task that is drawn once is one cell in a row of its own: sixty of them draw no history
    if len(often[0][1]) > 1:
        yield _heat(often)
    columns = ("task", "history", "visits", "first", "last", "reward", "last step")
    table = [
        (
            Link(name, "search", {"search": name.rsplit("/", 1)[-1]}),  # its seed: the key is not in the records
            kinds[name], len(h), _rate(h[:1]), _rate(h[-1:]), h[-1].reward,
            Link(str(h[-1].step), "step", {"step": h[-1].step}),
        )
        for name, h in often
    ]  # fmt: skip
    yield DataTable("Tasks", columns, table, f"most visited first, then the worst; at most {TASKS}")


def _rate(rows: Sequence[TaskRow]) -> float:
    return sum(r.successes or 0 for r in rows) / max(1, sum(r.trajectories for r in rows))


def classify(history: Sequence[TaskRow]) -> str:
    """One word for a task's visits, in order of steps."""
    if len(history) < 2:
        return ONCE
    # thirds, not single visits: one lucky group is no learning
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
    width = max(1, -(-max(row.step for row in rows) // BINS))
    cells = defaultdict[tuple[str, int], list[TaskRow]](list)
    for row in rows:
        cells[row.task.rsplit("/", 2)[1], (row.step - 1) // width].append(row)
    series = []
    for difficulty in sorted({d for d, _ in cells})[:6]:
        bins = sorted(b for d, b in cells if d == difficulty)
        counts = [
            (sum(r.successes or 0 for r in c), sum(r.trajectories for r in c))
            for b in bins
            if (c := cells[difficulty, b])
        ]
        bounds = [wilson(good, n) for good, n in counts]
        x, y = [float(b * width + 1) for b in bins], [good / max(1, n) for good, n in counts]
        series.append(Series(f"difficulty {difficulty}", x, y, [b.low for b in bounds], [b.high for b in bounds]))
    about = f"share of trajectories in bins of {width} steps, with Wilson's 95 % interval"
    return LineChart("Success by difficulty", series, about)


def _heat(histories: Sequence[tuple[str, list[TaskRow]]]) -> HeatMap:
    steps = sorted({row.step for _, rows in histories for row in rows})
    # rounded up, so that at most BINS columns remain
    width = max(1, -(-len(steps) // BINS))
    bins = [steps[i : i + width] for i in range(0, len(steps), width)]
    values = []
    for _, rows in histories:
        visits = [[row for row in rows if row.step in each] for each in bins]
        values.append([_rate(inside) if inside else None for inside in visits])
    about = "success of each task over the steps; empty: the task was not drawn"
    return HeatMap(
        "Success by task and step", [name for name, _ in histories], [str(b[0]) for b in bins], values, about
    )


# --------------------------------------------------------------------- reward


def reward(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """Signs that the policy games the reward instead of solving the task."""
    outcomes = run.step_outcomes()
    if not outcomes:
        yield Note("No trajectory has finished yet.")
        return
    steps = [o.step for o in outcomes]
    step = opened_step(run, query, steps)
    yield from step_header(run, query, step, steps)
    if len(steps) > 1:
        x, top = [float(s) for s in steps], max(o.best for o in outcomes)
        series = Series(f"reward {top:g}", x, [o.at_best / max(1, o.trajectories) for o in outcomes])
        about = "near 1: nothing is left to learn from it"
        yield LineChart("Share of trajectories with the highest reward", (series,), about)
        series = Series("tokens", x, [o.tokens / max(1, o.trajectories) for o in outcomes])
        yield LineChart("Tokens per trajectory", (series,), "a drift while success stands still is a warning sign")
        metrics = run.metrics()
        names = {n for row in metrics for n in row.values if n.startswith("reward/") and n != "reward/mean"}
        if names:
            parts = [Series(name.removeprefix("reward/"), *points(metrics, name)) for name in sorted(names)[:8]]
            yield LineChart("Components of the reward", parts, "mean of each named component")
        x, y = points(metrics, "answers/distinct")
        if len(x) > 1:
            about = "share of trajectories whose tokens differ from every sibling's"
            yield LineChart("Distinct answers", (Series("distinct", x, y),), about)
    yield from _paid(run, step)


def _paid(run: RunReader, step: int) -> Iterator[Any]:
    """What one step paid, and for what."""
    rows = [r for r in run.trajectories(step=step, order="t.reward DESC", limit=SAMPLE) if r.status != "failed"]
    if not rows:
        yield Note(f"Step {step} has no finished trajectory.")
        return
    rewards, lengths = np.array([r.reward or 0.0 for r in rows]), np.array([r.tokens for r in rows], float)
    # a correlation needs spread on both sides
    best, both = float(rewards.max()), rewards.std() > 0 and lengths.std() > 0
    paid = [r for r in rows if r.success is False and (r.reward or 0.0) >= best and best > 0]
    facts: list[tuple[str, Cell]] = [
        ("trajectories", len(rows)),
        ("highest reward", best),
        ("share with the highest reward", float((rewards == best).mean())),
        ("correlation of reward and length", float(np.corrcoef(rewards, lengths)[0, 1]) if both else float("nan")),
        ("highest reward without success", len(paid)),
    ]
    yield FactList(f"Step {step}", facts)
    if paid:
        text = f"{len(paid)} trajectories got the highest reward although the environment does not call them a success."
        yield Note(text, "warning")
    members = {r.id: run.trajectory(r.id) for r in rows}
    yield _oddities(run, rows, members)
    yield _repeated(run, rows, members)


def _oddities(run: RunReader, rows: Sequence[TrajectoryRow], members: dict[str, Trajectory]) -> DataTable:
    """Well-paid trajectories that are unusual in one of a few ways."""
    median = float(np.median([r.tokens for r in rows]))
    best = max(r.reward or 0.0 for r in rows)
    odd = []
    for row in rows if best > 0 else ():
        signs = {
            "no success": row.success is False,
            "very short": row.tokens < FEW_TOKENS * median,
            "very long": row.tokens > 4 * median,
            "truncated": row.status == "truncated",
            "tool errors": any(turn.tool_errors for turn in members[row.id].turns),
        }
        reasons = ", ".join(name for name, holds in signs.items() if holds)
        if reasons and (row.reward or 0.0) >= 0.9 * best:
            link = Link(row.id, "why", {"trajectory": row.id})
            odd.append((link, row.reward, reasons, row.tokens, _last_words(run, members[row.id])))
    columns = ("trajectory", "reward", "unusual", "tokens", "last words")
    return DataTable(
        "Unusual episodes with a high reward", columns, odd[:ODD], "at least 90 % of the highest reward of the step"
    )


def _last_words(run: RunReader, trajectory: Trajectory) -> str:
    last = trajectory.turns[-1].tokens if trajectory.turns else ()
    return "".join(token_texts(run.path, list(last[-24:])))[-TEXT:]


def _repeated(run: RunReader, rows: Sequence[TrajectoryRow], members: dict[str, Trajectory]) -> DataTable:
    by_answer = defaultdict[tuple[int, ...], list[TrajectoryRow]](list)
    for row in rows:
        turns = members[row.id].turns
        by_answer[tuple(turns[-1].tokens) if turns else ()].append(row)
    common = sorted(by_answer.items(), key=lambda item: -len(item[1]))[:ODD]  # stable: the best paid first
    cells = []
    for answer, same in common:
        if answer and len(same) > 1:
            link, mean = (
                Link(same[0].id, "why", {"trajectory": same[0].id}),
                sum(r.reward or 0.0 for r in same) / len(same),
            )
            cells.append((link, len(same), mean, _last_words(run, members[same[0].id])))
    about = "the same last turn, token by token, in several trajectories of the step"
    return DataTable("Repeated answers", ("for example", "times", "mean reward", "last words"), cells, about)
