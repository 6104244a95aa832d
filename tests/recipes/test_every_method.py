"""The contract of every method. One test for each builds it once and asks all that can be asked without a run: its expression,
its page and flags, the checks of ``turnwise check-method``, statistics, the factors of its gradient, one step on a real (tiny)
model. ``make thorough`` adds random shapes, cuts and orders, and several steps with a crash between them.

That its numbers are right is for ``test_contract.py`` (independent oracles) and ``tests/credit``."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import COUNTS, records_of

from turnwise import recipes
from turnwise.algebra.control import CriticsFirst
from turnwise.checks.method import check_method
from turnwise.checks.synthetic import gradient as loss_and_gradient
from turnwise.checks.synthetic import numbered, planned, policy_of, random_policy
from turnwise.cli.main import main
from turnwise.config.settings import Settings
from turnwise.core.batch import pack
from turnwise.core.levels import GROUP, TRAJECTORY
from turnwise.core.signals import TURN_CRITIC, TURN_CRITIC_TARGET, Signal
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.inspector.factors.decompose import decompose
from turnwise.models.tiny import tiny_model
from turnwise.recipes.catalogue import record_of
from turnwise.training.loop import update_policy

SHAPES = (
    [[[2, 1], [3], [1, 2, 2]], [[2], [1, 1]]],
    [[[1, 1], [2]], [[3, 1], [2, 2], [1]]],
    [[[2], [2, 1]], [[1], [3]]],
)
RAGGED = ([[[3, 2], [4], [1, 2, 1]], [[2], [3, 3]]], [[[0, 2], [5]], [[1], [0, 0, 1], [2, 2]]])
LINES = 12  # of a recipe's body
TOLERANCE = 1e-9  # of factors, relative to the largest gradient of a token, in float64

SIGN_NOT_CHECKED = {
    "information_consistency",  # rewards the entropy of answers; the environment's reward is not read
    "vas",  # teaches values alone; the policy stays as it is
    "grpo_passk",  # credits the lead over the second best, which is 0 wherever two succeed
}
OTHER_SIGN = {
    "discopop": "reinforces failures",  # as published: its loss rises with the margin on a short stretch above 0
    "b_coder": "reinforces failures",  # while V is not fitted, Q of each token is below its target: V less the likeliest's lead
    "direct_advantage": "no trajectory gets a gradient",  # its first batches teach the critic alone
}


@pytest.mark.parametrize("name", recipes.METHODS)
def test_contract(name, capsys, initial):
    recipe = recipes.build(name)
    is_a_short_frozen_expression(name, recipe)
    explains_itself_and_its_flags(name, capsys)
    passes_its_check(name)
    batches = [
        random_policy(pack(records_of(shape, seed, asks=recipe.requirements)), seed)
        for seed, shape in enumerate(RAGGED)
    ]
    for batch, leaves in batches:
        factors_multiply_and_sum_to_the_gradient(recipe, batch, leaves)
    statistics_do_not_change_with_the_backward_pass(recipe, *batches[0])
    takes_a_step(recipe, initial)


def is_a_short_frozen_expression(name, recipe):
    body = inspect.getsource(recipes.method(name)).split('"""')[-1]
    assert len([line for line in body.splitlines() if line.strip()]) <= LINES
    assert recipe == recipes.build(name) and hash(recipe) == hash(recipes.build(name))
    doc = inspect.getdoc(recipes.method(name))
    assert "Paper:" in doc and "Settings:" in doc  # what it is sure of: tests/provenance
    assert not set(recipes.parameters(name)) & {*Settings.__dataclass_fields__}, "a setting has this name already"


def explains_itself_and_its_flags(name, capsys):
    assert main(["explain", name, "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert entry["name"] == name and entry["paper"] and entry["slots"]["advantage"]
    assert main(["explain", name]) == 0
    said = capsys.readouterr().out
    assert "Paper:" in said and "Sure of: " in said
    record, line = record_of(name), " ".join(said.split())
    assert all(f"{code.address} at {code.commit[:12]}" in line for code in (record.code if record else ()))
    with pytest.raises(SystemExit):
        main(["train", name, "--help"])
    text = capsys.readouterr().out
    assert all("--" + parameter.replace("_", "-") in text for parameter in recipes.parameters(name))
    assert "--group-size" in text


def passes_its_check(name):
    """Level, sign, micro-batches, order, finite at the edges, memory, size."""
    report = check_method(name)
    if name in OTHER_SIGN:
        assert all(OTHER_SIGN[name] in problem for problem in report.problems), report.text()
        if name != "direct_advantage":
            return
        report = check_method(recipes.build(name, warm=0))
    assert report.ok, report.text()
    assert bool(report.notes) == (name in SIGN_NOT_CHECKED), report.text()


def factors_multiply_and_sum_to_the_gradient(recipe, batch, leaves):
    """What the inspector shows of a token is what automatic differentiation gives."""
    objective = recipe.objective
    part = planned(objective, batch)
    policy = policy_of(part, {s: x for s, x in leaves.items() if s in objective.signals_with_gradient})
    logp, loss = policy[Signal.LOGP].x, objective(part, policy).loss  # differentiated as by a learner
    (slope,) = torch.autograd.grad(loss, [logp], allow_unused=True) if loss.requires_grad else (None,)
    expected = torch.zeros_like(logp) if slope is None else -slope
    factors = decompose(objective, part, policy)
    scale = float(expected.abs().max()) or 1.0
    assert torch.allclose(factors.total, expected, rtol=0, atol=TOLERANCE * scale)
    assert bool(torch.isfinite(factors.total).all())


def statistics_do_not_change_with_the_backward_pass(recipe, batch, leaves):
    """A learner asks for them when the gradient is on its way, others before they take it."""
    seen = []
    for late in (False, True):
        objective = recipe.objective
        result = objective(objective.plan(objective.credit(batch)), policy_of(numbered(batch), leaves))
        if not late:
            seen.append(dict(result.stats))
        for side in result.side_losses.values():
            if side.requires_grad:
                torch.autograd.grad(side, list(leaves.values()), retain_graph=True, allow_unused=True)
        if result.loss.requires_grad:
            result.loss.backward()
        if late:
            seen.append(dict(result.stats))
    early, late = seen
    assert early.keys() == late.keys()
    for key, value in early.items():
        torch.testing.assert_close(
            torch.as_tensor(late[key]), torch.as_tensor(value), rtol=1e-12, atol=1e-12, equal_nan=True
        )


# -------------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def initial():
    return tiny_model(16, 0, hidden=32, layers=2, context=64).state_dict()


def make(initial, recipe):
    model = tiny_model(16, 1, hidden=32, layers=2, context=64)
    model.load_state_dict(initial)
    turns = bool(recipe.objective.signals & {*TURN_CRITIC, *TURN_CRITIC_TARGET})
    teacher = tiny_model(16, 2, hidden=32, layers=2, context=64) if Signal.TEACHER in recipe.objective.signals else None
    parts = {"critic": recipe.critics, "turn_critic": turns, "teacher": teacher, "noise": recipe.smoothing}
    learner = LocalLearner(model, LearnerSettings(lr=1e-3, positions=64), **parts)
    learner.reference()
    return learner, recipe.objective


def without_warm_up(recipe):
    """Three steps are too few for a whole warm-up of critics."""
    critics_first = isinstance(recipe.control, CriticsFirst)
    return replace(recipe, control=replace(recipe.control, warm=1)) if critics_first else recipe


def sampled_by(learner, groups):
    """The same groups as if this very policy had sampled them, give or take a thousandth: who mistrusts the sampler
    would otherwise reject them all."""
    logp = iter(learner.measure(pack(groups), frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL].x.tolist())
    turn = lambda t: replace(t, logp=tuple(next(logp) + 1e-3 * (-1) ** i for i, _ in enumerate(t.tokens)))  # noqa: E731
    trajectory = lambda t: replace(t, turns=tuple(map(turn, t.turns)))  # noqa: E731
    return [replace(g, trajectories=tuple(map(trajectory, g.trajectories))) for g in groups]


def takes_a_step(recipe, initial):
    learner, objective = make(initial, recipe)
    groups = sampled_by(learner, records_of(SHAPES[0], 0, asks=recipe.requirements))
    metrics = update_policy(learner, recipe, groups, 0, objective)
    assert metrics["skipped"] == 0 and metrics["loss"] == metrics["loss"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", recipes.METHODS)
def test_steps_and_a_crash_between_them(name, initial):
    recipe = without_warm_up(recipes.build(name))
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


# ------------------------------------------------------------------ random batches


def gradient(recipe, batch, leaves, parts):
    """Sum of loss and gradients over a cut of the batch into micro-batches of whole trajectories."""
    result = loss_and_gradient(recipe.objective, batch, leaves, parts)
    return result.loss, result.of


@pytest.mark.thorough
@pytest.mark.parametrize("name", recipes.METHODS)
@settings(deadline=None, max_examples=15)
@given(counts=COUNTS, seed=st.integers(0, 10**6), cut=st.integers(1, 40), data=st.data())
def test_packing_and_micro_batches(name, counts, seed, cut, data):
    """Finite; at a level; the same under any packing order and any cut into micro-batches, to 1e-10 in float64."""
    recipe = recipes.build(name)
    batch, leaves = random_policy(pack(records_of(counts, seed, asks=recipe.requirements)), seed)
    credited = recipe.objective.credit(batch)["advantage"]
    assert credited.level <= GROUP and torch.isfinite(credited.x).all()
    whole, grads = gradient(recipe, batch, leaves, lambda b: [b])
    assert torch.isfinite(whole)
    split, split_grads = gradient(recipe, batch, leaves, lambda b: b.split(cut))
    torch.testing.assert_close(split, whole, rtol=1e-10, atol=1e-10)
    order = data.draw(st.permutations(range(batch.tree.count(TRAJECTORY))))
    shuffled = numbered(batch).select(order)
    moved = {s: f.x.detach().requires_grad_() for s, f in policy_of(shuffled, leaves).items()}
    again, again_grads = gradient(recipe, shuffled, moved, lambda b: [b])
    torch.testing.assert_close(again, whole, rtol=1e-5, atol=1e-5)  # rewards are float32: sums depend on their order
    for signal, g in grads.items():
        torch.testing.assert_close(split_grads[signal], g, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            again_grads[signal], policy_of(shuffled, {signal: g})[signal].x, rtol=1e-4, atol=1e-6
        )
