"""How a score grows with compute: a sigmoid in log compute, fitted by least squares.

    R(C) = R₀ + (A − R₀) / (1 + (C_mid/C)^B)

A is the asymptote, B the steepness, C_mid the compute at the midpoint. Compare methods by A first, then B: few choices change
the asymptote, most change only the efficiency. (The Art of Scaling Reinforcement Learning Compute for LLMs,
arXiv 2510.13786.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ScalingCurve:
    asymptote: float
    slope: float
    middle: float
    start: float = 0.0

    def __call__(self, compute: float) -> float:
        return self.start + (self.asymptote - self.start) / (1 + (self.middle / compute) ** self.slope)


def fit(
    compute: Sequence[float], score: Sequence[float], start: float = 0.0, skip: int = 0, grid: int = 400
) -> ScalingCurve:
    """The curve nearest to (compute, score) after dropping the first ``skip`` points; ``start`` is the score without training.

    For a fixed A the model is linear: log((R − R₀)/(A − R)) = B (log C − log C_mid). So a grid search over A fits a line for
    each, weighted by the distance of each point from R₀ and A, where the logarithm amplifies noise."""
    c, r = np.asarray(compute, float)[skip:], np.asarray(score, float)[skip:]
    if c.shape != r.shape or len(c) < 3:
        raise ValueError(f"a fit needs at least 3 points of compute and score, got {c.size} and {r.size}")
    if not (c > 0).all() or not r.max() > start:
        raise ValueError("compute must be positive, and some score above the start")
    best, error = ScalingCurve(float(r.max()), 1.0, float(np.median(c)), start), np.inf
    for asymptote in np.linspace(r.max() + 1e-6, max(1.0, r.max() + 1e-3), grid):
        inside = (r > start) & (r < asymptote)
        if inside.sum() < 2:
            continue
        y = np.log((r[inside] - start) / (asymptote - r[inside]))
        weight = (r[inside] - start) * (asymptote - r[inside])
        slope, shift = np.polyfit(np.log(c[inside]), y, 1, w=weight)
        if slope <= 0:
            continue
        curve = ScalingCurve(float(asymptote), float(slope), float(np.exp(-shift / slope)), start)
        squared = float(np.square([curve(x) - s for x, s in zip(c, r)]).sum())
        best, error = (curve, squared) if squared < error else (best, error)
    return best
