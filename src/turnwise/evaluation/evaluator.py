"""Evaluation: a policy plays fixed tasks, each sample from its own seed, and is summarised with confidence intervals.

pass@k (unbiased), average@k and majority@k over several samples of each task; intervals by bootstrap over tasks. An
environment that reports no success has a reward, but neither a success rate nor the measures that count successes. Does not
know how a policy was trained.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from turnwise.config.settings import Settings
from turnwise.core.protocols import Generator, GroupScorer, Session
from turnwise.core.records import Group, Status, Stop, Task, Trajectory
from turnwise.core.retries import LOST_SHARE, lost_in, tried
from turnwise.core.seeds import stable_seed
from turnwise.errors import EnvironmentFault, HostFault
from turnwise.evaluation.failures import failure
from turnwise.maths import statistics

NO_SUCCESS = "neither environment nor rewards say what is a success, so success, pass@k and majority@k are not measured"
NAMED = 5  # reasons of failed episodes that a summary names


@dataclass(frozen=True)
class Evaluator:
    """``play(key, task, session)`` plays one episode; ``tasks(split, count)`` names the tasks of an evaluation."""

    settings: Settings
    generator: Generator
    play: Callable[..., Coroutine[Any, Any, Trajectory]]
    tasks: Callable[[str, int], Sequence[Task]]
    scorer: GroupScorer | None = None  # rewards beside the environment's
    exact: Callable[[], Mapping[str, float]] = dict  # metrics of the policy that need no episode
    ranked: Callable[[Evaluation], Mapping[str, float]] = lambda played: {}  # of the answers a method ranks first
    steer: Callable[[Session], Session] = lambda session: session  # how a method changes what is sampled

    async def run(self, split: str = "held_out") -> Evaluation:
        s = self.settings

        def one(key: str, task: Task, sample: int) -> Coroutine[Any, Any, Trajectory]:
            return self.play(key, task, self.steer(self.generator.open(stable_seed(s.seed, "evaluate", key))))

        played = await evaluate(self.tasks(split, s.eval_tasks), s.eval_samples, one, wave=s.slots)
        if (fatal := getattr(self.generator, "fatal", None)) is not None:
            raise fatal  # its servers are gone, and a table of failed episodes would say nothing about the model
        played = await scored(played, self.scorer)
        return replace(played, exact={**self.exact(), **self.ranked(played)})


@dataclass(frozen=True)
class Evaluation:
    """All trajectories of an evaluation, task by task."""

    tasks: tuple[Task, ...]
    trajectories: tuple[tuple[Trajectory, ...], ...]  # [task][sample]
    exact: Mapping[str, float] = field(default_factory=dict)  # of the policy itself, not of these episodes

    @property
    def success(self) -> np.ndarray | None:
        """[tasks, samples] of 0 and 1. None if no episode reports success; else an episode without a report has failed."""
        if all(t.success is None for row in self.trajectories for t in row):
            return None
        return self._array(lambda t: bool(t.success))

    @property
    def reward(self) -> np.ndarray:
        """[tasks, samples] of total rewards."""
        return self._array(lambda t: t.reward)

    @property
    def rewards(self) -> dict[str, np.ndarray]:
        """[tasks, samples] of each named reward; an episode that was not given one counts as 0."""
        names = sorted({name for row in self.trajectories for t in row for name in t.rewards})
        given = [[t.rewards for t in row] for row in self.trajectories]
        return {name: np.array([[r.get(name, 0.0) for r in row] for row in given], dtype=float) for name in names}

    def _array(self, measure: Callable[[Trajectory], float]) -> np.ndarray:
        return np.array([[measure(t) for t in row] for row in self.trajectories], dtype=float)

    @property
    def failures(self) -> dict[str, int]:
        """Numbers of failed episodes by reason, the most frequent first."""
        failed = (t.reason for row in self.trajectories for t in row if t.status == Status.FAILED)
        return dict(Counter(failed).most_common())

    def failure_note(self) -> str:
        """How many episodes failed, and why most of them did; empty where none did."""
        if not (failures := self.failures):
            return ""
        played, others = sum(map(len, self.trajectories)), len(failures) - 1
        more = f" ({others} other reasons)" * bool(others)
        return f"{sum(failures.values())} of {played} episodes failed: {next(iter(failures))}{more}"

    def rows(self) -> list[dict[str, Any]]:
        """The first episode of each task, JSON-able."""
        reported = self.success is not None
        return [
            {
                "task": task.key,
                "success": bool(first.success) if reported else None,
                "reward": first.reward,
                **({"rewards": dict(first.rewards)} if first.rewards else {}),
                **({"failure": cause} if (cause := failure(first)) else {}),
                "messages": list(first.messages),
            }
            for task, (first, *_) in zip(self.tasks, self.trajectories)
        ]

    def summary(self, seed: int = 0) -> dict[str, Any]:
        """Every number a table wants, JSON-able."""
        success, reward, rewards = self.success, self.reward, self.rewards
        out: dict[str, Any] = {
            **outcome(success, reward, seed),
            "rewards": {
                name: dict(zip(("mean", "interval"), interval(values, seed))) for name, values in rewards.items()
            },
            "tasks": reward.shape[0],
            "samples": reward.shape[1],
            **_episode_facts([t for row in self.trajectories for t in row]),
            **({"exact": dict(self.exact)} if self.exact else {}),
            "by_difficulty": {},
        }
        for level in sorted({task.difficulty for task in self.tasks}):
            rows = [task.difficulty == level for task in self.tasks]
            of_level = outcome(None if success is None else success[rows], reward[rows], seed)
            out["by_difficulty"][str(level)] = {**of_level, "tasks": sum(rows)}
        notes = [NO_SUCCESS * (success is None), self.failure_note()]
        if note := "; ".join(filter(None, notes)):
            out["note"] = note
        if failures := self.failures:
            out["failures"] = dict(list(failures.items())[:NAMED])
        return out if success is None else out | (per_k_metrics(self, success) if reward.shape[1] > 1 else {})


# -------------------------------------------------------------------- episodes


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
        begun = [tried(play(*job), partial(play, *job), lambda t: t.lost) for job in jobs[begin : begin + wave]]
        played += await asyncio.gather(*begun)
    rows = tuple(tuple(played[n * samples : (n + 1) * samples]) for n in range(len(tasks)))
    return Evaluation(tuple(tasks), rows)


async def scored(evaluation: Evaluation, scorer: GroupScorer | None) -> Evaluation:
    """The evaluation with the samples of each task scored as one group. Raises ``HostFault`` where the machine failed so many
    episodes that the result would say more about it than about the policy, ``EnvironmentFault`` where most failed otherwise."""
    rows = zip(evaluation.tasks, evaluation.trajectories)
    groups = [Group(f"evaluation.{n}", task, samples) for n, (task, samples) in enumerate(rows)]
    if scorer is not None:
        score = scorer.score
        groups = await asyncio.gather(*(tried(score(g), partial(score, g), lost_in) for g in groups))
    played = [t for group in groups for t in group.trajectories]
    lost = [t.reason for t in played if t.lost]
    if len(lost) > LOST_SHARE * len(played):
        raise HostFault(f"the machine failed {len(lost)} of {len(played)} episodes of an evaluation: {lost[-1]}")
    result = replace(evaluation, trajectories=tuple(group.trajectories for group in groups))
    if 2 * sum(result.failures.values()) > len(played):  # no success of 0 %: nobody has played
        raise EnvironmentFault(f"an evaluation has no result: {result.failure_note()}")
    return result


# --------------------------------------------------------------------- numbers


def outcome(success: np.ndarray | None, reward: np.ndarray, seed: int) -> dict[str, Any]:
    """Success and reward with their intervals. Success is None where the environment does not report it."""
    rate, bounds = (None, None) if success is None else interval(success, seed)
    mean, reward_bounds = interval(reward, seed)
    return {"success": rate, "interval": bounds, "reward": mean, "reward_interval": reward_bounds}


def _episode_facts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Counts per episode, and the shares of turns and episodes that a limit cut."""
    n, turns = max(1, len(trajectories)), [turn for t in trajectories for turn in t.turns]
    tokens = sum(t.sampled for t in trajectories)
    return {
        "turns": len(turns) / n,
        "tool_calls": sum(turn.tool_calls for turn in turns) / n,
        "tool_errors": sum(turn.tool_errors for turn in turns) / n,
        "tokens": tokens,
        "tokens_per_turn": tokens / max(1, len(turns)),
        "truncated_turns": sum(turn.stop == Stop.LENGTH for turn in turns) / max(1, len(turns)),
        "truncated": sum(t.status == Status.TRUNCATED for t in trajectories) / n,
        "failed": sum(t.status == Status.FAILED for t in trajectories),
    }


def interval(values: np.ndarray, seed: int) -> tuple[float, list[float] | None]:
    """The mean over tasks and its 95 % interval, of ``values`` [tasks, samples].

    Wilson's for 0 and 1 in single trials, else bootstrap over tasks. A bootstrap of equal numbers would claim certainty:
    of zeros and ones it is Wilson's then, and of other numbers there is no interval."""
    per_task = values.mean(1)
    binary = bool(np.isin(values, (0.0, 1.0)).all())
    if np.ptp(per_task) > 0 and not (binary and values.shape[1] == 1):
        bounds = statistics.bootstrap(per_task, seed=seed)
    elif binary:
        bounds = statistics.wilson(float(per_task.sum()), len(per_task))
    else:
        return float(per_task.mean()), None
    return bounds.estimate, [bounds.low, bounds.high]


def per_k_metrics(evaluation: Evaluation, success: np.ndarray) -> dict[str, Any]:
    """pass@k and majority@k for every power of two up to the number of samples."""
    n, k = success.shape
    sizes = [j for j in (1, 2, 4, 8, 16, 32, 64) if j <= k]
    correct = success.sum(1).astype(int)
    passes = {str(j): float(statistics.pass_at_k(np.full(n, k), correct, j).mean()) for j in sizes}
    # of each task, the answers, and the right one where some sample found it: an unsolved task has no majority that is right
    votes = [[last_message(t) for t in row] for row in evaluation.trajectories]
    truths = [next((last_message(t) for t in row if t.success), None) for row in evaluation.trajectories]
    majority = {
        str(j): float(np.mean([0.0 if t is None else statistics.majority_at_k(v, t, j) for v, t in zip(votes, truths)]))
        for j in sizes
    }
    return {"pass@k": passes, "average@k": float(success.mean()), "majority@k": majority}


def last_message(trajectory: Trajectory) -> str:
    """The last assistant message: the answer of a majority vote."""
    messages = [m["content"] for m in trajectory.messages if m.get("role") == "assistant"]
    return messages[-1].strip() if messages else ""
