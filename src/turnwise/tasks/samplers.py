"""Task samplers: which task is issued next. A sampler is a frozen piece of a recipe; ``open`` returns its live state.

    next · observe · state_dict · load_state_dict · metrics

A sampler knows tasks and finished groups; never tokens or losses.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from turnwise.core.limits import Declared, number
from turnwise.core.records import Group, Limit, Task
from turnwise.core.seeds import stable_seed
from turnwise.core.stateful import Stateful
from turnwise.errors import SettingError
from turnwise.tasks.task_source import TaskStream, shuffled_index


class Sampler(Declared):
    """Interface: the frozen description of a sampler. A subclass names the class of its live state in ``live``."""

    live: ClassVar[type[LiveSampler]]

    def open(self, tasks: TaskStream) -> LiveSampler:
        return self.live(tasks, self)


@dataclass
class LiveSampler(Stateful):
    """A sampler in a run. As it stands it issues draws 0, 1, 2 ... of the stream; a subclass chooses by ``task``, learns by
    ``observe``, and names what a checkpoint holds."""

    tasks: TaskStream
    rule: Any
    drawn: int = 0

    saved: ClassVar[tuple[str, ...]] = ("drawn",)

    def begin_wave(self, count: int) -> None:
        """So many tasks will be asked for together."""

    def next(self) -> tuple[int, Task]:
        """The number of this draw, and its task."""
        n, self.drawn = self.drawn, self.drawn + 1
        return n, self.task(n)

    def task(self, n: int) -> Task:
        """The task of draw ``n``; asked once for each n, in order."""
        return self.tasks.draw(n)

    def observe(self, group: Group) -> None:
        """Learn from a finished group."""

    def metrics(self) -> dict[str, float]:
        return {"tasks_drawn": float(self.drawn)}


def weighted_permutation(weights: Sequence[float], rng: random.Random) -> list[int]:
    """Indices in a weighted random order without replacement: sorted by log(u)/w, largest first (Efraimidis and Spirakis).

    The k-th index is a draw, in proportion to the weights, from those that the first k − 1 draws left."""
    keys = [math.log(1.0 - rng.random()) / max(weight, 1e-30) for weight in weights]
    return sorted(range(len(keys)), key=lambda i: -keys[i])


class Uniform(Sampler):
    """Every draw is a new task; all difficulties are equally likely."""

    live = LiveSampler


# ------------------------------------------------------------------ fixed pools


@dataclass
class _CyclePool(LiveSampler):
    def task(self, n: int) -> Task:
        return self.tasks.draw(shuffled_index(self.tasks.seed, n, self.rule.pool))

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "tasks_passes": self.drawn / self.rule.pool}


class CyclePool(Sampler):
    """Cycles through the first ``pool`` tasks of the stream, so that state by task (a baseline, a buffer) meets it again."""

    live = _CyclePool
    pool: int = number(128, least=1)


@dataclass
class _UnsolvedPool(LiveSampler):
    cursor: int = 0
    outcomes: dict[str, list[float]] = field(default_factory=dict)  # by task key: successes, episodes
    saved = ("drawn", "cursor", "outcomes")

    def task(self, n: int) -> Task:
        pool = self.rule.pool
        first = self.cursor - self.cursor % pool
        for offset in range(pool):
            position = first + (self.cursor + offset) % pool
            task = self.tasks.draw(position)
            successes, episodes = self.outcomes.get(task.key, (0.0, 0.0))
            if not episodes or successes / episodes < self.rule.solved:
                break
        else:  # all are solved: the next pool
            first = position = first + pool
            task = self.tasks.draw(position)
        self.cursor = first + (position + 1) % pool
        return task

    def observe(self, group: Group) -> None:
        counts = self.outcomes.setdefault(group.task.key, [0.0, 0.0])
        counts[0] += sum(t.solved for t in group.trajectories)
        counts[1] += len(group.trajectories)

    def metrics(self) -> dict[str, float]:
        solved = sum(good / n >= self.rule.solved for good, n in self.outcomes.values() if n)
        return {**super().metrics(), "tasks_solved": float(solved)}


class Unsolved(Sampler):
    """Cycles through a pool of ``pool`` tasks and skips every task whose success rate over all its episodes has reached
    ``solved``. When all are solved, the next ``pool`` tasks of the stream replace them."""

    live = _UnsolvedPool
    solved: float = number(0.9, above=0, most=1)
    pool: int = number(1024, least=1)


@dataclass
class _Begun(LiveSampler):
    fresh: int = 0
    again: list[int] = field(default_factory=list)  # draws of the stream
    issued: dict[str, int] = field(default_factory=dict)  # those in flight, by task key
    saved = ("drawn", "fresh", "again", "issued")

    def task(self, n: int) -> Task:
        place = self.again.pop(0) if self.again else self.fresh
        self.fresh = max(self.fresh, place + 1)
        self.issued[(task := self.tasks.draw(place)).key] = place
        return task

    def observe(self, group: Group) -> None:
        place = self.issued.pop(group.task.key, None)
        if place is not None and any(t.limit == Limit.TOKENS for t in group.trajectories):
            self.again.append(place)


class Begun(Sampler):
    """Tasks with an episode that a window cut, in the order in which they were cut; a new task where there is none."""

    live = _Begun


# ------------------------------------------------------------------ uncertainty


@dataclass
class _UncertaintyPool(LiveSampler):
    queue: list[int] = field(default_factory=list)  # the rest of this round, as indices into the pool
    posteriors: dict[str, list[float]] = field(default_factory=dict)  # by task key: a, b
    saved = ("drawn", "queue", "posteriors")

    def posterior(self, task: Task) -> tuple[float, float]:
        half = self.rule.strength / 2
        a, b = self.posteriors.get(task.key, (half, half))
        return a, b

    def task(self, n: int) -> Task:
        if not self.queue:
            rng = random.Random(f"{self.tasks.seed}/uncertain/{n}")
            weights = [self.rule.weight(*self.posterior(self.tasks.draw(i))) for i in range(self.rule.pool)]
            self.queue = weighted_permutation(weights, rng)[: self.rule.round]
        return self.tasks.draw(self.queue.pop(0))

    def observe(self, group: Group) -> None:
        a, b = self.posterior(group.task)
        for t in group.trajectories:
            a, b = self.rule.keep * a + t.solved, self.rule.keep * b + (not t.solved)
        self.posteriors[group.task.key] = [a, b]

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "tasks_seen": float(len(self.posteriors))}


class UncertaintySampler(Sampler):
    """Prefers tasks of uncertain outcome: ``round`` tasks at a time from a pool of ``pool``, without replacement within a
    round, with weight √(v(1−v)) + floor.

    v = a/(a + b), a ← keep·a + 1 for a success, b ← keep·b + 1 for a failure; a task starts with a = b = strength/2."""

    live = _UncertaintyPool
    pool: int = 1024
    round: int = number(64, least=1, most="pool")
    floor: float = number(0.05, above=0)
    keep: float = number(0.96, above=0, most=1)
    strength: float = number(8.0, above=0)

    def weight(self, a: float, b: float) -> float:
        v = a / (a + b)
        return math.sqrt(v * (1 - v)) + self.floor


# ------------------------------------------------------------------- curricula


@dataclass
class _WeightedSets(LiveSampler):
    counts: list[int] = field(default_factory=list)  # draws by difficulty
    saved = ("drawn", "counts")

    def __post_init__(self) -> None:
        levels = self.tasks.difficulties
        self.shares = parse_shares(self.rule.weights or "/".join("1" * len(levels)), levels)
        self.counts = [0] * len(levels)

    def task(self, n: int) -> Task:
        behind = [s * (sum(self.counts) + 1) - c if s > 0 else -math.inf for s, c in zip(self.shares, self.counts)]
        chosen = behind.index(max(behind))
        self.counts[chosen] += 1
        return self.tasks.draw(n, self.tasks.difficulties[chosen])

    def metrics(self) -> dict[str, float]:
        sets = zip(self.tasks.difficulties, self.counts) if self.drawn else ()
        return {**super().metrics(), **{f"tasks_of/{level}": float(count) for level, count in sets}}


def parse_shares(text: str, difficulties: tuple[int, ...]) -> list[float]:
    """``0.2/0.3/0.5``: one weight for each difficulty of the run, as shares of 1."""
    try:
        weights = [float(part) for part in text.split("/")]
    except ValueError:
        raise SettingError(f"weights is {text!r}; write numbers separated by /, one for each difficulty") from None
    if len(weights) != len(difficulties) or not min(weights) >= 0 or not 0 < sum(weights) < math.inf:
        raise SettingError(
            f"weights is {text!r} for the difficulties {', '.join(map(str, difficulties))}; write one weight of 0 or more "
            "for each, not all of them 0"
        )
    return [weight / sum(weights) for weight in weights]


class WeightedSets(Sampler):
    """The sets of tasks of each difficulty, in the given shares: ``weights`` = "0.2/0.3/0.5". Shares hold exactly, as far as
    whole tasks allow: each draw comes from the set that is furthest below its share."""

    live = _WeightedSets
    idle_without = frozenset({"difficulties"})
    weights: str = ""


@dataclass
class _Stages(LiveSampler):
    stage: int = 0
    finished: int = 0  # groups of this stage
    recent: deque[float] = field(default_factory=deque)  # their success rates, the latest ones
    saved = ("drawn", "stage", "finished", "recent")

    def __post_init__(self) -> None:
        self.recent = deque(maxlen=self.rule.window)

    def task(self, n: int) -> Task:
        u = stable_seed(self.tasks.seed, "stages", n) / 2**63
        earlier = self.stage > 0 and u < self.rule.review
        level = int(u / self.rule.review * self.stage) if earlier else self.stage
        return self.tasks.draw(n, self.tasks.difficulties[min(level, self.stage)])

    def observe(self, group: Group) -> None:
        if group.task.difficulty != self.tasks.difficulties[self.stage]:
            return
        results = group.outcomes
        self.finished += 1
        self.recent.append(sum(results) / len(results) if results else 0.0)
        full = len(self.recent) == self.rule.window
        done = self.finished >= self.rule.groups or (full and sum(self.recent) / len(self.recent) >= self.rule.solved)
        if done and self.stage + 1 < len(self.tasks.difficulties):
            self.stage, self.finished = self.stage + 1, 0
            self.recent.clear()

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "tasks_stage": float(self.stage), "tasks_in_stage": float(self.finished)}


class Stages(Sampler):
    """One stage for each difficulty, from the first to the last. A stage ends after ``groups`` finished groups of its own
    difficulty, or once their mean success over the last ``window`` reaches ``solved``. In later stages ``review`` of the tasks
    come from earlier ones."""

    live = _Stages
    idle_without = frozenset({"difficulties"})
    groups: int = number(400, above=0)
    window: int = number(64, above=0)
    solved: float = number(0.9, above=0)
    review: float = number(0.2, least=0, below=1)
