"""Samplers: which task next. A piece is frozen data; ``open`` gives the live sampler with five verbs.

    next · observe · state_dict · load_state_dict · metrics

A sampler knows tasks and finished groups, never tokens or losses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from turnwise.core.records import Group, Task
from turnwise.core.seeds import stable_seed
from turnwise.errors import SettingError


@dataclass(frozen=True)
class Tasks:
    """An endless supply: environment, split and difficulties; the n-th draw depends only on ``seed`` and n."""

    environment: str
    split: str = "train"
    difficulties: tuple[int, ...] = (1,)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.difficulties:
            raise SettingError("no difficulty given; write for example --difficulty 1,2")

    def draw(self, n: int, difficulty: int | None = None) -> Task:
        seed = stable_seed(self.seed, self.split, n)
        level = self.difficulties[seed % len(self.difficulties)] if difficulty is None else difficulty
        return Task(self.environment, seed % 2**31, self.split, level)


class LiveSampler(Protocol):
    def next(self) -> tuple[int, Task]:
        """The number of this draw, and its task."""
        ...

    def observe(self, group: Group) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class Sampler(Protocol):
    def open(self, tasks: Tasks) -> LiveSampler: ...


@dataclass(frozen=True)
class Uniform:
    """Every draw is a new task, difficulties alike."""

    def open(self, tasks: Tasks) -> LiveSampler:
        return Counter(tasks)


@dataclass
class Counter:
    """Draws by number; nothing that was played changes what comes next."""

    tasks: Tasks
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


@dataclass(frozen=True)
class Unsolved:
    """Turns round a pool of ``pool`` tasks; one whose success over all its episodes has reached ``solved`` is not drawn
    again, until none is left and the pool is renewed."""

    solved: float = 0.9
    pool: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.solved <= 1 or self.pool < 1:
            raise SettingError(
                f"solved {self.solved}, pool {self.pool}; write 0 < solved <= 1 and a pool of at least 1"
            )

    def open(self, tasks: Tasks) -> LiveSampler:
        return _Pool(tasks, self)


@dataclass
class _Pool:
    tasks: Tasks
    rule: Unsolved
    drawn: int = 0
    cursor: int = 0
    seen: dict[str, list[float]] = field(default_factory=dict)  # by task key: successes, episodes

    def next(self) -> tuple[int, Task]:
        for _ in range(self.rule.pool):
            task = self.tasks.draw(self.cursor)
            if not self._done(task):
                break
            self._forward()
        else:
            self.cursor += self.rule.pool - self.cursor % self.rule.pool  # all solved: the next pool
            task = self.tasks.draw(self.cursor)
        self._forward()
        number, self.drawn = self.drawn, self.drawn + 1
        return number, task

    def _forward(self) -> None:
        """The next task of the pool, then round again."""
        begin = self.cursor - self.cursor % self.rule.pool
        self.cursor = begin + (self.cursor + 1) % self.rule.pool

    def _done(self, task: Task) -> bool:
        good, n = self.seen.get(task.key, (0.0, 0.0))
        return n > 0 and good / n >= self.rule.solved

    def observe(self, group: Group) -> None:
        entry = self.seen.setdefault(group.task.key, [0.0, 0.0])
        entry[0] += sum(bool(t.success if t.success is not None else t.reward > 0) for t in group.trajectories)
        entry[1] += len(group.trajectories)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "cursor": self.cursor, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn, self.cursor = int(state["drawn"]), int(state["cursor"])
        self.seen = {key: list(value) for key, value in state["seen"].items()}

    def metrics(self) -> dict[str, float]:
        solved = sum(good / n >= self.rule.solved for good, n in self.seen.values() if n)
        return {"tasks_drawn": float(self.drawn), "tasks_solved": float(solved)}
