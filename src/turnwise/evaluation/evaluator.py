"""The evaluator: a policy plays fixed tasks, each sample from its own seed.."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.protocols import Generator
from turnwise.core.records import Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.evaluation.metrics import Evaluation, evaluate


@dataclass(frozen=True)
class Evaluator:
    """``play(key, task, session)`` plays one episode; ``tasks(split, count)`` names the tasks of an evaluation."""

    settings: Settings
    generator: Generator
    play: Callable[..., Coroutine[Any, Any, Trajectory]]
    tasks: Callable[[str, int], Sequence[Task]]

    async def run(self, split: str = "held_out") -> Evaluation:
        s = self.settings

        def one(key: str, task: Task, sample: int) -> Coroutine[Any, Any, Trajectory]:
            return self.play(key, task, self.generator.open(stable_seed(s.seed, "evaluate", key)))

        return await evaluate(self.tasks(split, s.eval_tasks), s.eval_samples, one, wave=s.slots)
