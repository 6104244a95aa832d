"""Every method learns: a short seeded run of each from the same cold starts, many at a time. Writes docs/learning.md.

    python bench/sweep.py                               every method, seed 0, as many at once as there are cores
    python bench/sweep.py --methods sapo gspo --seeds 0 1 2
    python bench/sweep.py --table sweep.jsonl more.jsonl --write docs/learning.md      only the table, of finished sweeps

Each run is a process of one thread: two of them on two cores are faster than one run on both. A row is written as soon as
a run ends, so a sweep that is stopped loses nothing; ``--minutes`` starts nothing new after that time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from turnwise import recipes
from turnwise.algebra.control import Passes

PASSES = {"epochs", "minibatches"}


def asked(method: str, options: argparse.Namespace) -> dict[str, str]:
    """The settings of --set that this method has a place for: one with steps of its own takes no passes."""
    given = dict(pair.split("=", 1) for pair in options.set)
    own = not isinstance(recipes.build(method).control, Passes)
    return {key: value for key, value in given.items() if not (own and key in PASSES)}


def command(method: str, seed: int, options: argparse.Namespace, name: str) -> list[str]:
    settings = {"env": options.env, "steps": options.steps, **asked(method, options)}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    line = [sys.executable, "-m", "turnwise.cli", "train", method, f"--seed={seed}", *flags]
    return [
        *line,
        f"--out={options.out}",
        f"--name={name}",
        "--json",
        "--device=cpu",
        f"--eval-tasks={options.eval_tasks}",
    ]


def call(line: list[str]) -> dict[str, Any]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(line, capture_output=True, text=True, env=env)
    if done.returncode:
        return {"error": done.stderr.strip()[-400:]}
    return dict(json.loads(done.stdout))


def cold(seed: int, options: argparse.Namespace) -> Path:
    """The cold start that all methods of a seed share."""
    folder = options.out / f"cold-{seed}" / "initial"
    if not folder.is_dir():
        line = [*command("reinforce", seed, options, f"cold-{seed}"), "--steps=1", "--eval-tasks=1"]
        found = call(line)
        if "error" in found:
            raise SystemExit(found["error"])
    return folder


def job(method: str, seed: int, initial: Path, options: argparse.Namespace) -> dict[str, Any] | None:
    if time.monotonic() > options.until:
        return None
    line = [*command(method, seed, options, f"{method}-{seed}"), f"--model={initial}", "--cold-steps=0"]
    began = time.perf_counter()
    found = call(line)
    row: dict[str, Any] = {"method": method, "seed": seed, "seconds": round(time.perf_counter() - began, 1)}
    row |= {"env": options.env, "steps": options.steps, "set": asked(method, options)}
    if "error" in found:
        return {**row, "error": found["error"]}
    before, after = found["success_before"], found["success_after"]
    return {**row, "before": before["success"], "after": after["success"], "interval": after["interval"]}


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each method, over its seeds. It learns when every seed's interval lies above where it began."""
    by: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by.setdefault(row["method"], []).append(row)
    lines = [
        "| method | environment | steps | seeds | before | after | least of the 95 % intervals | learns |",
        "|" + "---|" * 8,
    ]
    for method in recipes.METHODS:
        runs = [r for r in by.get(method, []) if "error" not in r]
        if not runs:
            lines.append(f"| {method} | – | – | 0 | – | – | – | {'failed' if method in by else 'not run'} |")
            continue
        mean = lambda key: sum(r[key] for r in runs) / len(runs)  # noqa: E731, B023
        learns = all(r["interval"][0] > r["before"] for r in runs)
        low = min(r["interval"][0] for r in runs)
        lines.append(
            f"| {method} | {runs[0]['env']} | {runs[0]['steps']} | {len(runs)} | {mean('before'):.0%} | {mean('after'):.0%} "
            f"| {low:.0%} | {'yes' if learns else 'no'} |"
        )
    good = sum(line.endswith("| yes |") for line in lines)
    return "\n".join([*lines, "", f"{good} of {len(recipes.METHODS)} methods learn in every seed that was run."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(recipes.METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--env", default="calculator")
    parser.add_argument("--set", nargs="*", default=[], help="other settings of the runs: epochs=2 minibatches=4")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-tasks", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=Path("runs") / f"sweep-{int(time.time())}")
    parser.add_argument("--rows", type=Path, help="append one JSON line for each run here")
    parser.add_argument("--table", type=Path, nargs="+", help="only show finished rows")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    rows = [json.loads(line) for path in options.table or () for line in path.read_text().splitlines()]
    if not options.table:
        options.until = time.monotonic() + 60 * options.minutes
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
    text = table(rows)
    print(text)
    if options.write:
        options.write.write_text(f"# Every method learns\n\n`python bench/sweep.py`\n\n{text}\n")


if __name__ == "__main__":
    main()
