"""Tests that every method learns: a short seeded run of each from shared cold starts, in parallel.
Writes docs/learning.md and docs/learning-all.md.

    python experiments/learning_sweep.py                               every method, seed 0, one process per core
    python experiments/learning_sweep.py --methods sapo gspo --seeds 0 1 2
    python experiments/learning_sweep.py --plan --jobs 15 --minutes 9 --rows rows.jsonl
        experiments/learning_plan.py: each method in an environment that suits it
    python experiments/learning_sweep.py --table sweep.jsonl more.jsonl --write docs/learning.md
        only the table of finished sweeps

Each run is a single-threaded process: two of them on two cores are faster than one run on both. A row is written as soon as
its run ends, so stopping a sweep loses nothing. After ``--minutes`` nothing new starts, and a plan stops its running processes.
A plan resumes from its ``--rows``: runs that they contain without an error are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import learning_plan
from learning_jobs import run_plan
from learning_report import page, whole_page
from processes import Row, call, read

from turnwise import recipes
from turnwise.algebra.control import Passes

PASSES = {"epochs", "minibatches"}


def applicable(method: str, options: argparse.Namespace) -> dict[str, str]:
    """The settings of --set that apply to this method: one with its own optimiser steps takes no passes."""
    values = dict(pair.split("=", 1) for pair in options.set)
    own_steps = not isinstance(recipes.build(method).control, Passes)
    return {key: value for key, value in values.items() if not (own_steps and key in PASSES)}


def command(method: str, seed: int, options: argparse.Namespace, name: str) -> list[str]:
    settings = {"env": options.env, "steps": options.steps, **applicable(method, options)}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    line = [sys.executable, "-m", "turnwise.cli.main", "train", method, f"--seed={seed}", *flags]
    return [
        *line,
        f"--out={options.out}",
        f"--name={name}",
        "--json",
        "--device=cpu",
        f"--eval-tasks={options.eval_tasks}",
    ]


def cold(seed: int, options: argparse.Namespace) -> Path:
    """The cold start that all methods of a seed share."""
    folder = options.out / f"cold-{seed}" / "initial"
    if not folder.is_dir():
        line = [*command("reinforce", seed, options, f"cold-{seed}"), "--steps=1", "--eval-tasks=1"]
        summary = call(line)
        if "error" in summary:
            raise SystemExit(summary["error"])
    return folder


def job(method: str, seed: int, initial: Path, options: argparse.Namespace) -> dict[str, Any] | None:
    if time.monotonic() > options.until:
        return None
    line = [*command(method, seed, options, f"{method}-{seed}"), f"--model={initial}", "--cold-steps=0"]
    began = time.perf_counter()
    summary = call(line)
    row: dict[str, Any] = {"method": method, "seed": seed, "seconds": round(time.perf_counter() - began, 1)}
    row |= {"env": options.env, "steps": options.steps, "set": dict(pair.split("=", 1) for pair in options.set)}
    if "error" in summary:
        return {**row, "error": summary["error"]}
    before, after = summary["success_before"], summary["success_after"]
    measured = {"before": before["success"], "before_interval": before["interval"]}
    return {**row, **measured, "after": after["success"], "interval": after["interval"]}


def sweep(options: argparse.Namespace) -> list[Row]:
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        initial = dict(zip(options.seeds, pool.map(lambda s: cold(s, options), options.seeds)))
        jobs = [pool.submit(job, m, s, initial[s], options) for s in options.seeds for m in options.methods]
        for one in jobs:
            row = one.result()
            if row is None:
                continue
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="run experiments/learning_plan.py")
    parser.add_argument("--methods", nargs="+", help="default: all, or all of the plan")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--env", default="calculator")
    parser.add_argument("--set", nargs="*", default=[], help="other settings of the runs: epochs=2 minibatches=4")
    parser.add_argument("--steps", type=int, default=0, help="default: 60, or the plan's own")
    parser.add_argument(
        "--tasks", type=int, default=400, help="tasks that scripted policies play for the files of a plan"
    )
    parser.add_argument("--eval-tasks", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=Path("runs") / f"sweep-{int(time.time())}")
    parser.add_argument("--rows", type=Path, help="append one JSON line for each run here")
    parser.add_argument("--table", type=Path, nargs="+", help="only show finished rows")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    options.until = time.monotonic() + 60 * options.minutes
    options.methods = options.methods or list(learning_plan.METHODS if options.plan else recipes.METHODS)
    if options.table:
        rows = read(options.table)
    elif options.plan:
        rows = run_plan(options)
    else:
        options.steps = options.steps or 60
        rows = sweep(options)
    print(whole_page(rows))
    if options.write:
        options.write.write_text(page(rows))
        options.write.with_stem(options.write.stem + "-all").write_text(whole_page(rows))


if __name__ == "__main__":
    main()
