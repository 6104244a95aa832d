"""Build a run from its inputs and run it. Imports every engine; ``training.api`` makes the cheap refusals first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.config.values import ModelName
from turnwise.core.protocols import Listener
from turnwise.errors import SettingError
from turnwise.recipes.recipe import Recipe
from turnwise.store.checkpoint import verify_model
from turnwise.store.lock import ProcessLock
from turnwise.store.rundir import RunDir
from turnwise.training import engines
from turnwise.training.events import RunEvents
from turnwise.training.interrupt import StopSignals
from turnwise.training.memory import check_resumed_memory
from turnwise.training.plan import GivenObjects, RunPlan
from turnwise.training.refusals import LOADED, check_model_name, rank_places, refuse
from turnwise.training.trainer import Trainer
from turnwise.training.watch import watched


def start_run(plan: RunPlan, listen: Listener, stop: StopSignals) -> dict[str, Any]:
    """Refuse what only torch and the model's files can tell, create the run directory, train. Returns the summary."""
    plan = plan.resolved()
    refuse(plan, LOADED)
    s, threads = plan.settings, engines.select_threads(plan.settings)
    recorded = {**s.as_dict(), "threads": threads}  # a resumed run uses as many: sums depend on it in the last bits
    run_dir = RunDir.create(s.out, s.name or free_name(s), recorded, repr(plan.recipe), s.seed)
    if s.cluster:
        return _on_cluster(run_dir, Settings.of(recorded), plan.notes, listen, stop)
    events = RunEvents(listen)
    with ProcessLock(run_dir.lock), watched(run_dir.path, events, s.env, s.steps):
        return Trainer(plan, run_dir, events, threads, stop, plan.notes).run()


def check_resumed(run_dir: RunDir, plan: RunPlan) -> None:
    """Refuse to go on where the model is gone, damaged or does not fit, before new settings are recorded and it is loaded."""
    refuse(plan, (rank_places,))
    settings, initial = plan.settings, run_dir.path / "initial"
    if not initial.is_dir():
        _check_first_model(run_dir, settings.model)
    check_resumed_memory(plan.resolved().settings, plan.recipe, initial)
    if initial.is_dir() and settings != Settings.of(
        run_dir.metadata()["settings"]
    ):  # otherwise nothing will be recorded
        verify_model(initial)


def _check_first_model(run_dir: RunDir, model: ModelName) -> None:
    """Refuse a run that has no copy of its model yet, where the model is gone: resuming cannot name another."""
    try:
        check_model_name(model)
    except SettingError as fault:
        if model.given_object:
            raise
        raise SettingError(
            f"the run {run_dir.path} has not copied its model yet, and the one that it began with is gone: {model}; put it back "
            "there, or start a new run with --model"
        ) from fault


def continue_run(
    run_dir: RunDir,
    settings: Settings,
    recipe: Recipe | None,
    given: GivenObjects,
    listen: Listener,
    stop: StopSignals,
    message: str = "",
    notes: Sequence[str] = (),
    here: bool = False,
) -> dict[str, Any]:
    """Continue a run from its last checkpoint. Returns the summary; that of a finished run if nothing is left to do. ``here``: in
    this process, also where the settings name a cluster."""
    plan = RunPlan.from_settings(settings, recipe, given)
    recorded = run_dir.metadata()["recipe"]
    if repr(plan.recipe) != recorded:
        raise SettingError(f"this run was started with another recipe: {recorded}")
    events = RunEvents(listen)
    if message:
        updates = plan.recipe.control.updates
        factor = engines.learner_settings(plan.settings, plan.recipe).lr_factor(run_dir.step * updates)
        events.message(f"{message}; the next step has the learning rate {settings.lr * factor:.3g}")
    if run_dir.summary.is_file():
        return Trainer(plan, run_dir, events, plan.settings.threads, stop).run()
    if settings.cluster and not here:
        return _on_cluster(run_dir, settings, notes, listen, stop)
    with ProcessLock(run_dir.lock) as lock, watched(run_dir.path, events, settings.env, settings.steps):
        return Trainer(plan, run_dir, events, plan.settings.threads, stop, notes, died=lock.left_by).run()


def _on_cluster(
    run_dir: RunDir, settings: Settings, notes: Sequence[str], listen: Listener, stop: StopSignals
) -> dict[str, Any]:
    from turnwise.training.cluster.driver import run_on_cluster  # late: imports ray

    return run_on_cluster(run_dir, settings, learn, notes, listen, stop)


def learn(path: Path, notes: Sequence[str], listen: Listener, stop: StopSignals) -> dict[str, Any]:
    """What the learner of a cluster does: the run of ``path`` from its last checkpoint, or from its beginning."""
    run_dir = RunDir.open(path)
    settings = Settings.of(run_dir.metadata()["settings"])
    return continue_run(run_dir, settings, None, GivenObjects(), listen, stop, notes=notes, here=True)


def free_name(settings: Settings) -> str:
    """A name that no run in the output folder has: method, environment, seed, a number."""
    method, env = (re.sub(r"[^\w+-]+", "-", name.split(":")[-1])[:40] for name in (settings.title, settings.env))
    base = f"{method}-{env}-s{settings.seed}"
    n = 1
    while (Path(settings.out) / f"{base}-{n}").exists():
        n += 1
    return f"{base}-{n}"
