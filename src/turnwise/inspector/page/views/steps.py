"""Views of a run over its steps: the overview, one step, where time goes, and the search over all trajectories."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from turnwise.inspector.page.blocks import (
    BarChart,
    Choice,
    DataTable,
    FactList,
    Note,
    ViewQuery,
    curves,
    step_choice,
)
from turnwise.inspector.page.views.failures import TOP, causes_table, read_failures
from turnwise.inspector.page.views.opening import solved_sentence
from turnwise.inspector.queries import RunReader, StepMetrics
from turnwise.maths.statistics import wilson
from turnwise.observe.charts import LineChart, Link, Series, Timeline
from turnwise.observe.mechanism import mechanism
from turnwise.observe.rules import solves_held_out

CURVES = (
    ("entropy", "Entropy", "of the policy at the sampled tokens, in nats"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("kl/behaviour", "KL of the sampler", "from the learner, by the k3 estimator"),
    ("clip_share", "Share of clipped tokens", "tokens whose gradient the method's bounds stop"),
    ("groups/zero_variance", "Groups that teach nothing", "share of groups whose rewards are all equal"),
    ("tokens_per_turn", "Tokens per turn", ""),
    ("seconds", "Seconds per step", ""),
)
RECENT, STEPS, PAGE, EPISODES = 10, 60, 100, 40
CHANGED = 3.0  # standard errors
EXPECTED = ("seconds", "tokens_per_second", "lr", "tasks_drawn")  # metrics that change by the clock or by themselves
PHASES = (("seconds/rollout", "collect"), ("seconds/learn", "learn"), ("seconds/publish", "publish"))
STEP_VIEWS = {
    "which tokens were pushed": ("gradient shares", "gradient"), "under another method": ("what if", "what-if"),
    "the same policy?": ("sampler and learner", "policy"), "seconds": ("where time goes", "waits"),
    "what was rewarded": ("is the reward gamed?", "reward"),
}  # fmt: skip


def overview(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """How the run goes, and where to look."""
    if headline := held_out_sentence(run):
        yield Note(headline, "good" if headline.endswith("solved.") else "info")
    rows = [row for row in run.metrics() if row["seconds"] is not None]
    settings, state = run.settings, "going on, or stopped" if run.summary is None else "finished"
    trajectories, tokens = run.count_trajectories() if run.has_ledger else (0, 0)
    facts: list[tuple[str, Any]] = [
        ("method", str(settings.get("method", ""))),
        ("environment", str(settings.get("env", ""))),
        ("model", str(settings.get("model", ""))),
        ("state", f"{state}: {rows[-1].step if rows else 0} of {settings.get('steps', '?')} steps"),
        ("trajectories", trajectories),
        ("sampled tokens", tokens),
    ]
    facts += [("mechanism", told)] if (told := mechanism([row.values for row in rows])) else []
    yield FactList("Run", facts)
    if not rows:
        yield Note("This run has not finished a step yet.")
    if sentence := solved_sentence(run):
        yield Note(sentence, "good")
    warnings = [message for message in run.messages() if message.get("level", "info") != "info"]
    yield from (Note(f"step {message['step']}: {message.get('text', '')}", "warning") for message in warnings[-12:])
    if (failed := read_failures(run)).failures:
        yield causes_table(failed, TOP)
    if run.has_ledger:
        yield from _outcomes(run)
    yield from curves(rows, CURVES)
    if len(rows) >= 6:
        yield _changes(rows)
    stored_steps = run.kept_steps() if run.has_ledger else []
    table = []
    for row in reversed(rows[-STEPS:]):
        factors = Link("factors", "gradient", {"step": row.step}) if row.step in stored_steps else None
        numbers = (row[name] for name in ("success", "reward", "entropy", "grad_norm", "seconds"))
        table.append((Link(str(row.step), "step", {"step": row.step}), *numbers, factors))
    columns = ("step", "success", "reward", "entropy", "gradient norm", "seconds", "tokens")
    yield DataTable("Steps", columns, table, f"newest first, at most {STEPS}")


def held_out_sentence(run: RunReader) -> str:
    """Success on held-out tasks before and after training, and whether that solves them; empty without an evaluation."""
    summaries = [(run.evaluation(when) or {}).get("summary", {}) for when in ("before", "after")]
    shares = [f"{100 * s['success']:.3g} %" for s in summaries if s.get("success") is not None]
    solved = ", solved" if solves_held_out(summaries[1]) else ""
    return f"{' → '.join(shares)} of held-out tasks{solved}." if shares else ""


def _outcomes(run: RunReader) -> Iterator[LineChart]:
    steps = run.step_outcomes()
    judged = [s for s in steps if s.judged]
    if len(judged) > 1:
        bounds = [wilson(s.successes, s.judged) for s in judged]
        x, y = [float(s.step) for s in judged], [s.successes / s.judged for s in judged]
        series = Series("success", x, y, [b.low for b in bounds], [b.high for b in bounds])
        yield LineChart("Success", (series,), "share of trajectories, with Wilson's 95 % interval")
    if len(steps) > 1:
        # of the mean: the deviation divided by the root of the number of trajectories
        half = [1.96 * s.deviation / math.sqrt(max(1, s.trajectories)) for s in steps]
        x, y = [float(s.step) for s in steps], [s.reward for s in steps]
        low, high = [a - b for a, b in zip(y, half)], [a + b for a, b in zip(y, half)]
        about = "mean of the trajectories ± 1.96 standard errors"
        yield LineChart("Reward", (Series("reward", x, y, low, high),), about)


def _changes(rows: Sequence[StepMetrics]) -> DataTable:
    """Metrics whose mean over the last steps is far from that of the steps before, in standard errors."""
    size = min(RECENT, len(rows) // 2)
    late, early = rows[-size:], rows[-3 * size : -size]
    changes = []
    for name in rows[-1].values:
        a, b = ([v for row in part if (v := row[name]) is not None] for part in (early, late))
        if len(a) < 2 or len(b) < 2 or name.startswith(EXPECTED):
            continue
        # Welch: early and late steps need not have the same variance
        error = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
        distance = (statistics.fmean(b) - statistics.fmean(a)) / error if error > 0 else 0.0
        if abs(distance) >= CHANGED:
            changes.append((abs(distance), name, statistics.fmean(a), statistics.fmean(b), distance))
    changes.sort(reverse=True)
    about = f"mean of the last {size} steps against the {len(early)} before; difference in standard errors, at least {CHANGED:g}"
    columns = ("metric", "before", "now", "difference")
    return DataTable("What changed lately", columns, [row[1:] for row in changes[:12]], about)


def step(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """What one step trained on, and what it logged."""
    number = query.step
    groups = run.groups(step=number, limit=PAGE, offset=max(0, query.offset))
    yield step_choice(number, run.steps())
    links = [(question, Link(title, view, {"step": number})) for question, (title, view) in STEP_VIEWS.items()]
    yield FactList("Views of this step", links)
    rows = []
    for g in groups:
        spread = "no" if g.reward_low == g.reward_high else "yes"
        outcome = (g.state, g.reason, g.reward, g.success, spread, g.trajectories, g.tokens)
        rows.append((Link(g.id, "siblings", {"group": g.id}), g.task.key, *outcome))
    columns = ("group", "task", "state", "reason", "reward", "success", "spread", "trajectories", "tokens")
    yield DataTable("Groups", columns, rows, f"from number {query.offset + 1}" if query.offset else "")
    if len(groups) == PAGE:
        more = Link("next groups", "step", {"step": number, "offset": query.offset + PAGE})
        yield FactList("", [("more", more)])
    numbers = {name: value for row in run.metrics() if row.step == number for name, value in row.values.items()}
    yield DataTable("Metrics", ("metric", "value"), sorted(numbers.items()))


def search(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """Searches ids, reasons and messages of all trajectories."""
    text = query.search.strip()
    if not text:
        yield Note("Type a word of a transcript, a trajectory's id, or a reason.")
        return
    rows = [
        (Link(t.id, "why", {"trajectory": t.id}), t.task.key, t.step, t.reward, t.status, t.reason, t.tokens)
        for t in run.trajectories(search=text, limit=PAGE, offset=max(0, query.offset))
    ]
    columns = ("trajectory", "task", "step", "reward", "status", "reason", "tokens")
    yield DataTable(f"{len(rows)} trajectories", columns, rows, f"that contain {text!r}, at most {PAGE}")


def waits(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """Seconds of a step in collecting, learning and publishing; seconds of a turn in sampling and in its tools."""
    # a row of an evaluation alone has no seconds
    rows = [row for row in run.metrics() if row["seconds"] is not None]
    if not rows:
        yield Note("This run has not finished a step yet.")
        return
    whole = max(sum(row["seconds"] or 0.0 for row in rows), 1e-9)
    shares = {name: sum(row[key] or 0.0 for row in rows) / whole for key, name in PHASES}
    about = "with staleness, collecting goes on while the learner works, and only the waiting for it is counted"
    yield BarChart("All steps", list(shares), list(shares.values()), about, percent=True)
    if len(rows) > 1:
        x = [float(row.step) for row in rows]
        yield LineChart("Seconds per step", [Series(n, x, [row[key] or 0.0 for row in rows]) for key, n in PHASES])
        speed = [row["tokens_per_second"] or 0.0 for row in rows]
        yield LineChart("Sampled tokens per second", (Series("tokens per second", x, speed),))
    steps = sorted({row.step for row in rows})
    number = query.step if query.step > 0 else steps[-1]
    yield Choice("step", "episodes of step", str(number), [str(s) for s in steps])
    lines = []
    for row in run.trajectories(step=number, order="t.sampled DESC", limit=EPISODES):
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
    yield Timeline(f"Episodes of step {number}", lines, about)
