"""A run's checkpoint with another method: what both methods keep is carried over, the rest begins anew.

Weights, the optimiser's state of shared parameters and the position in the stream of tasks are carried over. The memory of
pieces, replay buffers and critics that the first method did not have begin as in a new run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.config.settings import Settings, split_method
from turnwise.store.atomic import remove, write_json
from turnwise.store.checkpoint import latest, load_checkpoint, save_checkpoint
from turnwise.store.rundir import RunDir
from turnwise.training.plan import GivenObjects, RunPlan

OPTIMISER = "optimiser/"


def switch_method(run: RunDir, method: str, given: GivenObjects) -> None:
    """Rewrite settings and the newest checkpoint of ``run``, so that it continues with ``method`` and its defaults."""

    metadata = run.metadata()
    name, credit = split_method(method)
    others = {"method": name, "credit": credit, "method_options": {}, "credit_options": {}}
    settings = Settings.of({**metadata["settings"], **others})
    plan = RunPlan.from_settings(settings, None, given)
    path = latest(run.checkpoints)
    if path is not None:
        saved = load_checkpoint(path)
        tensors, state = _converted(plan, run, saved.tensors, saved.state)
        remove(path)
        save_checkpoint(run.checkpoints, saved.step, tensors, state, keep=settings.keep_checkpoints)
    write_json(run.path / "run.json", {**metadata, "settings": settings.as_dict(), "recipe": repr(plan.recipe)})


def _converted(plan: Any, run: RunDir, tensors: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[Any, Any]:
    """Tensors and state of a learner, sampler and mixture of the new method, with what the old ones share with them."""
    from turnwise.training import build, engines

    settings = plan.settings
    folder = run.path / "initial"
    tokenizer = build.load_tokenizer(settings, plan.env_spec, folder)
    renderer = build.make_renderer(settings, tokenizer)
    learner = engines.make_learner(
        settings, build.load_model(settings, 0, folder), plan.recipe, build.load_teacher(settings)
    )
    fresh = learner.checkpoint_state()
    names = fresh["tensors"]
    carried = {
        name: tensors[name]
        for name in tensors
        if name in names or (name.startswith(OPTIMISER) and name.removeprefix(OPTIMISER).split("/", 1)[-1] in names)
    }
    counts = {name: state["learner"][name] for name in ("version", "steps", "skipped")}
    mixture = plan.data.mixture(renderer, lambda _: None).state_dict()
    same_replay = mixture.keys() == state["mixture"].keys() and _alike(mixture["replay"], state["mixture"]["replay"])
    feed = _feed_state(plan, state["sampler"])
    return {**names, **carried}, {
        **state,
        "learner": {**fresh["scalars"], **counts},
        "memory": {"clock": state["memory"]["clock"], "states": {}},
        "mixture": state["mixture"] if same_replay else mixture,
        "sampler": feed,
    }


def _alike(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys()


def _feed_state(plan: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the feed of tasks: parts of the same kind go on; a sampler of another kind goes on after the draws so far, so
    that no id is issued twice."""
    from turnwise.training.task_feed import TaskFeed

    if plan.settings.offline:
        return dict(before)
    fresh = TaskFeed.open(plan.recipe, plan.data.tasks()).state_dict()
    old = before if "sampler" in before else {"sampler": before}
    kept = {name: old[name] for name in fresh if name in old and _same_kind(fresh[name], old[name])}
    drawn = {"drawn": old["sampler"]["drawn"]} if "drawn" in fresh["sampler"] and "drawn" in old["sampler"] else {}
    return {**fresh, **kept, "sampler": kept.get("sampler", {**fresh["sampler"], **drawn})}


def _same_kind(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() if isinstance(a, Mapping) and isinstance(b, Mapping) else type(a) is type(b)
