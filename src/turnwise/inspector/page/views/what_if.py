"""What if: the same batch under another method, both gradients beside each other, their cosine, and the slots that differ."""

from __future__ import annotations

from typing import Any

import torch

from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.errors import TurnwiseError
from turnwise.inspector.factors.explain import cosine
from turnwise.inspector.factors.stored_step import MethodFactors
from turnwise.inspector.page.blocks import BarChart, Choice, DataTable, FactList, Note, ViewPage
from turnwise.inspector.page.step_cache import factors_of
from turnwise.inspector.page.view_query import ViewQuery
from turnwise.inspector.page.views.transcripts import transcript
from turnwise.inspector.queries import RunReader
from turnwise.observe.charts import Link
from turnwise.recipes.registry import METHODS

ABOUT = "The same batch under another method: one update, from the same weights, on the same trajectories."
SHOWN = 20


def what_if(run: RunReader, query: ViewQuery) -> ViewPage:
    """Both gradients of one stored update, by trajectory and by token."""
    kept = run.kept_steps()
    step = query.step if query.step > 0 else kept[-1] if kept else 0
    own = str(run.settings.get("method", ""))
    other = query.method or next(name for name in ("gspo", "dr_grpo") if name != own)
    keep = {"step": step, "update": max(0, query.update)}
    blocks: list[Any] = [
        Choice("method", "another method", other, sorted(METHODS), keep),
        Choice("step", "step", str(step), [str(s) for s in kept], {"method": other}),
    ]
    if not kept:
        return ViewPage("what-if", "What if", ABOUT, [Note("This run keeps no token numbers (--keep-tokens).")])
    try:
        _, mine = factors_of(run, step, "", max(0, query.update))
        _, theirs = factors_of(run, step, other, max(0, query.update))
    except TurnwiseError as error:
        return ViewPage("what-if", "What if", ABOUT, [*blocks, Note(str(error), "warning")])
    blocks += [_agreement(mine, theirs, own, other), _slots(mine, theirs, own, other)]
    rows = _trajectories(mine, theirs)
    blocks.append(_table(rows, step, own, other))
    if rows:
        blocks += _transcripts(run, query.trajectory or rows[0][0], step, mine, theirs, own, other)
    return ViewPage("what-if", "What if", ABOUT, blocks)


def _agreement(mine: MethodFactors, theirs: MethodFactors, own: str, other: str) -> FactList:
    a, b = mine.factors.total, theirs.factors.total
    opposed = (a * b < 0).double().mean()
    only = lambda x, y: float(((x != 0) & (y == 0)).double().mean())  # noqa: E731
    norms = float(b.norm() / a.norm()) if float(a.norm()) > 0 else float("nan")
    return FactList(
        "Agreement",
        [
            ("cosine of the two token gradients", cosine(a, b)),
            (f"length of {other}'s, relative to {own}'s", norms),
            ("tokens with opposite signs", f"{100 * float(opposed):.2f} %"),
            (f"tokens that only {own} moves", f"{100 * only(a, b):.2f} %"),
            (f"tokens that only {other} moves", f"{100 * only(b, a):.2f} %"),
        ],
    )


def _slots(mine: MethodFactors, theirs: MethodFactors, own: str, other: str) -> DataTable:
    left, right = mine.recipe.slots(), theirs.recipe.slots()
    rows = [(slot, left[slot], right[slot]) for slot in left if left[slot] != right[slot]]
    about = "slots of the update only count here: another sampler, budget or strategy would have collected other data"
    return DataTable("Slots that differ", ("slot", own, other), rows, about)


def _trajectories(mine: MethodFactors, theirs: MethodFactors) -> list[tuple[str, float, float, float]]:
    """Trajectory, push of each method (normalised to Σ |gradient| = 1), and the difference; largest difference first."""
    tree = mine.batch.tree
    owner = tree.ancestor(TOKEN, TRAJECTORY)
    push = lambda x: torch.zeros(tree.count(TRAJECTORY), dtype=x.dtype).index_add(0, owner, x)  # noqa: E731
    a, b = (push(m.factors.total / m.factors.total.abs().sum().clamp(min=1e-30)) for m in (mine, theirs))
    rows = [(name, x, y, y - x) for name, x, y in zip(mine.batch.trajectory_ids, a.tolist(), b.tolist(), strict=True)]
    return sorted(rows, key=lambda row: -abs(row[3]))


def _table(rows: list[tuple[str, float, float, float]], step: int, own: str, other: str) -> DataTable:
    cells = [
        (Link(name, "what-if", {"step": step, "method": other, "trajectory": name}), x, y, d)
        for name, x, y, d in rows[:SHOWN]
    ]
    about = "push on each trajectory as a share of the update's gradient; the largest differences first"
    return DataTable("Where they differ", ("trajectory", own, other, "difference"), cells, about)


def _transcripts(
    run: RunReader, name: str, step: int, mine: MethodFactors, theirs: MethodFactors, own: str, other: str
) -> list[Any]:
    if name not in mine.batch.trajectory_ids:
        return [Note(f"trajectory {name} is not in this update", "warning")]
    k = mine.batch.trajectory_ids.index(name)
    at = (mine.batch.tree.ancestor(TOKEN, TRAJECTORY) == k).nonzero().squeeze(1)
    trajectory, blocks = run.trajectory(name), list[Any]()
    link = lambda i: Link("", "why", {"trajectory": name, "step": step, "token": i})  # noqa: E731
    gradients = {own: mine.factors.total, other: theirs.factors.total}
    for method, gradient in gradients.items():
        values, top = gradient[at].tolist(), float(gradient.abs().max()) or 1.0
        hint = lambda i, values=values: f"gradient {values[i]:.4g}"  # noqa: E731
        title = f"{name} under {method}"
        blocks.append(transcript(run, trajectory, [v / top for v in values], hint, link, title=title))
    shares = [float(m.factors.share[at].sum()) for m in (mine, theirs)]
    blocks.insert(0, BarChart(f"Share of the gradient that {name} has", (own, other), shares, percent=True))
    return blocks
