"""Paired differences that may be looked at after every pair, for as long as anybody likes: e-values, intervals, Holm, power.

Of n differences with mean x̄ and standard deviation s, t = x̄ √n / s. Against "the mean is 0, whatever the spread" the Bayes
factor of an effect (mean over spread) drawn from N(0, τ²), with the right Haar prior on the spread (r = 1 + n τ², ν = n − 1),

    E = r^(−1/2) · ((1 + t²/ν) / (1 + t²/(r ν)))^(n/2)

has mean 1 under that hypothesis at any time of stopping (Pérez-Ortiz, Lardy, de Heide and Grünwald, 2024): that it ever exceeds
1/α has probability α at most. The means that are not refused in this way are a confidence sequence (Wang and Ramdas, 2024).
Assumed: differences of seeds are independent and roughly normal. A betting sequence needs no normality, only bounds, and
cannot decide with a handful of seeds: five differences of 0.3 within [−1, 1] multiply a stake by 3.7 at most, and 20 are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

TAU = 2.0  # of effects that a handful of seeds can show at all; 1 to 3 lose a few percent of power
DRAWS, MOST_SEEDS = 2000, 64  # of the simulated power, and how far it looks for what would be needed


def evidence(differences: Sequence[float]) -> float:
    """E of the module. 1 where nothing can be known: fewer than two differences, or no spread between them."""
    n = len(differences)
    spread = float(np.std(differences, ddof=1)) if n > 1 else 0.0
    if spread <= 1e-12:
        return 1.0
    t2, r, freedom = n * (float(np.mean(differences)) / spread) ** 2, 1 + n * TAU**2, n - 1
    return math.exp(min(700.0, 0.5 * (n * math.log((1 + t2 / freedom) / (1 + t2 / (r * freedom))) - math.log(r))))


def half_width(n: int, alpha: float) -> float:
    """Half the interval of n differences, in units of s / √n: where E is 1/α. Infinite while no t can reach it."""
    r = 1 + n * TAU**2
    ratio = (math.sqrt(r) / alpha) ** (2 / n)
    return math.sqrt((n - 1) * (ratio - 1) / (1 - ratio / r)) if ratio < r else math.inf


def holm(evidences: Sequence[float], alpha: float) -> list[float]:
    """The error rate of each statement: α over the number of statements that are not decided before it, the clearest first. The
    probability that any tie among them is called a difference is α at most (Holm; 1/E is a p-value)."""
    levels, left = [0.0] * len(evidences), len(evidences)
    for i in sorted(range(len(evidences)), key=lambda i: -evidences[i]):
        levels[i] = alpha / left
        left -= evidences[i] * levels[i] > 1
    return levels


def power(gap: float, spread: float, seeds: int, alpha: float) -> np.ndarray:
    """The probability that a true difference ``gap`` is seen after at most 1, 2, ... ``seeds`` seeds, of differences with this
    spread: a simulation with a fixed seed."""
    n = np.arange(1, seeds + 1)
    sums = np.cumsum(drawn := np.random.default_rng(0).normal(gap, max(spread, 1e-12), (DRAWS, seeds)), axis=1)
    squares = np.cumsum(drawn**2, axis=1) - sums**2 / n
    size = np.sqrt(np.maximum(squares, 0) / np.maximum(n - 1, 1) / n)
    bounds = np.array([math.inf, *(half_width(k, alpha) for k in range(2, seeds + 1))])[:seeds]
    with np.errstate(invalid="ignore"):
        decided = (np.abs(sums / n) > bounds * size) & np.isfinite(bounds)
    return np.maximum.accumulate(decided, axis=1).mean(axis=0)


def seeds_needed(gap: float, spread: float, alpha: float, wanted: float = 0.8) -> int | None:
    """Seeds by which a true difference ``gap`` is seen with probability ``wanted``; None: more than ``MOST_SEEDS``."""
    enough = power(gap, spread, MOST_SEEDS, alpha) >= wanted
    return int(enough.argmax()) + 1 if gap and enough.any() else None
