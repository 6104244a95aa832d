"""Where tasks come from: an endless seeded stream, or a fixed list visited in a new seeded order every epoch.

Knows seeds and task records; not which task a sampler prefers, no token and no loss.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from turnwise.core.records import Task
from turnwise.core.seeds import stable_seed
from turnwise.errors import SettingError


@dataclass(frozen=True)
class TaskStream:
    """An endless stream of tasks of one environment, split and set of difficulties; draw n depends only on ``seed`` and n."""

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


@dataclass(frozen=True)
class TaskList(TaskStream):
    """A finite list: every epoch visits each of ``listed`` once; ``difficulty`` restricts a draw to tasks of that level."""

    listed: tuple[Task, ...] = ()

    def __post_init__(self) -> None:
        if not self.listed:
            raise SettingError("no tasks are listed; name at least one")

    def draw(self, n: int, difficulty: int | None = None) -> Task:
        candidates = tuple(t for t in self.listed if difficulty in (None, t.difficulty)) or self.listed
        return candidates[shuffled_index(self.seed, n, len(candidates))]


@lru_cache(maxsize=8)
def epoch_order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    """The permutation of ``range(count)`` that one epoch follows."""
    indices = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(indices)
    return tuple(indices)


def shuffled_index(seed: int, n: int, count: int) -> int:
    """The index in ``range(count)`` of draw n: every epoch of ``count`` draws visits each index once."""
    return epoch_order(seed, n // count, count)[n % count]
