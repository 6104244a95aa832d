"""Claims as data: what a paper says, the arms that would show it, the bed they run on; and the verdict that rows give.

    [bed.old]                                       a place to run in: settings of a run, and what it usually takes
    env = "experiments/worlds.py:SignedCalculator"
    seconds = 50
    start = { difficulty = [1] }                    what the shared cold start has otherwise than the run
    [claim.C16]
    paper = "TOPR"
    says = "negatives that taper and positives without a ratio stay stable on old data"
    bed = "old"
    set = { lag = 16 }                              of all arms
    arms = ["topr", "grpo lr=1e-3"]                 the first is claimed to be better than each other
    metric = "success"
    least = 0.05                                    the smallest effect that counts

Arms run with the same seeds from the same models, so the unit is the difference of a pair of runs. The interval of the mean
difference is Student's, at 1 − 0.05 / (number of other arms): the chance of any wrong word about a claim is 5 % at most.
Knows rows and no run.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.evidence.rows import Row, identity
from turnwise.config.settings import Settings, setting_type
from turnwise.errors import SettingError, nearest
from turnwise.inspector.compare.comparison import ALPHA, PairedDifference, paired_difference, student_t
from turnwise.recipes import signatures

WINDOW = 3  # evaluations averaged, so that one lucky one reaches no threshold
POWER = 0.8
HIGHER, LOWER, EQUAL = "higher", "lower", "equal"
HOLDS, FAILS, OPEN, MISSING, IDLE = "holds", "fails", "cannot tell", "not run", "does not apply"
OF_THE_START = ("model", "hidden", "layers", "vocabulary", "copying", "cold_batch", "cold_demos", "cold_lr", "cold_steps",
                "env", "difficulty", "max_turns", "history", "context", "max_tokens")  # fmt: skip


# ------------------------------------------------------------------- metrics


def outcome(row: Row) -> list[tuple[float, float]]:
    """Episodes played and held-out outcome. An evaluation that reports none counts as 0: no episode came to an answer."""
    return [(episodes, value or 0.0) for _, episodes, _, value in row["measured"]["curve"]]


def average(row: Row) -> float:
    """The mean outcome over all evaluations after the first: it sees how fast and how steadily a run learns."""
    return fmean(value for _, value in outcome(row)[1:])


def fall(row: Row) -> float:
    """The largest drop from the best outcome so far to a later one."""
    best = most = 0.0
    for _, value in outcome(row):
        best, most = max(best, value), max(most, best - value)
    return most


def episodes_until(row: Row, enough: float) -> float:
    """Episodes until the mean of the last evaluations reaches ``enough``; a run that never does counts all of its own."""
    points = outcome(row)
    for n in range(1, len(points)):
        if fmean(value for _, value in points[max(0, n + 1 - WINDOW) : n + 1]) >= enough:
            return points[n][0]
    return points[-1][0]


def per_success(name: str) -> Callable[[Row], float]:
    """So much of what an episode takes, for each success, in the evaluation after training."""

    def cost(row: Row) -> float:
        after = row["measured"]["after"]
        spent = after["turns"] * after["tokens_per_turn"] if name == "tokens" else after[name]
        return max(spent, 1e-3) / max(after["success"] or 0.0, 1 / after["tasks"])

    return cost


RATIOS = {"calls": per_success("tool_calls"), "tokens": per_success("tokens"), "turns": per_success("turns")}
PLAIN: dict[str, Callable[[Row], float]] = {
    "success": lambda row: row["measured"]["after"][row["measured"]["measure"]] or 0.0,
    "average": average,
    "fall": fall,
    "entropy": lambda row: row["measured"]["late"]["entropy"],
    "calibration": lambda row: row["measured"]["late"]["calibration/auc"],
}


def metric_of(name: str) -> tuple[Callable[[Row], float], bool]:
    """The number of a row, and whether arms are compared by its ratio. ``episodes@80``: episodes to 80 %."""
    if name.startswith("episodes@") and name[9:].isdigit():
        return lambda row: max(1.0, episodes_until(row, int(name[9:]) / 100)), True
    if name in RATIOS or name in PLAIN:
        return (RATIOS | PLAIN)[name], name in RATIOS
    raise SettingError(f"no metric {name!r}; {nearest(name, ['episodes@80', *RATIOS, *PLAIN])}")


# -------------------------------------------------------------------- claims


@dataclass(frozen=True)
class Run:
    """A run that a claim asks for. ``start``: settings of the cold-started model that it shares; ``arguments``: what the bed's
    own trainer takes beside settings."""

    settings: Mapping[str, Any]
    start: Mapping[str, Any]
    trainer: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    bed: str = ""
    seconds: float = 60.0

    @property
    def asked(self) -> Row:
        return {"settings": self.settings, "start": self.start, "trainer": self.trainer, "arguments": self.arguments}

    @property
    def name(self) -> str:
        return identity(self.asked)


@dataclass(frozen=True)
class Claim:
    name: str
    paper: str
    says: str
    bed: str
    arms: tuple[str, ...]
    metric: str
    direction: str
    least: float
    seeds: int
    runs: Mapping[tuple[str, int], Run]  # by arm and seed

    def __post_init__(self) -> None:
        metric_of(self.metric)
        if len(self.arms) < 2 or self.seeds < 2 or self.direction not in (HIGHER, LOWER, EQUAL):
            raise SettingError(
                f"claim {self.name} has {len(self.arms)} arms, {self.seeds} seeds and direction {self.direction!r}; write two "
                "arms or more, seeds = 2 or more, and a direction: higher, lower or equal"
            )


def load(path: Path) -> dict[str, Claim]:
    """The claims of a file; a wrong name of a method, setting, bed or metric is refused with the nearest one."""
    file, claims = _parsed(path), {}
    known = file.get("bed", {})
    for name, entry in file.get("claim", {}).items():
        given = {"direction": HIGHER, "least": 0.05, "seeds": 5, "set": {}, **entry}
        wanted = {"paper", "says", "bed", "arms", "metric", "direction", "least", "seeds", "set"}
        if wrong := wanted ^ given.keys():
            raise SettingError(f"claim {name} of {path} needs {', '.join(sorted(wanted))}; look at {sorted(wrong)[0]!r}")
        if given["bed"] not in known:
            raise SettingError(f"claim {name} of {path}: no bed {given['bed']!r}; {nearest(given['bed'], known)}")
        shared = given.pop("set")
        runs = {
            (arm, seed): _run(given["bed"], known[given["bed"]], shared, arm, seed)
            for seed in range(given["seeds"])
            for arm in given["arms"]
        }
        claims[name] = Claim(name=name, runs=runs, **{**given, "arms": tuple(given["arms"])})
    return claims


def beds(path: Path) -> Mapping[str, Any]:
    """The beds of a file, as it writes them."""
    return _parsed(path).get("bed", {})


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise SettingError(f"there are no claims at {path}; write --file CLAIMS.toml") from None
    except ValueError as fault:
        raise SettingError(f"{path} is no TOML: {fault}") from None


def _run(name: str, bed: Mapping[str, Any], shared: Mapping[str, Any], arm: str, seed: int) -> Run:
    """The run of an arm: its words (``METHOD key=value ...``) over what all arms share, over the bed's settings. A word that is
    no setting is a hyper-parameter of the method, or an argument of the bed's trainer."""
    method, *words = arm.split()
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    values = {**{k: v for k, v in bed.items() if k not in ("about", "seconds", "trainer", "start")}, **shared, **pairs}
    trainer, options, arguments, settings = bed.get("trainer", ""), {}, {}, {"method": method, "seed": seed}
    for key, value in values.items():
        if key in signatures.parameters(method.partition("+")[0]) and key in pairs:
            options[key] = value
        elif trainer and key in bed.get("arguments", ()):
            arguments[key] = int(value)
        elif key != "arguments":
            setting_type(key)
            settings[key] = value
    settings |= {"method_options": signatures.typed_options(method.partition("+")[0], options)} if options else {}
    plain = Settings.of(settings).as_dict()
    settings = {key: plain[key] for key in sorted({*settings, *(["credit"] if plain["credit"] else [])})}
    start = {key: settings[key] for key in OF_THE_START if key in settings} | bed.get("start", {})
    return Run(settings, start | {"seed": seed}, trainer, arguments, name, float(bed.get("seconds", 60)))


# ------------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Against:
    """The claimed arm beside another one, in the units of the metric (logarithms where it is a ratio), over paired seeds."""

    arm: str
    difference: PairedDifference
    is_ratio: bool
    verdict: str

    @property
    def size(self) -> str:
        d = self.difference
        if self.is_ratio:
            shown = [f"{math.exp(x):.2f}" if math.isfinite(x) else "?" for x in (d.mean, d.low, d.high)]
        else:
            shown = [f"{100 * x:+.1f}" if math.isfinite(x) else "?" for x in (d.mean, d.low, d.high)]
        return f"{shown[0]} [{shown[1]}, {shown[2]}]"


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    word: str
    against: tuple[Against, ...]
    meter: str  # how often the mechanism of the claimed arm acted
    note: str = ""


def judge(claim: Claim, rows: Mapping[str, Row]) -> Verdict:
    """The verdict of the rows, by the name of the run. It holds if the claimed arm is better than every other one; it fails if an
    interval excludes an effect of ``least`` in the claimed direction; *equal* holds if the interval lies within ± ``least``."""
    value, is_ratio = metric_of(claim.metric)
    scale: Callable[[float], float] = math.log if is_ratio else float
    done = {key: rows[run.name] for key, run in claim.runs.items() if run.name in rows}
    first, *others = claim.arms
    acted = [row["measured"]["acted"] for (arm, _), row in done.items() if arm == first]
    meter = {slot: fmean(each.get(slot, 0.0) for each in acted) for slot in dict.fromkeys(s for each in acted for s in each)}
    results = []
    for other in others:
        pairs = [
            tuple(scale(value(done[arm, seed])) for arm in (first, other))
            for seed in range(claim.seeds)
            if (first, seed) in done and (other, seed) in done
        ]
        left, right = [a for a, _ in pairs], [b for _, b in pairs]
        found = paired_difference(left, right, ALPHA / len(others))
        results.append(Against(other, found, is_ratio, _word(claim, found, is_ratio)))
    words = [each.verdict for each in results]
    word = next((w for w in (MISSING, FAILS, OPEN) if w in words), HOLDS)
    idle = bool(acted) and bool(meter) and not any(meter.values())
    shown = ", ".join(f"{slot} {share:.0%}" for slot, share in meter.items())
    return Verdict(claim, IDLE if idle else word, tuple(results), shown, "its mechanism never acted" if idle else "")


def _word(claim: Claim, found: PairedDifference, is_ratio: bool) -> str:
    if found.pairs < 2:
        return MISSING
    low, high, least = found.low, found.high, -math.log(1 - claim.least) if is_ratio else claim.least
    if claim.direction == EQUAL:
        return HOLDS if -least < low and high < least else FAILS if low > least or high < -least else OPEN
    if claim.direction == LOWER:
        low, high = -high, -low
    return HOLDS if low > 0 else FAILS if high < least else OPEN


def detectable(spread: float, pairs: int, alpha: float = ALPHA) -> float:
    """The difference that so many pairs show with a probability of 80 %, where differences have this standard deviation."""
    return (student_t(1 - alpha / 2, pairs - 1) + student_t(POWER, pairs - 1)) * spread / math.sqrt(pairs)


def chosen(claims: Mapping[str, Claim], names: str) -> list[Claim]:
    """``all``, or names with commas."""
    picked = list(claims) if names in ("", "all") else [name.strip() for name in names.split(",") if name.strip()]
    for name in picked:
        if name not in claims:
            raise SettingError(f"no claim {name!r}; {nearest(name, claims)}")
    return [claims[name] for name in picked]


def distinct_runs(claims: Sequence[Claim]) -> list[Run]:
    """Every run that the claims ask for, once; whole seeds of a claim first, and claims in their order."""
    return list({run.name: run for claim in claims for run in claim.runs.values()}.values())
