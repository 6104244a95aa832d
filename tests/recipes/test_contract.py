"""Every method against its independent oracle, and identities between methods."""

from __future__ import annotations

import dataclasses
import inspect
import math
import statistics

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import agents, objectives, offpolicy, records, reweight, selection, shelf, trust, values
from support.batches import from_oracle, oracle_name, records_of
from support.drawn import DRAWN, ELSEWHERE, drawn, for_oracle
from support.proven import PROVEN_ELSEWHERE

from turnwise import recipes
from turnwise.checks.synthetic import gradient as loss_and_gradient
from turnwise.checks.synthetic import random_policy
from turnwise.core.batch import pack
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal
from turnwise.recipes.recipe import Recipe

ORACLES = {
    "reinforce": objectives.reinforce,
    "rloo": objectives.rloo,
    "grpo": objectives.grpo,
    "dr_grpo": objectives.dr_grpo,
    "fg_expo": objectives.fg_expo,
    "dapo": objectives.dapo,
    "gspo": objectives.gspo,
    "gspo_token": objectives.gspo_token,
    "ppo": objectives.ppo,
    "turn_ppo": objectives.turn_ppo,
    "jet_rl": lambda batch, **hyper: objectives.grpo(
        batch, beta=0.0, **hyper
    ),  # the loss is GRPO's; tests/engines/test_narrow.py has the precision
    "sol_rl": lambda batch, **hyper: objectives.grpo(
        batch, beta=0.0, **hyper
    ),  # the same of what was kept; tests/rollout/test_screened.py has the choice
    "epo": lambda batch, **hyper: agents.epo(batch, history={}, weight=2.0, **hyper),
    "remax": None,  # its own test: the greedy rollout's return is told with each trajectory
    "red_drop": None,  # its own test: the dropping happens at admission
    "see_upo": None,  # its own test: one step for each turn
    "ppo_max": None,  # its own tests: they have a memory
    "safe": None,
}
for module in (trust, offpolicy, reweight, agents, shelf, selection, values):
    for name in recipes.METHODS:
        if name not in ORACLES and name not in PROVEN_ELSEWHERE and hasattr(module, name):
            ORACLES[name] = getattr(module, name)

HYPER = {
    "capo": {"objective": 1e-2, "policy": 1e-4},  # where our defaults are not the card's
    "dapo": {"limit": 14, "cache": 6, "dual": 10.0},  # answers of random batches are short
}

SCORES = {  # their oracle's loss is −w A log π with w detached; ours has the same gradient and another value
    "reinforce", "rloo", "rloo_kl", "cispo", "minpro", "dppo_tv", "dppo_kl", "topr", "vcpo", "rec_one_side", "rec_two_side",
    "rec_ring", "rec_sequence", "red_weight", "kimi_opmd", "asym_re", "rep_forward", "opmd", "minirl", "scale_rl",
    "fiberpo_domain", "aepo", "gpg", "vespo", "digirl",
}  # fmt: skip


def test_every_method_has_an_oracle():
    """Here, or in tests/credit: support/proven.py lists what those files prove."""
    assert sorted([*ORACLES, *PROVEN_ELSEWHERE]) == sorted(recipes.METHODS)


def loss_of(recipe: Recipe, batch, policy):
    objective = recipe.objective
    found = objective(objective.plan(objective.credit(batch)), policy)
    return found.loss, found.stats


def agree(mine, theirs, policy, reference, value=True, terms=0.0):
    """Loss and gradients of ours and of an oracle. ``terms``: how large what is summed up was, for rounding's sake."""
    if value:
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-9, abs=1e-9 + 1e-15 * terms)
    for signal in sorted(policy):
        found = None
        if mine.requires_grad:
            found = torch.autograd.grad(mine, policy[signal].x, retain_graph=True, allow_unused=True)[0]
        expected = torch.tensor(records.gradients(reference, theirs, oracle_name(signal)), dtype=torch.float64)
        found = torch.zeros_like(expected) if found is None else found
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def gradient(recipe, batch, leaves):
    """Loss and gradients of a whole batch."""
    result = loss_and_gradient(recipe.objective, batch, leaves, lambda b: [b])
    return result.loss, result.of


def tied(reference, advantage, fraction) -> bool:
    """Whether the last covariance chosen and the first that is not are equal but for rounding: then either choice is right."""
    found = sorted(reweight.covariances(reference, advantage), reverse=True)
    n = reweight.quota(fraction, len(found))
    return 0 < n < len(found) and found[n - 1] - found[n] < 1e-7


def test_every_setting_of_a_compared_method_is_drawn():
    """In support/drawn.py, or named there with the test that has it."""
    for name in ORACLES:
        known = {*DRAWN.get(name, {}), *ELSEWHERE.get(name, {})}
        assert sorted(known) == sorted(recipes.parameters(name)), name


@pytest.mark.parametrize("name", [name for name, oracle in ORACLES.items() if oracle])
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), overflow=st.booleans(), data=st.data())
def test_oracle(name, seed, overflow, data):
    reference = records.random_batch(seed, overflow=overflow)
    batch, policy = from_oracle(reference)
    hyper = {**HYPER.get(name, {}), **data.draw(drawn(name))}
    advantage, expected, *_ = ORACLES[name](reference, **for_oracle(name, hyper))
    fraction = inspect.signature(reweight.kl_cov).parameters["fraction"].default
    assume(name != "kl_cov" or not tied(reference, advantage, hyper.get("fraction", fraction)))
    recipe = recipes.build(name, **hyper)
    credited = recipe.objective.credit(batch)
    torch.testing.assert_close(
        credited["advantage"].at(TOKEN).x, torch.tensor(advantage, dtype=torch.float64), rtol=1e-8, atol=1e-8
    )
    loss, stats = loss_of(recipe, batch, policy)
    assert all(math.isfinite(float(v)) for v in stats.values())
    # where nothing is clipped, terms of e²⁰ may cancel, and what rounding leaves of them depends on the order of the sum
    size = (policy[Signal.LOGP] - batch.behaviour).x.detach().clamp(max=20).exp() * torch.tensor(advantage).abs()
    agree(loss, expected, policy, reference, value=name not in SCORES, terms=float(size.sum()) / max(1, len(advantage)))


# ------------------------------------------------- methods with more than a loss


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), hyper=drawn("see_upo"))
def test_see_upo_turn_by_turn(seed, hyper):
    """Every yielded part is the oracle's loss of that turn, with the credit multiplied by how later turns have moved."""
    reference = records.random_batch(seed)
    batch, policy = from_oracle(reference)
    recipe = recipes.build("see_upo", **hyper)
    objective = recipe.objective
    credit = agents.see_upo_advantage(reference)
    turns = max(len(t.turns) for t in records.trajectories(reference))
    parts = recipe.control.optimizer_steps(
        objective.credit(batch), 0, lambda b, s: {Signal.LOGP: policy[Signal.LOGP].detach()}
    )
    for k, part in zip(range(turns - 1, -1, -1), parts, strict=True):
        expected = agents.see_upo_turn(reference, k, credit, **hyper)
        agree(objective(objective.plan(part), policy).loss, expected.loss, policy, reference)
        credit = agents.see_upo_next(credit, expected.extra["ratio"])


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_remax_with_the_returns_of_greedy_rollouts(seed, data):
    reference = records.random_batch(seed)
    for group in reference:
        baseline = data.draw(st.floats(-2.0, 2.0))
        for one in group:
            one.facts["greedy_reward"] = baseline
    batch, policy = from_oracle(reference)
    expected = shelf.remax(reference)
    credited = recipes.build("remax").objective.credit(batch)["advantage"].at(TOKEN).x
    torch.testing.assert_close(credited, torch.tensor(expected.advantage, dtype=torch.float64), rtol=1e-8, atol=1e-8)
    agree(loss_of(recipes.build("remax"), batch, policy)[0], expected.loss, policy, reference, value=False)


def test_remax_with_a_baseline_of_zero_is_reinforce():
    """Identity: greedy rollouts that earn nothing take nothing off."""
    recipe = recipes.build("remax")
    batch, leaves = random_policy(pack(records_of([[[2], [1, 3]], [[2, 2]]], 5, asks=recipe.requirements)), 5)
    batch = dataclasses.replace(batch, facts={"greedy_reward": batch.tree.full(TRAJECTORY, 0.0, torch.float64)})
    left = gradient(recipe, batch, leaves)
    right = gradient(recipes.build("reinforce"), batch, leaves)
    torch.testing.assert_close(left[1][Signal.LOGP], right[1][Signal.LOGP])


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_red_drop_after_its_dropping(seed):
    reference = records.random_batch(seed)
    batch, policy = from_oracle(reference)
    expected = reweight.red_drop(reference)
    kept = [i for i, k in enumerate(expected.extra["kept"]) if k]
    batch = batch.put(row=Field(batch.tree, TOKEN, torch.arange(batch.tree.count(TOKEN)))).select(kept)
    mine = {s: Field(batch.tree, TOKEN, f.x[batch["row"].x]) for s, f in policy.items()}
    agree(loss_of(recipes.build("red_drop"), batch, mine)[0], expected.loss, policy, reference, value=False)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), hyper=drawn("ppo_max"))
def test_ppo_max_with_its_running_statistics(seed, hyper):
    reference = records.random_batch(seed)
    batch, policy = from_oracle(reference)
    rewards = [records.total(t) for t in records.trajectories(reference)]
    centre = hyper.get("centre", True)
    theirs = {key: value for key, value in hyper.items() if key != "centre"}
    mean = statistics.fmean(rewards) if centre else 0.0
    expected = agents.ppo_max(reference, mean=mean, std=statistics.stdev(rewards), **theirs)
    loss, _ = loss_of(recipes.build("ppo_max", **hyper), batch, policy)
    agree(loss, expected.loss, policy, reference)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), kl=st.floats(0.0, 1.0), threshold=st.floats(0.1, 0.6), hyper=drawn("safe"))
def test_safe_with_a_state(seed, kl, threshold, hyper):
    reference = records.random_batch(seed)
    batch, policy = from_oracle(reference)
    objective = recipes.build("safe", **hyper).objective
    guard = objective.penalties[1].weight
    objective.memory.of(guard).update(kl=kl, threshold=threshold)
    loss = objective(objective.plan(objective.credit(batch)), policy).loss
    expected = agents.safe(reference, kl_smoothed=kl, kl_threshold=threshold, **for_oracle("safe", hyper))
    agree(loss, expected.loss, policy, reference)


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    hyper=drawn("epo"),
    step=st.integers(0, 90),
    half=st.integers(1, 60),
    past=st.just(0.0) | st.floats(0.05, 1.5),
)
def test_epo_with_a_history(seed, hyper, step, half, past):
    reference = records.random_batch(seed)
    batch, policy = from_oracle(reference)
    objective = recipes.build("epo", half=half, **hyper).objective
    objective.memory.clock = step
    band = objective.penalties[1].penalty
    history = {0: past, 1: past / 2, 2: 0.9}
    for k, mean in history.items():
        objective.memory.of(band).update({f"sum{k}": 5 * mean, f"count{k}": 5.0})
    loss = objective(objective.plan(objective.credit(batch)), policy).loss
    weight = agents.epo_weight(step, half)
    expected = agents.epo(reference, history=history, weight=weight, **for_oracle("epo", hyper))
    agree(loss, expected.loss, policy, reference)
    assert objective.memory.of(band)["count0"] > 5  # this batch has joined the history


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), hyper=drawn("remix"), step=st.integers(0, 150), begin=st.integers(0, 90))
def test_remix_in_later_steps(seed, hyper, step, begin):
    """The KL moves from the base policy to the previous one by the oracle's schedule."""
    reference = records.random_batch(seed)
    batch, policy = from_oracle(reference)
    objective = recipes.build("remix", begin=begin, **hyper).objective
    objective.memory.clock = step
    loss = objective(objective.plan(objective.credit(batch)), policy).loss
    share = reweight.base_share(step, begin)
    expected = reweight.remix(reference, base_weight=share, **for_oracle("remix", hyper))
    agree(loss, expected.loss, policy, reference)


@pytest.mark.parametrize("name", ["st_ppo", "s_ppo", "so_grpo"])
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), floor=st.floats(0.5, 4.0), data=st.data())
def test_clipping_bias(name, seed, floor, data):
    """The side gradient of the clip's normaliser is the gradient of the oracle's clipped part."""
    reference = records.random_batch(seed)
    batch, policy = from_oracle(reference)
    hyper = data.draw(drawn(name))
    objective = recipes.build(name, floor=floor, **hyper).objective
    found = objective(objective.plan(objective.credit(batch)), policy)
    theirs = getattr(offpolicy, name)(reference, **hyper).extra["bias"]
    agree(found.side_losses["clipped"], theirs, policy, reference, value=False)
    side = [torch.tensor([0.0, 2.0])]
    assert objective.scales(batch, {"clipped": side}).gradient == pytest.approx(1 / max(2.0, floor))
    assert objective.scales(batch, {"clipped": [torch.zeros(2)]}).gradient == 1.0


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), base=st.floats(0.1, 1.5))
def test_vcpo_pace(seed, base):
    """lr √min(1, (ESS/B)/base): the oracle has the root for base 1."""
    reference = records.random_batch(seed)
    batch, _ = from_oracle(reference)
    objective = recipes.build("vcpo", base=base).objective
    planned = objective.plan(objective.credit(batch))
    pace = offpolicy.vcpo(reference).extra["pace"]
    assert objective.scales(planned, {}).rate == pytest.approx(min(1.0, pace / math.sqrt(base)), rel=1e-6)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), weight=st.floats(0.0, 1.0), target=st.floats(0.001, 5.0), rate=st.floats(0.001, 0.2))
def test_r2vpo_price(seed, weight, target, rate):
    reference = records.random_batch(seed)
    batch, _ = from_oracle(reference)
    objective = recipes.build("r2vpo", weight=weight, target=target, rate=rate).objective
    objective.plan(objective.credit(batch))
    violation = offpolicy.r2vpo(reference).extra["violation"]
    price = objective.memory.of(objective.penalties[0].weight)["lambda"]
    assert price == pytest.approx(offpolicy.dual_step(weight, violation, target, rate))


def test_signal_to_noise_of_equal_parts():
    objective = recipes.build("oblr_po").objective
    parts = [[1.0, 2.0], [3.0, 1.0], [0.5, -1.0], [2.0, 2.0]]
    sides = {str(k): [torch.tensor(g, dtype=torch.float64)] for k, g in enumerate(parts)}
    assert objective.gradient.scales(None, sides).rate == pytest.approx(offpolicy.snr(parts))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), hyper=drawn("bapo"))
def test_bapo_bounds(seed, hyper):
    reference = records.random_batch(seed)
    batch, _ = from_oracle(reference)
    objective = recipes.build("bapo", **hyper).objective
    planned = objective.plan(objective.credit(batch))
    bounds = tuple(float(planned[objective.gate, side].item) for side in ("low", "high"))
    assert bounds == pytest.approx(offpolicy.bapo(reference, **for_oracle("bapo", hyper)).extra["bounds"])


def test_gspo_is_grpo_ratio_for_one_token():
    """Identity: with one token in each trajectory the sequence ratio is the token ratio."""
    batch, leaves = random_policy(pack(records_of([[[1], [1], [1]], [[1], [1]]], 3)), 3)
    left = gradient(recipes.build("gspo", low=0.2, high=0.2), batch, leaves)
    right = gradient(recipes.build("grpo", clip=0.2, beta=0.0), batch, leaves)
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
    left = gradient(recipes.build("turn_ppo", lam=0.9), batch, leaves)
    right = gradient(recipes.build("ppo", lam=0.9), batch, leaves)
    torch.testing.assert_close(left[1][Signal.LOGP], right[1][Signal.LOGP])


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("grpo", {"clip": -0.1}, "Clip: low is -0.1"),
        ("grpo", {"beta": -1.0}, "weight of"),
        ("ppo", {"gamma": 1.5}, "gamma is 1.5"),
        ("dapo", {"cache": 0}, "OverlongPenalty: cache is 0"),
        ("dapo", {"dual": 0.5}, "dual is 0.5; write a number > 1, or None"),
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

    from turnwise.tasks.budgets import Fixed

    with pytest.raises(ValueError, match="--group-size 2"):
        replace(recipes.build("grpo"), budget=Fixed(8, 1))
    replace(recipes.build("ppo"), budget=Fixed(8, 1))


def test_a_penalty_of_weight_zero_costs_no_signal():
    assert Signal.REFERENCE in recipes.build("grpo").objective.signals
    assert Signal.REFERENCE not in recipes.build("grpo", beta=0.0).objective.signals
