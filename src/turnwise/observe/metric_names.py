"""The figures people watch, and the names under which a loop may log them. Does not know how any is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NAMES: dict[str, tuple[str, ...]] = {
    "success": ("success", "success_rate", "train/success"),
    "reward": ("reward", "reward_mean", "train/reward"),
    "turns": ("turns", "turns_mean", "train/turns"),
    "tool_errors": ("tool_errors", "tool_error_share", "train/tool_errors"),
    "loss": ("loss", "train/loss"),
    "entropy": ("entropy", "train/entropy"),
    "clip": ("clip", "clip_share", "clip_fraction", "clipped", "train/clip"),
    "kl": ("kl", "approx_kl", "train/kl"),
    "tokens_per_second": ("tokens_per_second", "tokens/s", "train/tokens_per_second"),
    "evaluation": ("eval/success", "eval_success", "evaluation/success"),
}
MISSING = "–"


def value(metrics: Mapping[str, Any], figure: str) -> float | None:
    """The figure under whichever of its names is there; None when it is not, or is no number."""
    for name in NAMES[figure]:
        if name in metrics:
            return number(metrics[name])
    return None


def number(seen: Any) -> float | None:
    """A finite float, or None. Tensors, text and NaN are all met in practice and must never stop a run."""
    try:
        out = float(seen)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return out if math.isfinite(out) else None


def text(seen: float | None, form: str = ".3f") -> str:
    return MISSING if seen is None else format(seen, form)


def duration(seconds: float | None) -> str:
    """
    >>> duration(3725), duration(65), duration(None)
    ('1h02m', '1m05s', '–')
    """
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return MISSING
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"
