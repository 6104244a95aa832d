"""A few real optimiser steps of every method on a real (tiny) model, and the same steps with a crash in between."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import records_of

from turnwise import recipes
from turnwise.engines.learner import LearnerSettings, LocalLearner
from turnwise.models.tiny import tiny_model
from turnwise.run import improve

SHAPES = ([[[2, 1], [3], [1, 2, 2]], [[2], [1, 1]]], [[[1, 1], [2]], [[3, 1], [2, 2], [1]]], [[[2], [2, 1]], [[1], [3]]])


@pytest.fixture(scope="module")
def initial():
    return tiny_model(16, 0, hidden=32, layers=2, context=64).state_dict()


def make(initial, recipe):
    model = tiny_model(16, 1, hidden=32, layers=2, context=64)
    model.load_state_dict(initial)
    settings = LearnerSettings(lr=1e-3, positions=64)
    learner = LocalLearner(model, settings, critic=recipe.critics, noise=recipe.smoothing)
    learner.reference()
    return learner, recipe.objective


@pytest.mark.parametrize("name", recipes.METHODS)
def test_steps_and_a_crash_between_them(name, initial):
    recipe = recipes.build(name)
    groups = [records_of(shape, seed) for seed, shape in enumerate(SHAPES)]
    learner, objective = make(initial, recipe)
    for step, batch in enumerate(groups):
        metrics = improve(learner, recipe, batch, step, objective)
        assert metrics["skipped"] == 0 and metrics["loss"] == metrics["loss"]
    assert any(not torch.equal(w, initial[n]) for n, w in learner.weights().items() if n in initial)
    first, remembered = make(initial, recipe)
    for step in (0, 1):
        improve(first, recipe, groups[step], step, remembered)
    second, restored = make(initial, recipe)
    second.load_state_dict(first.state_dict())
    restored.memory.load_state_dict(json.loads(json.dumps(remembered.memory.state_dict())))
    improve(second, recipe, groups[2], 2, restored)
    for n, w in learner.weights().items():
        assert torch.equal(w, second.weights()[n]), n
