"""``turnwise compare METHOD ... --env E``: trains the methods seed by seed, looks after each seed, stops when it can tell.

``sweep`` is the same over a grid of settings. A variant is a label and the settings that make it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.core.protocols import Listener
from turnwise.errors import SettingError
from turnwise.inspector.compare.comparison import ALPHA, Comparison, RunOutcome, compare_outcomes, read_outcome
from turnwise.training import api
from turnwise.training.watch import silent

Variant = tuple[str, Mapping[str, Any]]
SEEDS = 5


def method_variants(methods: Sequence[str]) -> list[Variant]:
    return [(method, {"method": method}) for method in methods]


def grid_variants(grid: Mapping[str, Sequence[str]]) -> list[Variant]:
    """One variant for each combination: ``{"lr": ["1e-4", "3e-4"], "group_size": ["4", "8"]}`` makes four."""
    if not grid:
        raise SettingError("the grid is empty; write --grid lr=1e-4,3e-4")
    combinations = itertools.product(*([(name, value) for value in values] for name, values in grid.items()))
    return [(" ".join(f"{name}={value}" for name, value in point), dict(point)) for point in combinations]


def compare_live(
    variants: Sequence[Variant],
    settings: Mapping[str, Any],
    out: str | Path,
    minutes: float,
    seeds: int = SEEDS,
    alpha: float = ALPHA,
    listen: Listener = silent,
    train: Callable[..., Any] = api.train,
) -> Comparison:
    """Train every variant with seed after seed until all pairs are decided, the seeds are used up, or the time is."""
    if len(variants) < 2:
        raise SettingError(
            "one variant has nothing to be compared with; give at least two methods, or two values in a grid"
        )
    if seeds < 2:
        raise SettingError(f"seeds is {seeds}; a comparison needs at least 2")
    out, end, first = Path(out), time.monotonic() + 60 * minutes, int(settings.get("seed", 0))
    outcomes: list[RunOutcome] = []
    comparison: Comparison | None = None
    for seed in range(first, first + seeds):
        began = time.monotonic()
        for n, (label, changes) in enumerate(variants):
            name = f"variant{n}-seed{seed}"
            train(listen, **{**settings, **changes, "seed": seed, "out": str(out), "name": name})
            outcomes.append(read_outcome(out / name, label))
        comparison = compare_outcomes(outcomes, seeds, alpha)
        # a seed takes about as long as the one before
        if comparison.decided or time.monotonic() + (time.monotonic() - began) > end:
            break
    assert comparison is not None
    return comparison
