"""Budgets: totals are conserved, bounds hold, formulas agree with oracles, state survives a restart."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.outcomes import group_of

from turnwise.errors import SettingError, TurnwiseError
from turnwise.recipes.experience import SLOTS, piece
from turnwise.tasks.budgets import (
    FallingWithSuccess,
    Fixed,
    RoundsOfUncertainty,
    TurnPercentile,
    Wide,
    greedy_sizes,
    most_probable_counts,
    student_quantile,
    trim,
    utility,
)
from turnwise.tasks.task_source import TaskStream

STREAM = TaskStream("test", difficulties=(1, 2), seed=3)
CONSERVING = ("fixed", "rollout_gdro", "v0")


def tasks(n: int, begin: int = 0):
    return [STREAM.draw(begin + i) for i in range(n)]


def taught(name: str, size: int = 4):
    """A live budget that has seen some groups: some tasks always solved, some never, some half."""
    live = piece("budget", name).of(8, size).open()
    for round_ in range(6):
        wave = tasks(8)
        for i, (task, n) in enumerate(zip(wave, live.sizes(wave))):
            live.observe(
                group_of(task, [i % 3 == 0 or (i % 3 == 1 and (j + round_) % 2) for j in range(n)], turns=1 + i % 3)
            )
    return live


@pytest.mark.parametrize("name", CONSERVING)
@given(count=st.integers(1, 12), size=st.integers(2, 8))
@settings(max_examples=15, deadline=None)
def test_the_mean_is_conserved(name, count, size):
    live = taught(name, size)
    assert sum(live.sizes(tasks(count))) == size * count


@pytest.mark.parametrize("name", SLOTS["budget"])
def test_state_survives_a_restart(name):
    one = taught(name)
    two = piece("budget", name).of(8, 4).open()
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for _ in range(3):
        assert one.sizes(tasks(8)) == two.sizes(tasks(8))
        assert [one.max_turns(t) for t in tasks(8)] == [two.max_turns(t) for t in tasks(8)]
        for task in tasks(8):
            one.observe(group_of(task, [1, 0]))
            two.observe(group_of(task, [1, 0]))
    assert one.metrics() == two.metrics()


@pytest.mark.parametrize("name", SLOTS["budget"])
def test_no_group_is_larger_than_the_largest(name):
    rule = piece("budget", name).of(8, 4)
    live = rule.open()
    sizes = live.sizes(tasks(8))
    groups = [group_of(t, [i % 2 for i in range(n)]) for t, n in zip(tasks(8), sizes)]
    total = [a + b for a, b in zip(sizes, live.rest(tasks(8), groups))]
    assert max(total) <= rule.largest and min(total) >= 1


def test_nonsense_is_refused():
    for spec in (
        "v0,least=0",
        "dart,easy=1",
        "brorl,width=0",
        "xrpo,first=1",
        "turn_control,percent=0",
        "rollout_gdro,floor=2",
    ):
        with pytest.raises((SettingError, TurnwiseError)):
            piece("budget", spec)


# ------------------------------------------------------------------- oracles


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_the_dynamic_program_equals_brute_force(seed, bins, total):
    rng = np.random.default_rng(seed)
    arms, members = [2, 3, 4, 5], rng.integers(1, 4, bins).tolist()
    logp = np.log(rng.dirichlet(np.ones(4), bins))
    chosen = most_probable_counts(logp, members, arms, total)
    every = list(itertools.product(range(4), repeat=bins))
    spent = lambda c: sum(m * arms[a] for m, a in zip(members, c))  # noqa: E731
    nearest = min((abs(spent(c) - total), spent(c)) for c in every)[1]
    best = max(sum(logp[b, a] for b, a in enumerate(c)) for c in every if spent(c) == nearest)
    assert sum(m * n for m, n in zip(members, chosen)) == nearest
    assert sum(logp[b, arms.index(n)] for b, n in enumerate(chosen)) == pytest.approx(best)


def test_a_single_arm_is_the_fixed_budget():
    live = piece("budget", "rollout_gdro,least=4,most=4").of(8, 4).open()
    assert live.sizes(tasks(8)) == [4] * 8


@given(st.integers(2, 30), st.floats(0, 1))
def test_utility_and_its_gain(n, p):
    q = 1 - p
    assert utility(1, p) == 0 and utility(n, 0.0) == 0 and utility(n, 1.0) == 0
    assert utility(n + 1, p) - utility(n, p) == pytest.approx(q + q**n * (n - (n + 1) * q), abs=1e-9)


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=6), st.integers(2, 10))
@settings(deadline=None)
def test_greedy_spends_all_and_gives_each_unit_to_the_largest_gain(rates, size):
    total = size * len(rates)
    sizes = greedy_sizes(rates, total, 2, 128)
    oracle = [2] * len(rates)
    while sum(oracle) < total:
        gains = [utility(n + 1, p) - utility(n, p) for n, p in zip(oracle, rates)]
        ties = [i for i, g in enumerate(gains) if g == max(gains)]
        oracle[min(ties, key=lambda i: (oracle[i], i))] += 1
    assert sum(sizes) == total and sizes == oracle


def test_equal_rates_get_equal_budgets():
    sizes = greedy_sizes([0.5] * 5, 33, 2, 128)
    assert sum(sizes) == 33 and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("freedom, t", [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423)])
def test_quantiles_of_student(freedom, t):
    assert student_quantile(0.95, freedom) == pytest.approx(t, abs=1e-4)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=5), st.integers(0, 12))
@settings(max_examples=30, deadline=None)
def test_rounds_follow_the_priority_of_the_paper(spreads, spare):
    rule = RoundsOfUncertainty(most=64)
    now, given_ = [4] * len(spreads), [0] * len(spreads)
    half = lambda n, s: student_quantile(0.95, n - 1) * s / math.sqrt(n)  # noqa: E731
    assert rule.open().sizes(tasks(3)) == [4, 4, 4] and RoundsOfUncertainty(size=3).open().sizes(tasks(2)) == [3, 3]
    assert rule.half_width(4, 0.5) == pytest.approx(3.182446 * 0.5 / 2)
    for _ in range(spare):
        priority = [half(n, s) - half(n + 1, s) + math.sqrt(math.log(1 + sum(now)) / n) for n, s in zip(now, spreads)]
        best = int(np.argmax(priority))
        now[best] += 1
        given_[best] += 1
    assert rule.allocate([4] * len(spreads), spreads, spare) == given_
    assert sum(given_) == spare


def test_falling_with_success():
    rule = FallingWithSuccess(8, 8)
    assert [rule.rollouts(r) for r in (0, 0.6, 0.8, 1.0)] == [8, 8, round(8 - 0.5 * 7), 1]
    live, task = rule.open(), tasks(1)[0]
    assert live.max_turns(task) == 0
    live.observe(group_of(task, [1, 0], turns=3))
    live.observe(group_of(task, [1, 0], turns=2))
    assert live.max_turns(task) == 3  # the longest success
    spared = FallingWithSuccess(8, 8, spare=2).open()
    spared.observe(group_of(task, [1, 0], turns=3))
    assert spared.max_turns(task) == 5


def test_turn_limits_are_a_percentile_after_calibration():
    live, task = TurnPercentile(calibrate=8, probe_every=4, remind=False).open(), tasks(1)[0]
    assert live.max_turns(task) == 0
    for turns in (1, 2, 3, 4):
        live.observe(group_of(task, [1, 0], turns=turns))
    limits = [live.max_turns(task) for _ in range(7)]
    assert set(limits) == {0, int(np.ceil(np.percentile([1, 1, 2, 2, 3, 3, 4, 4], 75)))}


def test_limits_of_which_the_policy_is_told_begin_at_a_lower_percentile():
    lists = []
    for start in (0.0, 50.0, 75.0):
        live, task = TurnPercentile(calibrate=8, probe_every=99, start=start).open(), tasks(1)[0]
        for turns in (1, 2, 3, 8):
            live.observe(group_of(task, [1, 0], turns=turns))
        lists.append(live.max_turns(task))
    high = int(np.ceil(np.percentile([1, 1, 2, 2, 3, 3, 8, 8], 75)))
    assert lists == [[high], [3, high], [high]]  # no extension: one limit; the median of the turns is 2.5


def test_wide_keeps_the_number_of_rollouts():
    assert Wide(size=512).of(64, 8) == Fixed(1, 512)
    assert Wide(size=32).of(64, 8) == Fixed(16, 32)
    assert Wide(size=512).of(2, 4) == Fixed(1, 512)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 60))
def test_trimming_reaches_the_total_where_bounds_allow(sizes, total):
    trimmed = trim(sizes, total, 1, 9)
    assert sum(trimmed) == min(max(total, len(sizes)), 9 * len(sizes))
