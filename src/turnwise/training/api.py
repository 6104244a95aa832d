"""Launching a run: start one, go on with one, rehearse one. Settings are refused here, before anything is written."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.protocols import Listener
from turnwise.errors import SettingError, nearest
from turnwise.recipes.recipe import Recipe
from turnwise.store.rundir import RunDir
from turnwise.training import build
from turnwise.training.env_spec import settle
from turnwise.training.events import Stages, silent
from turnwise.training.trainer import TRACKERS, Course


def train(listen: Listener = silent, recipe: Recipe | None = None, **settings: Any) -> dict[str, Any]:
    """Train an agent; the summary of the run.

    ``train(method="grpo", env="calculator", steps=50)``, or with pieces of your own: ``train(recipe=Recipe(...), ...)``
    """
    chosen = settle({**settings, "method": "own"} if recipe else settings)
    described = repr(build.examine(chosen, recipe))  # refuses before anything is written
    for kind in chosen.trackers:
        if kind not in TRACKERS:
            raise SettingError(f"there is no tracker {kind!r}; {nearest(kind, TRACKERS)}")
    run = RunDir.create(chosen.out, chosen.name or free_name(chosen), chosen.as_dict(), described, chosen.seed)
    return Course(chosen, run, Stages(listen), recipe).go()


def resume(path: str | Path, listen: Listener = silent, recipe: Recipe | None = None) -> dict[str, Any]:
    """Go on with a run that was stopped at any moment. A run with a recipe of your own needs it again."""
    run = RunDir.open(path)
    facts = run.facts()
    course = Course(Settings.of(facts["settings"]), run, Stages(listen), recipe)
    if repr(course.recipe) != facts["recipe"]:
        raise SettingError(f"this run was started with another recipe: {facts['recipe']}")
    return course.go()


def free_name(settings: Settings) -> str:
    env = re.sub(r"[^\w-]+", "-", settings.env.split(":")[-1])
    base = f"{settings.title}-{env}-s{settings.seed}"
    n = 1
    while (Path(settings.out) / f"{base}-{n}").exists():
        n += 1
    return f"{base}-{n}"


def dry_run(listen: Listener = silent, **settings: Any) -> dict[str, Any]:
    """Everything up to one real batch and one real update, in a folder that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = 4 if int(settings.get("eval_tasks", 4)) else 0
        wanted = {**settings, "out": folder, "name": "dry", "steps": 1, "eval_tasks": tasks, "trackers": ()}
        if int(wanted.get("cold_steps", -1)) != 0 and wanted.get("model", "tiny") == "tiny":
            wanted["cold_steps"] = 2
        return train(listen, **wanted)
