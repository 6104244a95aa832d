"""A sampler that prefers the tasks whose outcome it is least sure of."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

from turnwise.core.records import Group, Task
from turnwise.errors import SettingError
from turnwise.tasks.samplers import LiveSampler, Tasks


@dataclass(frozen=True)
class Uncertain:
    """From a pool of ``pool`` tasks, ``round`` at a time, none twice in a round, the likelier the larger √(v(1−v)) + floor.

    v = a/(a + b), a ← keep·a + 1 for a success, b ← keep·b + 1 for a failure; a task begins with a = b = strength/2."""

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

    def open(self, tasks: Tasks) -> LiveSampler:
        return _Uncertain(tasks, self)

    def weight(self, a: float, b: float) -> float:
        v = a / (a + b)
        return math.sqrt(v * (1 - v)) + self.floor


@dataclass
class _Uncertain:
    tasks: Tasks
    rule: Uncertain
    drawn: int = 0
    queue: list[int] = field(default_factory=list)  # what is left of this round, as places in the pool
    seen: dict[str, list[float]] = field(default_factory=dict)  # by task key: a, b

    def next(self) -> tuple[int, Task]:
        if not self.queue:
            self.queue = self._round()
        task = self.tasks.draw(self.queue.pop(0))
        number, self.drawn = self.drawn, self.drawn + 1
        return number, task

    def _round(self) -> list[int]:
        """A weighted draw without replacement: the largest log(u)/w."""
        dice = random.Random(f"{self.tasks.seed}/uncertain/{self.drawn}")
        lots = [math.log(1.0 - dice.random()) / self._weight(i) for i in range(self.rule.pool)]
        return sorted(range(self.rule.pool), key=lambda i: -lots[i])[: self.rule.round]

    def _weight(self, place: int) -> float:
        half = self.rule.strength / 2
        return self.rule.weight(*self.seen.get(self.tasks.draw(place).key, (half, half)))

    def observe(self, group: Group) -> None:
        half = self.rule.strength / 2
        a, b = self.seen.get(group.task.key, (half, half))
        for t in group.trajectories:
            good = bool(t.success if t.success is not None else t.reward > 0)
            a, b = self.rule.keep * a + good, self.rule.keep * b + (not good)
        self.seen[group.task.key] = [a, b]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "queue": self.queue, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn, self.queue = int(state["drawn"]), [int(i) for i in state["queue"]]
        self.seen = {key: list(value) for key, value in state["seen"].items()}

    def metrics(self) -> dict[str, float]:
        return {"tasks_drawn": float(self.drawn), "tasks_seen": float(len(self.seen))}


__all__ = ["Uncertain"]
