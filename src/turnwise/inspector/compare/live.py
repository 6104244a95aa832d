"""``turnwise compare METHOD ... --env E``: says what it can tell before it spends anything, trains the arms seed by seed, looks
after each seed, and stops when it can tell or the minutes are used up.

``sweep`` is the same over a grid of settings.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.protocols import Listener
from turnwise.errors import SettingError
from turnwise.inspector.compare.arms import ArmRunner, BudgetSpent, Likeness, Variant, arms_of, likenesses
from turnwise.inspector.compare.comparison import ALPHA, Comparison, RunOutcome, compare_outcomes
from turnwise.inspector.compare.sequential import MOST_SEEDS, half_width, power, seeds_needed
from turnwise.store.atomic import read_object, write_json
from turnwise.training.watch import silent

SEEDS, FEWEST_STEPS, SPREAD = 8, 10, 0.05  # of one method between seeds, until it is measured
GAPS = (0.05, 0.1, 0.2, 0.3)  # differences whose power is told
MARGIN = 1.1  # of every forecast


def method_variants(methods: Sequence[str]) -> list[Variant]:
    return [(method, {"method": method}) for method in methods]


def grid_variants(grid: Mapping[str, Sequence[str]]) -> list[Variant]:
    """One variant for each combination: ``{"lr": ["1e-4", "3e-4"], "group_size": ["4", "8"]}`` makes four."""
    if not grid:
        raise SettingError("the grid is empty; write --grid lr=1e-4,3e-4")
    combinations = itertools.product(*([(name, value) for value in values] for name, values in grid.items()))
    return [(" ".join(f"{name}={value}" for name, value in point), dict(point)) for point in combinations]


def fewest_seeds(alpha: float, pairs: int) -> int:
    """By which a verdict is possible at all."""
    return next(n for n in itertools.count(2) if math.isfinite(half_width(n, alpha / pairs)))


@dataclass(frozen=True)
class Forecast:
    """What so many minutes can tell. ``steps`` are those of a run, ``spread`` that of paired differences."""

    minutes: float
    seeds: int
    steps: int
    seconds_per_seed: float
    spread: float
    measured: bool  # the spread is this comparison's own
    alpha: float  # of the first statement
    fewest: int

    def power(self, gap: float) -> float:
        return float(power(gap, self.spread, max(self.seeds, 1), self.alpha)[-1])

    def needs(self, gap: float) -> str:
        """Seeds and minutes by which a true difference is seen with 80 %."""
        seeds = seeds_needed(gap, self.spread, self.alpha)
        return f"{seeds} seeds, {self.minutes_for(seeds):.0f} minutes" if seeds else f"more than {MOST_SEEDS} seeds"

    def text(self) -> str:
        each = f"{self.seconds_per_seed:.0f} s each"
        begin = f"{self.minutes:.3g} minutes give {self.seeds} common seeds of {self.steps} steps, {each}"
        if self.seeds < self.fewest:
            return f"{begin}; a verdict needs at least {self.fewest} seeds, {self.minutes_for(self.fewest):.0f} minutes"
        shares = ", ".join(f"{100 * gap:.0f} points {self.power(gap):.0%}" for gap in GAPS)
        whose = "measured" if self.measured else "assumed until it is measured"
        return (
            f"{begin}. A true difference would be seen with probability: {shares} (differences of seeds spread by "
            f"{self.spread:.3f}, {whose})"
        )

    def minutes_for(self, seeds: int) -> float:
        return MARGIN * seeds * self.seconds_per_seed / 60


@dataclass(frozen=True)
class LiveComparison:
    """``comparison`` is None where nothing was trained, for the reason in ``stopped``."""

    folder: str
    forecasts: tuple[Forecast, ...]
    likenesses: tuple[Likeness, ...]
    comparison: Comparison | None
    stopped: str
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())

    def text(self) -> str:
        lines = ["gradients on the same batches, before any training:"] if self.likenesses else []
        lines += [f"  {likeness.text()}" for likeness in self.likenesses]
        lines += [f"forecast: {one.text()}" for one in self.forecasts[:1]]
        lines += [self.comparison.text()] if self.comparison is not None else []
        return "\n".join(
            [*lines, *self.notes, f"{self.stopped}; {self.seconds / 60:.1f} minutes, runs in {self.folder}"]
        )

    def as_dict(self) -> dict[str, Any]:
        plain = {"folder": self.folder, "stopped": self.stopped, "seconds": self.seconds, "remarks": list(self.notes)}
        lists = {"forecasts": [asdict(f) for f in self.forecasts], "likenesses": [asdict(x) for x in self.likenesses]}
        finite = json.loads(json.dumps(lists), parse_constant=lambda _: None)  # a zero gradient has no cosine
        return plain | finite | (self.comparison.as_dict() if self.comparison is not None else {})

    def plot(self, path: str | Path) -> None:
        if self.comparison is None:
            raise SettingError(f"there is nothing to plot: {self.stopped}")
        self.comparison.plot(path)


def open_folder(base: Path, record: Mapping[str, Any]) -> Path:
    """``base``, or the next free ``base-N``; one where the same was begun goes on. ``record`` says what is the same."""
    record = json.loads(json.dumps(record, default=str))
    for n in itertools.count(1):
        folder = base if n == 1 else base.with_name(f"{base.name}-{n}")
        plan = folder / "plan.json"
        if not folder.exists() or not any(folder.iterdir()):
            write_json(plan, record)
        elif not plan.is_file() or {k: v for k, v in read_object(plan).items() if k in record} != record:
            continue
        return folder
    raise AssertionError


def check_budget(minutes: float, alpha: float) -> None:
    if not 0 < minutes < math.inf:
        raise SettingError(f"minutes is {minutes:g}; write a number above 0")
    if not 0 < alpha < 1:
        raise SettingError(f"alpha is {alpha:g}; write a number between 0 and 1")


def fitted_steps(runner: ArmRunner, runs: int, colds: int, seconds: float) -> int:
    """The steps with which so many runs, with their cold starts, end within ``seconds``; the default at most."""
    fixed, longer = runner.probe(FEWEST_STEPS), runner.probe(Settings.steps)
    each = (longer - fixed) / (Settings.steps - FEWEST_STEPS)
    room = (seconds / MARGIN - colds * runner.cold_seconds) / runs - fixed
    return max(FEWEST_STEPS, min(Settings.steps, FEWEST_STEPS + int(room / max(each, 1e-9))))


def compare_live(
    variants: Sequence[Variant],
    settings: Mapping[str, Any],
    out: str | Path,
    minutes: float,
    seeds: int = SEEDS,
    alpha: float = ALPHA,
    listen: Listener = silent,
    anyway: bool = False,
) -> LiveComparison:
    """Train every arm with seed after seed until all pairs are decided, the seeds are used up, or the time is. ``anyway``: also
    where the arms are the same update, or the time is too short for a verdict."""
    if len(variants) < 2:
        raise SettingError(
            "one variant has nothing to be compared with; give at least two methods, or two values in a grid"
        )
    if seeds < 2:
        raise SettingError(f"seeds is {seeds}; a comparison needs at least 2")
    check_budget(minutes, alpha)
    began, arms = time.monotonic(), arms_of(variants, settings)
    folder = open_folder(
        Path(out), {"variants": [[label, dict(more)] for label, more in variants], "settings": dict(settings)}
    )
    runner = ArmRunner(arms, folder, began + 60 * minutes, listen)
    pairs, forecasts, alike = math.comb(len(arms), 2), list[Forecast](), list[Likeness]()
    outcomes: list[RunOutcome] = []
    comparison: Comparison | None = None

    def ended(stopped: str, *notes: str) -> LiveComparison:
        spent = time.monotonic() - began
        return LiveComparison(str(folder), tuple(forecasts), tuple(alike), comparison, stopped, spent, notes)

    try:
        seconds, steps = runner.probe(FEWEST_STEPS), int(settings.get("steps") or 0)
        alike = likenesses(arms, runner.gradients(runner.common_batches()))
        record = read_object(folder / "plan.json")
        steps = steps or record.get("steps") or fitted_steps(runner, len(arms) * seeds, seeds, runner.left)
        write_json(folder / "plan.json", {**record, "steps": steps})
        runner.changes["steps"], seconds = steps, runner.probe(steps)
        noise = math.sqrt(2 * (SPREAD**2 + 0.25 / max(arms[0].plan.settings.eval_tasks, 1)))
        per_seed, fewest = len(arms) * seconds + runner.cold_seconds, fewest_seeds(alpha, pairs)
        possible = min(seeds, int(max(runner.left, 0.0) / (MARGIN * per_seed)))
        forecasts.append(Forecast(minutes, possible, steps, per_seed, noise, False, alpha / pairs, fewest))
        for text in [*(one.text() for one in alike), forecasts[0].text()]:
            runner.say(text)
        if not anyway and len(alike) == pairs and all(one.same for one in alike):
            return ended("cannot tell: all arms are the same update; nothing more was trained (--anyway trains them)")
        if not anyway and seeds >= fewest > possible:
            needed = f"--minutes {forecasts[0].minutes_for(fewest) + 1:.0f}, or fewer --steps"
            return ended(f"cannot tell, so nothing more was trained; write {needed} (--anyway trains)")
        same = {frozenset((one.left, one.right)): "the same update, see above" for one in alike if one.same}
        first = arms[0].plan.settings.seed
        for seed in range(first, first + seeds):
            lasted = time.monotonic()
            outcomes += [runner.outcome(arm, seed) for arm in arms]
            comparison = compare_outcomes(outcomes, True, alpha, same)
            lasted = time.monotonic() - lasted
            more = int(
                max(runner.left, 0.0) / (MARGIN * max(lasted, 0.1 * per_seed))
            )  # one that was only read takes no time
            runner.say(f"{comparison.text()}\n{lasted:.0f} s for this seed; the time left holds about {more} more")
            if comparison.decided:
                return ended(f"decided after {seed - first + 1} seeds")
            if seed + 1 < first + seeds and MARGIN * lasted > runner.left:
                break
        stopped = "all seeds are used up" if seed + 1 == first + seeds else "another seed would end too late"
    except BudgetSpent:
        stopped = "the minutes are used up; the same command goes on where it stopped"
    if comparison is None:
        return ended(f"cannot tell: {stopped}")
    return ended(stopped, *undecided_notes(comparison, forecasts[0]))


def undecided_notes(comparison: Comparison, told: Forecast) -> list[str]:
    """For each open pair, what would be needed: if its difference is what it is now, and for a smallest one that matters."""
    notes = []
    for pair in comparison.pairs:
        d = pair.difference
        if pair.decided or d.pairs < 3 or not math.isfinite(d.effect) or not d.effect:
            continue
        now = Forecast(**{**asdict(told), "spread": abs(d.mean / d.effect), "measured": True, "alpha": 1 - d.level})
        notes.append(
            f"{pair.left} against {pair.right}: to see {abs(100 * d.mean):.1f} points, as now, {now.needs(d.mean)}; "
            f"10 points, {now.needs(0.1)} (with probability 80 %, seeds spread by {now.spread:.3f})"
        )
    return notes
