"""Budgets: how many groups a step trains on, and how many trajectories and turns the group of each task gets.

A budget is a frozen piece; ``open`` returns its live state, which is asked once per wave of tasks. ``size`` is the mean number
of trajectories: most live budgets spend exactly ``size`` × tasks of a wave wherever whole numbers allow. What is believed of a
task is kept by its key, bounded, and checkpointed. Knows tasks and finished groups; no token and no loss.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np

from turnwise.core.limits import Declared, number
from turnwise.core.records import Group, Origin, Status, Task
from turnwise.core.stateful import Stateful, remember


@dataclass
class LiveBudget(Stateful):
    """A budget in a run. As it stands: the same number of trajectories for every task, and the environment's limit of turns."""

    rule: Any
    rounds: ClassVar[bool] = False  # whether ``rest`` may be more than 0

    def sizes(self, tasks: Sequence[Task]) -> list[int]:
        """The number of trajectories for each task of a wave, at first."""
        return [self.rule.size] * len(tasks)

    def rest(self, tasks: Sequence[Task], groups: Sequence[Group]) -> list[int]:
        """The number of further trajectories for each task of a wave, once those at first are known. All 0: none."""
        return [0] * len(tasks)

    def max_turns(self, task: Task) -> int | list[int]:
        """The turn limit of an episode of this task; 0: the environment's. A list: limits that are extended in this order, of
        which the policy is told."""
        return 0

    def observe(self, group: Group) -> None:
        """Learn from a finished group."""

    def metrics(self) -> dict[str, float]:
        return {}


class Budget(Declared):
    """Interface: the frozen description of a budget. A subclass names the class of its live state in ``live``; fields ``least``
    and ``most`` bound the trajectories of one group."""

    groups: int = number(8, least=1)
    size: int = number(8, least=1)

    live: ClassVar[type[LiveBudget]] = LiveBudget

    @property
    def largest(self) -> int:
        """The most trajectories that one group may get."""
        return getattr(self, "most", self.size)

    def of(self, groups: int, size: int) -> Budget:
        """This budget for so many groups with a mean of ``size`` trajectories, which its bounds then admit."""
        bounds = {"least": min, "most": max}
        fitting = {name: nearer(getattr(self, name), size) for name, nearer in bounds.items() if hasattr(self, name)}
        return replace(self, groups=groups, size=size, **fitting)

    def open(self) -> LiveBudget:
        return self.live(self)


class Fixed(Budget):
    """``groups`` groups per step, ``size`` trajectories per group."""


class Wide(Budget):
    """Few tasks with ``size`` trajectories each: as many rollouts per step as the budget it replaces, and at least one task."""

    groups: int = number(1, least=1)
    size: int = number(512, least=1)

    def of(self, groups: int, size: int) -> Budget:
        return Fixed(max(1, round(groups * size / self.size)), self.size)


# ------------------------------------------------------------- a bandit per bin


@dataclass
class _BinBandit(LiveBudget):
    price: float = 0.0
    history: dict[str, list[int]] = field(default_factory=dict)  # by task key: solved or not, the latest groups
    played: dict[str, list[int]] = field(default_factory=dict)  # by task key: bin and arm of the running group
    saved = ("price", "history", "played", "scores")

    def __post_init__(self) -> None:
        self.arms = list(range(self.rule.least, self.rule.most + 1))
        self.scores = np.zeros((self.rule.bins, len(self.arms)))

    def bin_of(self, task: Task) -> int:
        history = self.history.get(task.key, [0])
        return min(int(sum(history) / len(history) * self.rule.bins), self.rule.bins - 1)

    def sizes(self, tasks: Sequence[Task]) -> list[int]:
        bins = [self.bin_of(task) for task in tasks]
        active = sorted(set(bins))
        logp = np.log(self.rule.policy(self.scores[active]))
        members = [bins.count(b) for b in active]
        arms = dict(zip(active, most_probable_counts(logp, members, self.arms, self.rule.size * len(tasks))))
        chosen = [arms[b] for b in bins]
        self.price += self.rule.pace * (sum(chosen) / len(chosen) - self.rule.size)
        for task, b, n in zip(tasks, bins, chosen):
            remember(self.played, task.key, [b, n])
        return chosen

    def observe(self, group: Group) -> None:
        results = group.outcomes
        if not results:
            return
        b, n = self.played.pop(group.task.key, [self.bin_of(group.task), self.rule.size])
        if n in self.arms:
            gain = self.rule.sign * (1 - sum(results) / len(results))
            self.scores[b, self.arms.index(n)] -= gain + self.price * (n - self.rule.size)
        history = [*self.history.get(group.task.key, []), int(any(results))]
        remember(self.history, group.task.key, history[-self.rule.memory :])

    def metrics(self) -> dict[str, float]:
        return {"budget/price": self.price}


def most_probable_counts(logp: np.ndarray, members: Sequence[int], arms: Sequence[int], total: int) -> list[int]:
    """One arm for each bin with Σ members·arm = ``total`` and the largest Σ logp; where no choice meets the total, the
    nearest sum, ties by the lower one. Dynamic programming over the bins with the sum as its state."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for b, count in enumerate(members):
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for spent, (value, chosen) in best.items():
            for a, arm in enumerate(arms):
                key, score = spent + count * arm, value + float(logp[b, a])
                if key not in reached or score > reached[key][0]:
                    reached[key] = (score, (*chosen, arm))
        best = reached
    nearest = min(best, key=lambda spent: (abs(spent - total), spent))
    return list(best[nearest][1])


class BinBandit(Budget):
    """A bandit for each bin of difficulty chooses the number of rollouts of its tasks, under an exact mean.

    p(n | bin) = (1 − floor)·softmax(rate·score) + floor/arms. Of all choices whose counts sum to the budget, the most probable
    one is played. Then score ← score − (J + price·(n − mean)) with J = ``sign``·(1 − mean reward of the bin), and
    price ← price + pace·(rollouts per task − mean)."""

    live = _BinBandit
    size: int = number(4, least=1)
    least: int = number(2, least=1, most="most")
    most: int = 8
    bins: int = number(10, least=1)
    memory: int = 8
    rate: float = 0.1
    floor: float = number(0.15, above=0, most=1)
    pace: float = 0.01
    sign: float = -1.0  # −1: arms seen at a high loss score higher, as in the released code

    def policy(self, scores: np.ndarray) -> np.ndarray:
        """p(n | bin), from the scores of the arms [.., arms]."""
        z = np.exp(self.rate * (scores - scores.max(-1, keepdims=True)))
        return (1 - self.floor) * z / z.sum(-1, keepdims=True) + self.floor / scores.shape[-1]


# ------------------------------------------------------ predicted success rates


@dataclass
class _PredictedUtility(LiveBudget):
    posterior: dict[str, list[float]] = field(default_factory=dict)  # by task key: successes, failures
    recent: list[float] = field(default_factory=list)  # success rates of the latest groups
    saved = ("posterior", "recent")

    def sizes(self, tasks: Sequence[Task]) -> list[int]:
        prior = (sum(self.recent) + 0.5) / (len(self.recent) + 1)
        counts = [self.posterior.get(task.key, (0.0, 0.0)) for task in tasks]
        rates = [(good + 2 * prior) / (good + bad + 2) for good, bad in counts]
        return greedy_sizes(rates, self.rule.size * len(tasks), self.rule.least, self.rule.most)

    def observe(self, group: Group) -> None:
        results = group.outcomes
        if results:
            good, bad = self.posterior.get(group.task.key, (0.0, 0.0))
            solved = sum(results)
            now = [self.rule.keep * good + solved, self.rule.keep * bad + len(results) - solved]
            remember(self.posterior, group.task.key, now)
            self.recent = [*self.recent, solved / len(results)][-self.rule.context :]


def utility(n: int, p: float) -> float:
    """n(1 − p)(1 − (1 − p)^(n − 1))."""
    return n * (1 - p) * (1 - (1 - p) ** (n - 1))


def greedy_sizes(rates: Sequence[float], total: int, least: int, most: int) -> list[int]:
    """``least`` each, then one rollout at a time to the largest gain of utility; Σ = ``total`` where the bounds allow it."""
    sizes = [least] * len(rates)
    gain = lambda i: utility(sizes[i] + 1, rates[i]) - utility(sizes[i], rates[i])  # noqa: E731
    heap = [(-gain(i), sizes[i], i) for i in range(len(rates))]
    heapq.heapify(heap)
    for _ in range(total - sum(sizes)):
        while heap and sizes[heap[0][2]] >= most:
            heapq.heappop(heap)
        if not heap:
            break
        i = heap[0][2]
        sizes[i] += 1
        heapq.heapreplace(heap, (-gain(i), sizes[i], i))
    return trim(sizes, total, 1, most)


def trim(sizes: list[int], total: int, least: int, most: int) -> list[int]:
    """``sizes`` changed by single rollouts until they sum to ``total``, largest reduced first and smallest raised first;
    nearest possible where the bounds do not allow the total."""
    sizes = list(sizes)
    while sum(sizes) > total and max(sizes) > least:
        sizes[max(range(len(sizes)), key=lambda i: (sizes[i], -i))] -= 1
    while sum(sizes) < total and min(sizes) < most:
        sizes[min(range(len(sizes)), key=lambda i: (sizes[i], i))] += 1
    return sizes


class PredictedUtility(Budget):
    """Rollouts one at a time to the task with the largest gain of U(n) = n(1 − p)(1 − (1 − p)^(n − 1)): the expected number of
    wrong samples in a group that also has a right one. p is the mean of a Beta posterior over the task's past outcomes; a task
    without any takes the mean of the last ``context`` groups."""

    live = _PredictedUtility
    least: int = number(2, least=1, most="most")
    most: int = 128
    keep: float = number(0.9, above=0, most=1)
    context: int = number(256, least=1)


# ---------------------------------------------------- rounds within one step


@dataclass
class _RoundsOfUncertainty(LiveBudget):
    rounds = True

    def sizes(self, tasks: Sequence[Task]) -> list[int]:
        return [min(self.rule.first, self.rule.size)] * len(tasks)

    def rest(self, tasks: Sequence[Task], groups: Sequence[Group]) -> list[int]:
        rewards = [[t.reward for t in g.trajectories if t.status != Status.FAILED] for g in groups]
        spreads = [float(np.std(r, ddof=1)) if len(r) > 1 else 0.0 for r in rewards]
        counts = [len(g.trajectories) for g in groups]
        return self.rule.allocate(counts, spreads, self.rule.size * len(tasks) - sum(counts))


class RoundsOfUncertainty(Budget):
    """``first`` trajectories for each task, then the rest one at a time to the largest priority h(n) − h(n + 1) +
    bonus·√(log(1 + T)/n), with h(n) = t·s/√n the half-width of the confidence interval of the task's mean reward."""

    live = _RoundsOfUncertainty
    size: int = number(16, least=1)
    first: int = number(4, least=2, most="most")
    most: int = 64
    bonus: float = number(1.0, least=0)
    confidence: float = number(0.95, above=0, below=1)

    def half_width(self, n: int, s: float) -> float:
        return student_quantile(self.confidence, n - 1) * s / math.sqrt(n)

    def allocate(self, counts: Sequence[int], spreads: Sequence[float], spare: int) -> list[int]:
        """How many of ``spare`` rollouts each task gets, given its number so far and its sample standard deviation."""
        now = list(counts)
        for _ in range(spare):
            total = sum(now)
            best, priority = -1, -math.inf
            for i, (n, s) in enumerate(zip(now, spreads)):
                if n >= self.most:
                    continue
                gain = self.half_width(n, s) - self.half_width(n + 1, s) if s > 0 and n >= 2 else 0.0
                value = gain + self.bonus * math.sqrt(math.log(1 + total) / max(1, n))
                best, priority = (i, value) if value > priority else (best, priority)
            if best < 0:
                break
            now[best] += 1
        return [after - before for after, before in zip(now, counts)]


def central_mass(t: float, freedom: int) -> float:
    """P(|T| <= t) of Student's t for ``freedom`` degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for k in range(1 + odd, freedom - 2, 2):
        term *= cosine**2 * k / (k + 1)
        total += term
    if not odd:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))


@cache
def student_quantile(confidence: float, freedom: int) -> float:
    """t with P(|T| <= t) = ``confidence``, by bisection."""
    low, high = 0.0, 1.0
    while central_mass(high, freedom) < confidence:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if central_mass(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


# -------------------------------------------------------------- limits of turns


@dataclass
class _FallingWithSuccess(LiveBudget):
    rates: dict[str, list[float]] = field(default_factory=dict)  # by task key: the latest groups
    longest: dict[str, int] = field(default_factory=dict)  # by task key: turns of the longest success
    saved = ("rates", "longest")

    def sizes(self, tasks: Sequence[Task]) -> list[int]:
        rates = [self.rates.get(task.key, [0.0]) for task in tasks]
        return [self.rule.rollouts(sum(r) / len(r)) for r in rates]

    def max_turns(self, task: Task) -> int:
        longest = self.longest.get(task.key, 0)
        return longest + self.rule.spare if longest else 0

    def observe(self, group: Group) -> None:
        results = group.outcomes
        if not results:
            return
        history = [*self.rates.get(group.task.key, []), sum(results) / len(results)]
        remember(self.rates, group.task.key, history[-self.rule.window :])
        turns = [  # of each success, counted from the start of the episode
            len(t.turns) + (t.fork.turn if t.fork else 0)
            for t in group.trajectories
            if t.origin == Origin.POLICY and t.status == Status.FINISHED and t.turns and t.solved
        ]
        if turns:
            remember(self.longest, group.task.key, max(self.longest.get(group.task.key, 0), *turns))

    def metrics(self) -> dict[str, float]:
        limits = list(self.longest.values())
        return {"budget/turn_limit": float(np.mean(limits))} if limits else {}


class FallingWithSuccess(Budget):
    """All ``size`` trajectories while a task's success rate over its last ``window`` groups is at most ``easy``, then linearly
    fewer, down to ``least`` at a rate of 1. The turn limit of a task is its longest success, plus ``spare`` turns."""

    live = _FallingWithSuccess
    easy: float = number(0.6, least=0, below=1)
    least: int = number(1, least=1)
    window: int = number(4, least=1)
    spare: int = number(0, least=0)

    requirements: ClassVar = frozenset({"turn limits"})

    def rollouts(self, rate: float) -> int:
        over = max(0.0, rate - self.easy) / (1 - self.easy)
        return max(self.least, round(self.size - over * (self.size - self.least)))


@dataclass
class _TurnPercentile(LiveBudget):
    turns: dict[str, list[int]] = field(default_factory=dict)  # by difficulty: of the latest finished episodes
    issued: int = 0
    saved = ("turns", "issued")

    def limit(self, difficulty: int, percent: float | None = None) -> int:
        turns, percent = self.turns.get(str(difficulty), []), percent or self.rule.percent
        return int(np.ceil(np.percentile(turns, percent))) if len(turns) >= self.rule.calibrate else 0

    def max_turns(self, task: Task) -> int | list[int]:
        self.issued += 1
        limit = 0 if self.issued % self.rule.probe_every == 0 else self.limit(task.difficulty)
        if not (limit and self.rule.remind):
            return limit
        first = self.limit(task.difficulty, self.rule.start) if self.rule.start else limit
        return sorted({first, limit})

    def observe(self, group: Group) -> None:
        done = [t for t in group.trajectories if t.origin == Origin.POLICY and t.status == Status.FINISHED]
        now = [*self.turns.get(str(group.task.difficulty), []), *(len(t.turns) for t in done)]
        self.turns[str(group.task.difficulty)] = now[-4 * self.rule.calibrate :]

    def metrics(self) -> dict[str, float]:
        return {f"budget/turn_limit_{level}": float(self.limit(int(level))) for level in self.turns}


class TurnPercentile(Budget):
    """The usual number of rollouts; episodes end after the ``percent``-th percentile of the turns of finished episodes of the
    same difficulty. The first ``calibrate`` episodes of a difficulty have the environment's limit, and one group in
    ``probe_every`` keeps it later, so that the limit can rise again. With ``remind`` the policy reads after each turn how many
    are used and left; with ``start`` the limit it is told is that lower percentile at first, and extended on demand."""

    live = _TurnPercentile
    percent: float = number(75.0, above=0, most=100)
    calibrate: int = number(64, least=1)
    probe_every: int = number(8, least=1)
    remind: bool = True
    start: float = number(0.0, least=0, most="percent")

    requirements: ClassVar = frozenset({"turn limits"})
