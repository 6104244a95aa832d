"""KL estimators as penalties, against plain formulas and the exact gradients of a two-action policy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import records, trust
from support.batches import from_oracle

from turnwise.algebra.penalty import KL
from turnwise.algebra.piece import MicroBatchView, StepView
from turnwise.core.signals import Signal
from turnwise.recipes.families.trust_region import AccuracyWeight

NAMES = {"k1": KL("k1"), "k2": KL("k2"), "k3": KL("k3"), "k3+": KL("k3+"), "weighted k3": KL("k3", corrected=True)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("overflow", [False, True])
def test_estimators(name, overflow):
    reference = records.random_batch(3, overflow=overflow)
    batch, policy = from_oracle(reference)
    found = NAMES[name](MicroBatchView(batch, policy))
    costs = [trust.kl_loss(name)(t.logp, t.reference, t.behaviour) for t in records.tokens(reference)]
    torch.testing.assert_close(found.x.detach(), torch.stack([c.detach() for c in costs]), rtol=1e-9, atol=1e-9)
    mine = torch.autograd.grad(found.x.sum(), policy[Signal.LOGP].x)[0]
    theirs = torch.tensor(records.gradients(reference, torch.stack(costs).sum()), dtype=torch.float64)
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "mu", "gradient"),
    [
        ("k1", 0.7, 0.0),
        ("k2", 0.7, 0.17793),
        ("k3", 0.7, 0.2),
        ("k3+", 0.7, 0.17793),
        ("k2", 0.6, 0.20360),
        ("weighted k3", 0.6, 0.17793),
    ],
)
def test_expected_gradients_of_two_actions(name, mu, gradient):
    """π = (.7, .3), reference (.5, .5), samples from μ: what the estimator's gradient by logit 0 is on average."""
    logit = torch.tensor(math.log(0.7 / 0.3), dtype=torch.float64, requires_grad=True)
    logp = torch.stack([torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)])
    weights = (mu, 1 - mu)
    batch, policy = from_oracle([[records.Trajectory([records.Turn([records.token(-1.0), records.token(-1.0)], 0.0)])]])
    ref = batch[Signal.REFERENCE].map(lambda x: torch.full_like(x, math.log(0.5)))
    behaviour = batch.behaviour.map(lambda x: torch.tensor(weights, dtype=x.dtype).log())
    batch = replace(batch.put({Signal.REFERENCE: ref}), behaviour=behaviour)
    cost = NAMES[name](MicroBatchView(batch, {**policy, Signal.LOGP: policy[Signal.LOGP].map(lambda _: logp)}))
    total = sum(w * c for w, c in zip(weights, cost.x))
    assert float(torch.autograd.grad(total, logit)[0]) == pytest.approx(gradient, abs=2e-5)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), scale=st.floats(0, 2))
def test_the_weight_by_accuracy_stays_within_its_bounds(seed, scale):
    reference = records.random_batch(seed)
    batch, policy = from_oracle(reference)
    found = float(AccuracyWeight(scale)(StepView(batch, policy)).item)
    rewards = [records.total(trajectory) for group in reference for trajectory in group]
    mean = sum(rewards) / len(rewards)
    assert found == pytest.approx(scale * (math.tanh(mean) + 1) / 2, abs=1e-12)
    if 0 <= mean <= 1:
        assert 0.5 * scale - 1e-12 <= found <= 0.881 * scale + 1e-12
