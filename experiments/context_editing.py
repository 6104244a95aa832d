"""A policy that edits its own context against a fixed window, on ``archive``, whose pages do not fit into the context.

    python experiments/context_editing.py --seeds 0 1 2 3 4 --jobs 2
    python experiments/context_editing.py --table

Both begin with their own cold start from the environment's imperfect demonstrator and learn with the same method, batch and
number of steps. ``editing`` may keep notes and drop pages; ``window`` sees the task and as many of the latest messages as fit
(``--history 3``: two of six pages, and the question). A row holds the held-out success before and after, and its curve over
sampled tokens; the table compares both at the largest number of tokens that both have sampled. Rows go to
``experiments/results/context_editing.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import product
from pathlib import Path
from typing import Any

from parallel_runs import RESULTS, side_by_side
from processes import Row, read

ARMS: dict[str, dict[str, Any]] = {
    "editing": {"env": "archive"},
    "window": {"env": "archive,editing=false", "history": 3},
}
SETTINGS: dict[str, Any] = {
    "method": "dr_grpo", "difficulty": (2,), "context": 50, "groups": 16, "group_size": 8, "steps": 60, "eval_every": 10,
    "eval_tasks": 100, "cold_steps": 250, "cold_batch": 32, "cold_demos": 8000, "schedule": "constant",
}  # fmt: skip


def points(row: Row) -> list[tuple[float, float]]:
    """(sampled tokens, held-out success) of every evaluation of a run."""
    between = [(tokens, value) for _, tokens, value in row["curve"]]
    last = [(row["curve"][-1][1], row["after"]["success"])] if row["after"] and row["curve"] else []
    return [(0.0, row["before"]["success"]), *between, *last]


def success_at(row: Row, tokens: float) -> float:
    """The held-out success of the last evaluation at no more than ``tokens`` sampled tokens."""
    return [success for count, success in points(row) if count <= tokens][-1]


def of_these_settings(rows: list[Row]) -> list[Row]:
    """The rows that were made with the settings above; older ones are kept in the file."""
    return [row for row in rows if _compared(row["settings"]) == _compared({**SETTINGS, **ARMS[row["arm"]]})]


def _compared(settings: dict[str, Any]) -> str:
    """The settings that must agree, as text."""
    return json.dumps({key: settings[key] for key in sorted(settings) if key not in ("seed", "steps")})


def table(rows: list[Row]) -> str:
    """Both arms at equal tokens, by seed."""
    by = {(row["arm"], row["settings"]["seed"]): row for row in rows if row["before"] and row["curve"]}
    seeds = sorted({seed for _, seed in by if all((arm, seed) in by for arm in ARMS)})
    lines = ["| seed | tokens | editing, before | editing | window, before | window |", "|---|---|---|---|---|---|"]
    finals: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in seeds:
        tokens = min(points(by[arm, seed])[-1][0] for arm in ARMS)
        cells = []
        for arm in ARMS:
            finals[arm].append(success_at(by[arm, seed], tokens))
            cells += [f"{by[arm, seed]['before']['success']:.1%}", f"{finals[arm][-1]:.1%}"]
        lines.append(f"| {seed} | {tokens:,.0f} | {' | '.join(cells)} |")
    if seeds:
        means = {arm: statistics.mean(values) for arm, values in finals.items()}
        lines.append(f"| mean | | | {means['editing']:.1%} | | {means['window']:.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=SETTINGS["steps"])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings, values as JSON")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=7200.0, help="runs are stopped after this time")
    parser.add_argument("--out", default="runs")
    parser.add_argument("--results", type=Path, default=RESULTS / "context_editing.jsonl")
    parser.add_argument("--table", action="store_true", help="print the rows and run nothing")
    chosen = parser.parse_args()
    more = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in chosen.set)}
    rows = [] if more else of_these_settings(read([chosen.results]))
    made = {(row["arm"], row["settings"]["seed"]) for row in rows if row["after"]}
    todo = [] if chosen.table else [pair for pair in product(chosen.arms, chosen.seeds) if pair not in made]
    runs: list[tuple[Row, dict[str, Any], str]] = [
        (
            {"arm": arm},
            {**SETTINGS, **ARMS[arm], "seed": seed, "steps": chosen.steps, **more},
            "-".join(["context", arm, *(f"{key}{value}" for key, value in more.items()), str(seed)]),
        )
        for arm, seed in todo
    ]
    side_by_side(runs, chosen.results, chosen.out, chosen.jobs, chosen.seconds)
    print(table(of_these_settings(read([chosen.results]))))


if __name__ == "__main__":
    main()
