"""Who needs fewer episodes: methods from the same cold start of each seed, until held-out success first reaches a threshold.

    python experiments/credit_efficiency.py --env keydoor --methods grpo,gigpo --seeds 5 --jobs 16 --out credit.jsonl
    python experiments/credit_efficiency.py --table credit.jsonl

A row is written the moment its run ends, and rows the file already has are not run again: stop it at any time, go on with
the same command. Episodes are all that were played for training, those of dropped groups too. A success is the mean of the
last three evaluations, so that one lucky evaluation is no success; a run that never gets there counts with its whole budget.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import learning_sweep
import numpy as np
import processes

WINDOW = 3  # evaluations in a success
ENOUGH = {"keydoor": 0.8, "lookup": 0.8, "guess": 0.5}
STEPS = {"keydoor": 60, "lookup": 80, "guess": 100}
Row = dict[str, Any]


def curve(run: Path, before: float, after: float) -> list[tuple[int, float]]:
    """(episodes played so far, held-out success), from the beginning to the end."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "tasks_drawn" in row]
    size = sum(row["trajectories"] for row in steps) / sum(row["groups"] for row in steps)
    played = {row["step"]: round(row["tasks_drawn"] * size) for row in steps}
    seen = [(played[row["step"]], row["eval/success"]) for row in rows if "eval/success" in row]
    return [(0, before), *seen, (max(played.values()), after)]


def reached(points: list[tuple[int, float]], enough: float) -> int | None:
    """Episodes until the mean of the last evaluations is enough; None: never."""
    for n in range(1, len(points)):
        window = [success for _, success in points[max(0, n + 1 - WINDOW) : n + 1]]
        if sum(window) / len(window) >= enough:
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
    found = processes.call([*line, f"--checkpoint-every={options.steps}"])
    row["seconds"] = round(time.perf_counter() - began, 1)
    if "error" in found:
        return {**row, "error": found["error"]}
    points = curve(options.out / name, found["success_before"]["success"], found["success_after"]["success"])
    return {**row, "tokens": found["tokens"], "curve": points}


def play(options: argparse.Namespace) -> None:
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    known = {key(r) for r in read([options.rows]) if "error" not in r}
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
        asked = [{**vars(options), "method": m, "seed": s} for s in seeds for m in options.methods]
        pairs = [(each["method"], each["seed"]) for each in asked if key(each) not in known]
        list(pool.map(lambda pair: run(*pair), pairs))


def key(row: Row) -> tuple[Any, ...]:
    """What makes two runs the same run."""
    return (*(row[name] for name in ("env", "method", "seed", "steps")), *sorted(row["set"]))


def read(paths: list[Path]) -> list[Row]:
    return [json.loads(line) for path in paths if path.is_file() for line in path.read_text().splitlines()]


def interval(values: list[float], seed: int = 0) -> str:
    """The median, and its 95 % bootstrap interval over seeds."""
    x = np.array(values)
    drawn = np.median(x[np.random.default_rng(seed).integers(len(x), size=(4000, len(x)))], axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975], method="nearest")
    digits = 2 if np.median(x) < 20 else 0
    return f"{np.median(x):,.{digits}f} [{low:,.{digits}f}, {high:,.{digits}f}]"


def table(rows: list[Row], enough: float) -> str:
    """All methods, the fastest first. The ratio is taken seed by seed, to grpo from the same cold start."""
    good = [r for r in rows if "error" not in r]
    cost = {(r["method"], r["seed"]): reached(r["curve"], enough) or r["curve"][-1][0] for r in good}
    lines = []
    for method in dict.fromkeys(r["method"] for r in rows):
        mine = [r for r in good if r["method"] == method]
        if not mine:
            fault = next(r["error"] for r in rows if r["method"] == method).splitlines()[-1]
            lines.append((math.inf, f"| {method} | 0 | – | – | – | – | – | {fault[-100:]} |"))
            continue
        need = [cost[method, r["seed"]] for r in mine]
        pairs = [cost[method, r["seed"]] / cost["grpo", r["seed"]] for r in mine if ("grpo", r["seed"]) in cost]
        there = sum(reached(r["curve"], enough) is not None for r in mine)
        first, last = (np.mean([r["curve"][end][1] for r in mine]) for end in (0, -1))
        seconds = np.median([r["seconds"] for r in mine])
        cells = (len(mine), there, interval(need), interval(pairs) if pairs else "–", f"{first:.0%}", f"{last:.0%}")
        lines.append((float(np.median(need)), f"| {method} | " + " | ".join(map(str, cells)) + f" | {seconds:.0f} s |"))
    head = f"| method | seeds | reach {enough:.0%} | episodes until then | ratio to grpo | before | after | one run |"
    return "\n".join([head, "|" + "---|" * 8, *(line for _, line in sorted(lines, key=lambda pair: pair[0]))])


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
    parser.add_argument("--runs", dest="out", type=Path, help="where cold starts and runs lie; default: beside --out")
    parser.add_argument("--table", type=Path, nargs="+", help="only show finished rows")
    options = parser.parse_args()
    options.steps = options.steps or STEPS.get(options.env, 100)
    options.out = options.out or options.rows.parent / "-".join(["credit", options.env, *options.set])
    options.until = time.monotonic() + 60 * options.minutes
    if not options.table:
        play(options)
    rows = read(options.table or [options.rows])
    for kind in dict.fromkeys((r["env"], r["steps"], *sorted(r["set"])) for r in rows):
        mine = [r for r in rows if (r["env"], r["steps"], *sorted(r["set"])) == kind]
        enough = options.enough or ENOUGH.get(kind[0], 0.5)
        print(f"\n{kind[0]}, {kind[1]} steps{''.join(f', {word}' for word in kind[2:])}\n\n{table(mine, enough)}")


if __name__ == "__main__":
    main()
