"""Budgets that follow what a task has needed so far: fewer rollouts once it succeeds, and limits on its turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turnwise.core.records import Group, Origin, Status, Task
from turnwise.errors import RecipeError
from turnwise.tasks.allocation import remember
from turnwise.tasks.budgets import Budget, EqualSizes, LiveBudget, check_budget
from turnwise.tasks.pool import outcomes


@dataclass(frozen=True)
class FallingWithSuccess:
    """All ``size`` trajectories while a task's success rate over its last ``window`` groups is at most ``easy``, then linearly
    fewer, down to ``least`` at a rate of 1. The turn limit of a task is its longest success, plus ``spare`` turns."""

    groups: int = 8
    size: int = 8
    easy: float = 0.6
    least: int = 1
    window: int = 4
    spare: int = 0

    requirements = frozenset({"turn limits"})

    def __post_init__(self) -> None:
        check_budget(self.groups, self.size)
        if not (0 <= self.easy < 1 and self.least >= 1 and self.window >= 1 and self.spare >= 0):
            raise RecipeError(f"need 0 <= easy < 1, least >= 1, window >= 1 and spare >= 0, got {self}")

    @property
    def largest(self) -> int:
        return self.size

    def of(self, groups: int, size: int) -> Budget:
        return FallingWithSuccess(groups, size, self.easy, min(self.least, size), self.window, self.spare)

    def open(self) -> LiveBudget:
        return _FallingWithSuccess(self.size, self)

    def number(self, rate: float) -> int:
        over = max(0.0, rate - self.easy) / (1 - self.easy)
        return max(self.least, round(self.size - over * (self.size - self.least)))


@dataclass
class _FallingWithSuccess(EqualSizes):
    rule: FallingWithSuccess
    rates: dict[str, list[float]] = field(default_factory=dict)  # by task key: the latest groups
    longest: dict[str, int] = field(default_factory=dict)  # by task key: turns of the longest success

    def sizes(self, tasks: Sequence[Task]) -> list[int]:
        rates = [self.rates.get(task.key, [0.0]) for task in tasks]
        return [self.rule.number(sum(r) / len(r)) for r in rates]

    def max_turns(self, task: Task) -> int:
        longest = self.longest.get(task.key, 0)
        return longest + self.rule.spare if longest else 0

    def observe(self, group: Group) -> None:
        results = outcomes(group)
        if not len(results):
            return
        history = [*self.rates.get(group.task.key, []), float(results.mean())]
        remember(self.rates, group.task.key, history[-self.rule.window :])
        turns = successful_turns(group)
        if turns:
            remember(self.longest, group.task.key, max(self.longest.get(group.task.key, 0), *turns))

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates, "longest": self.longest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates, self.longest = dict(state["rates"]), {k: int(v) for k, v in state["longest"].items()}

    def metrics(self) -> dict[str, float]:
        limits = list(self.longest.values())
        return {"budget/turn_limit": float(np.mean(limits))} if limits else {}


def successful_turns(group: Group) -> list[int]:
    """Turns of each success of a group, counted from the start of the episode."""
    own = [t for t in group.trajectories if t.origin == Origin.POLICY and t.status == Status.FINISHED]
    good = [t for t in own if (t.success if t.success is not None else t.reward > 0)]
    return [len(t.turns) + (t.fork.turn if t.fork else 0) for t in good if t.turns]


@dataclass(frozen=True)
class TurnPercentile:
    """The usual number of rollouts; episodes end after the ``percent``-th percentile of the turns of finished episodes of the
    same difficulty. The first ``calibrate`` episodes of a difficulty have the environment's limit, and one group in
    ``probe_every`` keeps it later, so that the limit can rise again."""

    groups: int = 8
    size: int = 8
    percent: float = 75.0
    calibrate: int = 64
    probe_every: int = 8

    requirements = frozenset({"turn limits"})

    def __post_init__(self) -> None:
        check_budget(self.groups, self.size)
        if not (0 < self.percent <= 100 and self.calibrate >= 1 and self.probe_every >= 1):
            raise RecipeError(f"need 0 < percent <= 100, calibrate >= 1 and probe_every >= 1, got {self}")

    @property
    def largest(self) -> int:
        return self.size

    def of(self, groups: int, size: int) -> Budget:
        return TurnPercentile(groups, size, self.percent, self.calibrate, self.probe_every)

    def open(self) -> LiveBudget:
        return _TurnPercentile(self.size, self)


@dataclass
class _TurnPercentile(EqualSizes):
    rule: TurnPercentile
    turns: dict[str, list[int]] = field(default_factory=dict)  # by difficulty: of the latest finished episodes
    asked: int = 0

    def limit(self, difficulty: int) -> int:
        turns = self.turns.get(str(difficulty), [])
        return int(np.ceil(np.percentile(turns, self.rule.percent))) if len(turns) >= self.rule.calibrate else 0

    def max_turns(self, task: Task) -> int:
        self.asked += 1
        return 0 if self.asked % self.rule.probe_every == 0 else self.limit(task.difficulty)

    def observe(self, group: Group) -> None:
        done = [t for t in group.trajectories if t.origin == Origin.POLICY and t.status == Status.FINISHED]
        now = [*self.turns.get(str(group.task.difficulty), []), *(len(t.turns) for t in done)]
        self.turns[str(group.task.difficulty)] = now[-4 * self.rule.calibrate :]

    def state_dict(self) -> dict[str, Any]:
        return {"turns": self.turns, "asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turns, self.asked = {k: [int(n) for n in v] for k, v in state["turns"].items()}, int(state["asked"])

    def metrics(self) -> dict[str, float]:
        return {f"budget/turn_limit_{level}": float(self.limit(int(level))) for level in self.turns}
