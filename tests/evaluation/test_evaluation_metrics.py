"""Summaries of an evaluation: reward beside success, and success only where it is reported."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.core.records import Status, Stop, Task, Trajectory, Turn
from turnwise.errors import EnvironmentFault
from turnwise.evaluation.evaluator import Evaluation, interval, scored


def played(reward, success=None, rewards=None, difficulty=1, n=0, **turn):
    turns = (Turn((1,), (2, 3), (-0.1, -0.1), version=(0, 0), reward=reward, **turn),)
    return Trajectory(f"{n}", Task("x", n, "held_out", difficulty), turns, rewards or {}, success=success)


def evaluation(rows):
    return Evaluation(tuple(row[0].task for row in rows), tuple(map(tuple, rows)))


def test_rewards_have_intervals_and_success_is_absent_where_nobody_reports_it():
    rows = [
        [played(r * d, rewards={"digit": r, "short": 1.0}, difficulty=d, n=i)]
        for i, (r, d) in enumerate([(0.1, 1), (0.5, 1), (0.7, 2), (0.9, 2)])
    ]
    found = evaluation(rows).summary()
    json.dumps(found, allow_nan=False)
    assert found["success"] is None and found["interval"] is None and "what is a success" in found["note"]
    assert found["reward"] == pytest.approx((0.1 + 0.5 + 1.4 + 1.8) / 4)
    low, high = found["reward_interval"]
    assert low < found["reward"] < high
    assert found["rewards"]["digit"]["mean"] == pytest.approx(0.55) and len(found["rewards"]["digit"]["interval"]) == 2
    assert (
        found["by_difficulty"]["2"]["reward"] == pytest.approx(1.6) and found["by_difficulty"]["2"]["success"] is None
    )
    assert "pass@k" not in found


def test_where_some_episode_reports_success_the_silent_ones_failed():
    found = evaluation([[played(1.0, True), played(0.0, n=1)], [played(0.0), played(0.0, n=1)]]).summary()
    assert found["success"] == 0.25 and found["average@k"] == 0.25 and found["pass@k"]["2"] == 0.5
    assert "note" not in found
    assert evaluation([[played(0.0)], [played(1.0, True)]]).rows()[0]["success"] is False
    assert evaluation([[played(0.3)]]).rows()[0] == {
        "task": "x/held_out/1/0", "success": None, "reward": 0.3, "messages": [],
    }  # fmt: skip


def test_failed_episodes_are_named_with_the_most_frequent_reason():
    lost = [played(0.0, n=n).failed("the shop is closed" if n else "no shop") for n in range(3)]
    some = evaluation([[t] for t in [*lost, *(played(1.0, True, n=n) for n in range(3, 7))]])
    summary = asyncio.run(scored(some, None)).summary()
    assert summary["failed"] == 3 and summary["failures"] == {"the shop is closed": 2, "no shop": 1}
    assert summary["note"] == "3 of 7 episodes failed: the shop is closed (1 other reasons)"


def test_an_evaluation_in_which_most_episodes_failed_is_an_error_and_not_zero_percent():
    half = [[played(0.0, n=0).failed("the shop is closed")], [played(0.0, n=1)]]
    assert asyncio.run(scored(evaluation(half), None)).summary()["failed"] == 1
    with pytest.raises(EnvironmentFault, match="no result: 2 of 3 episodes failed: the shop is closed"):
        asyncio.run(scored(evaluation([*half, half[0]]), None))


def test_what_a_limit_cut_is_counted():
    rows = [[played(0.0, False, stop=Stop.LENGTH)], [played(1.0, True, n=1)]]
    found = evaluation(rows).summary()
    assert found["truncated_turns"] == 0.5 and found["tokens_per_turn"] == 2.0 and found["truncated"] == 0.0
    cut = Trajectory("c", Task("x", 9), rows[0][0].turns, status=Status.TRUNCATED, success=False)
    assert evaluation([[cut]]).summary()["truncated"] == 1.0


def test_equal_rewards_claim_no_certainty():
    assert interval(np.full((5, 2), 0.5), 0) == (0.5, None)
    mean, (low, high) = interval(np.ones((5, 2)), 0)  # of zeros and ones, Wilson's interval
    assert mean == 1.0 and low < 1.0 and high == 1.0


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=2), min_size=1, max_size=8))
def test_an_interval_holds_its_mean(values):
    mean, bounds = interval(np.array(values), 0)
    assert bounds is None or bounds[0] - 1e-6 * (1 + abs(mean)) <= mean <= bounds[1] + 1e-6 * (1 + abs(mean))
