"""Trackers: what is known of a task from the visits before this one. They read before they write."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from turnwise.algebra.piece import State, Whole, check
from turnwise.algebra.term import Term
from turnwise.algebra.value import Constant
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TRAJECTORY, Field, where
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact


@dataclass(frozen=True)
class Solved(Term):
    """1 for a trajectory that the environment calls a success, else 0; where it has no verdict, one that earned something."""

    def __call__(self, batch: Batch) -> Field:
        earned = batch.reward.sum(TRAJECTORY)
        verdict = where(batch.success.map(torch.isnan), earned > 0, batch.success > 0.5)
        return where(verdict, 1.0, 0.0).to(batch.reward.x.dtype)


@dataclass(frozen=True)
class Tracker(Term):
    """v = a / (a + b), how often a task was solved on its visits before this one. At GROUP.

    After the visit  a ← ρa + Σ r,  b ← ρb + Σ (1 − r)  with the ``result`` r in [0, 1] of each trajectory and ρ = ``keep``;
    ``one_vote`` takes the means instead of the sums. A new task begins with a = N (s + ½)/(n + 1), b = N (n − s + ½)/(n + 1),
    N = ``strength``, where the facts ``solved`` and ``tries`` tell s of n earlier tries; told nothing, a = b = N/2."""

    result: Term = field(default_factory=Solved)
    keep: Term = field(default_factory=lambda: Constant(1.0))
    strength: float = 8.0
    one_vote: bool = False

    late = True

    def __post_init__(self) -> None:
        check(self.strength > 0, f"strength is {self.strength}; write a positive number of visits")

    def start(self) -> State:
        return {"tasks": {}}

    def recall(self, state: State, batch: Batch) -> dict[object, Field]:
        tries, solved = (_of_group(Fact(name, missing=0.0)(batch)) for name in ("tries", "solved"))
        begin = lambda s: (self.strength * (s + 0.5) / (tries + 1)).x.tolist()  # noqa: E731
        a, b = begin(solved), begin(tries - solved)
        rows = [state["tasks"].get(task, (a[i], b[i])) for i, task in enumerate(tasks_of(batch))]
        column = lambda k: batch.tree.field(GROUP, [row[k] for row in rows], torch.float64)  # noqa: E731
        return {(self, "a"): column(0), (self, "b"): column(1)}

    def advance(self, state: State, whole: Whole) -> State:
        """Groups of one task are one visit: its order in the batch must not matter."""
        batch = whole.batch
        r = self.result(batch).to(torch.float64)
        keep = _of_group(self.keep(batch))
        gather = (lambda x: x.mean(GROUP)) if self.one_vote else (lambda x: x.sum(GROUP))
        columns = (keep, batch[self, "a"], batch[self, "b"], gather(r), gather(1 - r))
        known: dict[str, list[float]] = {}
        visits: dict[str, list[tuple[float, ...]]] = {}
        for task, *row in zip(tasks_of(batch), *(c.x.tolist() for c in columns)):
            visits.setdefault(task, []).append(tuple(row))
        for task, seen in visits.items():
            rho, a, b = min(row[0] for row in seen), seen[0][1], seen[0][2]
            votes = [sum(row[k] for row in seen) / (len(seen) if self.one_vote else 1) for k in (3, 4)]
            known[task] = [rho * a + votes[0], rho * b + votes[1]]
        return {"tasks": {**state["tasks"], **known}}

    def __call__(self, batch: Batch) -> Field:
        a, b = batch[self, "a"], batch[self, "b"]
        return (a / (a + b)).to(batch.reward.x.dtype)


@dataclass(frozen=True)
class Forgetting(Term):
    """ρ = clip(2^{−D/half}, low, high): what was known fades with the policy's drift D."""

    drift: Term
    half: float = 0.06
    low: float = 0.875
    high: float = 0.96

    def __post_init__(self) -> None:
        check(self.half > 0, f"half is {self.half}; write the drift that halves what is known, a positive number")
        check(0 <= self.low <= self.high <= 1, f"need 0 <= low <= high <= 1, got {self.low}, {self.high}")

    def __call__(self, batch: Batch) -> Field:
        return self.drift(batch).map(lambda d: torch.exp2(-d / self.half)).clamp(self.low, self.high)


@dataclass(frozen=True)
class DriftSince(Term):
    """D = Σ over the steps since a task was last seen of mean |log π − log π_previous|; 0 for a new task. At GROUP.

    By the triangle inequality no less than the mean |log π − log π_then| it stands for, had each step's batch shown the
    same tokens: nothing old has to be stored and scored again."""

    late = True

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.PROXIMAL, Signal.PREVIOUS})

    def start(self) -> State:
        return {"travelled": 0.0, "tasks": {}}

    def recall(self, state: State, batch: Batch) -> dict[object, Field]:
        then = [state["tasks"].get(task, float("nan")) for task in tasks_of(batch)]
        return {
            (self, "travelled"): batch.tree.full(BATCH, state["travelled"], torch.float64),
            (self, "then"): batch.tree.field(GROUP, then, torch.float64),
        }

    def _now(self, batch: Batch) -> Field:
        step = (batch[Signal.PROXIMAL] - batch[Signal.PREVIOUS]).abs().mean(BATCH)
        return batch[self, "travelled"] + step.to(torch.float64)

    def advance(self, state: State, whole: Whole) -> State:
        now = float(self._now(whole.batch).item)
        return {"travelled": now, "tasks": {**state["tasks"], **dict.fromkeys(tasks_of(whole.batch), now)}}

    def __call__(self, batch: Batch) -> Field:
        then = batch[self, "then"]
        return where(then.map(torch.isnan), 0.0, self._now(batch) - then)


def _of_group(value: Field) -> Field:
    """A coarser value as it is, a finer one by its mean."""
    return value.to(torch.float64).at(GROUP) if value.level >= GROUP else value.to(torch.float64).mean(GROUP)


def tasks_of(batch: Batch) -> tuple[str, ...]:
    """The task of each group; where nobody named them, its number."""
    return batch.tasks or tuple(map(str, batch.group.x.tolist()))


__all__ = ["DriftSince", "Forgetting", "Solved", "Tracker", "tasks_of"]
