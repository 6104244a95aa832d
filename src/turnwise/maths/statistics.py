"""Evaluation statistics: pass@k, average@k, majority@k, confidence intervals. Pure functions on arrays.

Suffixes: ``_T`` tasks. Does not know models, rewards or where the numbers came from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds it lies between: ``Interval(0.5, 0.4, 0.6)``"""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> np.ndarray:
    """1 − C(n−c, k) / C(n, k): the chance that at least one of k samples, drawn from n with c correct, is correct.

    Unbiased (Chen et al. 2021, arXiv 2107.03374). Computed as 1 − ∏ⱼ (n−c−j)/(n−j), which never overflows.

    >>> pass_at_k([4, 4], [1, 0], k=2).tolist()
    [0.5, 0.0]
    """
    n_T, c_T = np.broadcast_arrays(np.asarray(n, dtype=np.int64), np.asarray(c, dtype=np.int64))
    if k < 1 or (n_T < k).any():
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples per task; the smallest task has {n_T.min()}")
    if ((c_T < 0) | (c_T > n_T)).any():
        raise ValueError("the number of correct samples must lie between 0 and the number of samples")
    missed_T = np.ones(n_T.shape)
    for j in range(k):
        missed_T = missed_T * np.maximum(n_T - c_T - j, 0) / (n_T - j)
    return 1.0 - missed_T


def majority_at_k(answers: Sequence[Hashable], truth: Hashable, k: int) -> float:
    """The probability that the most frequent of k answers, drawn without replacement, is the true one.

    Exact over all subsets. A tie is broken uniformly. ``None`` is an abstention: it is one of the k but does not vote; without
    votes the result is wrong.

    >>> majority_at_k(["4", "4", "5"], "4", k=3)
    1.0
    """
    n = len(answers)
    if not 1 <= k <= n:
        raise ValueError(f"majority@{k} needs between 1 and {n} answers")
    counts = Counter(answers)
    abstentions = counts.pop(None, 0)
    correct = counts.pop(truth, 0)
    total = sum(
        comb(correct, votes) * ways / (tied + 1)
        for votes in range(1, min(correct, k) + 1)
        for tied, ways in _ways_by_ties(list(counts.values()), abstentions, k - votes, votes).items()
    )
    return float(total / comb(n, k))


def _ways_by_ties(counts: list[int], abstentions: int, places: int, most: int) -> dict[int, int]:
    """Ways for other answers (at most ``most`` votes each) and abstentions to fill ``places``, by how many answers tie."""
    ways: dict[tuple[int, int], int] = {(n, 0): comb(abstentions, n) for n in range(min(abstentions, places) + 1)}
    for count in counts:
        grown: dict[tuple[int, int], int] = {}
        for (filled, tied), way in ways.items():
            for votes in range(min(count, most, places - filled) + 1):
                key = (filled + votes, tied + (votes == most))
                grown[key] = grown.get(key, 0) + way * comb(count, votes)
        ways = grown
    out: dict[int, int] = {}
    for (filled, tied), way in ways.items():
        if filled == places:
            out[tied] = out.get(tied, 0) + way
    return out


def wilson(successes: float, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion: (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n).

    Stays inside [0, 1] and has a width at 0 and 1, where the normal approximation has none. Without trials it is [0, 1]."""
    _check_confidence(confidence)
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials is no proportion")
    if trials == 0:
        return Interval(float("nan"), 0.0, 1.0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * (p * (1 - p) / trials + z * z / (4 * trials**2)) ** 0.5 / (1 + z * z / trials)
    return Interval(p, min(max(0.0, centre - half), p), max(min(1.0, centre + half), p))


def bootstrap(
    values: ArrayLike,
    tasks: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of the mean over tasks, resampling whole *tasks*.

    Samples of one task are not independent; resampling single values would make the interval too narrow. ``tasks`` names the
    task of each value (None: every value is its own task). The estimate is the mean of the tasks' means."""
    _check_confidence(confidence)
    means_T = task_means(values, tasks)
    if means_T.size == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    sampled = np.empty(draws)
    for start in range(0, draws, 256):  # in slices, so that draws x tasks need not fit in memory
        resampled = rng.integers(0, means_T.size, size=(min(256, draws - start), means_T.size))
        sampled[start : start + 256] = means_T[resampled].mean(axis=1)
    low, high = np.quantile(sampled, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(float(means_T.mean()), float(low), float(high))


def task_means(values: ArrayLike, tasks: Sequence[Hashable] | None = None) -> np.ndarray:
    """The mean of each task's values, in order of first appearance."""
    flat = np.asarray(values, dtype=np.float64).reshape(-1)
    if tasks is None:
        return flat
    if len(tasks) != flat.size:
        raise ValueError(f"{flat.size} values but {len(tasks)} task names")
    places: dict[Hashable, int] = {}
    index = np.fromiter((places.setdefault(task, len(places)) for task in tasks), dtype=np.int64, count=flat.size)
    return np.bincount(index, weights=flat, minlength=len(places)) / np.maximum(np.bincount(index), 1)


def by_group(
    values: ArrayLike, groups: Sequence[Hashable], statistic: Callable[[np.ndarray], Any] = np.mean
) -> Mapping[Hashable, Any]:
    """A statistic of each group's values, such as success by difficulty; groups sorted where they can be.

    >>> {g: float(v) for g, v in by_group([1, 0, 1], [2, 1, 2]).items()}
    {1: 0.0, 2: 1.0}
    """
    flat = np.asarray(values, dtype=np.float64).reshape(-1)
    if len(groups) != flat.size:
        raise ValueError(f"{flat.size} values but {len(groups)} group names")
    places: dict[Hashable, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    kinds = {type(group) for group in places}
    names = sorted(places) if len(kinds) == 1 else list(places)  # type: ignore[type-var]
    return {name: statistic(flat[places[name]]) for name in names}


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; write a number between 0 and 1, such as 0.95")
