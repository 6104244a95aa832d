"""Evaluation metrics: how often a policy succeeds on held-out tasks, with confidence intervals. Does not know who plays.

pass@k (unbiased), average@k and majority@k over several samples of each task; intervals by bootstrap over tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnwise.core.records import Status, Task, Trajectory
from turnwise.maths import statistics


@dataclass(frozen=True)
class Evaluation:
    """All trajectories of an evaluation, task by task."""

    tasks: tuple[Task, ...]
    trajectories: tuple[tuple[Trajectory, ...], ...]  # [task][sample]

    @property
    def success(self) -> np.ndarray:
        """[tasks, samples] of 0 and 1."""
        return np.array([[bool(t.success) for t in row] for row in self.trajectories], dtype=float)

    def summary(self, seed: int = 0) -> dict[str, Any]:
        """Every number a table wants, JSON-able."""
        return summarise(self, seed)


async def evaluate(
    tasks: Sequence[Task],
    samples: int,
    play: Callable[[str, Task, int], Coroutine[Any, Any, Trajectory]],
    wave: int = 256,
) -> Evaluation:
    """``play(key, task, sample)`` for every task and sample, in waves."""
    jobs = [(f"{n}.{i}", task, i) for n, task in enumerate(tasks) for i in range(samples)]
    played: list[Trajectory] = []
    for begin in range(0, len(jobs), wave):
        # calling play is what opens a session: all of a wave before the first token
        played += await asyncio.gather(*[play(*job) for job in jobs[begin : begin + wave]])
    rows = tuple(tuple(played[n * samples : (n + 1) * samples]) for n in range(len(tasks)))
    return Evaluation(tuple(tasks), rows)


def summarise(evaluation: Evaluation, seed: int) -> dict[str, Any]:
    success = evaluation.success
    n, k = success.shape
    mean, low, high = interval(success, seed)
    trajectories = [t for row in evaluation.trajectories for t in row]
    turns = [turn for t in trajectories for turn in t.turns]
    out: dict[str, Any] = {
        "success": mean,
        "interval": [low, high],
        "tasks": n,
        "samples": k,
        "turns": len(turns) / max(1, len(trajectories)),
        "tool_calls": sum(turn.tool_calls for turn in turns) / max(1, len(trajectories)),
        "tool_errors": sum(turn.tool_errors for turn in turns) / max(1, len(trajectories)),
        "tokens": sum(t.sampled for t in trajectories),
        "failed": sum(t.status == Status.FAILED for t in trajectories),
        "by_difficulty": {},
    }
    for level in sorted({task.difficulty for task in evaluation.tasks}):
        rows = success[[task.difficulty == level for task in evaluation.tasks]]
        m, lo, hi = interval(rows, seed)
        out["by_difficulty"][str(level)] = {"success": m, "interval": [lo, hi], "tasks": len(rows)}
    if k > 1:
        out |= per_k_metrics(evaluation, seed)
    return out


def interval(success: np.ndarray, seed: int) -> tuple[float, float, float]:
    """Mean success and its 95 % interval: Wilson's for single trials, else bootstrap over tasks."""
    per_task = success.mean(1)
    if success.shape[1] == 1 or np.ptp(per_task) == 0:  # a bootstrap of equal numbers would claim certainty
        bounds = statistics.wilson(float(per_task.sum()), len(per_task))
    else:
        bounds = statistics.bootstrap(per_task, seed=seed)
    return bounds.estimate, bounds.low, bounds.high


def per_k_metrics(evaluation: Evaluation, seed: int) -> dict[str, Any]:
    """pass@k and majority@k for every power of two up to the number of samples."""
    success = evaluation.success
    n, k = success.shape
    sizes = [j for j in (1, 2, 4, 8, 16, 32, 64) if j <= k]
    correct = success.sum(1).astype(int)
    passes = {str(j): float(statistics.pass_at_k(np.full(n, k), correct, j).mean()) for j in sizes}
    majority = {str(j): float(np.mean([_majority(row, j) for row in evaluation.trajectories])) for j in sizes}
    return {"pass@k": passes, "average@k": float(success.mean()), "majority@k": majority}


def _majority(row: Sequence[Trajectory], k: int) -> float:
    """The probability that the most common last message of k samples is right."""
    truth = next((last_message(t) for t in row if t.success), None)
    return statistics.majority_at_k([last_message(t) for t in row], truth, k) if truth is not None else 0.0


def last_message(trajectory: Trajectory) -> str:
    """The last assistant message: the answer of a majority vote."""
    messages = [m["content"] for m in trajectory.messages if m.get("role") == "assistant"]
    return messages[-1].strip() if messages else ""
