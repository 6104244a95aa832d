"""Every method against its independent oracle, and the one contract all methods pass."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from helpers import COUNTS, from_oracle, records_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import objectives, records

from turnwise import recipes
from turnwise.batch import pack
from turnwise.levels import GROUP, TOKEN, TRAJECTORY, Field
from turnwise.recipe import Recipe
from turnwise.signals import Signal

ORACLES = {
    "reinforce": objectives.reinforce,
    "rloo": objectives.rloo,
    "grpo": objectives.grpo,
    "dr_grpo": objectives.dr_grpo,
    "dapo": lambda batch: objectives.dapo(batch, limit=192, cache=64),
    "gspo": objectives.gspo,
    "ppo": objectives.ppo,
    "turn_ppo": objectives.turn_ppo,
}
LOSS_IS_A_SCORE = {"reinforce", "rloo"}  # their oracle's loss is −A log π; ours has the same gradient and another value


def test_every_method_has_an_oracle():
    assert set(ORACLES) == set(recipes.METHODS)


def loss_of(recipe: Recipe, batch, policy):
    objective = recipe.objective
    return objective(objective.plan(objective.credit(batch)), policy)


@pytest.mark.parametrize("name", recipes.METHODS)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), overflow=st.booleans())
def test_oracle(name, seed, overflow):
    reference = records.random_batch(seed, overflow=overflow)
    advantage, expected = ORACLES[name](reference)
    batch, policy = from_oracle(reference)
    recipe = recipes.build(name)
    credited = recipe.objective.credit(batch)
    torch.testing.assert_close(
        credited["advantage"].at(TOKEN).x, torch.tensor(advantage, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )
    loss, stats = loss_of(recipe, batch, policy)
    if name not in LOSS_IS_A_SCORE:
        assert loss.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)
    assert all(math.isfinite(float(v)) for v in stats.values())
    for signal in (Signal.LOGP, Signal.VALUE):
        mine = torch.autograd.grad(loss, policy[signal].x, retain_graph=True, allow_unused=True)[0]
        theirs = torch.tensor(records.gradients(reference, expected, str(signal)), dtype=torch.float64)
        torch.testing.assert_close(torch.zeros_like(theirs) if mine is None else mine, theirs, rtol=1e-9, atol=1e-12)


def random_policy(batch, seed: int):
    """A policy that has moved, as leaves in float64."""
    g = torch.Generator().manual_seed(seed)
    n = batch.tree.count(TOKEN)
    noise = lambda scale: scale * torch.randn(n, dtype=torch.float64, generator=g)  # noqa: E731
    columns = {
        str(s): Field(batch.tree, TOKEN, batch.behaviour.x.double() + noise(0.2))
        for s in (Signal.REFERENCE, Signal.PROXIMAL)
    }
    columns |= {str(s): Field(batch.tree, TOKEN, noise(0.5)) for s in (Signal.OLD_VALUE, Signal.OLD_ENTROPY)}
    leaves = {
        Signal.LOGP: (batch.behaviour.x.double() + noise(0.3)).requires_grad_(),
        Signal.VALUE: noise(0.5).requires_grad_(),
        Signal.ENTROPY: noise(0.5).abs().requires_grad_(),
    }
    return batch.put(**columns), leaves


def gradient(recipe, batch, leaves, parts):
    """Sum of loss and gradients over a cut of the batch into micro-batches of whole trajectories."""
    objective = recipe.objective
    batch = objective.plan(objective.credit(batch))
    batch = batch.put(_row=Field(batch.tree, TOKEN, torch.arange(batch.tree.count(TOKEN))))
    total = 0.0
    for part in parts(batch):
        policy = {s: Field(part.tree, TOKEN, x[part["_row"].x]) for s, x in leaves.items()}
        loss, _ = objective(part, policy)
        total = total + loss
    if not total.requires_grad:
        return total.detach(), {}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return total.detach(), {s: g for s, g in zip(leaves, found) if g is not None}


@pytest.mark.parametrize("name", recipes.METHODS)
@settings(deadline=None, max_examples=25)
@given(counts=COUNTS, seed=st.integers(0, 10**6), cut=st.integers(1, 40), data=st.data())
def test_contract_packing_and_micro_batches(name, counts, seed, cut, data):
    """Finite; at a level; the same under any packing order and any cut into micro-batches, to 1e-10 in float64."""
    recipe = recipes.build(name)
    batch, leaves = random_policy(pack(records_of(counts, seed)), seed)
    credited = recipe.objective.credit(batch)["advantage"]
    assert credited.level <= GROUP and torch.isfinite(credited.x).all()
    whole, grads = gradient(recipe, batch, leaves, lambda b: [b])
    assert torch.isfinite(whole)
    split, split_grads = gradient(recipe, batch, leaves, lambda b: b.split(cut))
    torch.testing.assert_close(split, whole, rtol=1e-10, atol=1e-10)
    order = data.draw(st.permutations(range(batch.tree.count(TRAJECTORY))))
    shuffled = batch.put(_row=Field(batch.tree, TOKEN, torch.arange(batch.tree.count(TOKEN)))).select(order)
    moved = {s: x.detach()[shuffled["_row"].x].requires_grad_() for s, x in leaves.items()}
    again, again_grads = gradient(recipe, shuffled, moved, lambda b: [b])
    torch.testing.assert_close(again, whole, rtol=1e-6, atol=1e-6)  # rewards are float32: sums depend on their order
    for signal, g in grads.items():
        torch.testing.assert_close(split_grads[signal], g, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(again_grads[signal], g[shuffled["_row"].x], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", recipes.METHODS)
def test_recipe_is_a_short_frozen_expression(name):
    source = inspect.getsource(recipes.method(name))
    body = source.split('"""')[-1]
    assert len([line for line in body.splitlines() if line.strip()]) <= 12
    recipe = recipes.build(name)
    assert recipe == recipes.build(name) and hash(recipe) == hash(recipes.build(name))
    doc = inspect.getdoc(recipes.method(name))
    assert "Paper:" in doc and "Settings:" in doc and "Sure of:" in doc


def test_gspo_is_grpo_ratio_for_one_token():
    """Identity: with one token in each trajectory the sequence ratio is the token ratio."""
    batch, leaves = random_policy(pack(records_of([[[1], [1], [1]], [[1], [1]]], 3)), 3)
    left = gradient(recipes.build("gspo", low=0.2, high=0.2), batch, leaves, lambda b: [b])
    right = gradient(recipes.build("grpo", clip=0.2, beta=0.0), batch, leaves, lambda b: [b])
    torch.testing.assert_close(left[0], right[0])
    torch.testing.assert_close(left[1][Signal.LOGP], right[1][Signal.LOGP])


def test_dr_grpo_is_scaled_rloo_on_policy():
    """Identity: A(Dr.GRPO) = (G−1)/G · A(RLOO)."""
    batch = pack(records_of([[[2], [1, 3], [2], [1]]], 5))
    left = recipes.build("dr_grpo").objective.credit(batch)["advantage"].x
    right = recipes.build("rloo").objective.credit(batch)["advantage"].x
    torch.testing.assert_close(left, right * 3 / 4)


def test_turn_ppo_with_one_token_turns_is_token_ppo():
    """Identity: one token for each turn makes the turn ratio the token ratio (same averaging and lambda)."""
    batch, leaves = random_policy(pack(records_of([[[1, 1, 1]], [[1, 1, 1]]], 7)), 7)
    left = gradient(recipes.build("turn_ppo", lam=0.9), batch, leaves, lambda b: [b])
    right = gradient(recipes.build("ppo", lam=0.9), batch, leaves, lambda b: [b])
    torch.testing.assert_close(left[1][Signal.LOGP], right[1][Signal.LOGP])


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("grpo", {"clip": -0.1}, "clip low is -0.1"),
        ("grpo", {"beta": -1.0}, "weight of"),
        ("ppo", {"gamma": 1.5}, "gamma is 1.5"),
        ("dapo", {"cache": 0}, "overlong"),
        ("dapo", {"dual": 0.5}, "dual clip"),
        ("dr_grpo", {"length": 0}, "length is 0"),
        ("grpo", {"bta": 1}, "did you mean 'beta'"),
        ("grop", {}, "did you mean 'grpo'"),
    ],
)
def test_bad_hyper_parameters_are_refused_in_words(name, options, words):
    with pytest.raises(ValueError, match=words):
        recipes.build(name, **options)


def test_a_group_of_one_is_refused_where_peers_are_compared():
    from dataclasses import replace

    from turnwise.tasks.budget import Fixed

    with pytest.raises(ValueError, match="--group-size 2"):
        replace(recipes.build("grpo"), budget=Fixed(8, 1))
    replace(recipes.build("ppo"), budget=Fixed(8, 1))


def test_a_penalty_of_weight_zero_costs_no_signal():
    assert Signal.REFERENCE in recipes.build("grpo").objective.needs
    assert Signal.REFERENCE not in recipes.build("grpo", beta=0.0).objective.needs
