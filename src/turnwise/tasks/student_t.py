"""Quantiles of Student's t distribution for whole degrees of freedom, from its finite series. No other statistics."""

from __future__ import annotations

import math
from functools import cache


def central_mass(t: float, freedom: int) -> float:
    """P(|T| <= t) for ``freedom`` degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
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
