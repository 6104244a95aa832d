"""Start, resume and rehearse a run. Settings are refused here, before anything is written."""

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
from turnwise.training import engines
from turnwise.training.env_spec import resolve_settings
from turnwise.training.events import RunEvents, silent
from turnwise.training.plan import RunPlan, validate
from turnwise.training.trainer import TRACKERS, Trainer


def train(listen: Listener = silent, recipe: Recipe | None = None, **settings: Any) -> dict[str, Any]:
    """Train an agent and return the summary of the run.

    ``train(method="grpo", env="calculator", steps=50)``, or with a recipe of your own: ``train(recipe=Recipe(...), ...)``
    """
    plan = RunPlan.from_settings(resolve_settings({**settings, "method": "own"} if recipe else settings), recipe)
    validate(plan)
    for tracker in plan.settings.trackers:
        if tracker not in TRACKERS:
            raise SettingError(f"there is no tracker {tracker!r}; {nearest(tracker, TRACKERS)}")
    s, threads = plan.settings, engines.select_threads(plan.settings)
    recorded = {**s.as_dict(), "threads": threads}  # a resumed run uses as many: sums depend on it in the last bits
    run_dir = RunDir.create(s.out, s.name or free_name(s), recorded, repr(plan.recipe), s.seed)
    return Trainer(plan, run_dir, RunEvents(listen), threads).run()


def resume(path: str | Path, listen: Listener = silent, recipe: Recipe | None = None) -> dict[str, Any]:
    """Continue a run that was stopped at any moment. A run with a recipe of your own needs it again."""
    run_dir = RunDir.open(path)
    facts = run_dir.metadata()
    plan = RunPlan.from_settings(Settings.of(facts["settings"]), recipe)
    if repr(plan.recipe) != facts["recipe"]:
        raise SettingError(f"this run was started with another recipe: {facts['recipe']}")
    return Trainer(plan, run_dir, RunEvents(listen), plan.settings.threads).run()


def free_name(settings: Settings) -> str:
    """A name that no run in the output folder has: method, environment, seed, a number."""
    env = re.sub(r"[^\w-]+", "-", settings.env.split(":")[-1])
    base = f"{settings.title}-{env}-s{settings.seed}"
    n = 1
    while (Path(settings.out) / f"{base}-{n}").exists():
        n += 1
    return f"{base}-{n}"


def dry_run(listen: Listener = silent, **settings: Any) -> dict[str, Any]:
    """Everything up to one real batch and one real update, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = 4 if int(settings.get("eval_tasks", 4)) else 0
        settings |= {"out": folder, "name": "dry", "steps": 1, "eval_tasks": tasks, "trackers": ()}
        if int(settings.get("cold_steps", -1)) != 0 and settings.get("model", "tiny") == "tiny":
            settings["cold_steps"] = 2
        return train(listen, **settings)
