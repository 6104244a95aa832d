"""Values of steps, the best action of a state, replayed turns for critics, baselines by token, and critics that are frozen."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import records, selection, shelf
from support.batches import from_oracle, records_of
from support.segment_helpers import criticised, kept, made, slopes

from turnwise import recipes
from turnwise.checks.synthetic import random_policy
from turnwise.core.batch import pack
from turnwise.core.levels import TOKEN, TURN, Field
from turnwise.core.signals import TURN_CRITIC, Signal
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.models.tiny import tiny_model
from turnwise.training.loop import update_policy

SEEDS = st.integers(0, 10**6)
few = settings(deadline=None, max_examples=15)


@few
@given(seed=SEEDS, least=st.floats(-0.5, 0.5))
def test_the_best_action_of_each_state_is_kept(seed, least):
    reference = made(seed)
    batch, policy = criticised(reference)
    wanted = selection.digi_q(reference, least)
    turns = [turn for one in records.trajectories(reference) for turn in one.turns]
    _, found = slopes(recipes.build("digi_q", least=least).objective, batch, policy)
    states = {(g, turn.facts["state"]) for g, one in enumerate(reference) for t in one for turn in t.turns if turn.tokens}
    # the mean is over all states, also those whose best action is not good enough
    expected = [-float(w) / len(states) for turn, w in zip(turns, wanted) for _ in turn.tokens]
    assert found[Signal.LOGP].tolist() == pytest.approx(expected)


def test_one_logged_action_is_filtered_imitation():
    """Card: N = 1 logged action → filtered BC: a turn is kept exactly if its advantage is large enough."""
    batch, _ = random_policy(pack(records_of([[[2, 1]], [[3]], [[1, 2, 2]]], 3)), 3)
    turns = batch.tree.count(TURN)
    critic = {s: Field(batch.tree, TURN, torch.linspace(0, 1, turns) * (s in TURN_CRITIC[:2])) for s in TURN_CRITIC}
    alone = replace(batch, state=Field(batch.tree, TURN, torch.arange(turns)))
    recipe = recipes.build("digi_q", least=0.5)
    planned = recipe.objective.plan(recipe.objective.credit(alone.put(critic)))
    used = planned[recipe.gate.mask].at(TOKEN).x
    expected = (torch.linspace(0, 1, turns) > 0.5)[batch.tree.ancestor(TOKEN, TURN)]
    assert kept(recipe, alone.put(critic)).all() and used.tolist() == expected.tolist()


@few
@given(seed=SEEDS)
def test_archer_learns_from_replayed_turns_by_q_alone(seed):
    """Q of a replayed turn has a gradient; its V, its tokens and so the policy have none."""
    reference = made(seed)
    for one in reference[0]:
        one.facts["origin"] = "replay"
    batch, policy = criticised(reference)
    _, found = slopes(recipes.build("archer", fresh=0).objective, batch, policy)
    replayed = batch.replayed.at(TURN).x & (batch.tree.size(TOKEN, TURN).x > 0)
    assert found[Signal.LOGP][batch.replayed.at(TOKEN).x].abs().max() == 0
    assert found[Signal.V][replayed].abs().max() == 0 and found[Signal.SECOND_V][replayed].abs().max() == 0
    assert (found[Signal.Q][replayed].abs() > 0).any()


@few
@given(seed=SEEDS, clip=st.floats(0.05, 0.5))
def test_optimal_token_baseline(seed, clip):
    reference = records.random_batch(seed)
    for i, token in enumerate(records.tokens(reference)):
        token.facts["collision"] = 0.1 + 0.8 * ((seed + 7 * i) % 13) / 13
    batch, policy = from_oracle(reference)
    column = [token.facts["collision"] for token in records.tokens(reference)]
    batch = batch.put({Signal.COLLISION: Field(batch.tree, TOKEN, torch.tensor(column, dtype=torch.float64))})
    expected = shelf.optimal_token(reference, clip)
    objective = recipes.build("optimal_token", clip=clip).objective
    credited = objective.credit(batch)
    torch.testing.assert_close(credited["advantage"].x, torch.tensor(expected.advantage).double(), rtol=1e-6, atol=1e-7)
    loss = objective(objective.plan(credited), policy).loss
    torch.testing.assert_close(loss, expected.loss, rtol=1e-6, atol=1e-7)


def test_equal_energies_make_it_a_mean_by_token():
    """Identity: with the same W everywhere the baseline is the mean reward to go of the rows that reach the token."""
    batch, _ = random_policy(pack(records_of([[[3], [3], [3]]], 2)), 2)
    flat = {s: batch.tree.full(TOKEN, x, torch.float64) for s, x in ((Signal.PROXIMAL, -1.0), (Signal.COLLISION, 0.3))}
    found = recipes.build("optimal_token", eps=0.0).objective.credit(batch.put(flat))["advantage"].x
    expected = recipes.build("dr_grpo").objective.credit(batch)["advantage"].at(TOKEN).x
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-6)


@few
@given(seed=SEEDS, beta=st.floats(0.05, 2.0), imitation=st.floats(0.0, 2.0))
def test_pairs_of_the_turn_at_which_trajectories_fork(seed, beta, imitation):
    reference = records.random_batch(seed)
    rng = random.Random(seed)
    for one in records.trajectories(reference):
        for turn in one.turns:
            turn.facts["state"], turn.facts["action"] = rng.choice(["a", "a", "a", "b", None]), rng.choice([0, 0, 1])
    batch, policy = from_oracle(reference)
    expected = selection.evocua(reference, beta, imitation)
    recipe = recipes.build("evocua", beta=beta, imitation=imitation)
    loss, found = slopes(recipe.objective, batch.put({Signal.LOGP: policy[Signal.LOGP].detach()}), policy)
    torch.testing.assert_close(loss.detach(), expected.loss.detach(), rtol=1e-8, atol=1e-9)
    wanted = torch.tensor(records.gradients(reference, expected.loss), dtype=torch.float64)
    torch.testing.assert_close(found[Signal.LOGP], wanted, rtol=1e-8, atol=1e-9)


def test_a_pair_shares_its_history():
    """Identity: with one turn each and one state, the pair of turns is the pair of trajectories: DPO."""
    batch, leaves = random_policy(pack(records_of([[[2], [3]], [[1], [2], [2]]], 4)), 4)
    batch = replace(batch, state=batch.state.map(torch.zeros_like))
    policy = {Signal.LOGP: Field(batch.tree, TOKEN, leaves[Signal.LOGP])}
    one = slopes(recipes.build("evocua", imitation=0.0).objective, batch, policy)[1][Signal.LOGP]
    two = slopes(recipes.build("dpo", pairs="formed").objective, batch, policy)[1][Signal.LOGP]
    torch.testing.assert_close(one, two)


# -------------------------------------------------------------- on a real model


def learner_of(recipe):
    settings = LearnerSettings(lr=1e-2, positions=64)
    model = tiny_model(16, 1, hidden=32, layers=1, context=64)
    learner = LocalLearner(model, settings, critic=recipe.critics, separate_critic=True)
    learner.reference()
    return learner


def test_the_sum_of_squared_probabilities():
    learner = learner_of(recipes.build("grpo"))
    batch = pack(records_of([[[2, 1], [3]]], 0))
    found = learner.measure(batch, frozenset({Signal.COLLISION}))[Signal.COLLISION].x
    plain = tiny_model(16, 1, hidden=32, layers=1, context=64)  # the same weights, not prepared for packed batches
    logits = plain(batch.sequences.ids[None, : int(batch.sequences.start[1])]).logits[0]
    first = int(batch.sequences.sampled_at[0])
    torch.testing.assert_close(found[0], logits[first - 1].softmax(-1).square().sum().detach(), rtol=1e-4, atol=1e-5)
    assert ((found > 0) & (found <= 1)).all()


def test_a_critic_learns_first_and_is_frozen_then():
    """Policy unchanged while the critic learns, critic unchanged afterwards, also across a restart."""
    recipe = recipes.build("direct_advantage", warm=2, every=0)
    learner, objective = learner_of(recipe), recipe.objective
    groups = [records_of([[[2, 1], [3]], [[2], [1, 1]]], seed) for seed in range(4)]
    split = lambda: (  # noqa: E731
        {n: p.detach().clone() for n, p in learner.trained.items() if n.startswith("model/")},
        {n: p.detach().clone() for n, p in learner.trained.items() if not n.startswith("model/")},
    )
    same = lambda a, b: all(torch.equal(a[n], b[n]) for n in a)  # noqa: E731
    start = split()
    for step in (0, 1):
        update_policy(learner, recipe, groups[step], step, objective)
    taught = split()
    assert same(start[0], taught[0]) and not same(start[1], taught[1])
    update_policy(learner, recipe, groups[2], 2, objective)
    moved = split()
    assert not same(taught[0], moved[0]) and same(taught[1], moved[1])
    again, restored = learner_of(recipe), recipes.build("direct_advantage", warm=2, every=0).objective
    again.load_state_dict(learner.state_dict())
    restored.memory.load_state_dict(json.loads(json.dumps(objective.memory.state_dict())))
    update_policy(learner, recipe, groups[3], 3, objective)
    update_policy(again, recipe, groups[3], 3, restored)
    assert all(torch.equal(p, again.trained[n]) for n, p in learner.trained.items())


@pytest.mark.parametrize(
    "name, wrong", [("digirl", {"share": 0.0}), ("oapl", {"beta": 0.0}), ("direct_advantage", {"warm": -1})]
)
def test_nonsense_is_refused(name, wrong):
    with pytest.raises(ValueError, match="write"):
        recipes.build(name, **wrong)
