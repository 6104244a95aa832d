"""Where a view opens if the address does not say: on the step, trajectory and token of the run that show most.

The last step of a run often shows least: once every sibling succeeds, advantages are 0 and nothing is pushed. A view then opens
on the step in which most groups had different rewards, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from turnwise.inspector.factors.movement import logit_pushes
from turnwise.inspector.page.blocks import Note, ViewQuery, step_choice
from turnwise.inspector.queries import RunReader, StepMetrics
from turnwise.observe.rules import solved_since


def telling_step(metrics: Sequence[StepMetrics], steps: Sequence[int]) -> int:
    """Of ``steps``, the one in which most groups had different rewards, then that with the larger gradient; the last if no step
    has a gradient, 0 if there is none."""
    chosen, best = steps[-1] if steps else 0, (0.0, 0.0)
    allowed = set(steps)
    for row in metrics:
        norm = row["grad_norm"] or 0.0
        score = (1.0 - (row["groups/zero_variance"] or 0.0), norm)
        if row.step in allowed and norm > 0 and score > best:
            chosen, best = row.step, score
    return chosen


def opened_step(run: RunReader, query: ViewQuery, steps: Sequence[int]) -> int:
    return query.step if query.step > 0 else telling_step(run.metrics(), steps)


def step_header(run: RunReader, query: ViewQuery, step: int, steps: Sequence[int]) -> Iterator[object]:
    """The choice of a step; where the view chose it, why this one and not the last."""
    keep = {"method": query.method} if query.method else {}
    if query.step > 0 or not steps or step == steps[-1]:
        yield step_choice(step, steps, keep)
        return
    rows = {row.step: row for row in run.metrics() if row["groups/zero_variance"] is not None}
    spread = 1.0 - float(rows[step]["groups/zero_variance"] or 0.0) if step in rows else 0.0
    about = f"opened here because siblings had different rewards in {100 * spread:.0f} % of its groups, the most of any step"
    yield step_choice(step, steps, keep, about)
    if sentence := solved_sentence(run) or last_step_sentence(rows.get(steps[-1])):
        yield Note(sentence)


def last_step_sentence(last: StepMetrics | None) -> str:
    if last is None or last["grad_norm"] != 0:
        return ""
    return f"Step {last.step}, the last, has no gradient: in every group all siblings got the same reward."


def solved_sentence(run: RunReader) -> str:
    """That a run has solved its tasks, and since when; empty if it has not."""
    rows = [row for row in run.metrics() if row["groups"] is not None]
    at = solved_since([row.values for row in rows])
    if at is None:
        return ""
    since = f"since step {rows[at].step} every trajectory got the highest reward"
    return f"This run is solved: {since}, so later steps push no token."


def opened_token(run: RunReader, query: ViewQuery) -> tuple[int, str, int]:
    """Step, trajectory and token that ``why`` shows: those asked for, else the token with the largest push on its own logit, in
    the trajectory, or in the step. The trajectory is empty where nothing is stored, the token −1 where it has no numbers."""
    from turnwise.inspector.page.step_cache import updates_of  # late: it needs torch, and the overview does not

    name = query.trajectory
    step = query.step if query.step > 0 else run.trajectory_row(name).step if name else 0
    step = step or opened_step(run, query, run.kept_steps() or run.steps())
    peaks = []
    for update in updates_of(run, step):
        sizes = np.nan_to_num(np.abs(logit_pushes(update)))
        measured = np.isfinite(update.columns.get("after", np.full(len(sizes), np.nan)))
        ends = np.cumsum(update.sizes)
        for one, end, size in zip(update.trajectories, ends.tolist(), update.sizes):
            if size and name in ("", one):
                at = (
                    end
                    - size
                    + int(np.lexsort((-np.arange(size), sizes[end - size : end], measured[end - size : end]))[-1])
                )
                # a token that was measured after the step shows more than one with a larger push that was not
                peaks.append(((bool(measured[at]), float(sizes[at])), one, at - end + size))
    peak = max(peaks, key=lambda row: row[0], default=None)  # the first of equal ones
    if not name:
        rows = run.trajectories(step=step if step > 0 else None, limit=1)
        name = peak[1] if peak else rows[0].id if rows else ""
        step = step or (run.trajectory_row(name).step if name else 0)
    return step, name, query.token if query.token >= 0 else peak[2] if peak else -1
