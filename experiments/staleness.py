"""Which methods stay stable on old data: every batch is sampled by the policy of k optimiser steps ago, k = 0, 1, 4, 16, 64.

    python experiments/staleness.py --seeds 0 1 2 3 4 --jobs 6 [--env lookup]
    python experiments/staleness.py --table [--write docs/asynchrony.md]

``--staleness k`` of a run is a limit: how old tokens are depends on the speed of generator and learner and on the rows of the KV
cache (``--ages`` measures that). Here the age is exact and does not depend on the machine: the generator of a synchronous run
gets each publication k steps late, so every token of step t was sampled by the policy of step max(0, t − k). Evaluations use the
newest policy. All methods have the same tasks, batches and number of episodes, and all runs of a seed start from one cold start.
Each method has the learning rate with the best mean success at ages 0 and 16, in runs of a seed that the table does not count.
Rewards are 1 and −1, because ``topr`` tapers negative ones; the other methods standardise them. The tool of ``calculator`` does
arithmetic in this process.

A row holds the held-out success before and after, and its curve. A run fell if an evaluation is more than 20 points below an
earlier one. Rows go to ``experiments/results/staleness.jsonl``; a run whose row is there is not repeated. Whole seeds come first.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import late_policy
from parallel_runs import RESULTS, finished
from processes import Job, Row, read, schedule

METHODS = ("grpo", "vcpo", "topr", "st_ppo", "bapo")
LAGS = (0, 1, 4, 16, 64)
ENVS = {"calculator": "worlds:SignedCalculator", "lookup": "worlds:SignedLookup"}
SETTINGS: dict[str, Any] = {
    "difficulty": (1,), "groups": 4, "group_size": 8, "steps": 128, "schedule": "constant", "eval_every": 16,
    "eval_tasks": 100, "checkpoint_every": 1000, "device": "cpu",
}  # fmt: skip
RATES, TUNING_LAGS, TUNING_SEED = (2e-4, 5e-4, 1e-3), (0, 16), 100
AGES_RATE = 1.5e-3  # of the runs that only measure ages
FALLEN = 0.2  # a run that loses more than this from its best evaluation counts as fallen
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


# ------------------------------------------------------------------ one run, in a process of its own


def measured(settings: dict[str, Any], name: str, out: str, seconds: float) -> Row:
    """Run in a subprocess for at most ``seconds``; what it has measured."""
    row = finished(settings, name, out, seconds, program=__file__)
    del row["settings"]
    return {**row, "age": age(Path(out) / name)}


def age(run: Path) -> list[float]:
    """Mean and largest age of trained tokens in steps, over the second half of a run."""
    rows = [row for row in read([run / "metrics.jsonl"]) if "staleness" in row]
    late = rows[len(rows) // 2 :] or [{"staleness": 0.0, "staleness/oldest": 0.0}]
    mean = statistics.mean(row["staleness"] for row in late)
    return [round(mean, 2), max(row["staleness/oldest"] for row in late)]


# ------------------------------------------------------------------ all runs


Arm = tuple[str, str, int, int, float]  # kind of run, method, lag, seed, learning rate; 0: the one that tuning chooses


def jobs(options: argparse.Namespace, until: float) -> list[Job]:
    """Runs without a row yet: the tuning of every method, then whole seeds; the cold start of a seed before its runs."""
    known = {key_of(row) for row in read([options.results]) if "error" not in row}
    tuning = [("tuning", m, lag, TUNING_SEED, rate) for m in options.methods for rate in RATES for lag in TUNING_LAGS]
    arms: list[tuple[float, Arm]] = [(1.0, arm) for arm in tuning]
    for order, seed in enumerate(options.seeds):
        arms += [(-order, ("late", method, lag, seed, 0.0)) for method in options.methods for lag in options.lags]
    if options.ages:
        arms = [(0.0, ("ages", "grpo", lag, seed, AGES_RATE)) for seed in options.seeds for lag in options.lags]
    missing = [
        (cost, arm) for cost, arm in arms if (options.env, *arm[:4], *arm[4:] * (arm[0] == "tuning")) not in known
    ]
    found = [
        Job(("start", seed), lambda _, seed=seed: cold_start(options, seed, until), cost=2.0 - n)
        for n, seed in enumerate(dict.fromkeys(arm[3] for _, arm in missing))
    ]
    for cost, arm in missing:
        kind, method, _, seed, _ = arm
        tuned = [a for _, a in missing if a[0] == "tuning" and a[1] == method] if kind == "late" else []
        found.append(Job(arm, lambda _, arm=arm: one(options, arm, until), (("start", seed), *tuned), cost))
    return found


def key_of(row: Row) -> tuple[Any, ...]:
    key = row["env"], row["kind"], row["method"], row["lag"], row["seed"]
    return (*key, row["lr"]) if row["kind"] == "tuning" else key


def best_rate(rows: list[Row], env: str, method: str) -> float:
    """The learning rate of the best mean success in the runs for tuning; of equal ones, the one with the best curves."""
    found = [row for row in rows if (row["env"], row["kind"], row["method"]) == (env, "tuning", method)]
    found = [row for row in found if "error" not in row]

    def success(rate: float) -> tuple[float, float]:
        values = [points(row) for row in found if row["lr"] == rate] or [[0.0]]
        return statistics.mean(v[-1] for v in values), statistics.mean(statistics.mean(v) for v in values)

    return max(RATES, key=success)


def cold_start(options: argparse.Namespace, seed: int, until: float) -> None:
    """The model that all runs of a seed start from."""
    if not (start_of(options, seed) / "initial").is_dir():
        settings = {"env": ENVS[options.env], "difficulty": (1,), "method": "grpo", "seed": seed, "device": "cpu"}
        name = start_of(options, seed).name
        measured({**settings, "steps": 1, "eval_tasks": 0, "lag": 0}, name, options.out, until - time.monotonic())


def start_of(options: argparse.Namespace, seed: int) -> Path:
    return Path(options.out) / f"{options.env}-start-{seed}"


def one(options: argparse.Namespace, arm: Arm, until: float) -> None:
    """One run and its row."""
    kind, method, lag, seed, given = arm
    rate = given or best_rate(read([options.results]), options.env, method)
    about = {"env": options.env, "kind": kind, "method": method, "lag": lag, "seed": seed}
    about |= {"steps": options.steps, "lr": rate}
    settings = {**SETTINGS, **{key: about[key] for key in ("method", "seed", "steps", "lr")}, "env": ENVS[options.env]}
    settings |= {"model": str(start_of(options, seed) / "initial"), "cold_steps": 0}
    settings |= {"lag": 0, "staleness": lag} if kind == "ages" else {"lag": lag}
    name = f"{options.env}-{kind}-{method}-{lag}-{seed}-{rate:g}-{int(time.time())}"
    row = {**about, **measured(settings, name, options.out, until - time.monotonic())}
    with options.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(name, row["after"].get("success"), row["age"], f"{row['seconds']} s", row.get("error", ""), flush=True)


# ------------------------------------------------------------------ table


def points(row: Row) -> list[float]:
    """Held-out success at each evaluation. One that reports none counts as 0: no episode came to an answer."""
    between = {step: value for step, _, value in row["curve"]}
    every = SETTINGS["eval_every"]
    found = [between.get(step, 0.0) for step in range(every, row["steps"], every)]
    return [row["before"]["success"], *found, row["after"]["success"] or 0.0]


def fall(values: list[float]) -> float:
    """The largest drop from the best value so far to a later one."""
    best, most = values[0], 0.0
    for value in values:
        best = max(best, value)
        most = max(most, best - value)
    return most


def cell(rows: list[Row]) -> str:
    """Final success over seeds with its 95 % interval (Student), and how many runs had fallen at any time."""
    if not rows:
        return "–"
    finals = [points(row)[-1] for row in rows]
    fallen = sum(fall(points(row)) > FALLEN for row in rows)
    if len(finals) == 1:
        return f"{finals[0]:.0%}" + (", fell" if fallen else "")
    half = STUDENT.get(len(finals), 2.0) * statistics.stdev(finals) / len(finals) ** 0.5
    return f"{statistics.mean(finals):.0%} ± {100 * half:.0f}" + (f", {fallen} of {len(rows)} fell" if fallen else "")


def table(rows: list[Row], env: str) -> list[str]:
    """Methods down, ages across."""
    done = [
        row for row in rows if row["env"] == env and row["kind"] == "late" and row.get("after") and "error" not in row
    ]
    lines = [
        "| method | learning rate | " + " | ".join(f"{lag} steps old" if lag else "synchronous" for lag in LAGS) + " |",
        "|---" * 7 + "|",
    ]
    for method in METHODS:
        cells = [cell([r for r in done if r["method"] == method and r["lag"] == lag]) for lag in LAGS]
        lines.append(f"| {method} | {best_rate(rows, env, method):g} | " + " | ".join(cells) + " |")
    seeds = sorted({row["seed"] for row in done})
    started = [row["before"]["success"] for row in done]
    lines += [
        "",
        f"`{env}`, seeds {seeds}; before training {statistics.mean(started):.0%}." if done else f"`{env}`: no rows.",
    ]
    return lines


def ages_table(rows: list[Row]) -> list[str]:
    """How old tokens are in real asynchronous runs."""
    found = [row for row in rows if row["kind"] == "ages" and row.get("after") and "error" not in row]
    lines = ["| `--staleness` | mean age of a token, steps | largest | seeds |", "|---|---|---|---|"]
    for lag in LAGS:
        ages = [row["age"] for row in found if row["lag"] == lag]
        if ages:
            mean = statistics.mean(mean for mean, _ in ages)
            lines.append(f"| {lag} | {mean:.1f} | {max(most for _, most in ages):.0f} | {len(ages)} |")
    return lines if len(lines) > 2 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="calculator", choices=list(ENVS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--lags", type=int, nargs="+", default=list(LAGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=SETTINGS["steps"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=7200.0, help="no run begins or goes on after this time")
    parser.add_argument(
        "--ages", action="store_true", help="real asynchronous runs of grpo instead: how old are their tokens?"
    )
    parser.add_argument("--out", default="runs/staleness")
    parser.add_argument("--results", type=Path, default=RESULTS / "staleness.jsonl")
    parser.add_argument("--table", action="store_true", help="print the tables and run nothing")
    parser.add_argument("--write", default="", metavar="PAGE", help="write the tables into this page")
    options = parser.parse_args()
    if not options.table:
        until = time.monotonic() + options.seconds
        schedule(jobs(options, until), options.jobs, until)
    rows = read([options.results])
    envs = [env for env in ENVS if any(row["env"] == env and row["kind"] == "late" for row in rows)]
    lines = [line for env in envs for line in (*table(rows, env), "")] + ages_table(rows)
    print("\n".join(lines))
    if options.write:
        page = Path(options.write)
        text = page.read_text(encoding="utf-8")
        replaced = lambda m: m[1] + "\n".join(lines).strip() + "\n" + m[2]  # noqa: E731
        page.write_text(
            re.sub(r"(<!-- staleness -->\n).*?(<!-- end -->)", replaced, text, flags=re.S), encoding="utf-8"
        )


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        late_policy.train(**json.loads(sys.argv[1]))
    else:
        main()
