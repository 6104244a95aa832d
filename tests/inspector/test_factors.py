"""Factors of a token's gradient where their values are plain; that they give the gradient of every method is in
tests/recipes/test_every_method.py."""

import pytest
import torch

from turnwise import recipes
from turnwise.checks.synthetic import planned, policy_of, random_groups, random_policy
from turnwise.core.batch import pack
from turnwise.core.levels import TOKEN
from turnwise.core.signals import Signal
from turnwise.inspector.factors.decompose import decompose

TOLERANCE = 1e-9  # relative to the largest gradient of a token, in float64
SHAPES = ([[[3, 2], [4], [1, 2, 1]], [[2], [3, 3]]], [[[0, 2], [5]], [[1], [0, 0, 1], [2, 2]]])


def step(method: str, shape, seed: int):
    recipe = recipes.build(method)
    batch, leaves = random_policy(pack(random_groups(shape, seed, requirements=recipe.requirements)), seed)
    objective = recipe.objective
    part = planned(objective, batch)
    live = {s: x for s, x in leaves.items() if s in objective.signals_with_gradient}
    return objective, part, policy_of(part, live), live


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "dapo", "gspo", "reinforce"])
def test_where_nothing_couples_the_product_is_the_whole_gain(method):
    objective, part, policy, _ = step(method, SHAPES[0], 0)
    factors = decompose(objective, part, policy)
    scale = float(factors.total.abs().max())
    assert scale > 0
    assert float(factors.coupled.abs().max()) <= TOLERANCE * scale
    assert float(factors.by_gate.abs().max()) == 0
    assert torch.allclose(factors.product, factors.total - sum(factors.penalties.values(), torch.zeros(1)), atol=1e-12)


def test_a_token_level_ratio_has_itself_as_slope():
    objective, part, policy, _ = step("grpo", SHAPES[0], 1)
    factors = decompose(objective, part, policy)
    moved = (policy[Signal.LOGP].x.detach() - part.behaviour.at(TOKEN).x).exp()
    assert torch.allclose(factors.ratio, moved)
    assert torch.allclose(factors.ratio_slope, moved)
    assert torch.allclose(factors.credit, factors.weight * factors.advantage)


def test_a_clipped_token_has_gate_slope_zero():
    objective, part, policy, _ = step("grpo", SHAPES[0], 2)
    factors = decompose(objective, part, policy)
    clipped = (factors.gate != factors.ratio) & (factors.credit != 0)
    assert bool(clipped.any()) and bool((factors.gate_slope[clipped] == 0).all())
    open_ = (factors.gate == factors.ratio) & (factors.credit != 0)
    assert torch.allclose(factors.gate_slope[open_], torch.ones(1, dtype=torch.float64))


def test_shares_sum_to_one():
    objective, part, policy, _ = step("grpo", SHAPES[0], 0)
    assert float(decompose(objective, part, policy).share.sum()) == pytest.approx(1)
