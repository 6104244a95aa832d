"""Statistics of a comparison: the interval of a paired difference, looks whose error rates add up, effect sizes.

The unit is a pair of runs with the same seed: tasks, initial model and draws are the same, the method differs. Tasks of one
run are not independent of each other (one model answers them all), so they do not count as units. Assumed: the differences of
pairs are independent and roughly normal (each is a mean over many tasks). Then each look has its exact error rate by Student's
t, and by the union bound all looks at all pairs together err with probability ``alpha`` at most.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.errors import SettingError

BETTER, WORSE, CANNOT_TELL = "better", "worse", "cannot tell"


@dataclass(frozen=True)
class PairedDifference:
    """The mean of left − right over pairs, its interval at ``level``, effect sizes. ``low`` is −inf for fewer than two pairs."""

    pairs: int
    mean: float
    low: float
    high: float
    level: float
    effect: float  # mean over standard deviation of the pairs' differences
    wins: float  # share of pairs in which left is higher; a tie counts half

    @property
    def verdict(self) -> str:
        if self.low > 0:
            return BETTER
        return WORSE if self.high < 0 else CANNOT_TELL


@functools.cache
def student_t(probability: float, freedom: int) -> float:
    """The quantile of Student's t distribution."""
    try:
        from scipy.stats import t
    except ImportError:
        raise SettingError("comparisons need SciPy; install it: pip install 'turnwise[inspector]'") from None
    return float(t.ppf(probability, freedom))


def paired_difference(left: Sequence[float], right: Sequence[float], alpha: float) -> PairedDifference:
    """The difference of paired values with its two-sided interval of level 1 − alpha.

    With equal differences the spread is zero, and one cannot know how much of that is luck: no interval then, unless both
    sides are the same throughout."""
    differences = [a - b for a, b in zip(left, right, strict=True)]
    n = len(differences)
    mean = sum(differences) / n if n else math.nan
    wins = sum(0.5 if d == 0 else float(d > 0) for d in differences) / n if n else math.nan
    variance = sum((d - mean) ** 2 for d in differences) / (n - 1) if n > 1 else math.nan
    if n < 2 or variance == 0:
        effect = 0.0 if mean == 0 else math.nan
        return PairedDifference(n, mean, -math.inf, math.inf, 1 - alpha, effect, wins)
    spread = math.sqrt(variance)
    half = student_t(1 - alpha / 2, n - 1) * spread / math.sqrt(n)
    return PairedDifference(n, mean, mean - half, mean + half, 1 - alpha, mean / spread, wins)


def spent(looks: int, alpha: float) -> list[float]:
    """The error rate of each look, the first at two pairs; they sum to ``alpha``. Later looks have more data and get more."""
    weights = [float(n) for n in range(1, looks + 1)]
    return [alpha * weight / sum(weights) for weight in weights]


def sequential_verdict(
    left: Sequence[float], right: Sequence[float], planned: int, alpha: float
) -> tuple[int, PairedDifference]:
    """Look after every pair from the second on; stop at the first look that decides. Pairs used, and the last difference.

    ``planned``: the number of pairs at most, fixed before the first look."""
    if planned < 2:
        raise SettingError(f"{planned} pairs are planned; a comparison needs at least 2 seeds")
    rates = spent(planned - 1, alpha)
    found = paired_difference(left[:1], right[:1], rates[0])
    for n in range(2, min(planned, len(left)) + 1):
        found = paired_difference(left[:n], right[:n], rates[n - 2])
        if found.verdict != CANNOT_TELL:
            return n, found
    return min(planned, len(left)), found
