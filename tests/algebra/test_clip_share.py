"""``clip_share`` counts the tokens whose gradient a gate stops, not those whose ratio it only bends."""

from dataclasses import replace

import pytest
import torch
from support.batches import records_of

from turnwise import recipes
from turnwise.algebra import diagnostics
from turnwise.algebra.gate import CappedWeight, Clip
from turnwise.algebra.piece import MicroBatchView
from turnwise.core.batch import pack
from turnwise.core.levels import TOKEN, Field
from turnwise.core.signals import Signal


def update(gate, seed):
    """Metrics of an update under a gate, with ratios far from 1; ratio and advantage of each token."""
    objective = replace(recipes.build("dr_grpo").objective, gate=gate)
    batch = objective.plan(objective.credit(pack(records_of([[[3, 2], [4]], [[1], [2, 4], [3]]], seed))))
    generator = torch.Generator().manual_seed(seed)
    logp = (-3 * torch.rand(batch.tree.count(TOKEN), generator=generator, dtype=torch.float64)).requires_grad_()
    policy = {Signal.LOGP: Field(batch.tree, TOKEN, logp)}
    stats = objective(batch, policy).stats
    rho = objective.ratio(MicroBatchView(batch, policy)).at(TOKEN).x.detach()
    metrics = diagnostics.finish({name: float(value) for name, value in stats.items()})
    return metrics, rho, batch["advantage"].at(TOKEN).x


@pytest.mark.parametrize("seed", range(5))
def test_a_clip_stops_gradients_on_one_side_only(seed):
    metrics, rho, advantage = update(Clip(0.2, 0.2), seed)
    up, down = (advantage > 0) & (rho > 1.2), (advantage < 0) & (rho < 0.8)
    outside = (rho > 1.2) | (rho < 0.8)
    assert metrics["clip_share"] == pytest.approx(float((up | down).double().mean()))
    assert metrics["clip_share/up"] == pytest.approx(float(up.double().mean()))
    assert metrics["clip_share/down"] == pytest.approx(float(down.double().mean()))
    assert 0 < metrics["clip_share"] < float(outside.double().mean())


@pytest.mark.parametrize("seed", range(5))
def test_a_capped_weight_stops_none(seed):
    metrics, rho, _ = update(CappedWeight(1.2), seed)
    assert bool((rho > 1.2).any()) and metrics["clip_share"] == 0
