"""The metrics shown to users, the names under which a loop may log them, and their formatting.

Does not know how any metric is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

ALIASES: dict[str, tuple[str, ...]] = {
    "success": ("success", "success_rate", "train/success"),
    "reward": ("reward", "reward_mean", "train/reward"),
    "turns": ("turns", "turns_mean", "train/turns"),
    "tool_errors": ("tool_errors", "tool_error_share", "train/tool_errors"),
    "loss": ("loss", "train/loss"),
    "entropy": ("entropy", "train/entropy"),
    "clip": ("clip", "clip_share", "clip_fraction", "clipped", "train/clip"),
    "kl": ("kl", "approx_kl", "train/kl"),
    "tokens_per_second": ("tokens_per_second", "tokens/s", "train/tokens_per_second"),
    "evaluated_success": ("eval/success", "eval_success", "evaluation/success"),
    "evaluated_reward": ("eval/reward",),
}
MISSING = "–"


def metric_value(metrics: Mapping[str, Any], metric: str) -> float | None:
    """The metric under the first of its names that is present; None when it is absent or not a finite number."""
    for name in ALIASES[metric]:
        if name in metrics:
            return finite_number(metrics[name])
    return None


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
