"""Samplers that look for tasks at the frontier: neither always solved nor never solved.

Each is a frozen piece; ``open`` gives a pool with its beliefs. The formulas are those of the papers that the registry names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from turnwise.core.records import Group, Origin
from turnwise.errors import SettingError
from turnwise.tasks.pool import Array, LivePool, check_pool, draw_by_weight, largest
from turnwise.tasks.samplers import LiveSampler
from turnwise.tasks.task_source import TaskStream
from turnwise.tasks.text_diversity import diversity

# ------------------------------------------------------------- Thompson sampling


@dataclass(frozen=True)
class ThompsonFrontier:
    """The tasks of largest p̃(1 − p̃)², p̃ drawn from the Beta posterior of each task's success rate.

    Chosen: α ← fast·α + successes, β ← fast·β + failures. Others: α, β ← slow·α, slow·β. Pools above ``candidates`` tasks draw
    p̃ for that many of them in each wave, at random: 0 draws for all."""

    pool: int = 1024
    fast: float = 0.2
    slow: float = 0.999
    candidates: int = 1024

    def __post_init__(self) -> None:
        check_pool(self.pool)
        if not (0 <= self.fast <= 1 and 0 < self.slow <= 1 and self.candidates >= 0):
            raise SettingError(f"need 0 <= fast <= 1, 0 < slow <= 1 and candidates >= 0, got {self}")

    def open(self, tasks: TaskStream) -> LiveSampler:
        return _Thompson(tasks, self.pool, rule=self)


def thompson_score(p: Array) -> Array:
    """p(1 − p)², which is largest at 1/3."""
    return p * (1 - p) ** 2


@dataclass
class _Thompson(LivePool):
    rule: ThompsonFrontier = ThompsonFrontier()
    arrays: ClassVar[tuple[str, ...]] = ("alpha", "beta", "decays")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alpha, self.beta, self.decays = np.zeros(self.pool), np.zeros(self.pool), np.zeros(self.pool)

    def choose(self, count: int, rng: np.random.Generator) -> Array:
        some = self.rule.candidates and self.rule.candidates < self.pool
        among = np.unique(rng.integers(self.pool, size=self.rule.candidates)) if some else np.arange(self.pool)
        decay = self.rule.slow ** (self.waves - self.decays[among])  # of the waves in which they were not chosen
        p = rng.beta(self.alpha[among] * decay + 1, self.beta[among] * decay + 1)
        chosen = among[largest(thompson_score(p), count)]
        missed = self.waves - self.decays[chosen]
        self.alpha[chosen] *= self.rule.slow**missed
        self.beta[chosen] *= self.rule.slow**missed
        self.decays[chosen] = self.waves + 1
        return chosen

    def learn(self, i: int, results: Array, group: Group) -> None:
        self.alpha[i] = self.rule.fast * self.alpha[i] + results.sum()
        self.beta[i] = self.rule.fast * self.beta[i] + (1 - results).sum()
        self.rate[i] = (self.alpha[i] + 1) / (self.alpha[i] + self.beta[i] + 2)


# --------------------------------------------------------- variance and diversity


@dataclass(frozen=True)
class VariancePromotion:
    """A share of each wave is drawn, with replacement, in proportion to a·p(1 − p) + b·diversity; the rest follows a fixed
    permutation, so that every task is seen once per cycle. Weights are renewed every ``every`` waves from the latest group of
    each task; a task without one counts as half solved and fully diverse."""

    pool: int = 1024
    variance: float = 0.8
    diversity: float = 0.2
    share: float = 0.5
    every: int = 28
    momentum: float = 0.0

    def __post_init__(self) -> None:
        check_pool(self.pool, every=self.every)
        if not (min(self.variance, self.diversity) >= 0 and 0 <= self.share <= 1 and 0 <= self.momentum < 1):
            raise SettingError(f"need variance, diversity >= 0, 0 <= share <= 1 and 0 <= momentum < 1, got {self}")

    def open(self, tasks: TaskStream) -> LiveSampler:
        return _Promotion(tasks, self.pool, rule=self)

    def score(self, rate: Array, diverse: Array) -> Array:
        return self.variance * rate * (1 - rate) + self.diversity * diverse


@dataclass
class _Promotion(LivePool):
    rule: VariancePromotion = VariancePromotion()
    arrays: ClassVar[tuple[str, ...]] = ("diverse", "weights", "position")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.diverse, self.weights = np.ones(self.pool), np.ones(self.pool)
        self.position = np.zeros(1, dtype=np.int64)  # in the permutation
        self.order = np.random.Generator(np.random.PCG64(self.tasks.seed)).permutation(self.pool)

    def choose(self, count: int, rng: np.random.Generator) -> Array:
        if self.waves and self.waves % self.rule.every == 0:
            self.weights = self._renewed()
        weighted = draw_by_weight(self.weights, int(self.rule.share * count), rng, again=True)
        plain = self.order[(int(self.position[0]) + np.arange(count - len(weighted))) % self.pool]
        self.position[0] = (self.position[0] + len(plain)) % self.pool
        return interleave(plain, weighted)

    def _renewed(self) -> Array:
        score = self.rule.score(self.rate, self.diverse)
        fresh = (score - score.min()) / (np.ptp(score) + 1e-8) + 1e-8
        return self.rule.momentum * self.weights + (1 - self.rule.momentum) * fresh

    def learn(self, i: int, results: Array, group: Group) -> None:
        self.rate[i] = results.mean()
        own = [
            [token for turn in t.turns for token in turn.tokens]
            for t in group.trajectories
            if t.origin == Origin.POLICY
        ]
        self.diverse[i] = diversity(own)


def interleave(a: Array, b: Array) -> Array:
    """a₀ b₀ a₁ b₁ ..., then the rest of the longer one."""
    n = min(len(a), len(b))
    both = np.stack([a[:n], b[:n]], axis=1).reshape(-1)
    return np.concatenate([both, a[n:], b[n:]])


# --------------------------------------------------------------- difficulty bins


@dataclass(frozen=True)
class BinAdversary:
    """Tasks in proportion to an adversary's distribution over bins of difficulty: q(b) ∝ (1 − floor)·exp(rate·S(b)) + floor.

    A task's bin is its share of solved groups among the last ``memory``, with hysteresis ``margin``. S is the exponential mean
    of the bin's loss 1 − mean reward; within a bin all tasks are equally likely."""

    pool: int = 1024
    bins: int = 10
    rate: float = 0.1
    floor: float = 0.15
    smooth: float = 0.1
    limit: float = 10.0
    memory: int = 8
    margin: float = 0.0

    def __post_init__(self) -> None:
        check_pool(self.pool, bins=self.bins, memory=self.memory, limit=self.limit)
        if self.bins > 255:
            raise SettingError(f"{self.bins} bins; write at most 255")
        if not (0 <= self.floor <= 1 and 0 < self.smooth <= 1 and self.rate >= 0 and self.margin >= 0):
            raise SettingError(f"need 0 <= floor <= 1, 0 < smooth <= 1, rate >= 0 and margin >= 0, got {self}")

    def open(self, tasks: TaskStream) -> LiveSampler:
        return _Bins(tasks, self.pool, rule=self)

    def distribution(self, scores: Array) -> Array:
        """q over the bins, from their smoothed losses."""
        weights = np.exp(self.rate * scores.clip(-self.limit, self.limit))
        return (1 - self.floor) * weights / weights.sum() + self.floor / len(scores)


class DifficultyBins:
    """Which bin of solved groups each task is in. ``history`` [pool, memory] holds 0, 1, or −1 where nothing was seen."""

    def __init__(self, pool: int, bins: int, memory: int, margin: float) -> None:
        self.bins, self.margin = bins, margin
        self.history = np.full((pool, memory), -1, dtype=np.int8)
        self.bin = np.zeros(pool, dtype=np.uint8)

    def observe(self, i: int, solved: bool) -> None:
        self.history[i] = np.roll(self.history[i], -1)
        self.history[i, -1] = solved
        known = self.history[i][self.history[i] >= 0]
        share, old = float(known.mean()), int(self.bin[i])
        new = min(int(share * self.bins), self.bins - 1)
        edge = (old + 1) / self.bins if new > old else old / self.bins
        if new != old and abs(share - edge) >= self.margin:
            self.bin[i] = new


@dataclass
class _Bins(LivePool):
    rule: BinAdversary = BinAdversary()
    arrays: ClassVar[tuple[str, ...]] = ("scores", "known", "history", "bin")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.belief = DifficultyBins(self.pool, self.rule.bins, self.rule.memory, self.rule.margin)
        self.scores, self.known = np.zeros(self.rule.bins), np.zeros(self.rule.bins)

    @property
    def history(self) -> Array:
        return self.belief.history.reshape(-1)

    @history.setter
    def history(self, values: Array) -> None:
        self.belief.history = values.reshape(self.pool, -1)

    @property
    def bin(self) -> Array:
        return self.belief.bin

    @bin.setter
    def bin(self, values: Array) -> None:
        self.belief.bin = values

    def choose(self, count: int, rng: np.random.Generator) -> Array:
        """A bin by q, then one of its tasks; a task that was drawn already is skipped."""
        members = [np.flatnonzero(self.bin == b) for b in range(self.rule.bins)]
        q = np.where([len(m) > 0 for m in members], self.rule.distribution(self.scores), 0.0)
        chosen: dict[int, None] = {}
        for _ in range(8):
            bins = draw_by_weight(q, 2 * count, rng, again=True)
            for b, u in zip(bins.tolist(), rng.random(len(bins)).tolist()):
                chosen[int(members[b][int(u * len(members[b]))])] = None
                if len(chosen) == count:
                    return np.fromiter(chosen, dtype=np.int64)
        rest = (q / np.array([max(1, len(m)) for m in members]))[self.bin]
        rest[list(chosen)] = 0.0
        return np.concatenate([np.array([*chosen], dtype=np.int64), draw_by_weight(rest, count - len(chosen), rng)])

    def learn(self, i: int, results: Array, group: Group) -> None:
        super().learn(i, results, group)
        b, loss = int(self.bin[i]), 1 - float(results.mean())
        step = self.rule.smooth if self.known[b] else 1.0
        self.scores[b] += step * (loss - self.scores[b])
        self.known[b] = 1
        self.belief.observe(i, bool(results.any()))

    def metrics(self) -> dict[str, float]:
        q = self.rule.distribution(self.scores)
        return {**super().metrics(), **{f"difficulty/weight_{b}": float(x) for b, x in enumerate(q)}}


# -------------------------------------------------------------- Gaussian frontier


@dataclass(frozen=True)
class GaussianFrontier:
    """Weight exp(−(p − center)²/(2·width²)) on an exponential mean p of each task's success rate, which starts at 0.5."""

    pool: int = 1024
    keep: float = 0.9
    width: float = 0.35
    center: float = 0.5

    def __post_init__(self) -> None:
        check_pool(self.pool, width=self.width)
        if not (0 <= self.keep < 1 and 0 <= self.center <= 1):
            raise SettingError(f"need 0 <= keep < 1 and 0 <= center <= 1, got {self}")

    def open(self, tasks: TaskStream) -> LiveSampler:
        return _Gaussian(tasks, self.pool, rule=self)

    def weight(self, rate: Array) -> Array:
        return np.exp(-((rate - self.center) ** 2) / (2 * self.width**2))


@dataclass
class _Gaussian(LivePool):
    rule: GaussianFrontier = GaussianFrontier()
    arrays: ClassVar[tuple[str, ...]] = ("weights",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights = self.rule.weight(self.rate)  # changes only where a group is observed

    def choose(self, count: int, rng: np.random.Generator) -> Array:
        return draw_by_weight(self.weights, count, rng)

    def learn(self, i: int, results: Array, group: Group) -> None:
        self.rate[i] = self.rule.keep * self.rate[i] + (1 - self.rule.keep) * results.mean()
        self.weights[i] = self.rule.weight(self.rate[i])


# ------------------------------------------------------------------ pivot filter


@dataclass(frozen=True)
class PivotFilter:
    """First one pass over the pool, to profile each task with its group. Then only pivots are issued: tasks whose profiled
    results differ and whose mean is below ``below``; uniformly. ``renew``: profiled again at each visit. Without a pivot: all."""

    pool: int = 256
    below: float = 0.9
    renew: bool = True

    def __post_init__(self) -> None:
        check_pool(self.pool, below=self.below)

    def open(self, tasks: TaskStream) -> LiveSampler:
        return _Pivots(tasks, self.pool, rule=self)


@dataclass
class _Pivots(LivePool):
    rule: PivotFilter = PivotFilter()
    arrays: ClassVar[tuple[str, ...]] = ("issued",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.issued = np.zeros(self.pool, dtype=np.int64)

    def learn(self, i: int, results: Array, group: Group) -> None:
        if self.rule.renew or self.visits[i] == 1:
            self.rate[i] = results.mean()

    def is_pivot(self) -> Array:
        return (self.visits > 0) & (self.rate > 0) & (self.rate < min(1.0, self.rule.below))

    def choose(self, count: int, rng: np.random.Generator) -> Array:
        fresh = np.flatnonzero(self.issued == 0)[:count]
        self.issued[fresh] = 1
        pivots = np.flatnonzero(self.is_pivot())
        among = pivots if len(pivots) else np.arange(self.pool)
        rest = rng.choice(among, count - len(fresh), replace=count - len(fresh) > len(among))
        return np.concatenate([fresh, rest])

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "tasks_pivots": float(self.is_pivot().sum())}
