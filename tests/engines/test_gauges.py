"""Signals that cost more than a forward pass, each against the stock model; planning across micro-batches."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from oracles import reweight

from turnwise import recipes
from turnwise.algebra.gradient import LayerNoise
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN
from turnwise.core.signals import Signal
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.errors import SignalError

PREDICTED = (Signal.PREDICTED_LOGP_CHANGE, Signal.PREDICTED_LOGIT_SQUARE, Signal.PREDICTED_LOGIT_MEAN)


def rows(batch):
    """(token number, ids before it, the id, temperature) of every sampled token."""
    s = batch.sequences
    for n, at in enumerate(s.sampled_at.tolist()):
        begin = int(s.start[torch.searchsorted(s.start, at, right=True) - 1])
        yield n, s.ids[begin:at], int(s.ids[at]), float(batch.temperature.at(TOKEN).x[n]) or 1.0


@pytest.fixture
def exact(kit):
    return lambda positions=10**6: LocalLearner(
        kit.make_model(), LearnerSettings(dtype="float64", lr=1e-2, positions=positions)
    )


@pytest.mark.parametrize("positions", [1, 10**6])
def test_hellinger_and_predicted_changes(kit, exact, positions):
    batch = kit.make_batch(1)
    learner = exact(positions)
    learner.reference()
    stock = copy.deepcopy(learner.model)
    with torch.no_grad():
        learner.head.weight.add_(
            0.3 * torch.randn(learner.head.weight.shape, generator=torch.Generator().manual_seed(1))
        )
    found = learner.measure(batch, frozenset({Signal.HELLINGER, *PREDICTED}))
    moved = learner.model
    for n, before, token, temperature in list(rows(batch))[:12]:
        h, p = [], []
        for model in (moved, stock):
            out = model.get_decoder()(
                input_ids=before[None],
                use_cache=False,
                position_ids=torch.arange(len(before))[None],
                layout=_causal(before),
            ).last_hidden_state[0, -1]
            h.append(out)
            p.append(torch.softmax(model.get_output_embeddings()(out) / temperature, 0))
        assert found[Signal.HELLINGER].x[n] == pytest.approx(float(1 - (p[0] * p[1]).sqrt().sum()), abs=1e-9)
        ones = [[1.0] * len(h[0])] * len(p[0])
        sums = reweight.curvature_sums(p[0].tolist(), token, h[0].tolist(), 1e-3, ones)  # lr (1 − β₁)
        assert [float(found[s].x[n]) for s in PREDICTED] == pytest.approx(sums, rel=1e-8)


def _causal(ids):
    from turnwise.engines.learner.layouts import PackedLayout, SharedPrefixes

    start = torch.tensor([0, len(ids)])
    return PackedLayout(start, SharedPrefixes.of(ids, start))


def test_predicted_changes_use_the_optimizers_moments(kit, exact):
    """After a step the preconditioner is AdamW's own, (1 − β₁)/(√v̂ + ε), with v̂ clamped below by its mean."""
    learner, batch = exact(), kit.weighted(kit.make_batch(1), dtype=torch.float64)
    before = learner.measure(batch, frozenset(PREDICTED))[Signal.PREDICTED_LOGP_CHANGE].x
    learner.update(batch, kit.Linear())
    state = learner._policy_optimizer.state[learner.head.weight]
    v = state["exp_avg_sq"] / (1 - 0.999)
    expected = 1e-3 / (v.clamp(min=v.mean()).sqrt() + 1e-8)
    torch.testing.assert_close(learner.preconditioner(), expected)
    assert (learner.measure(batch, frozenset(PREDICTED))[Signal.PREDICTED_LOGP_CHANGE].x > before).all()


@pytest.mark.parametrize("positions", [1, 10**6])
def test_gradient_norms(kit, exact, positions):
    learner, batch = exact(positions), kit.make_batch(2)
    found = learner.measure(batch, frozenset({Signal.GRADIENT_NORM}))[Signal.GRADIENT_NORM]
    assert found.level == TRAJECTORY
    for k in range(len(batch)):
        total = learner.measurer.logp(batch.select([k])).x.sum()
        grads = torch.autograd.grad(total, [p for n, p in learner.trained.items() if n.startswith("model/")], allow_unused=True)
        expected = torch.cat([g.flatten() for g in grads if g is not None]).norm()
        assert float(found.x[k]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("positions", [1, 10**6])
def test_answers(kit, exact, positions):
    """At each turn: the mean log-probability of the gold answer after exactly the history the model had."""
    learner, batch = exact(positions), kit.make_batch(3)
    found = learner.measure(batch, frozenset({Signal.ANSWER_LOGP}))[Signal.ANSWER_LOGP]
    assert found.level == TURN
    turn_of, owner = batch.tree.parents[0].tolist(), batch.tree.parents[1].tolist()
    turns_done = set()
    for n, before, _, temperature in rows(batch):
        if turn_of[n] in turns_done:
            continue
        turns_done.add(turn_of[n])
        answer = torch.tensor(batch.answers[owner[turn_of[n]]])
        ids = torch.cat([before, answer])
        hidden = learner.model.get_decoder()(
            input_ids=ids[None], use_cache=False, layout=_causal(ids), position_ids=torch.arange(len(ids))[None]
        ).last_hidden_state[0]
        logits = learner.head(hidden)[len(before) - 1 : -1] / temperature
        logp = torch.log_softmax(logits, 1).gather(1, answer[:, None]).mean()
        assert float(found.x[turn_of[n]]) == pytest.approx(float(logp), abs=1e-6)
    with pytest.raises(SignalError, match=r"give the environment an answer\(\)"):
        learner.measure(replace(batch, answers=()), frozenset({Signal.ANSWER_LOGP}))


def test_previous_is_the_policy_before_the_last_batch(kit):
    learner, batch = LocalLearner(kit.make_model(), LearnerSettings(lr=1e-2)), kit.weighted(kit.make_batch(1))
    ask = frozenset({Signal.PREVIOUS, Signal.PROXIMAL})
    first = learner.measure(batch, ask)
    assert torch.equal(first[Signal.PREVIOUS].x, first[Signal.PROXIMAL].x)
    learner.update(batch, kit.Linear())
    other = LocalLearner(kit.make_model(), LearnerSettings(lr=1e-2))
    other.load_state_dict(learner.state_dict())  # survives a resume
    for one in (learner, other):
        second = one.measure(batch, ask)
        torch.testing.assert_close(second[Signal.PREVIOUS].x, first[Signal.PROXIMAL].x)
        assert not torch.equal(second[Signal.PROXIMAL].x, first[Signal.PROXIMAL].x)


@pytest.mark.parametrize(
    "name", ["bapo", "steer", "capo", "dgpo", "fiberpo_domain", "vcpo", "oblr_po", "st_ppo", "clip_cov"]
)
def test_planning_does_not_depend_on_micro_batches(kit, name):
    """Methods that plan over the whole step take the same step with one micro-batch or many."""
    recipe = recipes.build(name)
    weights = []
    for positions in (40, 10**6):
        settings = LearnerSettings(dtype="float64", lr=1e-2, positions=positions)
        learner = LocalLearner(kit.make_model(), settings, critic=recipe.critics)
        objective = recipe.objective
        learner.reference()
        for seed in (1, 2):
            batch = kit.make_batch(seed, temperature=1.0)
            batch = objective.credit(batch.put(learner.measure(batch, objective.signals_before_batch)))
            for _ in range(2):
                learner.update(batch, objective)
        weights.append(learner.weights())
    for parameter, w in weights[0].items():
        torch.testing.assert_close(w, weights[1][parameter], rtol=1e-5, atol=1e-8, msg=parameter)


def test_noise_affects_updates_only_and_trains_its_scale(kit):
    batch = kit.weighted(kit.make_batch(1))
    quiet = LocalLearner(kit.make_model(), LearnerSettings(lr=1e-2))
    noisy = LocalLearner(kit.make_model(), LearnerSettings(lr=1e-2), noise=LayerNoise(0.5, 1e-1))
    ask = frozenset({Signal.PROXIMAL})
    logps = [one.measure(batch, ask)[Signal.PROXIMAL].x for one in (quiet, noisy)]
    torch.testing.assert_close(*logps, rtol=1e-5, atol=1e-6)  # with noise the stock layers run, which round differently
    before = noisy.noise.log_sigma.detach().clone()
    losses = [one.update(batch, kit.Linear())["loss"] for one in (quiet, noisy)]
    assert losses[0] != losses[1]
    assert not torch.equal(before, noisy.noise.log_sigma)
    again = LocalLearner(kit.make_model(), LearnerSettings(lr=1e-2), noise=LayerNoise(0.5, 1e-1))
    assert again.update(batch, kit.Linear())["loss"] == losses[1]
