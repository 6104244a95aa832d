"""A few real optimiser steps of every method on a real (tiny) model, and the same steps with a crash in between."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from support.batches import records_of

from turnwise import recipes
from turnwise.algebra.control import CriticsFirst
from turnwise.core.batch import pack
from turnwise.core.signals import TURN_CRITIC, TURN_CRITIC_TARGET, Signal
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.models.tiny import tiny_model
from turnwise.training.loop import update_policy

SHAPES = (
    [[[2, 1], [3], [1, 2, 2]], [[2], [1, 1]]],
    [[[1, 1], [2]], [[3, 1], [2, 2], [1]]],
    [[[2], [2, 1]], [[1], [3]]],
)


@pytest.fixture(scope="module")
def initial():
    return tiny_model(16, 0, hidden=32, layers=2, context=64).state_dict()


def make(initial, recipe):
    model = tiny_model(16, 1, hidden=32, layers=2, context=64)
    model.load_state_dict(initial)
    settings = LearnerSettings(lr=1e-3, positions=64)
    turns = bool(recipe.objective.signals & {*TURN_CRITIC, *TURN_CRITIC_TARGET})
    teacher = tiny_model(16, 2, hidden=32, layers=2, context=64) if Signal.TEACHER in recipe.objective.signals else None
    own = {"critic": recipe.critics, "turn_critic": turns, "teacher": teacher, "noise": recipe.smoothing}
    learner = LocalLearner(model, settings, **own)
    learner.reference()
    return learner, recipe.objective


def sampled_by(learner, groups):
    """The same groups as if this very policy had sampled them, give or take a thousandth: who mistrusts the sampler
    would otherwise reject them all."""
    logp = iter(learner.measure(pack(groups), frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL].x.tolist())
    told = lambda turn: replace(turn, logp=tuple(next(logp) + 1e-3 * (-1) ** i for i, _ in enumerate(turn.tokens)))  # noqa: E731
    told_all = lambda t: replace(t, turns=tuple(map(told, t.turns)))  # noqa: E731
    return [replace(g, trajectories=tuple(map(told_all, g.trajectories))) for g in groups]


@pytest.mark.parametrize("name", recipes.METHODS)
def test_steps_and_a_crash_between_them(name, initial):
    recipe = recipes.build(name)
    if isinstance(recipe.control, CriticsFirst):  # three steps are too few for a whole warm-up
        recipe = replace(recipe, control=replace(recipe.control, warm=1))
    learner, objective = make(initial, recipe)
    groups = [
        sampled_by(learner, records_of(shape, seed, asks=recipe.requirements)) for seed, shape in enumerate(SHAPES)
    ]
    for step, batch in enumerate(groups):
        metrics = update_policy(learner, recipe, batch, step, objective)
        assert metrics["skipped"] == 0 and metrics["loss"] == metrics["loss"]
    assert any(not torch.equal(w, initial[n]) for n, w in learner.weights().items() if n in initial)
    first, remembered = make(initial, recipe)
    for step in (0, 1):
        update_policy(first, recipe, groups[step], step, remembered)
    second, restored = make(initial, recipe)
    second.load_state_dict(first.state_dict())
    restored.memory.load_state_dict(json.loads(json.dumps(remembered.memory.state_dict())))
    update_policy(second, recipe, groups[2], 2, restored)
    for n, w in learner.weights().items():
        assert torch.equal(w, second.weights()[n]), n
