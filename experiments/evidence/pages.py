"""The pages of evidence, from claims and rows: claims with their verdicts, and one page for each bed. Runs nothing.

Every figure comes from a row; rows that the code has left behind count nowhere, and the first page says how many they are.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.evidence.claims import (
    EQUAL,
    FAILS,
    HIGHER,
    HOLDS,
    IDLE,
    LOWER,
    MISSING,
    OPEN,
    Claim,
    Verdict,
    average,
    detectable,
    fall,
    judge,
    metric_of,
)
from experiments.evidence.rows import Row, identity, stale

GENERATED = "<!-- Written by `turnwise evidence table --write docs/evidence` from the rows. Do not edit. -->"
ABOUT = """\
What {papers} papers claim, tried with small models on beds of one or a few CPU minutes. Each claim is data
(`experiments/evidence/claims.toml`): arms, bed, metric and direction were written down before the runs. Arms run with the same
seeds from the same cold-started models; the unit is the difference of a pair of runs, and its interval is Student's over seeds,
at 95 % for all arms of a claim together (Bonferroni). Nothing is corrected for the number of claims: of forty true zeros, one
would hold by luck. No arm was tuned; every bed has one learning rate for all. A verdict is about models and tasks of this size,
not about the paper's."""
ROWS = """A row is one run, sealed, with its settings, commit, versions and machine: `turnwise evidence rerun 3`
repeats three drawn at random, and `turnwise evidence check` finds rows that were changed or whose method computes something else
now."""
READ = """The first arm is claimed to beat each other one. Differences are first minus other, in points; where the metric is a
cost they are ratios. The meter says on what share of the data the method's own parts acted."""
POWERS = """Floor: success before training. Ceiling: that of the best arm after it. Noise, in points of mean success over the run:
between seeds of one arm, and between pairs of runs of two arms with one seed. The last columns are the difference that n pairs
show with a probability of 80 %."""
ARMS = """Means over seeds, the best first. The order alone says nothing: look at the claims for intervals."""
WORDS = {
    HOLDS: "the interval lies on the claimed side of zero",
    FAILS: "the interval excludes an effect as large as the smallest that counts, or lies on the other side",
    OPEN: "the interval holds both zero and an effect that counts: more seeds would be needed",
    IDLE: "the method's mechanism never acted here, so it is the base method",
    MISSING: "fewer than two pairs of runs",
}
METRICS = {
    "success": "success after training", "average": "mean success over the run", "fall": "largest fall of a run",
    "calls": "tool calls for each success", "tokens": "tokens for each success", "turns": "turns for each success",
    "entropy": "entropy late in training", "calibration": "calibration (AUC) late in training",
}  # fmt: skip
SEEDS = (3, 5, 10, 20)


@dataclass(frozen=True)
class Arm:
    """All runs of one method with the same settings on a bed."""

    label: str
    rows: tuple[Row, ...]

    def mean(self, number: Any) -> float:
        return statistics.fmean(number(row) for row in self.rows)


def pages(claims: Sequence[Claim], rows: Mapping[str, Row], beds: Mapping[str, Any], limits: Path) -> dict[str, str]:
    """The text of each page, by the name of its file."""
    old = {name: why for name, row in rows.items() if (why := stale(row))}
    fresh = {name: row for name, row in rows.items() if name not in old}
    made = {"index.md": index(claims, fresh, old, beds, limits)}
    inside = {bed: [claim for claim in claims if claim.bed == bed] for bed in beds}
    return made | {f"{bed}.md": bed_page(bed, beds[bed], of_the_bed, fresh) for bed, of_the_bed in inside.items()}


# --------------------------------------------------------------------- claims


def index(
    claims: Sequence[Claim], rows: Mapping[str, Row], old: Mapping[str, str], beds: Mapping[str, Any], limits: Path
) -> str:
    verdicts = [judge(claim, rows) for claim in claims]
    count = {word: sum(v.word == word for v in verdicts) for word in WORDS}
    age = f"{len(old)} more are stale and count nowhere" if old else "none is stale"
    lines = ["# Evidence", "", GENERATED, "", ABOUT.format(papers=len({claim.paper for claim in claims})), ""]
    lines += ["| verdict | claims | means |", "|---|--:|---|"]
    lines += [f"| **{word}** | {count[word]} | {about} |" for word, about in WORDS.items()]
    lines += ["", f"{len(rows)} rows stand behind this page; {age}. {machines(rows)} {ROWS}", "", "## Claims", ""]
    if len(waiting := [v.claim.name for v in verdicts if v.word == MISSING]) < len(verdicts):
        lines += [READ, "", *table([v for v in verdicts if v.word != MISSING]), ""]
    if waiting:
        lines += [f"Not run yet: {', '.join(waiting)}.", ""]
    lines += ["## Beds", "", *[f"- [{bed}]({bed}.md): {about['about']}" for bed, about in beds.items()], ""]
    lines += [*(bed_table(rows, beds) if rows else []), "", *limit_table(limits)]
    return "\n".join(lines) + "\n"


def table(verdicts: Sequence[Verdict]) -> list[str]:
    lines = [
        "| claim | says | metric, bed | against | difference | pairs | verdict | meter |",
        "|---|---|---|---|--:|--:|---|---|",
    ]
    order = {word: n for n, word in enumerate((HOLDS, FAILS, OPEN, IDLE, MISSING))}
    for verdict in sorted(verdicts, key=lambda v: order[v.word]):
        claim = verdict.claim
        for n, other in enumerate(verdict.against):
            wanted = {HIGHER: "more", LOWER: "less", EQUAL: "equal"}[claim.direction]
            words = f"{wanted}: {metric_words(claim.metric)}, [{claim.bed}]({claim.bed}.md)"
            head = [f"{claim.name} {claim.paper}", claim.says, words] if n == 0 else ["", "", ""]
            pairs = other.difference.pairs
            size = other.size if pairs > 1 else "–"
            tail = [f"**{verdict.word}**", verdict.meter or "–"] if n == 0 else ["", ""]
            arms = f"`{claim.arms[0]}` − `{other.arm}`"
            lines.append(f"| {' | '.join([*head, arms, size, str(pairs), *tail])} |")
    return lines


def metric_words(metric: str) -> str:
    return METRICS.get(metric) or f"episodes until {metric.partition('@')[2]} %"


def machines(rows: Mapping[str, Row]) -> str:
    """Where the rows come from, in one sentence."""
    places: dict[str, int] = {}
    for row in rows.values():
        versions = row["versions"]
        place = f"{row['machine']['processor']}, Python {versions['python']}, torch {versions['torch']}"
        places[place] = places.get(place, 0) + 1
    return " ".join(f"{n} were played on {place}." for place, n in sorted(places.items(), key=lambda item: -item[1]))


# ----------------------------------------------------------------------- beds


def arms_of(bed: str, rows: Mapping[str, Row], labels: Mapping[str, str]) -> list[Arm]:
    """The arms of a bed, best first; an arm is named as the claims write it."""
    grouped: dict[str, list[Row]] = {}
    for name, row in rows.items():
        if row["bed"] == bed:
            key = identity({**row["settings"], "seed": 0, "arguments": row["arguments"]})
            grouped.setdefault(labels.get(name) or f"{row['settings']['method']} {key[:4]}", []).append(row)
    return sorted((Arm(label, tuple(each)) for label, each in grouped.items()), key=lambda arm: -arm.mean(average))


def noise(arms: Sequence[Arm], number: Any) -> float:
    """The standard deviation between seeds of one arm, pooled over arms."""
    several = [[number(row) for row in arm.rows] for arm in arms if len(arm.rows) > 1]
    return math.sqrt(statistics.fmean(map(statistics.variance, several))) if several else math.nan


def paired_noise(arms: Sequence[Arm], number: Any) -> float:
    """The standard deviation of a difference of two arms with one seed, pooled over all pairs of arms: shared seeds and cold
    starts make it smaller than that of independent runs."""
    values = [{row["settings"]["seed"]: number(row) for row in arm.rows} for arm in arms]
    spreads = [
        statistics.variance([left[seed] - right[seed] for seed in left.keys() & right.keys()])
        for n, left in enumerate(values)
        for right in values[n + 1 :]
        if len(left.keys() & right.keys()) > 1
    ]
    return math.sqrt(statistics.fmean(spreads)) if spreads else math.nan


def bed_table(rows: Mapping[str, Row], beds: Mapping[str, Any]) -> list[str]:
    heads = (
        "bed",
        "arms",
        "runs",
        "floor",
        "ceiling",
        "between seeds",
        "between paired seeds",
        *(f"n = {n}" for n in SEEDS),
    )
    lines = [POWERS, "", f"| {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) - 1)]
    success, _ = metric_of("success")
    for bed in beds:
        if arms := arms_of(bed, rows, {}):
            inside = [row for arm in arms for row in arm.rows]
            floor, ceiling = statistics.fmean(map(before, inside)), max(arm.mean(success) for arm in arms)
            spread = paired_noise(arms, average)
            shows = [f"{100 * detectable(spread, n):.0f}" if math.isfinite(spread) else "–" for n in SEEDS]
            spreads = [f"{100 * x:.1f}" if math.isfinite(x) else "–" for x in (noise(arms, average), spread)]
            cells = [f"[{bed}]({bed}.md)", len(arms), len(inside), f"{floor:.0%}", f"{ceiling:.0%}", *spreads, *shows]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def before(row: Row) -> float:
    return row["measured"]["curve"][0][-1] or 0.0


def bed_page(bed: str, about: Mapping[str, Any], claims: Sequence[Claim], rows: Mapping[str, Row]) -> str:
    labels = {
        run.name: " ".join([arm, *(f"{key}={value}" for key, value in sorted(run.arguments.items()))])
        for claim in claims
        for (arm, _), run in claim.runs.items()
    }
    success, _ = metric_of("success")
    of_the_bed = [
        f"`{key}` {value}" for key, value in about.items() if key not in ("about", "seconds", "trainer", "arguments")
    ]
    lines = [f"# Bed: {bed}", "", GENERATED, "", about["about"], "", f"Settings of every arm: {', '.join(of_the_bed)}.", ""]
    if not any(row["bed"] == bed for row in rows.values()):
        return "\n".join([*lines, f"No runs yet; {len(claims)} claims wait for some."]) + "\n"
    lines += [*bed_table(rows, {bed: about}), "", "## Arms", "", ARMS, ""]
    heads = ("arm", "seeds", "before", "after", "over the run", "largest fall", "tokens", "CPU seconds", "meter")
    lines += [f"| {' | '.join(heads)} |", "|---|" + "--:|" * 7 + "---|"]
    for arm in arms_of(bed, rows, labels):
        acted = [row["measured"]["acted"] for row in arm.rows]
        meter = {slot: statistics.fmean(each.get(slot, 0.0) for each in acted) for slot in acted[0]}
        shares = [f"{arm.mean(number):.0%}" for number in (before, success, average)]
        cost = {name: arm.mean(lambda row, name=name: row["cost"][name]) for name in ("tokens", "cpu_seconds")}
        cells = [f"`{arm.label}`", len(arm.rows), *shares, f"{100 * arm.mean(fall):.0f}"]
        cells += [f"{cost['tokens']:,.0f}", f"{cost['cpu_seconds']:.0f}"]
        cells += [", ".join(f"{slot} {share:.0%}" for slot, share in meter.items()) or "–"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    verdicts = [v for claim in claims if (v := judge(claim, rows)).word != MISSING]
    lines += ["", "## Claims", "", *(table(verdicts) if verdicts else ["None has rows yet."])]
    return "\n".join(lines).replace(f"[{bed}]({bed}.md)", bed) + "\n"


# --------------------------------------------------------------------- limits


def limit_table(path: Path) -> list[str]:
    """Which methods coincide in which limit: proven by the tests that the lines name, not by runs."""
    if not path.is_file():
        return []
    lines = ["## Where methods coincide", "", "Proven by identities, which tests hold; not by runs.", "",
             "| method | is | where | test |", "|---|---|---|---|"]  # fmt: skip
    for each in tomllib.loads(path.read_text(encoding="utf-8"))["limit"]:
        lines.append(f"| `{each['method']}` | `{each['is']}` | {each['where']} | `{each['test']}` |")
    return lines
