"""Turns of an expert as tasks: which are pivots, what is trained on, and that a profile is taken by the first policy."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.outcomes import group_of
from support.untrained import Untrained

from turnwise.errors import SettingError
from turnwise.rollout.strategies import Independent, OneTurn
from turnwise.store.ledger import SqliteLedger
from turnwise.tasks.admission import AfterDraws
from turnwise.tasks.pool_samplers import PivotFilter
from turnwise.tasks.task_source import TaskStream
from turnwise.training import api

TURNS = "turnwise.environments.expert_turns:KeyDoorTurns,demonstrations=4"
STREAM = TaskStream("test", seed=3)


@given(
    st.lists(st.lists(st.booleans(), min_size=2, max_size=5), min_size=6, max_size=6),
    st.floats(0.05, 1.5),
    st.booleans(),
)
def test_pivots_against_the_card(outcomes, below, renew):
    """Card: pivots are candidates with a variance above 0 and a mean below τ, profiled by the first policy. Every pivot has
    0 < μ < 1; τ = ∞ keeps every turn with a variance."""
    sampler = PivotFilter(6, below, renew).open(STREAM)
    sampler.begin_wave(6)
    first = [sampler.next()[1] for _ in range(6)]
    assert len({task.key for task in first}) == 6
    for number, (task, results) in enumerate(zip(first, outcomes)):
        sampler.observe(group_of(task, results, number))
        sampler.observe(group_of(task, [True] * 4, number))  # a later visit, when all succeed
    mean = [sum(results) / len(results) for results in outcomes]
    variance = [sum((x - m) ** 2 for x in results) / len(results) for m, results in zip(mean, outcomes)]
    pivots = {task.key for task, m, v in zip(first, mean, variance) if v > 0 and m < below and not renew}
    drawn = {sampler.next()[1].key for _ in range(40)}
    assert drawn == (pivots or {task.key for task in first}) if len(pivots) != 1 else drawn == pivots


def test_groups_of_the_profiling_pass_are_not_trained_on():
    task = STREAM.draw(0)
    admitted = [AfterDraws(3)(group_of(task, [True, False], n)) for n in range(5)]
    assert admitted[:3] == ["profiling"] * 3 and all(not isinstance(a, str) for a in admitted[3:])


def test_rollouts_have_one_turn_after_the_experts():
    world = Untrained(TURNS, history=0, context=600)
    group = world.grow(OneTurn(), seed=9, size=3)
    assert all(len(t.turns) == 1 and t.reward in (0.0, 1.0) for t in group.trajectories)
    measured, recorded = world.logp(group)
    assert (measured - recorded).abs().max() < 1e-4  # the expert's words are context


def test_nothing_is_played_after_the_one_turn():
    """Also where the environment would go on."""
    world = Untrained("keydoor")
    assert any(len(t.turns) > 1 for t in world.grow(Independent(), seed=2, size=3).trajectories)
    assert [len(t.turns) for t in world.grow(OneTurn(), seed=2, size=3).trajectories] == [1, 1, 1]


def test_another_environment_is_refused():
    with pytest.raises(SettingError, match="an expert's states and its action there"):
        api.train(method="pivotrl", env="keydoor", steps=1, out="unused")


@pytest.mark.slow
def test_a_run_profiles_first_and_then_trains_on_pivots(tmp_path):
    small = {
        "hidden": 48,
        "layers": 1,
        "cold_steps": 30,
        "cold_batch": 8,
        "groups": 2,
        "group_size": 4,
        "eval_tasks": 0,
        "warmup": 0,
    }
    options = {"pool": 12, "below": 1.0}
    api.train(
        method="pivotrl",
        method_options=options,
        env=TURNS,
        steps=3,
        out=str(tmp_path),
        name="run",
        trackers=(),
        **small,
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["dropped/profiling"] == 12
    with SqliteLedger(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert ledger.group_counts().dropped >= 12
