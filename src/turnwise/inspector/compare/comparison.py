"""A comparison of runs: outcomes at equal token budgets, differences over paired seeds, in words, JSON and a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from turnwise.errors import SettingError
from turnwise.inspector.compare.outcomes import RunOutcome, common_tokens, read_outcome
from turnwise.inspector.compare.statistics import (
    CANNOT_TELL,
    PairedDifference,
    paired_difference,
    sequential_verdict,
)

ALPHA = 0.05


@dataclass(frozen=True)
class ComparedPair:
    """``left`` against ``right`` over the seeds that both have."""

    left: str
    right: str
    difference: PairedDifference

    def text(self, measure: str) -> str:
        d = self.difference
        if d.pairs < 2:
            return f"{self.left} against {self.right}: cannot tell; {d.pairs} common seed, and a comparison needs at least 2"
        if not math.isfinite(d.low):
            return f"{self.left} against {self.right}: cannot tell; every pair differs by {d.mean:+.3f}, so there is no spread"
        words = "cannot tell" if d.verdict == CANNOT_TELL else f"{self.left} is {d.verdict}"
        return (
            f"{self.left} against {self.right}: {words}; {measure} {d.mean:+.3f}, {d.level:.1%} interval {d.low:+.3f} to "
            f"{d.high:+.3f} over {d.pairs} seeds; effect size {d.effect:.2f}, higher in {d.wins:.0%} of the seeds"
        )


@dataclass(frozen=True)
class Comparison:
    """``values``: by label, the outcome of each seed at the common token budget."""

    measure: str
    tokens: float
    alpha: float
    values: Mapping[str, Mapping[int, float]]
    pairs: tuple[ComparedPair, ...]
    notes: tuple[str, ...] = ()

    @property
    def decided(self) -> bool:
        return all(pair.difference.verdict != CANNOT_TELL for pair in self.pairs)

    def text(self) -> str:
        lines = [f"held-out {self.measure} after {self.tokens:.0f} sampled tokens, for each run the same:"]
        for label, by_seed in self.values.items():
            mean = sum(by_seed.values()) / len(by_seed)
            each = ", ".join(f"{value:.3f}" for value in by_seed.values())
            lines.append(f"  {label:<20} mean {mean:.3f}   seeds {', '.join(map(str, by_seed))}: {each}")
        lines += [f"  {pair.text(self.measure)}" for pair in self.pairs]
        lines.append(f"all statements together are wrong with probability {self.alpha:.0%} at most")
        return "\n".join([*lines, *self.notes])

    def as_dict(self) -> dict[str, Any]:
        pairs = [
            {"left": p.left, "right": p.right, "verdict": p.difference.verdict, **_finite(asdict(p.difference))}
            for p in self.pairs
        ]
        values = {
            label: {str(seed): value for seed, value in by_seed.items()} for label, by_seed in self.values.items()
        }
        return {
            "measure": self.measure, "tokens": self.tokens, "alpha": self.alpha, "values": values, "pairs": pairs,
            "notes": list(self.notes),
        }  # fmt: skip

    def plot(self, path: str | Path) -> None:
        """Every seed as a point, every label's mean as a bar."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 1.2 + 0.5 * len(self.values)))
        axes = figure.add_subplot()
        for n, by_seed in enumerate(self.values.values()):
            values = list(by_seed.values())
            axes.barh(n, sum(values) / len(values), color="#c8d5e6")
            axes.plot(values, [n] * len(values), "o", color="#2d5d9f", markersize=4)
        axes.set_yticks(range(len(self.values)), list(self.values))
        axes.set_xlabel(f"held-out {self.measure} after {self.tokens:.0f} tokens")
        figure.tight_layout()
        figure.savefig(path, dpi=120)


def compare_outcomes(outcomes: Sequence[RunOutcome], planned: int = 0, alpha: float = ALPHA) -> Comparison:
    """Compare every pair of labels. ``planned``: the seeds at most, where one looked after each (sequential); 0: one look."""
    labels = list(dict.fromkeys(outcome.label for outcome in outcomes))
    if len(labels) < 2:
        raise SettingError(
            f"all runs are {labels[0] if labels else 'missing'}; give runs of at least two methods or settings"
        )
    measures = {outcome.measure for outcome in outcomes}
    if len(measures) > 1:
        raise SettingError("some of the runs report success and others only a reward; compare runs of one environment")
    tokens = common_tokens(outcomes)
    values: dict[str, dict[int, float]] = {label: {} for label in labels}
    for outcome in sorted(outcomes, key=lambda o: o.seed):
        if outcome.seed in values[outcome.label]:
            raise SettingError(f"two runs of {outcome.label} have seed {outcome.seed}; give one of them")
        values[outcome.label][outcome.seed] = outcome.at(tokens)
    every = list(combinations(labels, 2))
    pairs = tuple(ComparedPair(a, b, _difference(values[a], values[b], planned, alpha / len(every))) for a, b in every)
    return Comparison(measures.pop(), tokens, alpha, values, pairs, _notes(outcomes, tokens))


def compare_runs(paths: Sequence[str | Path], alpha: float = ALPHA) -> Comparison:
    """Compare finished runs: one look."""
    return compare_outcomes([read_outcome(path) for path in paths], 0, alpha)


def _difference(a: Mapping[int, float], b: Mapping[int, float], planned: int, alpha: float) -> PairedDifference:
    seeds = [seed for seed in a if seed in b]
    left, right = [a[seed] for seed in seeds], [b[seed] for seed in seeds]
    return (
        sequential_verdict(left, right, planned, alpha)[1]
        if planned and seeds
        else paired_difference(left, right, alpha)
    )


def _notes(outcomes: Sequence[RunOutcome], tokens: float) -> tuple[str, ...]:
    largest = max(outcome.tokens for outcome in outcomes)
    if largest <= 1.05 * tokens:
        return ()
    return (
        f"runs sampled {tokens:.0f} to {largest:.0f} tokens; longer ones are read where they had sampled {tokens:.0f}, "
        "between their evaluations (--eval-every makes that finer)",
    )


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
