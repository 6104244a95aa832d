"""A comparison of runs: outcomes at equal token budgets, differences over paired seeds, in words, JSON and a plot.

The unit is a pair of runs with the same seed: tasks, initial model and draws are the same, the method differs. Tasks of one
run are not independent of each other (one model answers them all), so they do not count as units. Assumed: the differences of
pairs are independent and roughly normal (each is a mean over many tasks). Finished runs get one look, by Student's t and
Bonferroni; a live comparison looks after every seed (``sequential``). Either way ``alpha`` bounds the probability that any tie
is called a difference.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from turnwise.errors import SettingError
from turnwise.inspector.compare.sequential import evidence, half_width, holm
from turnwise.inspector.queries import RunReader
from turnwise.observe.mechanism import mechanism

ALPHA = 0.05
OF_ONE_RUN = ("seed", "name", "out", "threads", "trackers")  # settings that make no other kind of run
BETTER, WORSE, CANNOT_TELL = "better", "worse", "cannot tell"


# ----------------------------------------------------------- outcomes of runs


@dataclass(frozen=True)
class RunOutcome:
    """One run. ``curve``: sampled tokens and held-out outcome, from the evaluation before training to the one after."""

    path: str
    label: str
    seed: int
    tasks: int
    measure: str  # success, or reward where the environment reports no success
    curve: tuple[tuple[float, float], ...]
    mechanism: str = ""  # how often it acted

    @property
    def tokens(self) -> float:
        return self.curve[-1][0]

    def at(self, tokens: float) -> float:
        """The outcome after so many tokens, by interpolation between evaluations."""
        xs = [x for x, _ in self.curve]
        n = bisect_left(xs, tokens)
        if n == 0 or n == len(xs):
            return self.curve[min(n, len(xs) - 1)][1]
        (x0, y0), (x1, y1) = self.curve[n - 1], self.curve[n]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


def read_outcome(path: str | Path, label: str = "") -> RunOutcome:
    """The outcome of a finished run; refuses one without a held-out evaluation."""
    with RunReader(path) as reader:
        before, after = ((reader.evaluation(when) or {}).get("summary", {}) for when in ("before", "after"))
        settings, rows = reader.settings, reader.metrics()
    if not after.get("tasks"):
        raise SettingError(
            f"{path} has no evaluation after training, so there is nothing to compare; finish it, or train with --eval-tasks"
        )
    measure = "success" if after.get("success") is not None else "reward"
    title = f"{settings.get('method')}+{settings['credit']}" if settings.get("credit") else str(settings.get("method"))
    points, tokens = [(0.0, float(before.get(measure) or 0.0))], 0.0
    for row in rows:
        tokens += float(row["tokens"] or 0.0)
        value = row[f"eval/{measure}"]
        if value is not None and tokens > points[-1][0]:
            points.append((tokens, float(value)))
    end = (max(tokens, 1.0), float(after[measure]))
    curve = (*(point for point in points if point[0] < end[0]), end)
    name, seed, tasks = label or title, int(settings.get("seed", 0)), int(after["tasks"])
    return RunOutcome(str(path), name, seed, tasks, measure, curve, mechanism([row.values for row in rows]))


# ----------------------------------------------------------------- statistics


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
    """The quantile of Student's t distribution, for a probability of at least one half."""
    low, high = 0.0, math.pi / 2  # of the angle θ = atan(t / √ν), in which the distribution is a finite sum

    def between(angle: float) -> float:
        """P(|T| < t): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
        term = total = 1.0 if freedom % 2 == 0 else math.cos(angle) if freedom > 1 else 0.0
        for k in range(2 + freedom % 2, freedom - 1, 2):
            term *= (k - 1) / k * math.cos(angle) ** 2
            total += term
        return math.sin(angle) * total if freedom % 2 == 0 else (angle + math.sin(angle) * total) * 2 / math.pi

    while low < (middle := (low + high) / 2) < high:  # until no number lies between the two
        low, high = (middle, high) if between(middle) < 2 * probability - 1 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def paired_difference(
    left: Sequence[float], right: Sequence[float], alpha: float, sequential: bool = False
) -> PairedDifference:
    """The difference of paired values with its two-sided interval of level 1 − alpha; ``sequential``: at all looks together.

    With equal differences the spread is zero, and one cannot know how much of that is luck: no interval then, unless both
    sides are the same throughout."""
    differences = [a - b for a, b in zip(left, right, strict=True)]
    n = len(differences)
    mean = sum(differences) / n if n else math.nan
    wins = sum(0.5 if d == 0 else float(d > 0) for d in differences) / n if n else math.nan
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1)) if n > 1 else math.nan
    if n < 2 or spread <= 1e-12:
        effect = 0.0 if mean == 0 else math.nan
        return PairedDifference(n, mean, -math.inf, math.inf, 1 - alpha, effect, wins)
    # with a handful of seeds the normal interval is far too narrow
    half = (half_width(n, alpha) if sequential else student_t(1 - alpha / 2, n - 1)) * spread / math.sqrt(n)
    return PairedDifference(n, mean, mean - half, mean + half, 1 - alpha, mean / spread, wins)


# ---------------------------------------------------------------- comparisons


@dataclass(frozen=True)
class ComparedPair:
    """``left`` against ``right`` over the seeds that both have."""

    left: str
    right: str
    difference: PairedDifference
    alike: str = ""  # why these two are one and the same: no number of seeds tells them apart

    @property
    def decided(self) -> bool:
        return bool(self.alike) or self.difference.verdict != CANNOT_TELL

    def text(self, measure: str) -> str:
        d = self.difference
        if self.alike:
            return f"{self.left} against {self.right}: cannot tell; {self.alike}"
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
    tokens: float  # the smallest of the seeds' budgets
    alpha: float
    values: Mapping[str, Mapping[int, float]]
    pairs: tuple[ComparedPair, ...]
    notes: tuple[str, ...] = ()
    mechanisms: Mapping[str, str] = field(default_factory=dict)  # by label, of its first seed: how often it acted

    @property
    def decided(self) -> bool:
        return all(pair.decided for pair in self.pairs)

    def text(self) -> str:
        lines = [f"held-out {self.measure} after {self.tokens:.0f} sampled tokens, the same for all runs of a seed:"]
        for label, by_seed in self.values.items():
            mean = sum(by_seed.values()) / len(by_seed)
            each = ", ".join(f"{value:.3f}" for value in by_seed.values())
            lines.append(f"  {label:<20} mean {mean:.3f}   seeds {', '.join(map(str, by_seed))}: {each}")
            lines += [f"  {'':<20} mechanism: {told}" for told in filter(None, [self.mechanisms.get(label)])]
        lines += [f"  {pair.text(self.measure)}" for pair in self.pairs]
        lines.append(f"that any tie among them is called a difference has probability {self.alpha:.0%} at most")
        return "\n".join([*lines, *self.notes])

    def as_dict(self) -> dict[str, Any]:
        pairs = [
            {
                "left": p.left,
                "right": p.right,
                "verdict": CANNOT_TELL if p.alike else p.difference.verdict,
                "alike": p.alike,
            }
            # JSON has no infinity: an interval without bounds is null
            | {k: v if math.isfinite(v) else None for k, v in asdict(p.difference).items()}
            for p in self.pairs
        ]
        values = {
            label: {str(seed): value for seed, value in by_seed.items()} for label, by_seed in self.values.items()
        }
        return {
            "measure": self.measure, "tokens": self.tokens, "alpha": self.alpha, "values": values, "pairs": pairs,
            "notes": list(self.notes), "mechanisms": dict(self.mechanisms),
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


def compare_outcomes(
    outcomes: Sequence[RunOutcome],
    sequential: bool = False,
    alpha: float = ALPHA,
    alike: Mapping[frozenset[str], str] | None = None,
) -> Comparison:
    """Compare every pair of labels. ``sequential``: one looks after each seed. ``alike``: pairs of labels that are one and the
    same, with the reason."""
    labels = list(dict.fromkeys(outcome.label for outcome in outcomes))
    if len(labels) < 2:
        raise SettingError(
            f"all runs are {labels[0] if labels else 'missing'}; give runs of at least two methods or settings"
        )
    measures = {outcome.measure for outcome in outcomes}
    if len(measures) > 1:
        raise SettingError("some of the runs report success and others only a reward; compare runs of one environment")
    # the budget that every run of a seed reached; by seed, so that a later seed changes nothing of an earlier one
    budgets: dict[int, float] = {}
    for outcome in outcomes:
        budgets[outcome.seed] = min(budgets.get(outcome.seed, math.inf), outcome.tokens)
    values: dict[str, dict[int, float]] = {label: {} for label in labels}
    for outcome in sorted(outcomes, key=lambda o: o.seed):
        if outcome.seed in values[outcome.label]:
            raise SettingError(f"two runs of {outcome.label} have seed {outcome.seed}; give one of them")
        values[outcome.label][outcome.seed] = outcome.at(budgets[outcome.seed])
    pairs = compared_pairs(values, sequential, alpha, alike or {})
    tokens, largest, notes = min(budgets.values()), max(outcome.tokens for outcome in outcomes), list[str]()
    if any(outcome.tokens > 1.05 * budgets[outcome.seed] for outcome in outcomes):
        notes.append(
            f"runs sampled {tokens:.0f} to {largest:.0f} tokens; longer ones are read where the shortest of their seed ended, "
            "between their evaluations (--eval-every makes that finer)"
        )
    mechanisms = {o.label: o.mechanism for o in sorted(outcomes, key=lambda o: -o.seed) if o.mechanism}
    return Comparison(measures.pop(), tokens, alpha, values, pairs, tuple(notes), mechanisms)


def compared_pairs(
    values: Mapping[str, Mapping[int, float]], sequential: bool, alpha: float, alike: Mapping[frozenset[str], str]
) -> tuple[ComparedPair, ...]:
    """Every pair of labels over their common seeds. Those that are not ``alike`` share the error rate: by Holm where one looks
    after each seed, else evenly (Bonferroni)."""
    every, sides = list(combinations(values, 2)), list[tuple[list[float], list[float]]]()
    for a, b in every:
        seeds = [seed for seed in values[a] if seed in values[b]]
        sides.append(([values[a][seed] for seed in seeds], [values[b][seed] for seed in seeds]))
    open_pairs = [i for i, pair in enumerate(every) if frozenset(pair) not in alike]
    even = [alpha / max(1, len(open_pairs))] * len(open_pairs)
    strength = [evidence([x - y for x, y in zip(*sides[i])]) for i in open_pairs]
    levels = dict(zip(open_pairs, holm(strength, alpha) if sequential else even))
    return tuple(
        ComparedPair(
            a, b, paired_difference(*sides[i], levels.get(i, alpha), sequential), alike.get(frozenset((a, b)), "")
        )
        for i, (a, b) in enumerate(every)
    )


def compare_runs(paths: Sequence[str | Path], alpha: float = ALPHA) -> Comparison:
    """Compare finished runs: one look."""
    outcomes = [read_outcome(path) for path in paths]
    if len({outcome.label for outcome in outcomes}) == 1:
        outcomes = _labelled_by_settings(outcomes)
    return compare_outcomes(outcomes, alpha=alpha)


def _labelled_by_settings(outcomes: Sequence[RunOutcome]) -> list[RunOutcome]:
    """Runs of one method, called by the settings in which they differ: their agents, for example."""
    settings = list[dict[str, Any]]()
    for outcome in outcomes:
        with RunReader(outcome.path) as reader:
            settings.append(dict(reader.settings))
    names = dict.fromkeys(name for one in settings for name in one if name not in OF_ONE_RUN)
    apart = [name for name in names if len({str(one.get(name)) for one in settings}) > 1]
    labels = [", ".join(f"{name}={one.get(name)}" for name in apart) for one in settings]
    return [replace(o, label=f"{o.label} {label}".strip()) for o, label in zip(outcomes, labels)]
