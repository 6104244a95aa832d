"""The simulation of the asynchronous loop: cases that can be computed by hand, and laws."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.bench.pipeline import Pipeline, TurnLoad, simulate

EQUAL = Pipeline(groups=2, size=4, decode=lambda n: 0.01, learn=0.5, publish=0.1)


def equal():
    return (TurnLoad(100, 1.0), TurnLoad(50, 0.0))


def heavy(seed: int):
    rng = random.Random(seed)
    return lambda: [
        TurnLoad(1 + min(4000, rng.lognormvariate(4, 1)), rng.lognormvariate(-1, 1)) for _ in range(rng.randint(1, 5))
    ]


def test_a_synchronous_step_is_the_sum_of_its_stages():
    result = simulate(EQUAL, equal)
    assert result.seconds == pytest.approx(1.0 + 1.0 + 0.5 + 0.5 + 0.1)  # sample, wait, sample, learn, publish
    assert result.tokens == pytest.approx(8 * 150 / 3.1) and result.oldest == 0
    assert result.learner == pytest.approx(0.5 / 3.1) and result.generator == pytest.approx(1.5 / 3.1)


def test_a_reproducible_generator_waits_for_all_tools_before_the_next_turns():
    loads = itertools.cycle([(TurnLoad(100, 3.0), TurnLoad(100, 1.0)), (TurnLoad(100, 1.0), TurnLoad(100, 3.0))])
    draw = lambda: (*next(loads), TurnLoad(100))  # noqa: E731
    assert simulate(EQUAL, draw).seconds == pytest.approx(1 + 3 + 1 + 3 + 1 + 0.6)
    assert simulate(replace(EQUAL, staleness="0,continuous"), draw).seconds == pytest.approx(1 + 3 + 1 + 1 + 1 + 0.6)


def test_a_decode_step_that_grows_with_its_batch_shares_the_generator():
    shared = replace(EQUAL, decode=lambda n: 0.01 * n)
    assert simulate(shared, lambda: (TurnLoad(100),)).seconds == pytest.approx(8 * 1.0 + 0.6)
    waves = replace(EQUAL, slots=2)  # four waves of two
    assert simulate(waves, lambda: (TurnLoad(100),)).seconds == pytest.approx(4 * 1.0 + 0.6)


def test_one_step_of_staleness_hides_the_shorter_stage():
    result = simulate(replace(EQUAL, staleness=1, learn=3.0, publish=0.0), equal)
    assert result.seconds == pytest.approx(3.0) and result.learner == pytest.approx(1.0)
    on_one_device = simulate(replace(EQUAL, staleness=1, learn=3.0, publish=0.0, shared=True), equal)
    assert on_one_device.seconds > 4.0  # what is sampled cannot be hidden


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 6), st.floats(0.0, 5.0), st.integers(3, 64))
def test_laws(seed, staleness, learn, slots):
    pipeline = Pipeline(4, 3, lambda n: 0.002 + 0.0001 * n, learn, 0.05, staleness, slots)
    result = simulate(pipeline, heavy(seed), steps=24, warm_up=4)
    assert result.oldest <= staleness
    assert result.seconds >= learn + 0.05 - 1e-9
    assert 0 <= result.generator <= 1 + 1e-9 and 0 <= result.learner <= 1 + 1e-9
    assert result == simulate(pipeline, heavy(seed), steps=24, warm_up=4)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 64))
def test_to_wait_for_all_tools_is_never_faster(seed, tick):
    waits = Pipeline(4, 3, lambda n: 0.004, 0.5, 0.05, 0, tick=tick)
    alone = replace(waits, staleness="0,continuous")
    base, free = (simulate(p, heavy(seed), steps=12, warm_up=2) for p in (waits, alone))
    assert free.seconds <= base.seconds + 1e-9 and free.oldest == base.oldest == 0
    assert free.tokens * free.seconds == pytest.approx(base.tokens * base.seconds)  # the same episodes


def test_staleness_helps_a_heavy_tail_and_four_helps_more_than_one():
    pipeline = Pipeline(8, 8, lambda n: 0.004, learn=2.0, publish=0.1)
    times = [simulate(replace(pipeline, staleness=k), heavy(3), 200, 20).seconds for k in (0, 1, 4)]
    assert times[0] > 1.2 * times[1] > 1.2 * 0.99 * times[2]


def test_late_groups_are_waited_for_dropped_or_kept():
    """The policy of a run decides here, too."""
    pipeline = Pipeline(4, 3, lambda n: 0.002 + 0.0001 * n, 0.05, 0.01)
    wait, drop, keep = (simulate(replace(pipeline, staleness=k), heavy(3), 200, 20) for k in (1, "1,drop", "1,keep"))
    assert wait.oldest <= 1 and drop.oldest <= 1 < keep.oldest
    assert wait.dropped == keep.dropped == 0 < drop.dropped
    assert drop.seconds < wait.seconds and keep.seconds < wait.seconds


@pytest.fixture(scope="module")
def script():
    """benchmarks/pipeline.py as a module."""
    folder = Path(__file__).parents[2] / "benchmarks"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("pipeline_script", folder / "pipeline.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def test_recorded_episodes_stay_in_their_groups_and_in_order(script):
    groups = [[[TurnLoad(10 * g + n)] for n in range(4)] for g in range(3)]
    draw = script.episodes_of([*groups, []], 4)
    drawn = [[draw() for _ in range(4)] for _ in range(6)]
    assert drawn == groups * 2
    short = script.episodes_of([groups[0][:3]], 4)
    assert [short()[0].tokens for _ in range(8)] == [0, 1, 2, 0, 0, 1, 2, 0]


def test_a_step_waits_for_its_slowest_task_and_not_for_as_many_slow_episodes(script):
    """Every tenth group waits 10 s. In steps of two groups every fifth step meets it; were its four episodes spread over other
    groups, four of five would."""
    slow, fast = [TurnLoad(1, 10.0)], [TurnLoad(1, 0.0)]
    together = [[slow] * 4, *[[fast] * 4] * 9]
    apart = [[slow, *[fast] * 3], *[[fast] * 4]] * 4 + [[fast] * 4] * 2
    quick = replace(EQUAL, learn=0.0, publish=0.0)
    seconds = [simulate(quick, script.episodes_of(groups, 4)).seconds for groups in (together, apart)]
    assert seconds == pytest.approx([0.01 + 10 / 5, 0.01 + 10 * 4 / 5])
