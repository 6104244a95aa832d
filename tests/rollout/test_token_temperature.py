"""The temperature of each token follows the policy's entropy: against loops, the card's figure, and what is recorded."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.untrained import Untrained

from turnwise import recipes
from turnwise.engines.generator.logit_shift import tempered
from turnwise.recipes.families.entropy import NormalisedEntropy
from turnwise.rollout.strategies import ENTROPY_SCALE, EntropyTemperature, Independent, TokenTemperature

CARD = [0.01, 0.1, 0.2, 0.5, 1.0, 2.0]


def logits_of(entropy: float) -> torch.Tensor:
    """A row of logits whose softmax has this entropy."""
    row = torch.arange(64, dtype=torch.float64)
    low, high = 0.0, 50.0
    for _ in range(200):
        middle = (low + high) / 2
        p = torch.softmax(row * middle, 0)
        above = float(torch.special.entr(p).sum()) > entropy
        low, high = (middle, high) if above else (low, middle)
    return row * low


def test_the_cards_figure():
    """Card: H = [.01 ... 2], quantile .8, tau .05."""
    scale = NormalisedEntropy(0.8)._scale(torch.tensor(CARD))
    factors = [float((row / tempered(row, 1.0, TokenTemperature(0.05, *scale)))[1]) for row in map(logits_of, CARD)]
    assert factors == pytest.approx([0.95, 0.975, 0.98253, 0.99247, 1.0, 1.05], abs=1e-4)


@given(
    st.lists(st.integers(-40, 40).map(lambda x: x / 8), min_size=2, max_size=9),
    st.floats(0.0, 0.9),
    st.floats(-3.0, 1.0),
    st.floats(0.0, 2.0),
    st.floats(0.0, 2.0),
    st.sampled_from([1.0, 0.6]),
)
def test_against_loops(row, tau, middle, above, below, temperature):
    weights = [math.exp(x / temperature) for x in row]
    entropy = -math.fsum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)
    h = math.log(max(entropy, 1e-8)) - middle
    side = above if h > 0 else below
    h = math.copysign(1.0, h) * (h != 0) if abs(h) >= side else h / side
    found = tempered(torch.tensor(row).double(), temperature, TokenTemperature(tau, middle, above, below))
    assert found.tolist() == pytest.approx([x / (1 + tau * h) for x in row], abs=1e-4)


def test_what_is_masked_stays_masked():
    row = torch.tensor([1.0, -math.inf, 2.0])
    assert tempered(row, 1.0, TokenTemperature(0.5, 0.0, 1.0, 1.0)).tolist()[1] == -math.inf


def grow(world, strategy, **told):
    request = replace(world.request(), last_metrics=told)
    return asyncio.run(strategy.begin(request))


def test_recorded_are_the_probabilities_of_the_distribution_that_was_sampled():
    """Tau is large, so that plain log-probabilities would be seen."""
    world = Untrained("calculator")
    told = dict(zip(ENTROPY_SCALE, (1.0, 1.0, 1.0)))
    group = grow(world, EntropyTemperature(0.5), **told)
    rule, compared = TokenTemperature(0.5, 1.0, 1.0, 1.0), 0
    for trajectory in group.trajectories:
        assert trajectory.guidance == "temperature by entropy"
        ids: list[int] = []
        for turn in trajectory.turns:
            ids = [*([] if turn.restart else ids), *turn.context, *turn.tokens]
            with torch.no_grad():
                rows = world.model(input_ids=torch.tensor([ids])).logits[0].float()
            for k, (token, logp) in enumerate(zip(turn.tokens, turn.logp)):
                row = tempered(rows[len(ids) - len(turn.tokens) + k - 1], 1.0, rule)
                assert logp == pytest.approx(float(torch.log_softmax(row, -1)[token]), abs=1e-3)
                compared += 1
    assert compared > 20
    plain, _ = world.logp(group)
    assert (plain - torch.tensor([x for t in group.trajectories for turn in t.turns for x in turn.logp])).abs().mean() > 0.01


def test_without_a_scale_or_with_tau_0_it_is_independent():
    tokens = lambda group: [[list(turn.tokens) for turn in t.turns] for t in group.trajectories]  # noqa: E731
    plain = tokens(grow(Untrained("calculator"), Independent()))
    assert tokens(grow(Untrained("calculator"), EntropyTemperature(0.5))) == plain
    told = dict(zip(ENTROPY_SCALE, (1.0, 1.0, 1.0)))
    assert tokens(grow(Untrained("calculator"), EntropyTemperature(0.0), **told)) == plain
    assert tokens(grow(Untrained("calculator"), EntropyTemperature(0.9), **told)) != plain


def test_the_method_tells_the_scale_of_its_last_step():
    recipe = recipes.build("hapo")
    assert recipe.strategy == EntropyTemperature(0.05) and not recipes.build("hapo", tau=0.0).strategy.shifts_logits
    objective = recipe.objective
    assert objective.told == dict.fromkeys(ENTROPY_SCALE, 0.0)  # nothing before the first step
    assert recipes.build("grpo").objective.told == {}
    piece = next(p for p in objective.gate.parts if isinstance(p, NormalisedEntropy))
    assert piece._scale(torch.tensor(CARD)) == pytest.approx((0.0, math.log(2), math.log(100)), abs=1e-6)
    assert piece._scale(torch.tensor([])) == (0.0, 0.0, 0.0)
