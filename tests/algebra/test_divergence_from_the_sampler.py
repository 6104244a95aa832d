"""The metrics ``kl/behaviour``: estimates of KL(sampler ‖ learner), since the tokens are the sampler's."""

from __future__ import annotations

import pytest
import torch
from oracles import records
from support.batches import from_oracle

from turnwise import recipes
from turnwise.core.levels import TOKEN, Field
from turnwise.core.signals import Signal

SAMPLER, LEARNER = [0.5, 0.25, 0.25], [0.2, 0.5, 0.3]  # probabilities of three tokens
COUNTS = [2, 1, 1]  # a sample in which every token occurs as often as the sampler draws it


def test_k1_and_k3_are_the_divergence_and_k2_is_half_the_mean_square():
    sampler, learner = torch.tensor(SAMPLER).double().log(), torch.tensor(LEARNER).double().log()
    drawn = [i for i, count in enumerate(COUNTS) for _ in range(count)]
    tokens = [records.token(learner[i].item(), behaviour=sampler[i].item()) for i in drawn]
    reference = [[records.Trajectory([records.Turn(tokens, 1.0)]), records.Trajectory([records.Turn([], 0.0)])]]
    batch, _ = from_oracle(reference)
    objective = recipes.build("dapo").objective
    policy = {
        Signal.LOGP: Field(batch.tree, TOKEN, learner[drawn]),
        Signal.ENTROPY: Field(batch.tree, TOKEN, torch.zeros(len(drawn), dtype=torch.float64)),
    }
    stats = objective(objective.plan(objective.credit(batch)), policy).stats
    divergence = float((sampler.exp() * (sampler - learner)).sum())
    assert divergence > 0.1
    assert float(stats["kl/behaviour/k1"]) == pytest.approx(divergence)
    assert float(stats["kl/behaviour"]) == pytest.approx(divergence)
    square = float((sampler.exp() * (sampler - learner) ** 2).sum() / 2)
    assert float(stats["kl/behaviour/k2"]) == pytest.approx(square)
