"""Curricula: stages from easy to hard, a window that slides along a ranking of the tasks, and weighted sets of tasks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from turnwise.core.records import Group, Task
from turnwise.core.seeds import stable_seed
from turnwise.errors import SettingError
from turnwise.tasks.pool import Array, LivePool, check_pool, draw_by_weight, outcomes
from turnwise.tasks.samplers import LiveSampler, SequentialSampler
from turnwise.tasks.task_source import TaskStream


def parse_weights(text: str, difficulties: tuple[int, ...]) -> Array:
    """``0.2/0.3/0.5``: one weight for each difficulty of the run, as shares of 1."""
    try:
        weights = np.array([float(part) for part in text.split("/")])
    except ValueError:
        raise SettingError(f"weights is {text!r}; write numbers separated by /, one for each difficulty") from None
    if len(weights) != len(difficulties) or not (weights >= 0).all() or not 0 < weights.sum() < math.inf:
        raise SettingError(
            f"weights is {text!r} for the difficulties {', '.join(map(str, difficulties))}; write one weight of 0 or more "
            "for each, not all of them 0"
        )
    return weights / weights.sum()


# --------------------------------------------------------------- weighted sets


@dataclass(frozen=True)
class WeightedSets:
    """The sets of tasks of each difficulty, in the given shares: ``weights`` = "0.2/0.3/0.5". Shares hold exactly, as far as
    whole tasks allow: each draw comes from the set that is furthest below its share."""

    weights: str = ""

    def open(self, tasks: TaskStream) -> LiveSampler:
        levels = tasks.difficulties
        return _WeightedSets(tasks, shares=parse_weights(self.weights or "/".join("1" * len(levels)), levels))


@dataclass
class _WeightedSets(SequentialSampler):
    shares: Array = field(default_factory=lambda: np.ones(1))
    counts: list[int] = field(default_factory=list)

    def task(self, n: int) -> Task:
        counts = np.array(self.counts or [0] * len(self.shares))
        behind = np.where(self.shares > 0, self.shares * (counts.sum() + 1) - counts, -np.inf)
        chosen = int(behind.argmax())
        self.counts = [int(c) + (i == chosen) for i, c in enumerate(counts)]
        return self.tasks.draw(n, self.tasks.difficulties[chosen])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.counts = [int(c) for c in state["counts"]]

    def metrics(self) -> dict[str, float]:
        sets = zip(self.tasks.difficulties, self.counts)
        return {**super().metrics(), **{f"tasks_of/{level}": float(count) for level, count in sets}}


# ----------------------------------------------------------------------- stages


@dataclass(frozen=True)
class Stages:
    """One stage for each difficulty, from the first to the last. A stage ends after ``groups`` finished groups of its own
    difficulty, or once their mean success over the last ``window`` reaches ``solved``. In later stages ``review`` of the tasks
    come from earlier ones."""

    groups: int = 400
    window: int = 64
    solved: float = 0.9
    review: float = 0.2

    def __post_init__(self) -> None:
        check_pool(1, groups=self.groups, window=self.window, solved=self.solved)
        if not 0 <= self.review < 1:
            raise SettingError(f"review is {self.review}; write a share from 0 to below 1")

    def open(self, tasks: TaskStream) -> LiveSampler:
        return _Stages(tasks, rule=self)


@dataclass
class _Stages(SequentialSampler):
    rule: Stages = Stages()
    stage: int = 0
    finished: int = 0  # groups of this stage
    recent: deque[float] = field(default_factory=deque)  # their success rates, the latest ones

    def task(self, n: int) -> Task:
        levels = self.tasks.difficulties
        u = stable_seed(self.tasks.seed, "stages", n) / 2**63
        earlier = self.stage > 0 and u < self.rule.review
        level = int(u / self.rule.review * self.stage) if earlier else self.stage
        return self.tasks.draw(n, levels[min(level, self.stage)])

    def observe(self, group: Group) -> None:
        if group.task.difficulty != self.tasks.difficulties[self.stage]:
            return
        self.finished += 1
        self.recent.append(float(outcomes(group).mean()) if len(outcomes(group)) else 0.0)
        if len(self.recent) > self.rule.window:
            self.recent.popleft()
        full = len(self.recent) == self.rule.window
        done = self.finished >= self.rule.groups or (full and sum(self.recent) / len(self.recent) >= self.rule.solved)
        if done and self.stage + 1 < len(self.tasks.difficulties):
            self.stage, self.finished, self.recent = self.stage + 1, 0, deque()

    def state_dict(self) -> dict[str, Any]:
        own = {"stage": self.stage, "finished": self.finished, "recent": list(self.recent)}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.stage, self.finished = int(state["stage"]), int(state["finished"])
        self.recent = deque(float(x) for x in state["recent"])

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "tasks_stage": float(self.stage), "tasks_in_stage": float(self.finished)}


# --------------------------------------------------------------- sliding window


@dataclass(frozen=True)
class SlidingWindow:
    """A Gaussian window over a ranking of the tasks; it moves on as the policy succeeds:
    μ ← μ + clip(step·tanh(slope·(accuracy/best − target)) + step·tanh(slope·concentration), 0, furthest).

    Tasks are ranked by the angles between hidden states of their prompts, which a run measures before its first step
    (``set_scores``; by difficulty until then). ``concentration`` of responses is not measured: its term is 0. ``inter`` is the
    weight of a score's second part."""

    pool: int = 1024
    width: float = 1000.0
    step: float = 500.0
    slope: float = 2.0
    target: float = 0.5
    furthest: float = 1000.0
    best: float = 1.0
    inter: float = 8.0

    measures = "angles"

    def __post_init__(self) -> None:
        check_pool(self.pool, width=self.width, best=self.best)

    @classmethod
    def scaled(cls, pool: int, width: float, step: float, slope: float, target: float, inter: float) -> SlidingWindow:
        """A window that fits the pool: a ``width`` of 0 is an eighth of it, and steps shrink in the same proportion."""
        factor = 1.0 if width else pool / 8 / 1000.0
        return cls(pool, width or pool / 8, step * factor, slope, target, 1000.0 * factor, inter=inter)

    def open(self, tasks: TaskStream) -> LiveSampler:
        return _Window(tasks, self.pool, rule=self)

    def weight(self, rank: Array, center: float) -> Array:
        return np.exp(-0.5 * ((rank - center) / self.width) ** 2)

    def moved(self, center: float, accuracy: float, concentration: float = 0.0) -> float:
        turn = math.tanh(self.slope * (accuracy / self.best - self.target)) + math.tanh(self.slope * concentration)
        return center + min(max(self.step * turn, 0.0), self.furthest)


@dataclass
class _Window(LivePool):
    rule: SlidingWindow = SlidingWindow()
    arrays: ClassVar[tuple[str, ...]] = ("rank", "center", "wave_rewards")

    def __post_init__(self) -> None:
        super().__post_init__()
        difficulty = np.array([task.difficulty for task in self.members])
        self.rank = np.argsort(np.argsort(difficulty, kind="stable"), kind="stable").astype(np.float64)
        self.center, self.wave_rewards = np.zeros(1), np.zeros(0)
        self._order: Array = np.zeros(0)
        self._ordered: Array = np.zeros(0)  # the ranking that ``_order`` was computed for
        self.kernel = self.rule.weight(np.arange(self.pool), 0.0).clip(min=1e-12)  # by distance from the center

    @property
    def order(self) -> Array:
        """The task of each rank."""
        if self._ordered is not self.rank:
            self._order, self._ordered = np.argsort(self.rank, kind="stable"), self.rank
        return self._order

    def set_scores(self, scores: Sequence[float]) -> None:
        """Rank the tasks by measured scores, largest first."""
        self.rank = np.argsort(np.argsort(-np.asarray(scores), kind="stable"), kind="stable").astype(np.float64)

    def choose(self, count: int, rng: np.random.Generator) -> Array:
        if len(self.wave_rewards):
            self.center[0] = self.rule.moved(float(self.center[0]), float(self.wave_rewards.mean()))
            self.wave_rewards = np.zeros(0)
        center = min(round(float(self.center[0])), self.pool - 1)
        weights = np.concatenate([self.kernel[center:0:-1], self.kernel[: self.pool - center]])  # by rank
        return self.order[draw_by_weight(weights, count, rng)]

    def learn(self, i: int, results: Array, group: Group) -> None:
        super().learn(i, results, group)
        rewards = [t.reward for t in group.trajectories]
        self.wave_rewards = np.append(self.wave_rewards, float(np.mean(rewards)))

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "tasks_window": float(self.center[0])}
