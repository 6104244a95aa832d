"""Masks that choose the part of a step with most of its gradient: optimal, relaxed by schedule, and counted by reason."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import records, selection
from support.batches import COUNTS, from_oracle, records_of
from support.segment_helpers import kept

from turnwise import recipes
from turnwise.checks.synthetic import random_policy
from turnwise.core.batch import pack
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.signals import Signal
from turnwise.recipes.families.selection import ceiling, max_variance_subset


def steps_of(name: str, batch, clock: int = 0, **hyper):
    """The objective at the step ``clock`` and the planned batch."""
    objective = recipes.build(name, **hyper).objective
    objective.memory.clock = clock
    return objective, objective.plan(objective.credit(batch))


@settings(deadline=None, max_examples=60)
@given(values=st.lists(st.floats(-3, 3), min_size=1, max_size=9), data=st.data())
def test_no_subset_has_a_larger_variance(values, data):
    """Card: Var(A_S) ≥ Var of any other size-N subset, by brute force."""
    count = data.draw(st.integers(1, len(values)))
    x = torch.tensor(values, dtype=torch.float64)
    chosen = max_variance_subset(x, torch.arange(len(values)), count)
    assert len(set(chosen.tolist())) == count
    best = max(selection.variance([values[i] for i in subset]) for subset in combinations(range(len(values)), count))
    assert float(x[chosen].var(correction=0)) >= best - 1e-5


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), step=st.integers(0, 12), share=st.floats(0.05, 1.0), end=st.floats(0.05, 1.0))
def test_the_schedule_is_linear_and_the_quota_is_held(seed, step, share, end):
    """Card: (N, K) = (1 − q)(N_init, K_init) + q(N_final, K_final); kept tokens ≤ ceil(K%·tokens)."""
    reference = records.random_batch(seed)
    batch, _ = from_oracle(reference)
    progress = min(1.0, step / 10)
    now = (1 - progress) * share + progress * end
    expected = selection.d3s(reference, rows=now, tokens=now)
    hyper = {"rows": share, "rows_end": end, "tokens": share, "tokens_end": end, "ramp": 10}
    _, planned = steps_of("d3s", batch, step, **hyper)
    found = planned["weight"].at(TOKEN).x > 0
    wanted = [id(t) in expected.extra["tokens"] for t in records.tokens(reference)]
    assert found.tolist() == wanted
    rows = [len(records.sampled(t)) for t in records.trajectories(reference)]
    assert int(found.sum()) <= ceiling(now * sum(rows[i] for i in expected.extra["rows"]))


@settings(deadline=None, max_examples=20)
@given(counts=COUNTS, seed=st.integers(0, 10**6))
def test_all_rows_and_all_tokens_are_plain_grpo(counts, seed):
    """Card: N = all, K = 100 is GRPO bit for bit."""
    batch, _ = random_policy(pack(records_of(counts, seed)), seed)
    weights = [
        steps_of(name, batch, **hyper)[1]["weight"].at(TOKEN).x
        for name, hyper in (
            ("d3s", {"rows": 1.0, "rows_end": 1.0, "tokens": 1.0, "tokens_end": 1.0}),
            ("grpo", {"beta": 0.0}),
        )
    ]
    assert torch.equal(*weights)


def test_groups_without_advantage_are_dropped_first():
    """Card: zero-advantage groups are dropped first."""
    batch = pack(records_of([[[2], [2], [2], [2]], [[2], [2], [2], [2]]], 4))
    batch, _ = random_policy(batch, 4)
    reward = torch.zeros(8)
    reward[:2] = 1.0
    batch = replace(batch, reward=batch.reward.map(lambda x: reward.to(x.dtype)))
    planned = steps_of("d3s", batch, rows=0.5, tokens=1.0)[1]
    assert planned["weight"].at(TOKEN).sum(GROUP).x.gt(0).tolist() == [True, False]


@settings(deadline=None, max_examples=20)
@given(counts=COUNTS, seed=st.integers(0, 10**6), share=st.floats(0.1, 1.0))
def test_a_group_keeps_the_share_of_its_turns(counts, seed, share):
    batch, _ = random_policy(pack(records_of(counts, seed)), seed)
    found = (steps_of("dart", batch, share=share)[1]["weight"].at(TOKEN).x > 0).double()
    tree = batch.tree
    turns = batch.tree.size(TOKEN, TURN)
    used = (Field(tree, TOKEN, found).sum(TURN) > 0).to(torch.float64).sum(GROUP).x
    there = (turns > 0).to(torch.float64).sum(GROUP).x
    assert used.tolist() == [ceiling(share * n) for n in there.tolist()]


def test_every_turn_is_kept_by_a_share_of_one():
    batch, _ = random_policy(pack(records_of([[[2, 3], [1]], [[2]]], 5)), 5)
    assert kept(recipes.build("dart", share=1.0), batch).all()


@pytest.mark.parametrize("name", ["d3s", "dart"])
def test_dropped_tokens_are_counted_by_reason(name):
    batch, leaves = random_policy(pack(records_of([[[3, 2], [2], [4]], [[2], [3], [1, 2]]], 6)), 6)
    objective, planned = steps_of(name, batch, **({"share": 0.5} if name == "dart" else {"rows": 0.5, "tokens": 0.5}))
    policy = {s: Field(batch.tree, TOKEN, leaves[s]) for s in (Signal.LOGP, Signal.ENTROPY)}
    stats = objective(planned, policy).stats
    counted = {key: float(value) for key, value in stats.items() if key.startswith("dropped/")}
    dropped = int((planned["weight"].at(TOKEN).x == 0).sum())
    assert sum(counted.values()) == dropped > 0 and all(counted.values())
    assert len(counted) == (2 if name == "d3s" else 1)
    assert planned.tree.count(TRAJECTORY) == 6


@pytest.mark.parametrize("hyper", [{"rows": 0.0}, {"tokens_end": 1.5}, {"ramp": 0}])
def test_nonsense_is_refused(hyper):
    with pytest.raises(ValueError, match="write"):
        recipes.build("d3s", **hyper)
