"""The loss around a credit: clip, dual clip, KL and average of methods whose oracle checks the credit alone.

The loss is computed once more from the credit, token by token, with the constants of the released code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import records
from support.batches import from_oracle

from turnwise import recipes
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal


@dataclass(frozen=True)
class Around:
    """What released code does with an advantage. ``average``: "token" (all tokens alike) or "row" (all trajectories alike)."""

    average: str
    low: float = 0.2
    high: float = 0.2
    dual: float = math.inf
    kl: float = 0.0


RANKS = (Signal.EFFECTIVE_RANK, Signal.EFFECTIVE_RANK_VELOCITY, Signal.EFFECTIVE_RANK_ACCELERATION)

RELEASED = {
    "adora": Around("token", kl=1e-3),
    "gdpo": Around("token"),
    "mc_grpo": Around("row"),
    "rlfr": Around("row", dual=3.0),
    "unlikeliness": Around("token", kl=0.1),
    "verl_rank": Around("token", kl=1e-3),
}


def by_hand(rows: list[list[records.Token]], advantage: list[float], rule: Around) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    count, filled = sum(len(row) for row in rows), sum(1 for row in rows if row)
    credits = iter(advantage)
    for row in rows:
        for token in row:
            a, share = next(credits), 1 / count if rule.average == "token" else 1 / (len(row) * filled)
            rho = torch.exp(token.logp - token.behaviour)
            gain = torch.minimum(rho * a, rho.clamp(1 - rule.low, 1 + rule.high) * a)
            if a < 0:
                gain = torch.maximum(gain, torch.tensor(rule.dual * a, dtype=torch.float64))
            apart = token.reference - token.logp
            total = total - share * (gain - rule.kl * (torch.exp(apart) - apart - 1))
    return total


@pytest.mark.parametrize("name", sorted(RELEASED))
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_loss_around_the_credit(name, seed):
    reference = records.random_batch(seed)
    batch, policy = from_oracle(reference)
    flat = list(records.tokens(reference))
    scores = torch.tensor([(7 * i + seed) % 11 / 10 for i in range(len(flat))], dtype=torch.float64)
    ranks = torch.tensor([(5 * i + seed) % 7 for i in range(batch.tree.count(TRAJECTORY))], dtype=torch.float64)
    batch = batch.put({Signal.FLOW_DEVIATION: Field(batch.tree, TOKEN, scores)})
    batch = batch.put(dict.fromkeys(RANKS, Field(batch.tree, TRAJECTORY, ranks)))
    objective = recipes.build(name).objective
    planned = objective.plan(objective.credit(batch))
    loss = objective(planned, policy).loss
    advantage, kept = planned[Column.ADVANTAGE].at(TOKEN).x, planned[Column.WEIGHT].x > 0
    rows = [records.sampled(t) for t in records.trajectories(reference)]
    used = kept.split([len(row) for row in rows])
    rows = [row for row, use in zip(rows, used) if use.any()]
    wanted = by_hand(rows, advantage[kept].tolist(), RELEASED[name])
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-8, atol=1e-10)
    if not flat:
        return
    found = torch.autograd.grad(loss, policy[Signal.LOGP].x, allow_unused=True)[0]
    slope = torch.tensor(records.gradients(reference, wanted), dtype=torch.float64)
    torch.testing.assert_close(torch.zeros_like(slope) if found is None else found, slope, rtol=1e-8, atol=1e-10)
