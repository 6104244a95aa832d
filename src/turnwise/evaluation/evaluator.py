"""The evaluator: a policy plays fixed tasks, each sample from its own seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.protocols import Generator, GroupScorer, Session
from turnwise.core.records import Group, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.evaluation.metrics import Evaluation, evaluate


@dataclass(frozen=True)
class Evaluator:
    """``play(key, task, session)`` plays one episode; ``tasks(split, count)`` names the tasks of an evaluation."""

    settings: Settings
    generator: Generator
    play: Callable[..., Coroutine[Any, Any, Trajectory]]
    tasks: Callable[[str, int], Sequence[Task]]
    scorer: GroupScorer | None = None  # rewards beside the environment's
    exact: Callable[[], Mapping[str, float]] = dict  # metrics of the policy that need no episode
    ranked: Callable[[Evaluation], Mapping[str, float]] = (
        lambda played: {}
    )  # metrics of the answers a method ranks first
    steer: Callable[[Session], Session] = lambda session: session  # how a method changes what is sampled

    async def run(self, split: str = "held_out") -> Evaluation:
        s = self.settings

        def one(key: str, task: Task, sample: int) -> Coroutine[Any, Any, Trajectory]:
            return self.play(key, task, self.steer(self.generator.open(stable_seed(s.seed, "evaluate", key))))

        played = await evaluate(self.tasks(split, s.eval_tasks), s.eval_samples, one, wave=s.slots)
        if (fatal := getattr(self.generator, "fatal", None)) is not None:
            raise fatal  # its servers are gone, and a table of failed episodes would say nothing about the model
        played = played if self.scorer is None else await scored(played, self.scorer)
        return replace(played, exact={**self.exact(), **self.ranked(played)})


async def scored(evaluation: Evaluation, scorer: GroupScorer) -> Evaluation:
    """The evaluation with the samples of each task scored as one group."""
    rows = zip(evaluation.tasks, evaluation.trajectories)
    groups = [Group(f"evaluation.{n}", task, samples) for n, (task, samples) in enumerate(rows)]
    done = await asyncio.gather(*map(scorer.score, groups))
    return replace(evaluation, trajectories=tuple(group.trajectories for group in done))
