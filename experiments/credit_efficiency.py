"""Sample efficiency: episodes each method needs from shared cold starts until held-out success first reaches a threshold.

    python experiments/credit_efficiency.py --env keydoor --methods grpo,gigpo --seeds 5 --jobs 16 --out credit.jsonl
    python experiments/credit_efficiency.py --table credit.jsonl
    python experiments/credit_efficiency.py --write docs/results-credit.md     the tables of that page, from their rows

A row is written as soon as its run ends, and runs that the file already has are skipped: stop at any time and resume with the
same command. Episodes are all that were played for training, including those of dropped groups. Success is the mean of the last
three evaluations, so that one lucky evaluation does not count; a run that never reaches the threshold counts its whole budget.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import learning_sweep
import numpy as np
import processes

WINDOW = 3  # evaluations averaged
THRESHOLDS = {"keydoor": 0.8, "lookup": 0.8, "guess": 0.5}
RESULTS = Path(__file__).parent / "results"
STEPS = {"keydoor": 60, "lookup": 80, "guess": 100}
Row = dict[str, Any]


def curve(run: Path, before: float, after: float) -> list[tuple[int, float]]:
    """(episodes played so far, held-out success), from the beginning to the end."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "tasks_drawn" in row]
    size = sum(row["trajectories"] for row in steps) / sum(row["groups"] for row in steps)
    played = {row["step"]: round(row["tasks_drawn"] * size) for row in steps}
    evaluations = [(played[row["step"]], row["eval/success"]) for row in rows if "eval/success" in row]
    return [(0, before), *evaluations, (max(played.values()), after)]


def episodes_until(points: list[tuple[int, float]], enough: float) -> int | None:
    """Episodes until the mean of the last evaluations reaches ``enough``; None: never."""
    for n in range(1, len(points)):
        window = [success for _, success in points[max(0, n + 1 - WINDOW) : n + 1]]
        if fmean(window) >= enough:
            return points[n][0]
    return None


def job(method: str, seed: int, initial: Path, options: argparse.Namespace) -> Row | None:
    if time.monotonic() > options.until:
        return None
    name, began = f"{method}-{seed}-{os.getpid()}", time.perf_counter()
    row: Row = {"method": method, "seed": seed, "env": options.env, "steps": options.steps, "set": options.set}
    try:
        line = learning_sweep.command(method, seed, options, name)
    except Exception as fault:  # no such method, or a setting it refuses
        return {**row, "error": str(fault)}
    line += [f"--model={initial}", "--cold-steps=0", f"--eval-every={options.eval_every}", "--trackers="]
    summary = processes.call([*line, f"--checkpoint-every={options.steps}"])
    row["seconds"] = round(time.perf_counter() - began, 1)
    if "error" in summary:
        return {**row, "error": summary["error"]}
    points = curve(options.out / name, summary["success_before"]["success"], summary["success_after"]["success"])
    return {**row, "tokens": summary["tokens"], "curve": points}


def run_all(options: argparse.Namespace) -> None:
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    finished = {key(r) for r in read([options.rows]) if "error" not in r}
    lock = threading.Lock()

    def run(method: str, seed: int) -> None:
        row = job(method, seed, initial[seed], options)
        if row is not None:
            with lock, options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row["env"], method, seed, row.get("error") or row["curve"][-1], flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        seeds = range(options.seeds)
        initial = dict(zip(seeds, pool.map(lambda seed: learning_sweep.cold(seed, options), seeds)))
        requested = [{**vars(options), "method": m, "seed": s} for s in seeds for m in options.methods]
        pairs = [(each["method"], each["seed"]) for each in requested if key(each) not in finished]
        list(pool.map(lambda pair: run(*pair), pairs))


def key(row: Row) -> tuple[Any, ...]:
    """The identity of a run: equal keys are the same run."""
    return (*(row[name] for name in ("env", "method", "seed", "steps")), *sorted(row["set"]))


def read(paths: list[Path]) -> list[Row]:
    return [json.loads(line) for path in paths if path.is_file() for line in path.read_text().splitlines()]


def interval(values: list[float], seed: int = 0) -> str:
    """The median, and its 95 % bootstrap interval over seeds."""
    x = np.array(values)
    medians = np.median(x[np.random.default_rng(seed).integers(len(x), size=(4000, len(x)))], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975], method="nearest")
    digits = 2 if np.median(x) < 20 else 0
    return f"{np.median(x):,.{digits}f} [{low:,.{digits}f}, {high:,.{digits}f}]"


def table(rows: list[Row], enough: float) -> str:
    """All methods, the most efficient first. The ratio to grpo is taken per seed, from the same cold start."""
    good = [r for r in rows if "error" not in r]
    cost = {(r["method"], r["seed"]): episodes_until(r["curve"], enough) or r["curve"][-1][0] for r in good}
    lines = []
    for method in dict.fromkeys(r["method"] for r in rows):
        runs = [r for r in good if r["method"] == method]
        if not runs:
            fault = next(r["error"] for r in rows if r["method"] == method).splitlines()[-1]
            lines.append((math.inf, f"| {method} | 0 | – | – | – | – | – | {fault[-100:]} |"))
            continue
        need = [cost[method, r["seed"]] for r in runs]
        pairs = [cost[method, r["seed"]] / cost["grpo", r["seed"]] for r in runs if ("grpo", r["seed"]) in cost]
        reaching = sum(episodes_until(r["curve"], enough) is not None for r in runs)
        first, last = (fmean(r["curve"][end][1] for r in runs) for end in (0, -1))
        seconds = np.median([r["seconds"] for r in runs])
        cells = (len(runs), reaching, interval(need), interval(pairs) if pairs else "–", f"{first:.0%}", f"{last:.0%}")
        lines.append((float(np.median(need)), f"| {method} | " + " | ".join(map(str, cells)) + f" | {seconds:.0f} s |"))
    head = f"| method | seeds | reach {enough:.0%} | episodes until then | ratio to grpo | before | after | one run |"
    return "\n".join([head, "|" + "---|" * 8, *(line for _, line in sorted(lines, key=lambda pair: pair[0]))])


def tables(rows: list[Row], enough: float) -> str:
    """A table for each environment and setting of the rows, under a line that names them."""
    parts = []
    for kind in dict.fromkeys((r["env"], r["steps"], *sorted(r["set"])) for r in rows):
        runs = [r for r in rows if (r["env"], r["steps"], *sorted(r["set"])) == kind]
        words = "".join(f", {word}" for word in kind[2:])
        parts += [f"`{kind[0]}`, {kind[1]} steps{words}:", table(runs, enough or THRESHOLDS.get(kind[0], 0.5))]
    return "\n\n".join(parts)


def with_tables(page: str) -> str:
    """The page with each block ``<!-- rows FILE THRESHOLD -->`` filled from the rows of that file."""

    def filled(match: re.Match[str]) -> str:
        text = tables(read([RESULTS / match["file"]]), float(match["enough"]))
        return f"<!-- rows {match['file']} {match['enough']} -->\n{text}\n<!-- /rows -->"

    return re.sub(r"<!-- rows (?P<file>\S+) (?P<enough>\S+) -->.*?<!-- /rows -->", filled, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="keydoor")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["grpo"], help="grpo,gigpo,...")
    parser.add_argument("--seeds", type=int, default=5, help="how many: 0, 1, ...")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, default=0, help="0: the environment's own")
    parser.add_argument("--enough", type=float, default=0.0, help="the success to reach; 0: the environment's own")
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--eval-tasks", type=int, default=64)
    parser.add_argument("--set", nargs="*", default=[], help="other settings of all runs: difficulty=2 groups=4")
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing new after that time")
    parser.add_argument(
        "--out", dest="rows", type=Path, default=Path("runs") / "credit.jsonl", help="one JSON line for each run"
    )
    parser.add_argument("--runs", dest="out", type=Path, help="folder of cold starts and runs; default: beside --out")
    parser.add_argument("--table", type=Path, nargs="+", help="only show finished rows")
    parser.add_argument("--write", type=Path, help="only fill the tables of this page from their rows")
    options = parser.parse_args()
    options.steps = options.steps or STEPS.get(options.env, 100)
    options.out = options.out or options.rows.parent / "-".join(["credit", options.env, *options.set])
    options.until = time.monotonic() + 60 * options.minutes
    if options.write:
        options.write.write_text(with_tables(options.write.read_text()))
        return
    if not options.table:
        run_all(options)
    print(tables(read(options.table or [options.rows]), options.enough))


if __name__ == "__main__":
    main()
