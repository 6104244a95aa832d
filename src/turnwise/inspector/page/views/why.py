"""Why this token: a transcript coloured by gradient, and each factor of the chosen token's gradient with its piece."""

from __future__ import annotations

from typing import Any

import numpy as np

from turnwise.core.records import Trajectory
from turnwise.errors import TurnwiseError
from turnwise.inspector.factors.explain import TokenExplanation, explain_token
from turnwise.inspector.page.blocks import DataTable, FactList, Note, ViewPage
from turnwise.inspector.page.step_cache import factors_of, update_of, updates_of
from turnwise.inspector.page.view_query import ViewQuery
from turnwise.inspector.page.views.transcripts import transcript
from turnwise.inspector.queries import RunReader, TokenColumns
from turnwise.observe.charts import Link

ABOUT = "Click a token: each factor of its gradient, the piece that computed it, and its peers."
COLUMNS = ("advantage", "logp", "entropy", "gate", "weight", "slope")


def why(run: RunReader, query: ViewQuery) -> ViewPage:
    """The transcript of one trajectory, and the factors of one of its tokens."""
    step, name = opened_transcript(run, query)
    if not name:
        return ViewPage("why", "Why this token", ABOUT, [Note("No trajectory is stored yet.")])
    row, trajectory = run.trajectory_row(name), run.trajectory(name)
    columns, reason = _columns(run, step, name)
    slopes = [-float(x) for x in columns.get("slope", ())]
    top = max((abs(x) for x in slopes), default=0.0) or 1.0
    hint = lambda i: _hint(columns, i)  # noqa: E731
    link = lambda i: Link("", "why", {"trajectory": name, "step": step, "token": i})  # noqa: E731
    about = "Green: the step made the token more likely, red: less; stronger colour: larger gradient."
    blocks: list[Any] = [_facts(run, trajectory, row.group, step)]
    blocks += [Note(reason, "warning")] if reason else []
    if query.token >= 0 and not reason:
        blocks += _factors(run, step, name, query)
    tones = [x / top for x in slopes]
    blocks.append(transcript(run, trajectory, tones, hint, link, query.token, query.offset, about=about))
    return ViewPage("why", "Why this token", ABOUT, blocks)


def opened_transcript(run: RunReader, query: ViewQuery) -> tuple[int, str]:
    """The step and the trajectory that ``why`` shows for a query; the trajectory is empty where nothing is stored."""
    name = query.trajectory or _largest(run, query.step)
    return (query.step if query.step > 0 else run.trajectory_row(name).step) if name else 0, name


def _largest(run: RunReader, step: int) -> str:
    """The trajectory of a step (default: the newest that is kept) with the largest gradient of a token."""
    kept = run.kept_steps()
    step = step if step > 0 else kept[-1] if kept else -1
    rows = run.trajectories(step=step, limit=1) if step > 0 else run.trajectories(limit=1)
    peaks = [_peak(update) for update in updates_of(run, step) if len(update.columns.get("slope", ()))]
    return "" if not rows else max(peaks)[1] if peaks else rows[0].id


def _peak(update: TokenColumns) -> tuple[float, str]:
    """The largest gradient of an update's tokens, and whose it is."""
    sizes = np.nan_to_num(np.abs(update.columns["slope"]))
    at = int(sizes.argmax())
    return float(sizes[at]), update.trajectories[int(np.searchsorted(np.cumsum(update.sizes), at, side="right"))]


def _columns(run: RunReader, step: int, name: str) -> tuple[dict[str, Any], str]:
    update = update_of(run, step, name)
    if update is not None:
        return update.of(name), ""
    kept = run.kept_steps()
    which = f"stored are steps {kept[0]} to {kept[-1]}" if kept else "this run kept none (--keep-tokens)"
    return (
        {},
        f"The numbers of this trajectory's tokens are not stored: it was not trained on, or too long ago; {which}.",
    )


def _hint(columns: dict[str, Any], index: int) -> str:
    values = {name: float(columns[name][index]) for name in COLUMNS if name in columns and index < len(columns[name])}
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _facts(run: RunReader, trajectory: Trajectory, group: str, step: int) -> FactList:
    success = {None: "not judged", True: "yes", False: "no"}[trajectory.success]
    rows: list[tuple[str, Any]] = [
        ("trajectory", trajectory.id),
        ("group", Link(group, "siblings", {"group": group})),
        ("task", trajectory.task.key),
        ("step", Link(str(step), "step", {"step": step})),
        ("reward", trajectory.reward),
        ("success", success),
        ("status", f"{trajectory.status}{': ' + trajectory.reason if trajectory.reason else ''}"),
        ("tokens", trajectory.sampled),
    ]
    rows += [(f"reward: {name}", value) for name, value in trajectory.rewards.items()]
    return FactList("Trajectory", rows)


def _factors(run: RunReader, step: int, name: str, query: ViewQuery) -> list[Any]:
    try:
        stored, found = factors_of(run, step, query.method, trajectory=name)
        one = explain_token(stored, found, name, query.token)
    except TurnwiseError as error:
        return [Note(f"The factors cannot be recomputed: {error}", "warning")]
    return [*_check(one), *_tables(one)]


def _check(one: TokenExplanation) -> list[Note]:
    direction = "more" if one.gradient > 0 else "less"
    text = f"The step made this token {direction} likely: gradient {one.gradient:.4g}, {100 * one.share:.2g} % of the update."
    if one.gradient == 0:
        text = "This token has no gradient."
    notes = [Note(text)]
    if one.agrees is not None:
        same = "equals" if one.agrees else "DIFFERS from"
        level = "good" if one.agrees else "warning"
        notes.append(Note(f"Recomputed gradient {same} what the step stored ({one.stored:.4g}).", level))
    return notes


def _tables(one: TokenExplanation) -> list[DataTable]:
    chain = [(s.name, s.value, s.piece, s.inputs, s.formula) for s in one.chain]
    peers = [
        (Link(p.trajectory, "why", {"trajectory": p.trajectory, "step": one.step}), p.reward, p.advantage, p.share)
        for p in one.peers
    ]
    return [
        DataTable("Factors", ("factor", "value", "piece", "numbers", "formula"), chain, f"product: {one.numbers}"),
        DataTable("Summands of the gradient", ("part", "value"), one.summands),
        DataTable("Peers", ("trajectory", "reward", "mean advantage", "share of the gradient"), peers),
    ]
