"""Evaluate a run, a model or a scripted policy on an environment: what ``turnwise eval`` calls. Knows no statistics."""

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
from turnwise.rollout.scripted import play_scripted
from turnwise.store.rundir import RunDir
from turnwise.training import build, engines
from turnwise.training.env_spec import EnvSpec, resolve_settings

SPLITS = ("held_out", "train")


def evaluate_policy(run: str, player: str, split: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of an evaluation: whose policy, on which environment and split, with which result."""
    if split not in SPLITS:
        raise SettingError(f"no split {split!r}; known: {', '.join(SPLITS)}")
    settings, folder = select_policy(run, overrides)
    if not settings.eval_tasks:
        raise SettingError("eval_tasks is 0; write at least 1")
    env_spec = EnvSpec.from_settings(settings)
    evaluation = asyncio.run(_scripted(env_spec, player, split) if player else _model(env_spec, folder, split))
    who = player or run or settings.model
    return {"who": who, "environment": settings.env, "split": split, **evaluation.summary(settings.seed)}


def select_policy(run: str, overrides: Mapping[str, Any]) -> tuple[Settings, Path | None]:
    """The settings of a run with ``overrides`` on top, and the folder of its model."""
    if not run:
        return resolve_settings(overrides), None
    directory = RunDir.open(run)
    folder = next((p for p in (directory.model, directory.path / "initial") if p.is_dir()), None)
    if folder is None:
        raise SettingError(f"the run {run} has no model yet; `turnwise resume {run}` continues it")
    extra = {k: v for k, v in overrides.items() if k not in ("method", "method_options")}
    return Settings.of({**directory.metadata()["settings"], **extra}), folder


async def _scripted(env_spec: EnvSpec, player: str, split: str) -> Evaluation:
    s, renderer = env_spec.settings, Renderer(build.byte_tokenizer())

    def one(key: str, task: Task, sample: int) -> Coroutine[Any, Any, Trajectory]:
        return play_scripted(player, env_spec.make(task), key, task, renderer, env_spec.scripted_limits)

    return await evaluate(env_spec.first_tasks(split, s.eval_tasks), s.eval_samples, one)


async def _model(env_spec: EnvSpec, folder: Path | None, split: str) -> Evaluation:
    s = env_spec.settings
    if folder is None and s.model == build.TINY:
        raise SettingError("say what to evaluate: a run directory, --model PATH, or --player oracle")
    tokenizer = build.load_tokenizer(s, env_spec, folder)
    renderer = Renderer(tokenizer)
    generator = engines.make_local_generator(s, build.load_model(s, len(tokenizer), folder), renderer, dialogues=1)
    return await build.make_evaluator(env_spec, renderer, generator).run(split)
