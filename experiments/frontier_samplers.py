"""Do samplers at the frontier find it? A mixture of 1,000 tasks of which 80 % are too easy or too hard, with a simulated learner.

    python experiments/frontier_samplers.py [seeds] > experiments/results/frontier_samplers.json

A task has a difficulty d; a policy of skill s solves it with probability σ(8·(s_k − d)), where k is one of twenty kinds of tasks
and s_k the skill in it. A group teaches in proportion to the variance of its outcomes: s_k grows by 0.04·4·p̂(1 − p̂), half of it
spreads to all kinds. Easy tasks have d = −1, hard ones d = 3, the others lie between 0 and 1. The share of groups without
variance and the rollouts until 80 % of the middle tasks succeed are compared with uniform sampling. No model is trained: this
measures the samplers, not the learner.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys

from turnwise.core.records import Group, Status, Task, Trajectory, Turn
from turnwise.recipes.experience import piece
from turnwise.tasks.task_source import TaskList

TASKS, KINDS, GROUPS, SIZE, STEPS, GOAL = 1000, 20, 16, 8, 1500, 0.8
SAMPLERS = (
    "uniform", "cycle,pool=1000", "spo,pool=1000", "vade,pool=1000", "mmr1,pool=1000", "prompt_gdro,pool=1000",
    "fg_expo,pool=1000", "fg_expo,pool=1000,width=0.15,keep=0.5", "pivot,pool=1000",
)  # fmt: skip


def difficulty(task: Task) -> float:
    """80 % are too easy or too hard."""
    u = random.Random(task.seed).random()
    return -1.0 if u < 0.4 else 3.0 if u < 0.8 else (u - 0.8) / 0.2


def played(task: Task, number: int, results: list[bool]) -> Group:
    turn = lambda r: Turn((1,), (2,), (-0.5,), version=(0,), reward=float(r))  # noqa: E731
    members = [
        Trajectory(f"{number}.{i}", task, (turn(r),), status=Status.FINISHED, success=r) for i, r in enumerate(results)
    ]
    return Group(str(number), task, tuple(members))


def run(spec: str, seed: int) -> dict[str, float]:
    """One simulated run: share of groups without variance, the same after as many groups as there are tasks, and rollouts until
    the goal (all of them if it is not reached)."""
    rng = random.Random(seed)
    listed = tuple(Task("mixture", n) for n in range(TASKS))
    sampler = piece("sampler", spec).open(TaskList("mixture", "train", (1,), seed, listed))
    middle = [t for t in listed if 0 <= difficulty(t) <= 1]
    skill, flat, late, groups, reached = [0.0] * KINDS, 0, 0, 0, 0
    chance = lambda t: 1 / (1 + math.exp(-8 * (skill[t.seed % KINDS] - difficulty(t))))  # noqa: E731
    for _ in range(STEPS):
        if hasattr(sampler, "begin_wave"):
            sampler.begin_wave(GROUPS)
        for number, task in [sampler.next() for _ in range(GROUPS)]:
            results = [rng.random() < chance(task) for _ in range(SIZE)]
            rate = sum(results) / SIZE
            groups, flat = groups + 1, flat + (rate in (0.0, 1.0))
            late += groups > TASKS and rate in (0.0, 1.0)
            gain = 0.04 * 4 * rate * (1 - rate) / 2
            skill = [s + gain / KINDS for s in skill]
            skill[task.seed % KINDS] += gain
            sampler.observe(played(task, number, results))
        if statistics.mean(map(chance, middle)) >= GOAL:
            reached = groups * SIZE
            break
    after_first_pass = late / max(1, groups - TASKS)
    spent = {"rollouts": float(reached or groups * SIZE), "reached": float(bool(reached))}
    return {"flat": flat / groups, "flat_late": after_first_pass, **spent}


def interval(values: list[float]) -> list[float]:
    """Mean and half-width of its 95 % interval (t with four degrees of freedom for five seeds)."""
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}.get(len(values), 2.0)
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return [round(statistics.mean(values), 4), round(t * spread, 4)]


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rows = []
    for spec in SAMPLERS:
        results = [run(spec, seed) for seed in range(seeds)]
        row = {"sampler": spec, **{key: interval([r[key] for r in results]) for key in results[0]}}
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    print(json.dumps({"seeds": seeds, "tasks": TASKS, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
