"""Evaluation from the command line: of a run, of any model, or of a scripted player."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.records import Task, Trajectory
from turnwise.errors import SettingError
from turnwise.evaluation.metrics import Evaluation, evaluate
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import play_script
from turnwise.store.rundir import RunDir
from turnwise.training import build
from turnwise.training.env_spec import World, settle

SPLITS = ("held_out", "train")


def evaluate_policy(run: str, player: str, split: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of an evaluation, with who was judged on what."""
    if split not in SPLITS:
        raise SettingError(f"no split {split!r}; known: {', '.join(SPLITS)}")
    settings, folder = chosen(run, given)
    if not settings.eval_tasks:
        raise SettingError("eval_tasks is 0; write at least 1")
    world = World.of(settings)
    found = asyncio.run(_scripted(world, player, split) if player else _model(world, folder, split))
    who = player or run or settings.model
    return {"who": who, "environment": settings.env, "split": split, **found.summary(settings.seed)}


def chosen(run: str, given: Mapping[str, Any]) -> tuple[Settings, Path | None]:
    """A run's own settings with what was given on top, and where its model lies."""
    if not run:
        return settle(given), None
    directory = RunDir.open(run)
    folder = next((p for p in (directory.model, directory.path / "initial") if p.is_dir()), None)
    if folder is None:
        raise SettingError(f"the run {run} has no model yet; `turnwise resume {run}` goes on with it")
    extra = {k: v for k, v in given.items() if k not in ("method", "method_options")}
    return Settings.of({**directory.facts()["settings"], **extra}), folder


async def _scripted(world: World, player: str, split: str) -> Evaluation:
    s, renderer = world.settings, Renderer(build.tokenizer_for_scripts())

    def one(key: str, task: Task, sample: int) -> Coroutine[Any, Any, Trajectory]:
        return play_script(player, world.open(task), key, task, renderer, world.unbounded)

    return await evaluate(world.first(split, s.eval_tasks), s.eval_samples, one)


async def _model(world: World, folder: Path | None, split: str) -> Evaluation:
    s = world.settings
    if folder is None and s.model == build.TINY:
        raise SettingError("say what to evaluate: a run directory, --model PATH, or --player oracle")
    tokenizer = build.tokenizer_of(s, world, folder)
    renderer = Renderer(tokenizer)
    generator = build.generator_of(s, build.model_of(s, len(tokenizer), folder), renderer, dialogues=1)
    return await build.evaluator_of(world, renderer, generator).run(split)
