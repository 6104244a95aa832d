"""Samplers over a pool of tasks and what is believed about each of them: arrays over the first tasks of a stream.

Most look for tasks at the frontier: neither always solved nor never solved. Every decision is vectorised: a wave costs a fraction
of a millisecond at 100,000 tasks. The formulas are those of the papers that the registry names. Knows token ids, no loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from turnwise.core.limits import number
from turnwise.core.records import Group, Origin, Task
from turnwise.core.seeds import stable_seed
from turnwise.tasks.samplers import LiveSampler, Sampler

Array = np.ndarray
BINS = 10  # of the histogram of believed success rates


class PoolSampler(Sampler):
    """The first ``pool`` tasks of the stream."""

    pool: int = number(1024, least=1)


@dataclass
class LivePool(LiveSampler):
    """Issues tasks of a pool in waves. ``visits`` counts finished groups, ``rate`` is the believed success rate by task.

    A subclass says in which order a wave is chosen and what a finished group changes. A pool larger than the list of tasks it is
    drawn from holds some tasks several times; their beliefs are shared."""

    waves: int = 0
    wave: int = 1  # tasks that are asked for together
    queue: list[int] = field(default_factory=list)  # the rest of this wave, as indices into the pool

    saved: ClassVar[tuple[str, ...]] = ("drawn", "waves", "wave", "queue", "visits", "rate")

    def __post_init__(self) -> None:
        self.pool = self.rule.pool
        self.members = [self.tasks.draw(i) for i in range(self.pool)]
        self.index = {task.key: i for i, task in reversed(list(enumerate(self.members)))}
        self.visits = np.zeros(self.pool)
        self.rate = np.full(self.pool, 0.5)

    def begin_wave(self, count: int) -> None:
        self.wave = count

    def task(self, n: int) -> Task:
        if not self.queue:
            # Random numbers depend on the seed of the run and the number of the wave alone: a resumed run draws the same.
            seed = stable_seed(self.tasks.seed, type(self).__name__, self.waves)
            chosen = self.choose(self.wave, np.random.Generator(np.random.PCG64(seed)))
            self.queue = [int(i) for i in chosen]
            self.waves += 1
        return self.members[self.queue.pop(0)]

    def observe(self, group: Group) -> None:
        i, results = self.index.get(group.task.key), np.array(group.outcomes, dtype=np.float64)
        if i is None or not len(results):
            return
        self.visits[i] += 1
        self.learn(i, results, group)

    def metrics(self) -> dict[str, float]:
        """How many tasks were seen, and a histogram of the success rates believed of them."""
        seen = self.visits > 0
        counts = np.histogram(self.rate[seen], bins=BINS, range=(0.0, 1.0))[0]
        frontier = ((self.rate > 0) & (self.rate < 1) & seen).sum()
        histogram = {f"difficulty/{b / BINS:.1f}": float(n) for b, n in enumerate(counts)}
        numbers = {"tasks_seen": float(seen.sum()), "tasks_frontier": float(frontier)}
        return {**super().metrics(), **numbers, **histogram}

    def choose(self, count: int, rng: np.random.Generator) -> Array:
        """Indices of the next ``count`` tasks."""
        raise NotImplementedError

    def learn(self, i: int, results: Array, group: Group) -> None:
        """Update the belief about task ``i`` from the results of one group."""
        self.rate[i] = results.mean()


def draw_by_weight(weights: Array, count: int, rng: np.random.Generator, again: bool = False) -> Array:
    """``count`` indices in proportion to the weights; with replacement if ``again`` or if there are too few."""
    total = np.cumsum(weights, dtype=np.float64)
    if again or count > int((weights > 0).sum()):
        return np.searchsorted(total, rng.random(count) * total[-1], side="right").clip(max=len(weights) - 1)
    # Without replacement: repeated draws are skipped, which leaves exactly successive sampling. Where one task holds most of the
    # weight, that takes too long, and keys are sorted instead (Efraimidis and Spirakis).
    chosen: dict[int, None] = {}
    for _ in range(8):
        for i in np.searchsorted(total, rng.random(2 * count) * total[-1], side="right").tolist():
            if i < len(weights) and weights[i] > 0:
                chosen[i] = None
            if len(chosen) == count:
                return np.fromiter(chosen, dtype=np.int64)
    rest = np.array(weights, dtype=np.float64)
    rest[list(chosen)] = 0.0
    with np.errstate(divide="ignore"):
        keys = np.where(rest > 0, np.log1p(-rng.random(len(rest))) / rest, -np.inf)
    return np.array([*chosen, *np.argsort(-keys, kind="stable")[: count - len(chosen)]], dtype=np.int64)


def largest(scores: Array, count: int) -> Array:
    """Indices of the ``count`` largest scores, largest first; ties go to the lower index."""
    count = min(count, len(scores))
    part = np.argpartition(-scores, count - 1)[:count]
    return part[np.lexsort((part, -scores[part]))]


# ------------------------------------------------------------- Thompson sampling


@dataclass
class _Thompson(LivePool):
    saved = (*LivePool.saved, "alpha", "beta", "decays")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alpha, self.beta, self.decays = np.zeros(self.pool), np.zeros(self.pool), np.zeros(self.pool)

    def choose(self, count: int, rng: np.random.Generator) -> Array:
        some = self.rule.candidates and self.rule.candidates < self.pool
        among = np.unique(rng.integers(self.pool, size=self.rule.candidates)) if some else np.arange(self.pool)
        decay = self.rule.slow ** (self.waves - self.decays[among])  # of the waves in which they were not chosen
        p = rng.beta(self.alpha[among] * decay + 1, self.beta[among] * decay + 1)
        # p(1 − p)², which is largest at 1/3
        chosen = among[largest(p * (1 - p) ** 2, count)]
        missed = self.waves - self.decays[chosen]
        self.alpha[chosen] *= self.rule.slow**missed
        self.beta[chosen] *= self.rule.slow**missed
        self.decays[chosen] = self.waves + 1
        return chosen

    def learn(self, i: int, results: Array, group: Group) -> None:
        self.alpha[i] = self.rule.fast * self.alpha[i] + results.sum()
        self.beta[i] = self.rule.fast * self.beta[i] + (1 - results).sum()
        self.rate[i] = (self.alpha[i] + 1) / (self.alpha[i] + self.beta[i] + 2)


class ThompsonFrontier(PoolSampler):
    """The tasks of largest p̃(1 − p̃)², p̃ drawn from the Beta posterior of each task's success rate.

    Chosen: α ← fast·α + successes, β ← fast·β + failures. Others: α, β ← slow·α, slow·β. Pools above ``candidates`` tasks draw
    p̃ for that many of them in each wave, at random: 0 draws for all."""

    live = _Thompson
    fast: float = number(0.2, least=0, most=1)
    slow: float = number(0.999, above=0, most=1)
    candidates: int = number(1024, least=0)


# --------------------------------------------------------- variance and diversity


@dataclass
class _Promotion(LivePool):
    saved = (*LivePool.saved, "diverse", "weights", "position")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.diverse, self.weights = np.ones(self.pool), np.ones(self.pool)
        self.position = 0  # in the permutation
        self.order = np.random.Generator(np.random.PCG64(self.tasks.seed)).permutation(self.pool)

    def choose(self, count: int, rng: np.random.Generator) -> Array:
        if self.waves and self.waves % self.rule.every == 0:
            score = self.rule.score(self.rate, self.diverse)
            fresh = (score - score.min()) / (np.ptp(score) + 1e-8) + 1e-8
            self.weights = self.rule.momentum * self.weights + (1 - self.rule.momentum) * fresh
        weighted = draw_by_weight(self.weights, int(self.rule.share * count), rng, again=True)
        plain = self.order[(self.position + np.arange(count - len(weighted))) % self.pool]
        self.position = (self.position + len(plain)) % self.pool
        # a₀ b₀ a₁ b₁ ..., then the rest of the longer one
        n = min(len(plain), len(weighted))
        both = np.stack([plain[:n], weighted[:n]], axis=1).reshape(-1)
        return np.concatenate([both, plain[n:], weighted[n:]])

    def learn(self, i: int, results: Array, group: Group) -> None:
        super().learn(i, results, group)
        sampled = [t for t in group.trajectories if t.origin == Origin.POLICY]
        self.diverse[i] = diversity([[token for turn in t.turns for token in turn.tokens] for t in sampled])


def diversity(answers: Sequence[Sequence[int]]) -> float:
    """1 − mean over the answers of BLEU(answer, all others); 0 for fewer than two answers.

    BLEU: geometric mean of clipped precisions of 1-, 2- and 3-grams, times the brevity penalty; 0.1 replaces a count of 0."""
    if len(answers) < 2:
        return 0.0
    bleu = []
    for i, answer in enumerate(answers):
        others = [other for j, other in enumerate(answers) if j != i]
        logs = []
        for n in (1, 2, 3):
            limit: Counter[tuple[int, ...]] = Counter()
            for other in others:
                limit |= Counter(zip(*(other[k:] for k in range(n))))
            ngrams: Counter[tuple[int, ...]] = Counter(zip(*(answer[k:] for k in range(n))))
            logs.append(math.log(((ngrams & limit).total() or 0.1) / max(1, ngrams.total())))
        closest = min(map(len, others), key=lambda length: (abs(length - len(answer)), length))
        brevity = 1.0 if len(answer) > closest else math.exp(1 - closest / max(1, len(answer)))
        bleu.append(min(1.0, brevity * math.exp(sum(logs) / len(logs))))
    return 1.0 - sum(bleu) / len(bleu)


class VariancePromotion(PoolSampler):
    """A share of each wave is drawn, with replacement, in proportion to a·p(1 − p) + b·diversity; the rest follows a fixed
    permutation, so that every task is seen once per cycle. Weights are renewed every ``every`` waves from the latest group of
    each task; a task without one counts as half solved and fully diverse."""

    live = _Promotion
    variance: float = number(0.8, least=0)
    diversity: float = number(0.2, least=0)
    share: float = number(0.5, least=0, most=1)
    every: int = number(28, above=0)
    momentum: float = number(0.0, least=0, below=1)

    def score(self, rate: Array, diverse: Array) -> Array:
        return self.variance * rate * (1 - rate) + self.diversity * diverse


# --------------------------------------------------------------- difficulty bins


@dataclass
class _Bins(LivePool):
    """``history`` [pool, memory] holds 0, 1, or −1 where nothing was seen: whether the latest groups of a task were solved."""

    saved = (*LivePool.saved, "scores", "measured", "history", "bin")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scores, self.measured = np.zeros(self.rule.bins), np.zeros(self.rule.bins)
        self.history = np.full((self.pool, self.rule.memory), -1, dtype=np.int8)
        self.bin = np.zeros(self.pool, dtype=np.uint8)

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
        old, loss = int(self.bin[i]), 1 - float(results.mean())
        step = self.rule.smooth if self.measured[old] else 1.0
        self.scores[old] += step * (loss - self.scores[old])
        self.measured[old] = 1
        self.history[i] = np.roll(self.history[i], -1)
        self.history[i, -1] = results.any()
        share = float(self.history[i][self.history[i] >= 0].mean())
        new = min(int(share * self.rule.bins), self.rule.bins - 1)
        edge = (old + 1) / self.rule.bins if new > old else old / self.rule.bins
        if new != old and abs(share - edge) >= self.rule.margin:
            self.bin[i] = new

    def metrics(self) -> dict[str, float]:
        q = self.rule.distribution(self.scores)
        return {**super().metrics(), **{f"difficulty/weight_{b}": float(x) for b, x in enumerate(q)}}


class BinAdversary(PoolSampler):
    """Tasks in proportion to an adversary's distribution over bins of difficulty: q(b) ∝ (1 − floor)·exp(rate·S(b)) + floor.

    A task's bin is its share of solved groups among the last ``memory``, with hysteresis ``margin``. S is the exponential mean
    of the bin's loss 1 − mean reward; within a bin all tasks are equally likely."""

    live = _Bins
    bins: int = number(10, least=1, most=255)
    rate: float = number(0.1, least=0)
    floor: float = number(0.15, least=0, most=1)
    smooth: float = number(0.1, above=0, most=1)
    limit: float = number(10.0, above=0)
    memory: int = number(8, above=0)
    margin: float = number(0.0, least=0)

    def distribution(self, scores: Array) -> Array:
        """q over the bins, from their smoothed losses."""
        weights = np.exp(self.rate * scores.clip(-self.limit, self.limit))
        return (1 - self.floor) * weights / weights.sum() + self.floor / len(scores)


# -------------------------------------------------------------- Gaussian frontier


@dataclass
class _Gaussian(LivePool):
    saved = (*LivePool.saved, "weights")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights = self.rule.weight(self.rate)  # changes only where a group is observed

    def choose(self, count: int, rng: np.random.Generator) -> Array:
        return draw_by_weight(self.weights, count, rng)

    def learn(self, i: int, results: Array, group: Group) -> None:
        self.rate[i] = self.rule.keep * self.rate[i] + (1 - self.rule.keep) * results.mean()
        self.weights[i] = self.rule.weight(self.rate[i])


class GaussianFrontier(PoolSampler):
    """Weight exp(−(p − center)²/(2·width²)) on an exponential mean p of each task's success rate, which starts at 0.5."""

    live = _Gaussian
    keep: float = number(0.9, least=0, below=1)
    width: float = number(0.35, above=0)
    center: float = number(0.5, least=0, most=1)

    def weight(self, rate: Array) -> Array:
        return np.exp(-((rate - self.center) ** 2) / (2 * self.width**2))


# ------------------------------------------------------------------ pivot filter


@dataclass
class _Pivots(LivePool):
    saved = (*LivePool.saved, "issued")

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


class PivotFilter(PoolSampler):
    """First one pass over the pool, to profile each task with its group. Then only pivots are issued: tasks whose profiled
    results differ and whose mean is below ``below``; uniformly. ``renew``: profiled again at each visit. Without a pivot: all."""

    live = _Pivots
    pool: int = number(256, least=1)
    below: float = number(0.9, above=0)
    renew: bool = True


# --------------------------------------------------------------- sliding window


@dataclass
class _Window(LivePool):
    saved = (*LivePool.saved, "order", "center", "wave_rewards")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_scores([-float(task.difficulty) for task in self.members])
        self.center = 0.0
        self.wave_rewards: list[float] = []
        self.kernel = self.rule.weight(np.arange(self.pool), 0.0).clip(min=1e-12)  # by distance from the center

    def set_scores(self, scores: Sequence[float]) -> None:
        """Rank the tasks by measured scores, largest first."""
        self.order = np.argsort(-np.asarray(scores), kind="stable")  # the task of each rank

    def choose(self, count: int, rng: np.random.Generator) -> Array:
        if self.wave_rewards:
            self.center = self.rule.moved(self.center, float(np.mean(self.wave_rewards)))
            self.wave_rewards = []
        center = min(round(self.center), self.pool - 1)
        weights = np.concatenate([self.kernel[center:0:-1], self.kernel[: self.pool - center]])  # by rank
        return self.order[draw_by_weight(weights, count, rng)]

    def learn(self, i: int, results: Array, group: Group) -> None:
        super().learn(i, results, group)
        self.wave_rewards.append(float(np.mean([t.reward for t in group.trajectories])))

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "tasks_window": self.center}


class SlidingWindow(PoolSampler):
    """A Gaussian window over a ranking of the tasks; it moves on as the policy succeeds:
    μ ← μ + clip(step·tanh(slope·(accuracy/best − target)) + step·tanh(slope·concentration), 0, furthest).

    Tasks are ranked by the angles between hidden states of their prompts, which a run measures before its first step
    (``set_scores``; by difficulty until then). ``concentration`` of responses is not measured: its term is 0."""

    live = _Window
    width: float = number(1000.0, above=0)
    step: float = 500.0
    slope: float = 2.0
    target: float = 0.5
    furthest: float = 1000.0
    best: float = number(1.0, above=0)
    # is the weight of a score's second part
    inter: float = 8.0

    measures: ClassVar = "angles"

    @classmethod
    def scaled(cls, pool: int, width: float, step: float, slope: float, target: float, inter: float) -> SlidingWindow:
        """A window that fits the pool: a ``width`` of 0 is an eighth of it, and steps shrink in the same proportion."""
        factor = 1.0 if width else pool / 8 / 1000.0
        return cls(pool, width or pool / 8, step * factor, slope, target, 1000.0 * factor, inter=inter)

    def weight(self, rank: Array, center: float) -> Array:
        return np.exp(-0.5 * ((rank - center) / self.width) ** 2)

    def moved(self, center: float, accuracy: float, concentration: float = 0.0) -> float:
        turn = math.tanh(self.slope * (accuracy / self.best - self.target)) + math.tanh(self.slope * concentration)
        return center + min(max(self.step * turn, 0.0), self.furthest)
