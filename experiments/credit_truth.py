"""The page of the truth about credit, from the reports of ``turnwise credit-bench --out experiments/results``.

    python experiments/credit_truth.py        writes docs/evidence/credit.md and its picture

Learning rows are those of ``experiments/evidence/rows.jsonl`` in the environment of a report: for each method, the mean success
over a run, seed by seed. A prediction is the rank correlation of a score with it over methods. Its interval redraws the seeds,
which all methods share; p is the share of orders of the methods that would correlate as much.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from experiments.evidence import rows as evidence_rows  # noqa: E402
from experiments.evidence.claims import average  # noqa: E402
from turnwise.inspector.credit_bench import RANDOM, SCORES, TRUE  # noqa: E402

RESULTS = Path(__file__).parent / "results"
ROWS = Path(__file__).parent / "evidence" / "rows.jsonl"
PAGE, PICTURE = ROOT / "docs" / "evidence" / "credit.md", ROOT / "docs" / "images" / "credit-truth.png"
SEEDS = 4  # of a method, at least, that all methods of a bed share
PLAIN = {"trainer": "", "arguments": {}}  # a method as it is named, trained as usual
Report = dict[str, Any]


def reports() -> list[Report]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("credit-*.json"))]


def scored(report: Report) -> dict[tuple[Any, ...], list[Any]]:
    """Rows with scores, those that are the same credit together, the best first."""
    same: dict[tuple[Any, ...], list[Any]] = {}
    for row in report["rows"]:
        if "correlation" in row:
            same.setdefault(tuple(json.dumps(row.get(name)) for name in SCORES), []).append(row)
    return same


def cell(value: list[float | None] | None) -> str:
    return "–" if value is None or value[0] is None else "{:.2f} [{:.2f}, {:.2f}]".format(*value)


def names(rows: list[Any], most: int = 6) -> str:
    written = [f"`{row['method']}`" if row["method"] not in (TRUE, RANDOM) else row["method"] for row in rows]
    return ", ".join(written[:most]) + (f" and {len(written) - most} more" if len(written) > most else "")


def table(report: Report) -> str:
    heads = [name for name in SCORES if any(name in row for row in report["rows"])]
    lines = [f"| credit of | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for rows in scored(report).values():
        luck = rows[0].get("luck")  # where it may be all, there is no rest whose share bias could be
        shown = rows[0] | ({"bias": None} if luck and luck[2] is not None and luck[2] >= 1 else {})
        lines.append(f"| {names(rows)} | {' | '.join(cell(shown.get(name)) for name in heads)} |")
    return "\n".join(lines)


def without(report: Report) -> str:
    """Methods without a score, by reason."""
    reasons: dict[str, list[Any]] = {}
    for row in (row for row in report["rows"] if "correlation" not in row):
        reason = row["note"].replace(row["method"], "the method").split("; write")[0].split(", and ")[0]
        reasons.setdefault(reason, []).append(row)
    most_first = sorted(reasons.items(), key=lambda pair: -len(pair[1]))
    return "\n".join(f"- {reason}: {names(rows, 99)}" for reason, rows in most_first)


def learned(rows: list[Any], environment: str) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """By bed and difficulty of that environment: of each plain method the mean success over a run, seed by seed."""
    beds: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in rows:
        asked = row["settings"]
        plain = {key: row[key] for key in PLAIN} == PLAIN and not asked.get("method_options") and not asked.get("credit")
        if asked["env"] == environment and plain and "measured" in row:
            methods = beds.setdefault((row["bed"], ", ".join(map(str, asked["difficulty"]))), {})
            methods.setdefault(asked["method"], {}).setdefault(asked["seed"], average(row))
    return beds


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, ties at their mean rank."""
    ranks = [np.array([(x < v).sum() + (x == v).sum() / 2 for v in x]) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1]) if all(np.ptp(r) > 0 for r in ranks) else float("nan")


def prediction(score: np.ndarray, learned: np.ndarray) -> tuple[float, float, float, float]:
    """Rank correlation of scores, [methods], with the mean of what was learned, [methods, seeds]; its interval, and p."""
    lot, seeds = np.random.default_rng(0), learned.shape[1]
    drawn = [rank_correlation(score, learned[:, lot.integers(seeds, size=seeds)].mean(1)) for _ in range(2000)]
    mean = learned.mean(1)
    orders = np.array([rank_correlation(score, lot.permutation(mean)) for _ in range(2000)])
    estimate = rank_correlation(score, mean)
    p = float((np.abs(orders) >= abs(estimate) - 1e-9).mean())
    return estimate, *(float(q) for q in np.nanquantile(drawn, [0.025, 0.975])), p


def predictions(found: list[Report], rows: list[Any]) -> str:
    lines = ["| report | learning rows | methods | seeds | score | rank correlation with mean success | p |", "|---" * 7 + "|"]
    for report in found:
        for (bed, level), methods in learned(rows, report["environment"]).items():
            methods = {method: seeds for method, seeds in methods.items() if len(seeds) >= SEEDS}
            for name in ("correlation", "gradient", "exact"):
                values = {row["method"]: row[name][0] for row in report["rows"] if row.get(name, [None])[0] is not None}
                shared = [method for method in methods if method in values]
                seeds = sorted(set.intersection(*({*methods[method]} for method in shared))) if shared else []
                if len(shared) < 3 or len(seeds) < SEEDS:
                    continue
                score = np.array([values[method] for method in shared])
                table = np.array([[methods[method][seed] for seed in seeds] for method in shared])
                if np.ptp(score):
                    rho, low, high, p = prediction(score, table)
                    there = f"{report['environment']} {', '.join(map(str, report['difficulty']))}, {report['policy']}"
                    each = ", ".join(f"`{method}` {values[method]:.2f} → {x:.0%}" for method, x in zip(shared, table.mean(1)))
                    lines.append(f"| {there} | [{bed}]({bed}.md), difficulty {level}: {each} | {len(shared)} | {len(seeds)} "
                                 f"| {name} | {rho:.2f} [{low:.2f}, {high:.2f}] | {p:.2f} |")  # fmt: skip
    if len(lines) == 2:
        return f"Open: no environment has both a report and three methods with learning rows of {SEEDS} shared seeds (n = 0)."
    return "\n".join(lines)


def draw(found: list[Report]) -> None:
    """For each environment, every credit: how well it follows the true advantage, and how well its gradient follows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(found), 4.2))
    for n, report in enumerate(found):
        axes = figure.add_subplot(1, len(found), n + 1)
        across = "exact" if any("exact" in row for row in report["rows"]) else "gradient"
        for rows in scored(report).values():
            x, y = rows[0]["correlation"], rows[0].get(across)
            if not y or x[0] is None or y[0] is None:
                continue
            end = rows[0]["method"] in (TRUE, RANDOM)
            axes.plot([x[1], x[2]], [y[0]] * 2, color="#c0c8d4", linewidth=0.7, zorder=1)
            axes.plot([x[0]] * 2, [y[1], y[2]], color="#c0c8d4", linewidth=0.7, zorder=1)
            shape, colour = ("s", "#b3452c") if end else ("o", "#2d5d9f")
            axes.plot(x[0], y[0], shape, color=colour, markersize=4 + min(len(rows), 40) ** 0.5)
        axes.axhline(0, color="#888", linewidth=0.5)
        axes.axvline(0, color="#888", linewidth=0.5)
        axes.set(
            title=report["environment"],
            xlim=(-0.6, 1.1),
            ylim=(-0.6, 1.1),
            xlabel="correlation with the true advantage",
        )
        if not n:
            axes.set_ylabel("cosine of the batch's gradient with the true one")
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


def page(found: list[Report], words: str, rows: list[Any]) -> str:
    """The generated part: everything behind the marker of the page."""
    parts = [words.rstrip(), ""]
    for r in found:
        truth = f"{r['forks']} forks of each turn" if r["forks"] else f"{r['states']:,} states enumerated"
        known = (
            f"at most {r['unlisted']:.2%} of the answers in a state not listed; A known for {r['known']:.1%} of turns"
        )
        facts = [
            f"Policy: {r['policy']} ({r['success']:.0%} success)",
            f"{r['batches']} batches of {r['tasks']} groups of {r['group']}, {r['turns']:,} turns", f"truth: {truth}",
            *([] if r["forks"] else [known]), f"seed {r['seed']}, commit `{r['commit']}`",
        ]  # fmt: skip
        parts += [
            f"## {r['environment']}, difficulty {', '.join(map(str, r['difficulty']))}",
            "",
            "; ".join(facts) + ".",
            "",
            table(r),
            "",
            "Without a score:",
            "",
            without(r),
            "",
        ]
    parts += ["## Does the score predict sample efficiency?", "", predictions(found, rows), ""]
    return "\n".join(parts)


MARK = "<!-- generated by experiments/credit_truth.py -->"


def main() -> None:
    found = reports()
    before = PAGE.read_text() if PAGE.is_file() else f"# The truth about credit\n\n{MARK}\n"
    PAGE.parent.mkdir(exist_ok=True)
    rows = [row for row in evidence_rows.read(ROWS) if "measured" in row and not evidence_rows.stale(row)]
    PAGE.write_text(page(found, before.split(MARK)[0] + MARK, rows))
    draw(found)


if __name__ == "__main__":
    main()
