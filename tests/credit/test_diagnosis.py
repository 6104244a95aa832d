"""Diagnostics of credit against slow loops, and on batches made to show one thing."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import COUNTS, records_of

from turnwise import recipes
from turnwise.core.batch import pack
from turnwise.core.levels import TRAJECTORY
from turnwise.credit.metrics import calibration_auc, index_bias, measure_credit


@settings(deadline=None, max_examples=40)
@given(counts=COUNTS, seed=st.integers(0, 10**6))
def test_finite_and_blind_to_packing(counts, seed):
    batch = recipes.build("grpo").objective.credit(pack(records_of(counts, seed)))
    found = measure_credit(batch)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    again = measure_credit(batch.select(order))
    assert found.keys() == again.keys()
    for name, value in found.items():
        assert value == value and again[name] == pytest.approx(value, abs=1e-6), name


@settings(deadline=None, max_examples=60)
@given(counts=COUNTS, seed=st.integers(0, 10**6))
def test_calibration_is_the_share_of_ordered_pairs(counts, seed):
    groups = records_of(counts, seed)
    wins = pairs = 0.0
    for group in groups:
        rows = [(sum(sum(t.logp) for t in x.turns) / x.sampled, x.success) for x in group.trajectories if x.sampled]
        for (a, right), (b, wrong) in itertools.product(rows, rows):
            if right and not wrong:
                pairs += 1
                wins += 1.0 if a > b else 0.5 if a == b else 0.0
    found = calibration_auc(pack(groups))
    assert (found is None) == (pairs == 0)
    if pairs:
        assert found == pytest.approx(wins / pairs, abs=1e-6)


def test_trajectory_credit_has_nothing_inside_and_turn_credit_has():
    batch = pack(records_of([[[2, 2], [3, 1], [1, 1]]], 3))
    whole = measure_credit(recipes.build("grpo").objective.credit(batch))
    assert whole["credit/variance_within"] == pytest.approx(0, abs=1e-9)
    stepped = batch["advantage"] if "advantage" in batch.columns else None
    assert stepped is None
    turnwise = batch.put(advantage=batch.reward)
    assert measure_credit(turnwise)["credit/variance_within"] > 0.01


def test_flat_groups_are_told_apart():
    groups = records_of([[[1], [1]], [[1], [1]], [[1], [1]]], 0)
    paid = ([1.0, 1.0], [0.0, 0.0], [0.0, 1.0])
    rows = []
    for group, rewards in zip(groups, paid):
        turn = lambda t, r: replace(t, turns=tuple(replace(u, reward=r) for u in t.turns))  # noqa: E731
        rows.append(replace(group, trajectories=tuple(turn(t, r) for t, r in zip(group.trajectories, rewards))))
    found = measure_credit(recipes.build("grpo").objective.credit(pack(rows)))
    assert found["groups/all_succeed"] == found["groups/all_fail"] == pytest.approx(1 / 3)
    assert found["groups/distinct"] == pytest.approx(4 / 3)


def test_index_bias_is_nothing_where_all_episodes_are_equally_long():
    batch = pack(records_of([[[1, 1], [1, 1], [1, 1]]], 5))
    outcome = batch.reward.sum(TRAJECTORY)
    assert index_bias(batch, outcome) == pytest.approx(0, abs=1e-7)
    ragged = pack(records_of([[[1], [1, 1, 1], [1, 1]]], 5))
    assert index_bias(ragged, ragged.reward.sum(TRAJECTORY)) > 0
