"""Tasks that come back: a list of given ones, or a pool of the endless supply; every pass over them in a new seeded order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from turnwise.core.records import Task
from turnwise.errors import SettingError
from turnwise.tasks.samplers import Counter, LiveSampler, Tasks


@lru_cache(maxsize=8)
def order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    """The order of one pass."""
    places = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(places)
    return tuple(places)


def place(seed: int, n: int, count: int) -> int:
    """Which of ``count`` things the n-th draw is: each once in a pass."""
    return order(seed, n // count, count)[n % count]


@dataclass(frozen=True)
class Listed(Tasks):
    """The n-th draw is one of ``listed``, each once in a pass; of one difficulty where that is asked for."""

    listed: tuple[Task, ...] = ()

    def __post_init__(self) -> None:
        if not self.listed:
            raise SettingError("no tasks are listed; name at least one")

    def draw(self, n: int, difficulty: int | None = None) -> Task:
        some = [t for t in self.listed if difficulty in (None, t.difficulty)] or list(self.listed)
        return some[place(self.seed, n, len(some))]


@dataclass(frozen=True)
class Rounds:
    """The first ``pool`` tasks of the supply, each once in a pass, again and again: what is kept by task meets its task."""

    pool: int = 128

    def __post_init__(self) -> None:
        if self.pool < 1:
            raise SettingError(f"a pool of {self.pool} tasks; write at least 1")

    def open(self, tasks: Tasks) -> LiveSampler:
        return _Rounds(tasks, pool=self.pool)


@dataclass
class _Rounds(Counter):
    pool: int = 1

    def task(self, n: int) -> Task:
        return self.tasks.draw(place(self.tasks.seed, n, self.pool))

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "tasks_passes": self.drawn / self.pool}
