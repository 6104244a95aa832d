"""Task samplers: which task is issued next. A sampler is a frozen piece of a recipe; ``open`` returns its live state.

    next · observe · state_dict · load_state_dict · metrics

A sampler knows tasks and finished groups; never tokens or losses.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnwise.core.records import Group, Task
from turnwise.errors import SettingError
from turnwise.tasks.task_source import TaskStream, shuffled_index


class LiveSampler(Protocol):
    """Interface: a sampler in a run. Draws tasks, learns of their results, survives a crash."""

    def next(self) -> tuple[int, Task]:
        """The number of this draw, and its task."""
        ...

    def observe(self, group: Group) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class Sampler(Protocol):
    """Interface: the frozen description of a sampler; ``open`` makes the live one."""

    def open(self, tasks: TaskStream) -> LiveSampler: ...


def weighted_permutation(weights: Sequence[float], rng: random.Random) -> list[int]:
    """Indices in a weighted random order without replacement: sorted by log(u)/w, largest first (Efraimidis and Spirakis).

    The k-th index is a draw, in proportion to the weights, from those that the first k − 1 draws left."""
    keys = [math.log(1.0 - rng.random()) / max(weight, 1e-30) for weight in weights]
    return sorted(range(len(keys)), key=lambda i: -keys[i])


# --------------------------------------------------------------------- uniform


@dataclass(frozen=True)
class Uniform:
    """Every draw is a new task; all difficulties are equally likely."""

    def open(self, tasks: TaskStream) -> LiveSampler:
        return SequentialSampler(tasks)


@dataclass
class SequentialSampler:
    """Issues draws 0, 1, 2 ... of the stream; outcomes do not affect the order."""

    tasks: TaskStream
    drawn: int = field(default=0)

    def next(self) -> tuple[int, Task]:
        n, self.drawn = self.drawn, self.drawn + 1
        return n, self.task(n)

    def task(self, n: int) -> Task:
        return self.tasks.draw(n)

    def observe(self, group: Group) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = int(state["drawn"])

    def metrics(self) -> dict[str, float]:
        return {"tasks_drawn": float(self.drawn)}


# ------------------------------------------------------------------ fixed pools


@dataclass(frozen=True)
class CyclePool:
    """Cycles through the first ``pool`` tasks of the stream, each once per epoch, so that per-task state (a baseline, a
    replay buffer) meets its task again."""

    pool: int = 128

    def __post_init__(self) -> None:
        if self.pool < 1:
            raise SettingError(f"a pool of {self.pool} tasks; write at least 1")

    def open(self, tasks: TaskStream) -> LiveSampler:
        return _CyclePool(tasks, pool=self.pool)


@dataclass
class _CyclePool(SequentialSampler):
    pool: int = 1

    def task(self, n: int) -> Task:
        return self.tasks.draw(shuffled_index(self.tasks.seed, n, self.pool))

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "tasks_passes": self.drawn / self.pool}


@dataclass(frozen=True)
class Unsolved:
    """Cycles through a pool of ``pool`` tasks and skips every task whose success rate over all its episodes has reached
    ``solved``. When all are solved, the next ``pool`` tasks of the stream replace them."""

    solved: float = 0.9
    pool: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.solved <= 1 or self.pool < 1:
            raise SettingError(
                f"solved {self.solved}, pool {self.pool}; write 0 < solved <= 1 and a pool of at least 1"
            )

    def open(self, tasks: TaskStream) -> LiveSampler:
        return _UnsolvedPool(tasks, self)


@dataclass
class _UnsolvedPool:
    tasks: TaskStream
    rule: Unsolved
    drawn: int = 0
    cursor: int = 0
    outcomes: dict[str, list[float]] = field(default_factory=dict)  # by task key: successes, episodes

    def next(self) -> tuple[int, Task]:
        for _ in range(self.rule.pool):
            task = self.tasks.draw(self.cursor)
            if not self._is_solved(task):
                break
            self._advance()
        else:
            self.cursor += self.rule.pool - self.cursor % self.rule.pool  # all solved: the next pool
            task = self.tasks.draw(self.cursor)
        self._advance()
        number, self.drawn = self.drawn, self.drawn + 1
        return number, task

    def _advance(self) -> None:
        """Move the cursor to the next task of the pool, wrapping around at its end."""
        begin = self.cursor - self.cursor % self.rule.pool
        self.cursor = begin + (self.cursor + 1) % self.rule.pool

    def _is_solved(self, task: Task) -> bool:
        successes, episodes = self.outcomes.get(task.key, (0.0, 0.0))
        return episodes > 0 and successes / episodes >= self.rule.solved

    def observe(self, group: Group) -> None:
        counts = self.outcomes.setdefault(group.task.key, [0.0, 0.0])
        counts[0] += sum(bool(t.success if t.success is not None else t.reward > 0) for t in group.trajectories)
        counts[1] += len(group.trajectories)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "cursor": self.cursor, "seen": self.outcomes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn, self.cursor = int(state["drawn"]), int(state["cursor"])
        self.outcomes = {key: list(value) for key, value in state["seen"].items()}

    def metrics(self) -> dict[str, float]:
        solved = sum(good / n >= self.rule.solved for good, n in self.outcomes.values() if n)
        return {"tasks_drawn": float(self.drawn), "tasks_solved": float(solved)}


# ------------------------------------------------------------------ uncertainty


@dataclass(frozen=True)
class UncertaintySampler:
    """Prefers tasks of uncertain outcome: ``round`` tasks at a time from a pool of ``pool``, without replacement within a
    round, with weight √(v(1−v)) + floor.

    v = a/(a + b), a ← keep·a + 1 for a success, b ← keep·b + 1 for a failure; a task starts with a = b = strength/2."""

    pool: int = 1024
    round: int = 64
    floor: float = 0.05
    keep: float = 0.96
    strength: float = 8.0

    def __post_init__(self) -> None:
        if not 1 <= self.round <= self.pool:
            raise SettingError(f"rounds of {self.round} from a pool of {self.pool}; write 1 <= round <= pool")
        if not (self.floor > 0 and 0 < self.keep <= 1 and self.strength > 0):
            raise SettingError(f"need floor > 0, 0 < keep <= 1 and strength > 0, got {self}")

    def open(self, tasks: TaskStream) -> LiveSampler:
        return _UncertaintyPool(tasks, self)

    def weight(self, a: float, b: float) -> float:
        v = a / (a + b)
        return math.sqrt(v * (1 - v)) + self.floor


@dataclass
class _UncertaintyPool:
    tasks: TaskStream
    rule: UncertaintySampler
    drawn: int = 0
    queue: list[int] = field(default_factory=list)  # the rest of this round, as indices into the pool
    posteriors: dict[str, list[float]] = field(default_factory=dict)  # by task key: a, b

    def next(self) -> tuple[int, Task]:
        if not self.queue:
            self.queue = self._draw_round()
        task = self.tasks.draw(self.queue.pop(0))
        number, self.drawn = self.drawn, self.drawn + 1
        return number, task

    def _draw_round(self) -> list[int]:
        rng = random.Random(f"{self.tasks.seed}/uncertain/{self.drawn}")
        return weighted_permutation([self._weight(i) for i in range(self.rule.pool)], rng)[: self.rule.round]

    def _weight(self, index: int) -> float:
        half = self.rule.strength / 2
        return self.rule.weight(*self.posteriors.get(self.tasks.draw(index).key, (half, half)))

    def observe(self, group: Group) -> None:
        half = self.rule.strength / 2
        a, b = self.posteriors.get(group.task.key, (half, half))
        for t in group.trajectories:
            success = bool(t.success if t.success is not None else t.reward > 0)
            a, b = self.rule.keep * a + success, self.rule.keep * b + (not success)
        self.posteriors[group.task.key] = [a, b]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "queue": self.queue, "seen": self.posteriors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn, self.queue = int(state["drawn"]), [int(i) for i in state["queue"]]
        self.posteriors = {key: list(value) for key, value in state["seen"].items()}

    def metrics(self) -> dict[str, float]:
        return {"tasks_drawn": float(self.drawn), "tasks_seen": float(len(self.posteriors))}
