"""Numbers as users read them: whether a value is one, its digits, a duration. Does not know how any metric is computed."""

from __future__ import annotations

import math
from typing import Any

MISSING = "–"


def finite_number(value: Any) -> float | None:
    """A finite float, or None. Tensors, text and NaN all occur in practice and must not stop a run."""
    try:
        out = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return out if math.isfinite(out) else None


def format_number(value: float | None, spec: str = ".3f") -> str:
    return MISSING if value is None else format(value, spec)


def format_duration(seconds: float | None) -> str:
    """
    >>> format_duration(3725), format_duration(65), format_duration(None)
    ('1h02m', '1m05s', '–')
    """
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return MISSING
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"
