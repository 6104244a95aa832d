"""Do comparisons and searches keep their error rate? Simulated from measured noise, and on real runs of equal arms.

    python experiments/compare_error_rate.py [--out experiments/results/compare_error_rate.json]
    python experiments/compare_error_rate.py --jobs 16 --minutes 25 --rows DIR     real tiny runs, then the same questions

A simulated run: held-out success of one seed is a mean over tasks of answers that are right with that seed's probability. The
seeds of a method vary, and half of the variance is common to both methods of a pair. How they vary is drawn in four ways:
``measured`` are the residuals of the project's own runs of three seeds (SmolLM2), ``normal`` has a standard deviation of 0.05,
``collapse`` loses one seed in ten entirely, and ``solved`` is 0.05 around 98 %, cut off at 100 %.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.inspector.compare.comparison import BETTER, CANNOT_TELL, RunOutcome, compare_outcomes
from turnwise.inspector.compare.search import confirm, halve, score

TASKS, SEEDS, ALPHA, ARMS = 200, 8, 0.05, 16
ROWS = Path(__file__).parent / "results" / "smollm2.jsonl"
KINDS = ("measured", "normal", "collapse", "solved")
Draw = Callable[[str, int], RunOutcome]


def measured_residuals() -> np.ndarray:
    """Deviations of single seeds from the mean of their method and task, widened for the few seeds of each."""
    ends: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        ends[row["task"], row["method"]].append(row["after"][0])
    groups = [np.array(values) for values in ends.values() if len(values) > 2]
    return np.concatenate([(x - x.mean()) * np.sqrt(len(x) / (len(x) - 1)) for x in groups])


def simulated(kind: str, gaps: dict[str, float], rng: np.random.Generator, level: float = 0.6) -> Draw:
    """Runs of arms whose true success differs from ``level`` by ``gaps``. One number a run, however often it is asked for."""
    residuals, drawn = measured_residuals(), dict[tuple[str, int], float]()

    def noise() -> float:
        return float(rng.choice(residuals)) if kind == "measured" else float(rng.normal(0, 0.05))

    def outcome(label: str, seed: int) -> RunOutcome:
        for key in (("", seed), (label, seed)):
            drawn.setdefault(key, noise())
        middle = 0.98 if kind == "solved" else level
        rate = middle + gaps.get(label, 0.0) + (drawn["", seed] + drawn[label, seed]) / np.sqrt(2)
        if kind == "collapse" and rng.random() < 0.1:
            rate = 0.05
        tokens = float(rng.uniform(9_500, 10_500))
        after = rng.binomial(TASKS, float(np.clip(rate, 0, 1))) / TASKS
        return RunOutcome("", label, seed, TASKS, "success", ((0.0, 0.3), (tokens, after)))

    return outcome


def compared(labels: Sequence[str], outcome: Draw, seeds: int) -> tuple[set[tuple[str, str]], int]:
    """One live comparison: the claims (better, worse) that it ends with, and the seeds that it took."""
    outcomes: list[RunOutcome] = []
    for n in range(seeds):
        outcomes += [outcome(label, n) for label in labels]
        comparison = compare_outcomes(outcomes, True, ALPHA)
        if comparison.decided:
            break
    ends = [(p.left, p.right, p.difference.verdict) for p in comparison.pairs if p.difference.verdict != CANNOT_TELL]
    return {(a, b) if verdict == BETTER else (b, a) for a, b, verdict in ends}, n + 1


def searched(labels: Sequence[str], outcome: Draw, seeds: int = 16) -> tuple[str, str]:
    """One search: the arm that it claims (empty: none), and the arm that led."""
    base = labels[0]
    outcomes, ranked, fresh = halve(labels, outcome, 0, lambda runs: True)
    if score(outcomes, ranked[0], base) <= 0:
        return "", ranked[0]
    taken: list[int] = []
    comparison = confirm(base, ranked[0], outcome, fresh, ALPHA, lambda runs: taken.append(runs) or len(taken) < seeds)
    return (ranked[0] if comparison.pairs[0].difference.verdict == BETTER else ""), ranked[0]


def comparison_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rows = []
    for kind in KINDS:
        for arms, gap, seeds in [(2, 0.0, 8), (2, 0.0, 32), (4, 0.0, 12), (2, 0.1, 8), (2, 0.2, 8), (2, 0.3, 8), (4, 0.3, 12)]:
            if kind == "solved" and gap:
                continue
            labels = [f"arm{n}" for n in range(arms)]
            rng = np.random.default_rng([seed, KINDS.index(kind), arms, int(100 * gap), seeds])
            results = [compared(labels, simulated(kind, {labels[0]: gap}, rng), seeds) for _ in range(count)]
            false = [any(not gap or pair[0] != labels[0] for pair in claims) for claims, _ in results]
            right = [all((labels[0], other) in claims for other in labels[1:]) for claims, _ in results]
            rows.append({"what": "comparison", "noise": kind, "arms": arms, "gap": gap, "seeds": seeds, "count": count,
                         "false": float(np.mean(false)), "seen": float(np.mean(right)) if gap else 0.0,
                         "mean_seeds": float(np.mean([n for _, n in results]))})  # fmt: skip
    return rows


def search_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Ties, a planted winner, and rewards that are shuffled: nobody learns, and success stays at 2 %."""
    rows, labels = [], [f"arm{n}" for n in range(ARMS + 1)]
    for kind in ("measured", "normal", "collapse"):
        for what, gaps, level in [("ties", {}, 0.6), ("shuffled rewards", {}, 0.02), ("winner +0.1", {"arm5": 0.1}, 0.6),
                                  ("winner +0.2", {"arm5": 0.2}, 0.6), ("base is best", {"arm0": 0.1}, 0.6)]:  # fmt: skip
            rng = np.random.default_rng([seed, KINDS.index(kind), len(what), int(100 * level)])
            results = [searched(labels, simulated(kind, gaps, rng, level)) for _ in range(count)]
            false = [bool(claimed) and gaps.get(claimed, 0.0) <= 0 for claimed, _ in results]
            rows.append({"what": "search", "noise": kind, "planted": what, "count": count, "false": float(np.mean(false)),
                         "seen": float(np.mean([c == "arm5" for c, _ in results])),
                         "led": float(np.mean([led == "arm5" for _, led in results]))})  # fmt: skip
    return rows


# ------------------------------------------------------------------- real runs

# about 12 s of one core: from 22 % to 55 % on average, so that runs can differ in both directions
TINY = {"env": "calculator", "difficulty": (1,), "hidden": 96, "layers": 2, "vocabulary": 400, "cold_steps": 60,
        "cold_demos": 300, "cold_batch": 24, "steps": 15, "groups": 8, "group_size": 6, "max_tokens": 32, "context": 200,
        "eval_tasks": 100, "trackers": (), "threads": 1, "keep_tokens": 0, "remeasure_tokens": 0, "checkpoint_every": 100,
        "lr": 1e-3}  # fmt: skip
ARMS_OF_RUNS = {"equal": {}, "still": {"lr": 1e-9}}  # "still" does not learn: a planted difference


def train_rows(job: tuple[int, float, str]) -> int:
    """Train runs with seeds of this job's own until the time is over: two equal ones, then one that does not learn."""
    import turnwise

    number, end, folder = job
    file, made = Path(folder, f"rows-{number}.jsonl"), 0
    first = len(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else 0
    longest = 0.0
    for n in range(first, 10**6):
        began = time.time()
        if began + 1.2 * longest > end:
            return made
        arm, seed = ("still" if n % 3 == 2 else "equal"), number * 100_000 + n
        with tempfile.TemporaryDirectory() as out:
            settings = {**TINY, **ARMS_OF_RUNS[arm], "out": out, "seed": seed}
            summary = turnwise.train(quiet=True, method="dr_grpo", name="run", **settings)
        ends = [summary[f"success_{when}"]["success"] for when in ("before", "after")]
        row = {"arm": arm, "seed": seed, "ends": ends, "tokens": summary["tokens"], "seconds": round(time.time() - began, 1)}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
        made, longest = made + 1, max(longest, time.time() - began)
    return made


def real(pool: dict[str, list[dict[str, Any]]], kinds: dict[str, str], rng: random.Random) -> Draw:
    """Every run of every arm is another run of the pool, of the kind that ``kinds`` names: no two arms share anything."""
    decks = {arm: rng.sample(rows, len(rows)) for arm, rows in pool.items()}
    drawn: dict[tuple[str, int], RunOutcome] = {}

    def outcome(label: str, seed: int) -> RunOutcome:
        if (label, seed) not in drawn:
            row = decks[kinds.get(label, "equal")].pop()
            curve = ((0.0, row["ends"][0]), (float(row["tokens"]), row["ends"][1]))
            drawn[label, seed] = RunOutcome("", label, seed, TINY["eval_tasks"], "success", curve)
        return drawn[label, seed]

    return outcome


def real_rows(folder: str, comparisons: int = 200, searches: int = 50) -> list[dict[str, Any]]:
    """Comparisons and searches over real runs. A run serves once in each of them, and in several of them: the pool is finite."""
    pool: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in sorted(Path(folder).glob("rows-*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            pool[json.loads(line)["arm"]].append(json.loads(line))
    rng, sizes = random.Random(0), {arm: len(rows) for arm, rows in pool.items()}
    ends = {arm: [row["ends"][1] for row in rows] for arm, rows in pool.items()}
    about = {arm: {"runs": len(x), "mean": float(np.mean(x)), "spread": float(np.std(x))} for arm, x in ends.items()}
    rows: list[dict[str, Any]] = [{"what": "real runs", **about}]
    for kinds in ({}, {"b": "still"}):
        if min(sizes.get(kind, 0) for kind in {"equal", *kinds.values()}) < 2 * SEEDS:
            continue
        claims = [compared(["a", "b"], real(pool, kinds, rng), SEEDS)[0] for _ in range(comparisons)]
        rows.append({"what": "real comparison", "planted": "b does not learn" if kinds else "ties", "count": comparisons,
                     "false": float(np.mean([bool(c - ({("a", "b")} if kinds else set())) for c in claims])),
                     "seen": float(np.mean([("a", "b") in c for c in claims])) if kinds else 0.0})  # fmt: skip
    labels = [f"arm{n}" for n in range(5)]  # rungs of 4 and 2 arms: 8 runs, and 32 of the confirmation
    for planted, kinds in (("ties", {}), ("only arm3 learns", dict.fromkeys({*labels} - {"arm3"}, "still"))):
        if min(sizes.get("equal", 0), sizes.get("still", 0) if kinds else 10**6) < 45:
            continue
        claims = [searched(labels, real(pool, kinds, rng), 12)[0] for _ in range(searches)]
        rows.append({"what": "real search", "planted": planted, "count": searches,
                     "false": float(np.mean([bool(c) and not (kinds and c == "arm3") for c in claims])),
                     "seen": float(np.mean([c == "arm3" for c in claims])) if kinds else 0.0})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parser.add_argument("--count", type=int, default=1000, help="simulated comparisons and searches of each kind")
    parser.add_argument("--rows", default="", help="folder of real runs: only these, no simulation")
    parser.add_argument("--jobs", type=int, default=0, help="processes that train real runs; 0: none, only read --rows")
    parser.add_argument("--minutes", type=float, default=20.0, help="for the training of real runs")
    given = parser.parse_args()
    if given.rows:
        Path(given.rows).mkdir(parents=True, exist_ok=True)
        end = time.time() + 60 * given.minutes
        if given.jobs:
            with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
                made = pool.map(train_rows, [(n, end, given.rows) for n in range(given.jobs)])
            print(f"{sum(made)} runs more in {given.rows}")
        rows = real_rows(given.rows)
    else:
        rows = comparison_rows(given.count) + search_rows(given.count)
    for row in rows:
        print(json.dumps(row), flush=True)
    if given.out:
        path = Path(given.out)
        old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        # simulated rows and real ones come from two calls
        others = [row for row in old if str(row["what"]).startswith("real") != bool(given.rows)]
        path.write_text(json.dumps(others + rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
