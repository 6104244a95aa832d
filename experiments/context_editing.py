"""A policy that edits its own context against a fixed window, on ``archive``, whose pages do not fit into the context.

    python experiments/context_editing.py --seeds 0 1 2 3 4

Both begin with their own cold start from the environment's imperfect demonstrator and learn with the same method, batch and
number of steps. ``editing`` may keep notes and drop pages; ``window`` sees the task and the latest page (``--history 1``). A row
holds the held-out success before and after, and its curve over sampled tokens; the table compares both at the largest number of
tokens that both have sampled. Rows go to ``experiments/results/context_editing.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import accumulate
from pathlib import Path
from typing import Any

from turnwise.training import api

RESULTS = Path(__file__).parent / "results" / "context_editing.jsonl"
ARMS: dict[str, dict[str, Any]] = {
    "editing": {"env": "archive"},
    "window": {"env": "archive,editing=false", "history": 1},
}
SETTINGS: dict[str, Any] = {
    "method": "dr_grpo", "difficulty": (1,), "context": 112, "steps": 30, "eval_every": 5, "eval_tasks": 100, "cold_steps": 150,
    "trackers": (), "threads": 1, "keep_tokens": 0, "schedule": "constant",
}  # fmt: skip


def play(arm: str, seed: int, out: str) -> dict[str, Any]:
    """One run; its row."""
    name = f"context-{arm}-s{seed}"
    summary = api.train(**{**SETTINGS, **ARMS[arm]}, seed=seed, out=out, name=name, quiet=True)
    run = Path(summary["run"])
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in logged if "tokens" in row]
    tokens = dict(zip((row["step"] for row in steps), accumulate(row["tokens"] for row in steps)))
    curve = [[tokens[row["step"]], row["eval/success"]] for row in logged if "eval/success" in row]
    before, after = (json.loads((run / f"evaluation_{when}.json").read_text()) for when in ("before", "after"))
    first, last = (found.get("content", found)["summary"]["success"] for found in (before, after))
    curve = [[0.0, first], *curve, [max(tokens.values()), last]]
    return {"arm": arm, "seed": seed, "steps": SETTINGS["steps"], "curve": curve}


def success_at(curve: list[list[float]], tokens: float) -> float:
    """The held-out success of the last evaluation at no more than ``tokens`` sampled tokens."""
    return [success for count, success in curve if count <= tokens][-1]


def table(rows: list[dict[str, Any]]) -> str:
    """Both arms at equal tokens, by seed."""
    by = {(row["arm"], row["seed"]): row["curve"] for row in rows}
    seeds = sorted({seed for _, seed in by if all((arm, seed) in by for arm in ARMS)})
    lines = ["| seed | tokens | editing, before | editing | window, before | window |", "|---|---|---|---|---|---|"]
    finals: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in seeds:
        tokens = min(by[arm, seed][-1][0] for arm in ARMS)
        cells = []
        for arm in ARMS:
            finals[arm].append(success_at(by[arm, seed], tokens))
            cells += [f"{by[arm, seed][0][1]:.0%}", f"{finals[arm][-1]:.0%}"]
        lines.append(f"| {seed} | {tokens:,.0f} | {' | '.join(cells)} |")
    if seeds:
        means = {arm: statistics.mean(values) for arm, values in finals.items()}
        lines.append(f"| mean | | | {means['editing']:.0%} | | {means['window']:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", default="runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    rows = [json.loads(line) for line in chosen.results.read_text().splitlines()] if chosen.results.is_file() else []
    for seed in chosen.seeds:
        for arm in ARMS:
            if not any(row["arm"] == arm and row["seed"] == seed for row in rows):
                rows.append(play(arm, seed, chosen.out))
                with chosen.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(rows[-1]["arm"], seed, rows[-1]["curve"][0], rows[-1]["curve"][-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
