"""Budgets that differ by task: more rollouts where they teach more, at an unchanged total.

Each live budget keeps what it believes by task key, bounded, and checkpoints it. Knows no token and no loss.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turnwise.core.records import Group, Status, Task
from turnwise.errors import RecipeError
from turnwise.tasks.budgets import Budget, EqualSizes, LiveBudget, check_budget
from turnwise.tasks.pool import outcomes
from turnwise.tasks.student_t import student_quantile

MEMORY = 65536  # tasks of which a budget remembers anything; the oldest are forgotten first


def remember(memory: dict[str, Any], key: str, value: Any) -> None:
    """Store ``value`` as the latest entry, and forget the oldest beyond ``MEMORY``."""
    memory.pop(key, None)
    memory[key] = value
    while len(memory) > MEMORY:
        del memory[next(iter(memory))]


def trim(sizes: list[int], total: int, least: int, most: int) -> list[int]:
    """``sizes`` changed by single rollouts until they sum to ``total``, largest reduced first and smallest raised first;
    nearest possible where the bounds do not allow the total."""
    sizes = list(sizes)
    while sum(sizes) > total and max(sizes) > least:
        sizes[max(range(len(sizes)), key=lambda i: (sizes[i], -i))] -= 1
    while sum(sizes) < total and min(sizes) < most:
        sizes[min(range(len(sizes)), key=lambda i: (sizes[i], i))] += 1
    return sizes


# ------------------------------------------------------------- a bandit per bin


@dataclass(frozen=True)
class BinBandit:
    """A bandit for each bin of difficulty chooses the number of rollouts of its tasks, under an exact mean.

    p(n | bin) = (1 − floor)·softmax(rate·score) + floor/arms. Of all choices whose counts sum to the budget, the most probable
    one is played. Then score ← score − (J + price·(n − mean)) with J = ``sign``·(1 − mean reward of the bin), and
    price ← price + pace·(rollouts per task − mean)."""

    groups: int = 8
    size: int = 4
    least: int = 2
    most: int = 8
    bins: int = 10
    memory: int = 8
    rate: float = 0.1
    floor: float = 0.15
    pace: float = 0.01
    sign: float = -1.0  # −1: arms seen at a high loss score higher, as in the released code

    def __post_init__(self) -> None:
        check_budget(self.groups, self.size)
        if not (1 <= self.least <= self.most and 0 < self.floor <= 1 and self.bins >= 1):
            raise RecipeError(f"need 1 <= least <= most, 0 < floor <= 1 and bins >= 1, got {self}")

    @property
    def largest(self) -> int:
        return self.most

    def of(self, groups: int, size: int) -> Budget:
        least, most = min(self.least, size), max(self.most, size)
        return BinBandit(groups, size, least, most, self.bins, self.memory, self.rate, self.floor, self.pace, self.sign)

    def open(self) -> LiveBudget:
        return _BinBandit(self.size, self)

    def policy(self, scores: np.ndarray) -> np.ndarray:
        """p(n | bin), from the scores of the arms [.., arms]."""
        z = np.exp(self.rate * (scores - scores.max(-1, keepdims=True)))
        return (1 - self.floor) * z / z.sum(-1, keepdims=True) + self.floor / scores.shape[-1]


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


@dataclass
class _BinBandit(EqualSizes):
    rule: BinBandit
    price: float = 0.0
    history: dict[str, list[int]] = field(default_factory=dict)  # by task key: solved or not, the latest groups
    played: dict[str, list[int]] = field(default_factory=dict)  # by task key: bin and arm of the running group
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0))

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
        arms = dict(zip(active, most_probable_counts(logp, members, self.arms, self.size * len(tasks))))
        chosen = [arms[b] for b in bins]
        self.price += self.rule.pace * (sum(chosen) / len(chosen) - self.size)
        for task, b, n in zip(tasks, bins, chosen):
            remember(self.played, task.key, [b, n])
        return chosen

    def observe(self, group: Group) -> None:
        results = outcomes(group)
        if not len(results):
            return
        b, n = self.played.pop(group.task.key, [self.bin_of(group.task), self.size])
        if n in self.arms:
            gain = self.rule.sign * (1 - float(results.mean()))
            self.scores[b, self.arms.index(n)] -= gain + self.price * (n - self.size)
        history = [*self.history.get(group.task.key, []), int(results.any())]
        remember(self.history, group.task.key, history[-self.rule.memory :])

    def state_dict(self) -> dict[str, Any]:
        return {"price": self.price, "history": self.history, "played": self.played, "scores": self.scores.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.price, self.history, self.played = float(state["price"]), dict(state["history"]), dict(state["played"])
        self.scores = np.array(state["scores"], dtype=np.float64)

    def metrics(self) -> dict[str, float]:
        return {"budget/price": self.price}


# ------------------------------------------------------ predicted success rates


@dataclass(frozen=True)
class PredictedUtility:
    """Rollouts one at a time to the task with the largest gain of U(n) = n(1 − p)(1 − (1 − p)^(n − 1)): the expected number of
    wrong samples in a group that also has a right one. p is the mean of a Beta posterior over the task's past outcomes; a task
    without any takes the mean of the last ``context`` groups."""

    groups: int = 8
    size: int = 8
    least: int = 2
    most: int = 128
    keep: float = 0.9
    context: int = 256

    def __post_init__(self) -> None:
        check_budget(self.groups, self.size)
        if not (1 <= self.least <= self.most and 0 < self.keep <= 1 and self.context >= 1):
            raise RecipeError(f"need 1 <= least <= most, 0 < keep <= 1 and context >= 1, got {self}")

    @property
    def largest(self) -> int:
        return self.most

    def of(self, groups: int, size: int) -> Budget:
        least, most = min(self.least, size), max(self.most, size)
        return PredictedUtility(groups, size, least, most, self.keep, self.context)

    def open(self) -> LiveBudget:
        return _PredictedUtility(self.size, self)


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


@dataclass
class _PredictedUtility(EqualSizes):
    rule: PredictedUtility
    posterior: dict[str, list[float]] = field(default_factory=dict)  # by task key: successes, failures
    recent: list[float] = field(default_factory=list)  # success rates of the latest groups

    def predicted(self, task: Task) -> float:
        prior = (sum(self.recent) + 0.5) / (len(self.recent) + 1)
        good, bad = self.posterior.get(task.key, (0.0, 0.0))
        return (good + 2 * prior) / (good + bad + 2)

    def sizes(self, tasks: Sequence[Task]) -> list[int]:
        rates = [self.predicted(task) for task in tasks]
        return greedy_sizes(rates, self.size * len(tasks), self.rule.least, self.rule.most)

    def observe(self, group: Group) -> None:
        results = outcomes(group)
        if len(results):
            good, bad = self.posterior.get(group.task.key, (0.0, 0.0))
            now = [self.rule.keep * good + results.sum(), self.rule.keep * bad + (1 - results).sum()]
            remember(self.posterior, group.task.key, [float(x) for x in now])
            self.recent = [*self.recent, float(results.mean())][-self.rule.context :]

    def state_dict(self) -> dict[str, Any]:
        return {"posterior": self.posterior, "recent": self.recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.posterior, self.recent = dict(state["posterior"]), [float(x) for x in state["recent"]]


# ---------------------------------------------------- rounds within one step


@dataclass(frozen=True)
class RoundsOfUncertainty:
    """``first`` trajectories for each task, then the rest one at a time to the largest priority h(n) − h(n + 1) +
    bonus·√(log(1 + T)/n), with h(n) = t·s/√n the half-width of the confidence interval of the task's mean reward."""

    groups: int = 8
    size: int = 16
    first: int = 4
    most: int = 64
    bonus: float = 1.0
    confidence: float = 0.95

    def __post_init__(self) -> None:
        check_budget(self.groups, self.size)
        if not (2 <= self.first <= self.most and 0 < self.confidence < 1 and self.bonus >= 0):
            raise RecipeError(f"need 2 <= first <= most, 0 < confidence < 1 and bonus >= 0, got {self}")

    @property
    def largest(self) -> int:
        return self.most

    def of(self, groups: int, size: int) -> Budget:
        most = max(self.most, size)
        return RoundsOfUncertainty(groups, size, self.first, most, self.bonus, self.confidence)

    def open(self) -> LiveBudget:
        return _RoundsOfUncertainty(self.size, self)

    def half_width(self, n: int, s: float) -> float:
        return student_quantile(self.confidence, n - 1) * s / math.sqrt(n)

    def allocate(self, counts: Sequence[int], spreads: Sequence[float], spare: int) -> list[int]:
        """How many of ``spare`` rollouts each task gets, given its number so far and its sample standard deviation."""
        now, given = list(counts), [0] * len(counts)
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
            given[best] += 1
        return given


@dataclass
class _RoundsOfUncertainty(EqualSizes):
    rule: RoundsOfUncertainty

    rounds = True

    def sizes(self, tasks: Sequence[Task]) -> list[int]:
        return [min(self.rule.first, self.size)] * len(tasks)

    def rest(self, tasks: Sequence[Task], groups: Sequence[Group]) -> list[int]:
        rewards = [[t.reward for t in g.trajectories if t.status != Status.FAILED] for g in groups]
        spreads = [float(np.std(r, ddof=1)) if len(r) > 1 else 0.0 for r in rewards]
        counts = [len(g.trajectories) for g in groups]
        return self.rule.allocate(counts, spreads, self.size * len(tasks) - sum(counts))
