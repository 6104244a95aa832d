"""Samplers: which task next. A piece is frozen data; ``open`` gives the live sampler with five verbs.

    next · observe · state_dict · load_state_dict · metrics

A sampler knows tasks and finished groups, never tokens or losses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from turnwise.data import Group, Task
from turnwise.errors import SettingError
from turnwise.seeds import stable_seed


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
        return _Counter(tasks)


@dataclass
class _Counter:
    tasks: Tasks
    drawn: int = field(default=0)

    def next(self) -> tuple[int, Task]:
        n, self.drawn = self.drawn, self.drawn + 1
        return n, self.tasks.draw(n)

    def observe(self, group: Group) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = int(state["drawn"])

    def metrics(self) -> dict[str, float]:
        return {"tasks_drawn": float(self.drawn)}
