"""Defaults of pieces are those of the method they were written for: who composes by hand gets the paper's numbers."""

from __future__ import annotations

import pytest
from support.batches import records_of

from turnwise import recipes
from turnwise.algebra.gate import RatioRegression
from turnwise.algebra.value import LambdaReturn, Measured
from turnwise.core.batch import pack
from turnwise.core.signals import Signal
from turnwise.recipes.families.actor_critic import KLController
from turnwise.recipes.families.entropy import CovarianceClip, DampEntropyChange, quota
from turnwise.recipes.families.off_policy import GammaWeight, TwoSided
from turnwise.recipes.families.tool_agents import InformationClip
from turnwise.recipes.families.trust_region import BalancedClip, DualVariable, Fibration, SigmoidGate, WideningClip


@pytest.mark.parametrize(
    "method, piece",
    [
        ("clip_cov", CovarianceClip()),
        ("rec_ring", TwoSided(far_low=0.6, far_high=2.0)),
        ("bapo", BalancedClip()),
        ("ctpo", WideningClip()),
        ("a2tgpo", InformationClip()),
        ("steer", DampEntropyChange()),
        ("fiberpo", Fibration()),
        ("vespo", GammaWeight()),
        ("bpo", RatioRegression(LambdaReturn(1.0, 0.95) - Measured(Signal.OLD_SECOND_VALUE), 1e-3)),
        ("sapo", SigmoidGate()),
        ("r2vpo", DualVariable()),
        ("safe", KLController()),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_a_piece_without_arguments_is_the_one_of_its_method(method, piece):
    assert repr(piece) in repr(recipes.build(method))


def test_a_share_of_tokens_is_none_for_nothing_and_else_at_least_one():
    tokens = pack(records_of([[[3], [2]]], 0)).behaviour
    assert [quota(share, tokens) for share in (0.0, 1e-6, 0.5, 1.0)] == [0, 1, 2, 5]


def test_states_are_required_only_where_their_spread_is_asked_for():
    assert "state" in recipes.build("direct_advantage", least=0.1).requirements
    assert "state" not in recipes.build("direct_advantage").requirements
