"""Trackers: per-task statistics from earlier visits. They are read before the present batch updates them. Knows no
sampler."""

from __future__ import annotations

from dataclasses import field

from turnwise.algebra.piece import State, StepView
from turnwise.algebra.term import Term
from turnwise.algebra.value import Constant
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.credit.fact import Fact
from turnwise.maths.lazy_torch import torch


class Solved(Term):
    """1 for a successful trajectory by the environment's verdict, else 0; without a verdict, 1 where the return is
    positive."""

    def __call__(self, batch: Batch) -> Field:
        earned = batch.reward.sum(TRAJECTORY)
        verdict = where(batch.success.map(torch.isnan), earned > 0, batch.success > 0.5)
        return where(verdict, 1.0, 0.0).to(batch.reward.x.dtype)


class SuccessTracker(Term):
    """v = a / (a + b), the success rate of a task on its earlier visits. At GROUP.

    After the visit  a ← ρa + Σ r,  b ← ρb + Σ (1 − r)  with the ``result`` r in [0, 1] of each trajectory and ρ =
    ``keep``; ``average`` uses means instead of sums. A new task starts with a = N (s + ½)/(n + 1), b = N (n − s + ½)/(n
    + 1), N = ``strength``, from the facts ``solved`` (s) and ``tries`` (n) of earlier tries; without them a = b =
    N/2."""

    updates_after_credit = True
    result: Term = field(default_factory=Solved)
    keep: Term = field(default_factory=lambda: Constant(1.0))
    strength: float = number(8.0, above=0)
    average: bool = False

    def initial_state(self) -> State:
        return {"tasks": {}}

    def memory_columns(self, state: State, batch: Batch) -> dict[object, Field]:
        tries, solved = (_of_group(Fact(name, missing=0.0)(batch)) for name in ("tries", "solved"))
        prior = lambda s: (self.strength * (s + 0.5) / (tries + 1)).x.tolist()  # noqa: E731
        a, b = prior(solved), prior(tries - solved)
        counts = [state["tasks"].get(task, (a[i], b[i])) for i, task in enumerate(task_keys(batch))]
        column = lambda k: batch.tree.field(GROUP, [row[k] for row in counts], torch.float64)  # noqa: E731
        return {(self, "a"): column(0), (self, "b"): column(1)}

    def next_state(self, state: State, view: StepView) -> State:
        """All groups of a task in one batch are one visit, so that their order does not matter."""
        batch = view.batch
        r = self.result(batch).to(torch.float64)
        keep = _of_group(self.keep(batch))
        gather = (lambda x: x.mean(GROUP)) if self.average else (lambda x: x.sum(GROUP))
        columns = (keep, batch[self, "a"], batch[self, "b"], gather(r), gather(1 - r))
        updated: dict[str, list[float]] = {}
        visits: dict[str, list[tuple[float, ...]]] = {}
        for task, *row in zip(task_keys(batch), *(c.x.tolist() for c in columns)):
            visits.setdefault(task, []).append(tuple(row))
        for task, rows in visits.items():
            rho, a, b = min(row[0] for row in rows), rows[0][1], rows[0][2]
            votes = [sum(row[k] for row in rows) / (len(rows) if self.average else 1) for k in (3, 4)]
            updated[task] = [rho * a + votes[0], rho * b + votes[1]]
        return {"tasks": {**state["tasks"], **updated}}

    def __call__(self, batch: Batch) -> Field:
        a, b = batch[self, "a"], batch[self, "b"]
        return (a / (a + b)).to(batch.reward.x.dtype)


def _of_group(value: Field) -> Field:
    """A coarser value unchanged, a finer one as its mean over the group."""
    return value.to(torch.float64).at(GROUP) if value.level >= GROUP else value.to(torch.float64).mean(GROUP)


def task_keys(batch: Batch) -> tuple[str, ...]:
    """The key of each group's task; its index where tasks are unnamed."""
    return batch.task_keys or tuple(map(str, batch.group.x.tolist()))
