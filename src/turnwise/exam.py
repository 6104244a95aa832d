"""The exam: a policy plays fixed tasks, each sample from its own seed. Does not know who asks, nor what is learned from it."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from turnwise import assemble
from turnwise.data import Task, Trajectory
from turnwise.evaluate import Evaluation, evaluate
from turnwise.ports import Generator
from turnwise.rollout.render import Renderer
from turnwise.seeds import stable_seed
from turnwise.world import World


@dataclass(frozen=True)
class Exam:
    world: World
    renderer: Renderer
    generator: Generator

    async def sit(self, split: str = "held_out") -> Evaluation:
        s = self.world.settings
        play = assemble.player(self.world, self.renderer, assemble.sampling_of(s, s.eval_temperature))

        def one(key: str, task: Task, sample: int) -> Coroutine[Any, Any, Trajectory]:
            return play(key, task, self.generator.open(stable_seed(s.seed, "evaluate", key)))

        return await evaluate(self.world.first(split, s.eval_tasks), s.eval_samples, one, wave=s.slots)
