"""The page of the truth about credit, from the reports of ``turnwise credit-bench --out experiments/results``.

    python experiments/credit_truth.py        writes docs/evidence/credit.md and its picture

The learning rows are those of ``credit_efficiency.py`` with several seeds: for each method, how many episodes it needed compared
with grpo from the same cold starts. A prediction is a rank correlation between a score and that ratio over methods; its interval
redraws the seeds of the learning runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

from credit_efficiency import episodes_until, read  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
PAGE, PICTURE = ROOT / "docs" / "evidence" / "credit.md", ROOT / "docs" / "images" / "credit-truth.png"
TRUE, RANDOM = "the true advantage", "random numbers"
SCORES = (
    "correlation",
    "sign",
    "gradient",
    "exact",
)  # luck and bias of the rows of 2026-11-19 took siblings for independent
LEARNING = {  # learning rows: the threshold of docs/results-credit.md, and environment and difficulty of the report
    "credit_keydoor2.jsonl": (0.8, "keydoor", [2]), "credit_keydoor.jsonl": (0.4, "keydoor", [2]),
    "credit_lookup.jsonl": (0.6, "lookup", [1, 2]), "credit_lookup2.jsonl": (0.5, "lookup", [2, 3]),
}  # fmt: skip
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
        lines.append(f"| {names(rows)} | {' | '.join(cell(rows[0].get(name)) for name in heads)} |")
    return "\n".join(lines)


def without(report: Report) -> str:
    """Methods without a score, by reason."""
    reasons: dict[str, list[Any]] = {}
    for row in (row for row in report["rows"] if "correlation" not in row):
        reason = row["note"].replace(row["method"], "the method").split("; write")[0].split(", and ")[0]
        reasons.setdefault(reason, []).append(row)
    most_first = sorted(reasons.items(), key=lambda pair: -len(pair[1]))
    return "\n".join(f"- {reason}: {names(rows, 99)}" for reason, rows in most_first)


def learned(file: str, enough: float) -> dict[str, list[float]]:
    """By method with at least four seeds, the log of its episodes over grpo's, seed by seed."""
    rows = [row for row in read([RESULTS / file]) if "error" not in row]
    cost = {(r["method"], r["seed"]): episodes_until(r["curve"], enough) or r["curve"][-1][0] for r in rows}
    ratios: dict[str, list[float]] = {}
    for (method, seed), episodes in cost.items():
        if ("grpo", seed) in cost:
            ratios.setdefault(method, []).append(float(np.log(episodes / cost["grpo", seed])))
    return {method: each for method, each in ratios.items() if len(each) >= 4}


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, ties at their mean rank."""
    ranks = [np.array([(x < v).sum() + (x == v).sum() / 2 for v in x]) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1]) if all(np.ptp(r) > 0 for r in ranks) else float("nan")


def predictions(found: list[Report]) -> str:
    lines = ["| learning rows | methods | score | rank correlation with fewer episodes |", "|---|---|---|---|"]
    lot = np.random.default_rng(0)
    for file, (enough, *where) in LEARNING.items():
        report = next((r for r in found if [r["environment"], r["difficulty"]] == where), None)
        if report is None:
            continue
        ratios = learned(file, enough)
        for name in ("correlation", "exact", "gradient"):
            rows = [row for row in report["rows"] if row.get(name) and row[name][0] is not None]
            by_method = {row["method"]: row[name][0] for row in rows}
            shared = [method for method in ratios if method in by_method]
            if len(shared) < 3:
                continue
            score = np.array([by_method[method] for method in shared])
            drawn = []
            for draw in range(1001):
                seeds = [np.array(ratios[method]) for method in shared]
                picks = [x[lot.integers(len(x), size=len(x))] if draw else x for x in seeds]
                drawn.append(rank_correlation(score, -np.array([p.mean() for p in picks])))
            low, high = np.nanquantile(drawn[1:], [0.025, 0.975])
            lines.append(
                f"| `{file}` ({', '.join(shared)}) | {len(shared)} | {name} | {drawn[0]:.2f} [{low:.2f}, {high:.2f}] |"
            )
    if len(lines) == 2:
        return "Open: no report yet of an environment and difficulty that has learning rows with several seeds (n = 0)."
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


def page(found: list[Report], words: str) -> str:
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
    parts += ["## Does the score predict sample efficiency?", "", predictions(found), ""]
    return "\n".join(parts)


MARK = "<!-- generated by experiments/credit_truth.py -->"


def main() -> None:
    found = reports()
    before = PAGE.read_text() if PAGE.is_file() else f"# The truth about credit\n\n{MARK}\n"
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(found, before.split(MARK)[0] + MARK))
    draw(found)


if __name__ == "__main__":
    main()
