"""``turnwise search --env E --hours H``: which arm beats the base here, if any does?

Successive halving: every arm takes a seed, the better half another, and so on; the base takes every seed, and an arm's score is
its mean difference to the base. The one that is left meets the base again on seeds that nobody has seen, by the anytime-valid
test of ``compare``. Only this is claimed: however the halving chose, a claim where nothing differs has probability alpha at most.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.protocols import Listener
from turnwise.errors import SettingError
from turnwise.inspector.compare.arms import Arm, ArmRunner, BudgetSpent, Variant, likenesses
from turnwise.inspector.compare.comparison import ALPHA, BETTER, Comparison, RunOutcome, compare_outcomes
from turnwise.inspector.compare.live import FEWEST_STEPS, MARGIN, check_budget, fitted_steps, open_folder
from turnwise.store.atomic import atomic_write, read_object, write_json
from turnwise.training.watch import silent

BASE = "grpo"
METHODS = ("dr_grpo", "ppo", "dapo", "gspo", "cispo", "reinforce_pp", "gpg", "reinforce", "opo")
CREDITS = ("gigpo", "hgpo", "salt", "turn_ppo")
KNOBS = (("group_size", 16), ("sampler", "vade"), ("epochs", 2), ("group_size", 4))
CONFIRMATIONS, MOST_CONFIRMATIONS = 8, 32  # seeds that the time is planned for, and at most
NOTHING = "nothing beats the base"
Outcomes = dict[str, dict[int, RunOutcome]]


def default_space(base: str, settings: Mapping[str, Any]) -> list[Variant]:
    """The base first, then its learning rate, other methods, credit with the base's objective, and how much is sampled for whom.
    Where the time is short, the last are left out."""
    lr = float(settings.get("lr", Settings.lr))
    space: list[Variant] = [(base, {"method": base})]
    space += [(f"{base} lr={rate:g}", {"method": base, "lr": rate}) for rate in (3 * lr, lr / 3)]
    space += [(method, {"method": method}) for method in METHODS if method != base]
    space += [(f"{base}+{credit}", {"method": base, "credit": credit}) for credit in CREDITS]
    for name, value in KNOBS:
        space.append((f"{base} {name}={value}", {"method": base, name: value}))
    return space


def runnable(space: Sequence[Variant], settings: Mapping[str, Any]) -> tuple[list[Arm], dict[str, str]]:
    """The arms that can run here, and why the others cannot. The base must."""
    arms, refused = [Arm.of(space[0][0], {**settings, **space[0][1]})], dict[str, str]()
    for label, changes in space[1:]:
        try:
            arm = Arm.of(label, {**settings, **changes})
        except SettingError as fault:
            refused[label] = str(fault)
            continue
        twin = next((other.label for other in arms if other.digest == arm.digest), "")
        if twin:
            refused[label] = f"the same as {twin}"
        else:
            arms.append(arm)
    return arms, refused


# ------------------------------------------------------- the search itself: labels and outcomes


def rungs(arms: int) -> Iterator[tuple[int, int]]:
    """(arms besides the base, new seeds) of each rung: half as many arms, and from the third rung on twice as many seeds. None
    for a single arm: nothing is to be chosen."""
    for rung in itertools.takewhile(lambda rung: arms >> rung > 1, itertools.count()):
        yield arms >> rung, max(1, 2 ** (rung - 1))


def cost(arms: int) -> tuple[int, int]:
    """Runs and seeds of all rungs and of the planned confirmation."""
    plan = list(rungs(arms))
    seeds = sum(new for _, new in plan)
    return sum((n + 1) * new for n, new in plan) + 2 * CONFIRMATIONS, seeds + CONFIRMATIONS


def score(outcomes: Outcomes, label: str, base: str) -> float:
    """The mean difference to the base, each pair at the tokens that both reached."""
    pairs = [(arm, outcomes[base][seed]) for seed, arm in outcomes[label].items()]
    budgets = [min(arm.tokens, other.tokens) for arm, other in pairs]
    return sum(arm.at(tokens) - other.at(tokens) for (arm, other), tokens in zip(pairs, budgets)) / max(len(pairs), 1)


def halve(
    labels: Sequence[str], outcome: Callable[[str, int], RunOutcome], seed: int, go_on: Callable[[int], bool]
) -> tuple[Outcomes, list[str], int]:
    """Outcomes of all runs, the arms from best to worst, and the first seed that nobody has seen. ``labels``: the base first.
    ``go_on``: whether so many runs more fit into the time; the first rung is taken in any case."""
    base, *alive = labels
    outcomes: Outcomes = {label: {} for label in labels}
    ranked: list[str] = []
    for count, new in rungs(len(alive)):
        if outcomes[base] and not go_on((count + 1) * new):
            break
        ranked, alive = alive[count:] + ranked, alive[:count]
        for n in range(seed, seed + new):
            for label in (base, *alive):
                outcomes[label][n] = outcome(label, n)
        seed += new
        alive = sorted(alive, key=lambda label: -score(outcomes, label, base))
    return outcomes, alive + ranked, seed


def confirm(
    base: str,
    best: str,
    outcome: Callable[[str, int], RunOutcome],
    seed: int,
    alpha: float,
    go_on: Callable[[int], bool],
) -> Comparison:
    """The best arm against the base on fresh seeds, until that is decided or nothing more fits into the time."""
    outcomes: list[RunOutcome] = []
    for n in range(seed, seed + MOST_CONFIRMATIONS):
        outcomes += [outcome(label, n) for label in (best, base)]
        comparison = compare_outcomes(outcomes, True, alpha)
        if comparison.decided or not go_on(2):
            break
    return comparison


# ---------------------------------------------------------------- and its report


@dataclass
class SearchReport:
    """Everything that was tried. ``arms`` are rows, the best first; ``left_out`` says why the others were not tried."""

    folder: str
    base: str
    alpha: float
    steps: int = 0
    seconds: float = 0.0
    arms: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    confirmation: Comparison | None = None
    verdict: str = NOTHING
    stopped: str = ""

    def text(self) -> str:
        lines = [f"{self.verdict}" + (f" ({self.stopped})" if self.stopped else "")]
        lines += [self.confirmation.text()] if self.confirmation is not None else []
        lines += [f"tried, {self.steps} steps each; differences to {self.base} chose and prove nothing:"]
        for row in self.arms:
            lines.append(f"  {row['label']:<24} {100 * row['difference']:+6.1f} points   {row['seeds']} seeds")
        lines += [f"  {label:<24} not tried: {reason}" for label, reason in self.left_out.items()]
        return "\n".join([*lines, f"{self.seconds / 60:.1f} minutes, runs and report in {self.folder}"])

    def as_dict(self) -> dict[str, Any]:
        confirmation = None if self.confirmation is None else self.confirmation.as_dict()
        return {**vars(self), "confirmation": confirmation}

    def write(self) -> SearchReport:
        write_json(Path(self.folder, "search.json"), self.as_dict())
        with atomic_write(Path(self.folder, "search.txt")) as path:
            path.write_text(self.text() + "\n", encoding="utf-8")
        return self


def search(
    space: Sequence[Variant],
    settings: Mapping[str, Any],
    out: str | Path,
    minutes: float,
    alpha: float = ALPHA,
    listen: Listener = silent,
) -> SearchReport:
    """Search ``space``, whose first variant is the base. The same call goes on with what stands in ``out``."""
    check_budget(minutes, alpha)
    began, (arms, refused) = time.monotonic(), runnable(space, settings)
    if len(arms) < 2:
        reasons = "; ".join(f"{label}: {reason}" for label, reason in refused.items()) or "name one besides the base"
        raise SettingError(f"there is no arm to try against {arms[0].label}: {reasons}")
    folder = open_folder(Path(out), {"search": [arm.label for arm in arms], "settings": dict(settings)})
    runner = ArmRunner(arms, folder, began + 60 * minutes, listen)
    report = SearchReport(str(folder), arms[0].label, alpha, left_out=dict(refused))
    by_label = {arm.label: arm for arm in arms}
    outcomes: Outcomes = {}

    def outcome(label: str, seed: int) -> RunOutcome:
        one = runner.outcome(by_label[label], seed)
        outcomes.setdefault(label, {})[seed] = one
        return one

    def fits(runs: int) -> bool:
        each = sum(runner.seconds) / max(len(runner.seconds), 1)
        return MARGIN * (runs * each + runner.cold_seconds) < runner.left

    try:
        seconds = runner.probe(FEWEST_STEPS)
        for one in likenesses(arms, runner.gradients(runner.common_batches())):
            if one.same and one.right in by_label:
                report.left_out[one.right] = f"the same update as {one.left} (cosine {min(one.first, one.later):.4f})"
                del by_label[one.right]
        labels = list(by_label)
        record = read_object(folder / "plan.json")
        fitting = (n for n in range(len(labels), 1, -1) if n == 2 or _seconds(runner, n - 1, seconds) <= runner.left)
        count = int(record.get("arms") or next(fitting, 2))
        report.left_out |= dict.fromkeys(labels[count:], "no time for it; write more --minutes")
        labels = labels[:count]
        if len(labels) < 2:
            report.stopped = "every arm is the same update as another"
            return report.write()
        runs, seeds = cost(len(labels) - 1)
        report.steps = int(
            settings.get("steps") or record.get("steps") or fitted_steps(runner, runs, seeds, runner.left)
        )
        write_json(folder / "plan.json", {**record, "steps": report.steps, "arms": len(labels)})
        runner.changes["steps"], seconds = report.steps, runner.probe(report.steps)
        runner.say(
            f"{len(labels) - 1} arms against {labels[0]}, {report.steps} steps, about {runs} runs and {seeds} seeds"
        )
        first = arms[0].plan.settings.seed
        _, ranked, fresh = halve(labels, outcome, first, lambda more: fits(more + 2 * CONFIRMATIONS))
        report.arms = _rows(outcomes, ranked if outcomes else [], labels[0])
        if len(ranked) > 1 and score(outcomes, ranked[0], labels[0]) <= 0:
            report.stopped = f"on average none of the arms was above {labels[0]}, so none was tried again"
        else:
            runner.say(f"{ranked[0]} against {labels[0]} on fresh seeds")
            report.confirmation = confirm(labels[0], ranked[0], outcome, fresh, alpha, fits)
            d = report.confirmation.pairs[0].difference
            if d.verdict == BETTER:
                report.verdict = f"{ranked[0]} beats {labels[0]}: {100 * d.mean:+.1f} points on {d.pairs} fresh seeds"
            else:
                more = (2 * seconds + runner.cold_seconds) * CONFIRMATIONS / 60
                report.stopped = f"{ranked[0]} led, and {d.pairs} fresh seeds do not confirm it"
                report.stopped += f"; {CONFIRMATIONS} would take {more:.0f} minutes" if d.pairs < CONFIRMATIONS else ""
    except BudgetSpent:
        report.stopped = "the minutes are used up before a verdict; the same command goes on where it stopped"
        base = arms[0].label
        seen = sorted((x for x in outcomes if x != base), key=lambda x: -len(outcomes[x]))
        report.arms = report.arms or _rows(outcomes, seen, base)
    report.seconds = time.monotonic() - began
    return report.write()


def _seconds(runner: ArmRunner, arms: int, run: float) -> float:
    runs, seeds = cost(arms)
    return MARGIN * (runs * run + seeds * runner.cold_seconds)


def _rows(outcomes: Outcomes, labels: Sequence[str], base: str) -> list[dict[str, Any]]:
    """A row for each arm; runs that the base does not have yet are left out of the difference."""
    rows = []
    for label in labels:
        paired = {base: outcomes[base], label: {n: o for n, o in outcomes[label].items() if n in outcomes[base]}}
        ends = {seed: o.curve[-1][1] for seed, o in outcomes[label].items()}
        rows.append(
            {"label": label, "difference": score(paired, label, base), "seeds": len(paired[label]), "ends": ends}
        )
    return rows
