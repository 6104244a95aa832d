"""Scores of tasks that a sampler asks the model for before the first step: the prompts of its pool are rendered and read once."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from turnwise.core.records import Task
from turnwise.errors import SettingError

if TYPE_CHECKING:
    from turnwise.rollout.renderer import Renderer
    from turnwise.training.env_spec import EnvSpec


def first_prompts(env_spec: EnvSpec, renderer: Renderer, tasks: Sequence[Task]) -> list[list[int]]:
    """The ids of the first prompt of each task."""

    async def messages(task: Task) -> Any:
        opened = env_spec.make(task)
        first = opened.reset(task.seed)
        first = await first if inspect.isawaitable(first) else first
        if (closed := getattr(opened, "close", None)) is not None and inspect.isawaitable(ended := closed()):
            await ended
        return first

    async def all_messages() -> list[Any]:
        return [await messages(task) for task in tasks]

    with ThreadPoolExecutor(1) as thread:  # a loop of its own: the caller may run inside one
        opened = thread.submit(lambda: asyncio.run(all_messages())).result()
    return [renderer.open(list(found), env_spec.tools).ids for found in opened]


def score_tasks(collector: Any, learner: Any, env_spec: EnvSpec, renderer: Renderer) -> bool:
    """Give a sampler that ``measures`` angles the scores of its pool; False: it does not ask. Called before the first step only:
    the ranking is part of the sampler's state."""
    sampler: Any = getattr(getattr(collector, "sampler", None), "sampler", None)
    if getattr(getattr(sampler, "rule", None), "measures", "") != "angles":
        return False
    if env_spec.agent is not None:
        raise SettingError(
            "this sampler ranks tasks by their prompts, and an agent writes its own; write another --sampler"
        )
    if not hasattr(learner, "model"):
        raise SettingError(
            "this sampler reads hidden states in the learner's process; write --ranks 1 or another --sampler"
        )
    from turnwise.engines.learner.packed_forward import decoder_layers
    from turnwise.engines.learner.signals.angles import prompt_angles

    prompts = first_prompts(env_spec, renderer, sampler.members)
    angles = prompt_angles(learner.model, decoder_layers(learner.model), prompts)
    sampler.set_scores([intra + sampler.rule.inter * inter for intra, inter in angles])
    return True
