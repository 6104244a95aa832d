"""Whether methods learn by their own mechanism: fresh actions, pivots, corrected sampling, Q from logits, steered decoding.

    python experiments/values_learning.py --jobs 4 --seconds 500 --results rows.jsonl
    python experiments/values_learning.py --only vas props --seeds 0 1

One row for each run: the held-out success before and after, and the metrics that show the mechanism. Each run is a process of its
own with one thread. Runs that would end after ``--seconds`` are not begun; finished ones are skipped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

TURNS = "turnwise.environments.expert_turns"
CALCULATOR = {"env": "calculator", "steps": 50}
KEYDOOR = {"env": "keydoor", "steps": 30}
PLANS: dict[str, dict[str, Any]] = {  # name of a row: the arguments of train()
    "archer": {"method": "archer", **CALCULATOR},
    "archer fresh=0": {"method": "archer", "method_options": {"fresh": 0}, **CALCULATOR},
    "pivotrl": {
        "method": "pivotrl", "env": f"{TURNS}:KeyDoorTurns", "steps": 40, "difficulty": (1,), "history": 1, "context": 96,
        "max_tokens": 4, "cold_batch": 8, "cold_steps": 60,
    },
    "pivotrl all turns": {
        "method": "pivotrl", "method_options": {"pool": 1, "below": 10.0}, "sampler": "uniform", "env": f"{TURNS}:KeyDoorTurns",
        "steps": 40, "difficulty": (1,), "history": 1, "context": 96, "max_tokens": 4, "cold_batch": 8, "cold_steps": 60,
    },
    "vas": {"method": "vas", **CALCULATOR, "value_lr": 3e-3, "eval_temperature": 1.0},
    "vas beta=10": {"method": "vas", "method_options": {"beta": 10.0}, **CALCULATOR, "value_lr": 3e-3, "eval_temperature": 1.0},
    "b_coder": {"method": "b_coder", **CALCULATOR, "critic": "separate", "eval_temperature": 1.0, "eval_samples": 4},
    "b_coder alpha=1": {
        "method": "b_coder", "method_options": {"alpha": 1.0, "imitation": 0.1, "passes": 0, "warm": 0}, **CALCULATOR,
        "eval_temperature": 1.0, "eval_samples": 4,
    },
    "props": {"method": "props", **CALCULATOR},
    "ppo": {"method": "ppo", **CALCULATOR},
    "props keydoor": {"method": "props", **KEYDOOR},
    "ppo keydoor": {"method": "ppo", **KEYDOOR},
}  # fmt: skip
KEPT = ("success", "interval", "tasks")
SHOWN = (
    "tasks_pivots",
    "tasks_frontier",
    "mixed/policy",
    "mixed/replay",
    "penalty/ConservativeQError",
    "penalty/ActionValueError",
)


def kept(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The part of an evaluation that a row keeps; with several samples also the success of the answer that is ranked first."""
    ranked = {key: value for key, value in evaluation.get("exact", {}).items() if key == "reranked_success"}
    return {key: evaluation[key] for key in KEPT} | ranked


def run(name: str, seed: int, out: str, more: dict[str, Any]) -> dict[str, Any]:
    """Train one row and tell what came out."""
    from turnwise.training import api

    began = time.time()
    label = f"{name} {seed}".replace(" ", "_").replace("=", "_")
    row: dict[str, Any] = {"row": name, "seed": seed}
    try:
        found = api.train(**{**PLANS[name], **more}, seed=seed, out=out, name=label, trackers=(), threads=1)
        rows = [json.loads(line) for line in (Path(out) / label / "metrics.jsonl").read_text().splitlines()]
        steps = [r for r in rows if "loss" in r or "success" in r]
        row |= {
            "before": kept(found["success_before"]),
            "after": kept(found["success_after"]),
            "settings": {k: str(v) for k, v in PLANS[name].items()},
        }
        row["metrics"] = {
            k: [round(r[k], 4) for r in steps if r.get(k) is not None][-1:] for k in SHOWN if any(k in r for r in steps)
        }
        row["train_success"] = [round(r["success"], 3) for r in steps if r.get("success") is not None][
            :: max(1, len(steps) // 10)
        ]
    except Exception as fault:  # the row tells of it, the others go on
        row["error"] = f"{type(fault).__name__}: {fault}"[:400]
    return {**row, "minutes": round((time.time() - began) / 60, 2)}


def work(jobs: multiprocessing.Queue, results: str, out: str, until: float, more: dict[str, Any]) -> None:
    while time.time() < until:
        try:
            name, seed = jobs.get(timeout=5)
        except Exception:  # another process took the last one
            return
        row = run(name, seed, out, more)
        with open(results, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            json.dumps({k: row[k] for k in ("row", "seed", "before", "after", "error", "minutes") if k in row}),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=list(PLANS))
    parser.add_argument("--out", default="runs/values")
    parser.add_argument("--results", default="experiments/results/values.jsonl")
    parser.add_argument("--set", nargs="*", default=[], help="settings of every run, name=value")
    flags = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    done = set()
    if Path(flags.results).is_file():
        rows = [json.loads(line) for line in Path(flags.results).read_text().splitlines()]
        done = {(r["row"], r["seed"]) for r in rows if "error" not in r}
    context = multiprocessing.get_context("spawn")
    jobs = context.Queue()
    for seed in flags.seeds:
        for name in flags.only:
            if (name, seed) not in done:
                jobs.put((name, seed))
    more = {key: json.loads(value) for key, value in (word.split("=", 1) for word in flags.set)}
    until = time.time() + flags.seconds
    workers = [
        context.Process(target=work, args=(jobs, flags.results, flags.out, until, more)) for _ in range(flags.jobs)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(1.0, until + 5 - time.time()))
    for worker in workers:
        worker.kill()


if __name__ == "__main__":
    main()
