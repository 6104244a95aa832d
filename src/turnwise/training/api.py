"""Start, resume and rehearse a run. Settings are refused here, before anything is written; the cheapest checks come first,
so that a misspelt name is answered before torch is imported."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from turnwise import environments
from turnwise.config.settings import Settings
from turnwise.core.protocols import Listener
from turnwise.engines.sharded.torchrun import torchrun_rank
from turnwise.errors import SettingError
from turnwise.store.lost_ledger import begin_ledger
from turnwise.store.rundir import RunDir
from turnwise.training import dry_run as dry_running
from turnwise.training.interrupt import Result, StopSignals, in_event_loop
from turnwise.training.plan import GivenObjects, RunPlan, name_rewards
from turnwise.training.refusals import AT_ONCE, RESUMED, WITH_RECIPE, refuse
from turnwise.training.resume import changed_settings, extend
from turnwise.training.watch import silent

if TYPE_CHECKING:
    from turnwise.recipes.recipe import Recipe

P = ParamSpec("P")
R = TypeVar("R")


def _one_of_torchrun(work: Callable[P, R]) -> Callable[P, R]:
    """``work`` in rank 0 of the processes that torchrun started; the others serve its learner until the run ends, then end."""

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        started = torchrun_rank()
        if started is None:
            return work(*args, **kwargs)
        if started.rank:
            from turnwise.engines.sharded.worker import main_of_torchrun

            raise SystemExit(main_of_torchrun(started))
        try:
            return work(*args, **kwargs)
        finally:
            from turnwise.engines.sharded.rank_pool import release_ranks

            release_ranks(started)

    return run


@_one_of_torchrun
def train(
    listen: Listener | None = None,
    recipe: Recipe | Callable[..., Recipe] | None = None,
    *,
    config: str | Path = "",
    quiet: bool = False,
    tokenizer: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train an agent and return the summary of the run.

    ``train(method="grpo", env="calculator", steps=50)``; with your own classes and objects: ``train(env=MyEnvironment,
    method=my_recipe, model=my_model, tokenizer=my_tokenizer)``; or from a file: ``train(config="run.yaml", lr=1e-5)``.

    Progress is shown in a terminal and in a notebook unless ``quiet``; ``listen`` receives the events instead. Ctrl-C, or
    interrupting the cell, writes a checkpoint, from which ``resume`` continues.
    """
    if listen is not None and not callable(listen):
        raise SettingError(
            f"the first argument is a function that receives events, not {listen!r}; write method={listen!r}"
        )
    plan = RunPlan.from_caller(settings, config, recipe, tokenizer)
    refuse(plan, (*AT_ONCE, *WITH_RECIPE))
    with _listener(listen, quiet) as shown:
        return _run(lambda stop: _trainer().start_run(plan, shown, stop))


@_one_of_torchrun
def resume(
    path: str | Path,
    listen: Listener | None = None,
    recipe: Recipe | Callable[..., Recipe] | None = None,
    *,
    env: Any = None,
    reward: Any = None,
    agent: Any = None,
    quiet: bool = False,
    new_ledger: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """Continue a run that was stopped at any moment; ``resume(run, steps=200)`` extends one.

    A recipe, environment, environment argument, reward or agent that ``train`` was given as an object must be given again.
    ``new_ledger``: go on without the ledger, which was lost.
    """
    run_dir = RunDir.open(path)
    settings = Settings.of(run_dir.metadata()["settings"])
    new = changed_settings(settings, changes)  # refuses before the engines are imported
    env_class = environments.name_of(env)[1] if env is not None and not isinstance(env, str) else None
    given = GivenObjects(env_class, rewards=name_rewards({"reward": reward}), agent=agent)
    # a function is called as it was at the start
    given_recipe = recipe(**settings.method_options) if callable(recipe) else recipe
    if given.env_class is None:
        environments.load(env if isinstance(env, str) else settings.env)
    if changes or not run_dir.summary.is_file():
        plan = RunPlan(new, given_recipe, given)
        refuse(plan, RESUMED)
        _trainer().check_resumed(run_dir, plan)
    message = ""
    if new_ledger:
        begin_ledger(run_dir)
    if changes:
        settings, message = extend(run_dir, settings, changes)
    with _listener(listen, quiet) as shown:
        return _run(lambda stop: _trainer().continue_run(run_dir, settings, given_recipe, given, shown, stop, message))


def dry_run(listen: Listener | None = None, **settings: Any) -> dict[str, Any]:
    """A few real steps at these settings in a temporary folder; ``estimate`` in the result says what the whole run will take."""
    return dry_running.dry_run(train, listen or silent, settings)


# --------------------------------------------------------------------- helpers


def _trainer() -> Any:
    """The module that imports the engines, late."""
    from turnwise.training import trainer

    return trainer


def _run(work: Callable[[StopSignals], Result]) -> Result:
    """Run in this thread; in one of its own where this one already runs an event loop."""
    stop = StopSignals()
    return stop.run_in_thread(lambda: work(stop)) if in_event_loop() else work(stop)


@contextlib.contextmanager
def _listener(listen: Listener | None, quiet: bool) -> Iterator[Listener]:
    """What receives the events: the caller's listener, else a display where somebody watches, else nothing."""
    if listen is not None or quiet:
        yield listen or silent
        return
    from turnwise.observe.notebook import default_display

    shown: Callable[[str, Mapping[str, Any]], None] = default_display() or silent
    try:
        yield shown
    finally:
        shown("end", {})
