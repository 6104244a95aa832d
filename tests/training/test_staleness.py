"""The staleness policy: bounds on what is issued and on the age of what is trained on, whatever the delays."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.training.staleness import StalenessPolicy


@settings(max_examples=120, deadline=None)
@given(
    limit=st.integers(0, 5), count=st.integers(1, 4), seed=st.integers(0, 10**6), slow=st.floats(0, 0.5)
)  # fmt: skip
def test_bounds_hold_whatever_the_delays(limit, count, seed, slow):
    policy, rng = StalenessPolicy(limit), random.Random(seed)
    issued: dict[str, int] = {}
    finish: dict[str, int] = {}
    clock = number = 0
    for step in range(15):
        while True:
            running = sum(finish[k] > clock for k in issued)
            for _ in range(policy.admit(running, len(issued), count)):
                issued[str(number)] = step
                finish[str(number)] = clock + (rng.randint(20, 60) if rng.random() < slow else rng.randint(0, 2))
                number += 1
            assert len(issued) <= (limit + 1) * count
            chosen = policy.select(issued, [k for k in issued if finish[k] <= clock], count, step)
            if chosen is not None:
                break
            assert any(finish[k] > clock for k in issued), "it waits for nothing"
            clock += 1
        assert len(chosen) == len(set(chosen)) == count
        ages = [step - issued.pop(k) for k in chosen]
        assert max(ages) <= limit
        clock += 1


def test_a_slow_group_is_overtaken_until_its_last_step():
    policy = StalenessPolicy(2)
    issued = {"0": 0, "1": 0, "2": 0}
    assert policy.select(issued, ["1", "2"], 1, 0) == ["1"]
    issued = {"0": 0, "2": 0, "3": 1}
    assert policy.select(issued, ["2", "3"], 1, 1) == ["2"]
    issued = {"0": 0, "3": 1, "4": 2}
    assert policy.select(issued, ["3", "4"], 1, 2) is None, "its last step: training waits"
    assert policy.select(issued, ["0", "3", "4"], 1, 2) == ["0"]


def test_overtaking_does_not_gather_more_than_later_steps_can_train():
    policy = StalenessPolicy(2)
    issued = {"0": 0, "1": 0, "2": 1}
    assert policy.select(issued, ["2"], 1, 1) is None, "0 and 1 would both be due in step 2"


def test_it_never_waits_for_nothing():
    """Groups that a short step left over are all ready: waiting could not end."""
    assert StalenessPolicy(1).select({"0": 0, "1": 0, "2": 0}, ["0", "1", "2"], 1, 5) == ["0"]


def test_synchronous_rollouts_come_in_waves_and_in_order():
    policy = StalenessPolicy(0)
    assert policy.admit(1, 1, 4) == 0 and policy.admit(0, 1, 4) == 3
    assert policy.select({"0": 0, "1": 0}, ["1"], 1, 0) is None
    assert policy.select({"0": 0, "1": 0}, ["1", "0"], 1, 0) == ["0"]
