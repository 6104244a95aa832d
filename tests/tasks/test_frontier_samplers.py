"""Samplers against oracles written from the papers' formulas, and the laws that hold for all of them."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.outcomes import group_of

from turnwise.core.records import Task
from turnwise.errors import SettingError
from turnwise.recipes.experience import SLOTS, piece
from turnwise.tasks.pool_samplers import (
    BinAdversary,
    GaussianFrontier,
    SlidingWindow,
    ThompsonFrontier,
    VariancePromotion,
    diversity,
    draw_by_weight,
    largest,
)  # fmt: skip
from turnwise.tasks.samplers import Stages
from turnwise.tasks.task_source import TaskStream

STREAM = TaskStream("test", difficulties=(1, 2, 3), seed=5)
SMALL = {"pool": "64"}
SPECS = {
    name: ",".join([name, "pool=64"]) if "pool" in function.__code__.co_varnames else name
    for name, function in SLOTS["sampler"].items()
}


def solves(task: Task, try_: int) -> bool:
    """A third of the tasks is always solved, a third never, a third sometimes."""
    kind = task.seed % 3
    return kind == 0 or (kind == 1 and (task.seed // 3 + try_) % 2 == 0)


def run(sampler, waves: int, count: int = 8, size: int = 4) -> list[str]:
    """Draw and observe; the keys in order."""
    drawn = []
    for _ in range(waves):
        begin = getattr(sampler, "begin_wave", None)
        if begin:
            begin(count)
        wave = [sampler.next() for _ in range(count)]
        drawn += [task.key for _, task in wave]
        for number, task in wave:
            sampler.observe(group_of(task, [solves(task, number + i) for i in range(size)], number))
    return drawn


def test_a_pool_is_cycled_without_its_solved_tasks_and_then_replaced():
    live = piece("sampler", "unsolved,pool=5,solved=0.5").open(STREAM)
    wave = lambda count: [live.next()[1].key for _ in range(count)]  # noqa: E731
    of = lambda *numbers: [STREAM.draw(n).key for n in numbers]  # noqa: E731
    assert wave(7) == of(0, 1, 2, 3, 4, 0, 1)
    for n, results in ((3, [1, 0]), (2, [1, 0, 0])):  # a half is enough, a third is not
        live.observe(group_of(STREAM.draw(n), results))
    assert wave(4) == of(2, 4, 0, 1) and live.metrics()["tasks_solved"] == 1
    for n in (0, 1, 2, 2, 4):
        live.observe(group_of(STREAM.draw(n), [1, 1]))
    assert wave(6) == of(5, 6, 7, 8, 9, 5)


# ---------------------------------------------------------------- laws of all


@pytest.mark.parametrize("name", SPECS)
def test_the_same_seed_draws_the_same_tasks(name):
    assert run(piece("sampler", SPECS[name]).open(STREAM), 6) == run(piece("sampler", SPECS[name]).open(STREAM), 6)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("between", [8, 3])
def test_state_survives_a_restart_also_within_a_wave(name, between):
    """What is drawn after a restart equals what would have been drawn without one, also from a half-issued wave."""
    one, two = piece("sampler", SPECS[name]).open(STREAM), piece("sampler", SPECS[name]).open(STREAM)
    run(one, 4)
    if hasattr(one, "begin_wave"):
        one.begin_wave(8)
    for _ in range(between):
        one.next()
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    rest = [one.next() for _ in range(5)]
    assert rest == [two.next() for _ in range(5)]
    assert run(one, 4) == run(two, 4)
    assert one.metrics() == two.metrics()


@pytest.mark.parametrize("name", SPECS)
def test_draws_are_numbered_and_metrics_are_numbers(name):
    sampler = piece("sampler", SPECS[name]).open(STREAM)
    numbers = [sampler.next()[0] for _ in range(5)]
    assert numbers == [0, 1, 2, 3, 4]
    run(sampler, 2)
    assert all(isinstance(v, float) and math.isfinite(v) for v in sampler.metrics().values())


@pytest.mark.parametrize("name", ["vade", "fg_expo", "pivot"])
def test_frontier_samplers_prefer_tasks_with_mixed_outcomes(name):
    quick = {"fg_expo": ",width=0.1,keep=0.5"}.get(name, "")
    keys = run(piece("sampler", SPECS[name] + quick).open(STREAM), 60)
    mixed = [int(key.rsplit("/", 1)[1]) % 3 == 1 for key in keys[len(keys) // 2 :]]
    uniform = [STREAM.draw(i).seed % 3 == 1 for i in range(64)]
    assert np.mean(mixed) > np.mean(uniform) + 0.1


def test_nonsense_is_refused():
    for spec in (
        "vade,pool=0",
        "vade,fast=2",
        "fg_expo,width=0",
        "vade,poool=3",
        "vad",
        "sets,weights=a/b",
        "craft,review=1",
    ):
        with pytest.raises(SettingError):
            piece("sampler", spec).open(STREAM)


# ------------------------------------------------------------------- oracles


def test_thompson_posteriors_follow_the_paper():
    """The numbers of the paper's figure: 0.1 → 1.02 and 8.4 → 8.68 with one success of 8, 9.0 → 8.991 where not chosen."""
    live = ThompsonFrontier(pool=4).open(STREAM)
    live.alpha[:], live.beta[:] = [0.1, 9.0, 0, 0], [8.4, 0.2, 0, 0]
    live.waves = 1
    live.decays[:] = 1
    live.learn(0, np.array([1.0] + [0.0] * 7), None)
    assert live.alpha[0] == pytest.approx(1.02) and live.beta[0] == pytest.approx(8.68)
    live.waves = 2  # one wave without task 1
    live.alpha[0] = 50.0  # certain: never chosen
    p = live.alpha[1] * live.rule.slow ** (live.waves - live.decays[1])
    assert p == pytest.approx(8.991)


@given(st.lists(st.floats(0, 1), min_size=5, max_size=30), st.integers(1, 5))
def test_the_largest_scores_are_chosen(p, count):
    p = np.array(p)
    score = p * (1 - p) ** 2
    chosen = largest(score, count)
    assert len(set(chosen.tolist())) == count
    assert sorted(score[chosen]) == pytest.approx(sorted(score)[-count:])


def test_thompson_decay_of_the_unchosen_equals_a_decay_in_every_wave():
    rng = np.random.default_rng(0)
    live = ThompsonFrontier(pool=16, slow=0.9).open(STREAM)
    alpha, beta = np.zeros(16), np.zeros(16)
    for _ in range(12):
        live.begin_wave(3)
        tasks = [live.next()[1] for _ in range(3)]
        chosen = [live.index[t.key] for t in tasks]
        others = np.setdiff1d(np.arange(16), chosen)
        alpha[others] *= 0.9
        beta[others] *= 0.9
        for i, task in zip(chosen, tasks):
            results = rng.integers(2, size=4)
            live.observe(group_of(task, results))
            alpha[i], beta[i] = 0.2 * alpha[i] + results.sum(), 0.2 * beta[i] + 4 - results.sum()
    decay = 0.9 ** (live.waves - live.decays)
    np.testing.assert_allclose(live.alpha * decay, alpha, rtol=1e-12)
    np.testing.assert_allclose(live.beta * decay, beta, rtol=1e-12)


@given(st.lists(st.floats(0, 1), min_size=3, max_size=12), st.floats(0.05, 2))
def test_the_gaussian_weight(rates, width):
    rates = np.array(rates)
    oracle = np.exp(-((rates - 0.5) ** 2) / (2 * width * width))
    np.testing.assert_allclose(GaussianFrontier(width=width).weight(rates), oracle, rtol=1e-12)
    np.testing.assert_allclose(GaussianFrontier(width=width).weight(1 - rates), oracle, rtol=1e-9)


def test_the_gaussian_rate_is_an_exponential_mean():
    live = GaussianFrontier(pool=4, keep=0.9).open(STREAM)
    task = live.members[2]
    live.observe(group_of(task, [1, 1, 0, 0, 1, 1, 1, 1]))
    live.observe(group_of(task, [0] * 8))
    assert live.rate[2] == pytest.approx(0.9 * (0.9 * 0.5 + 0.1 * 0.75))
    assert live.rate[[0, 1, 3]].tolist() == [0.5] * 3


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=10), st.floats(0, 1), st.floats(0, 2))
def test_the_adversary_of_bins(scores, floor, rate):
    scores = np.array(scores)
    omega = np.exp(rate * np.clip(scores, -10, 10))
    oracle = (1 - floor) * omega / omega.sum() + floor / len(scores)
    q = BinAdversary(rate=rate, floor=floor).distribution(scores)
    np.testing.assert_allclose(q, oracle, rtol=1e-9)
    assert q.sum() == pytest.approx(1) and (q >= floor / len(scores) - 1e-12).all()


def test_bins_follow_the_share_of_solved_groups_and_scores_are_smoothed_means():
    live = BinAdversary(pool=4, smooth=0.1, memory=4).open(STREAM)
    task = live.members[1]
    assert live.bin[1] == 0
    live.observe(group_of(task, [1, 0, 0, 0]))  # loss 0.75 of bin 0; then solved in 1 of 1: bin 9
    live.observe(group_of(task, [0, 0, 0, 0]))  # loss 1 of bin 9; then 1 of 2: bin 5
    assert live.bin[1] == 5 and live.scores[0] == 0.75 and live.scores[9] == 1.0
    live.observe(group_of(live.members[2], [1, 1, 1, 1]))  # loss 0 of bin 0
    assert live.scores[0] == pytest.approx(0.9 * 0.75)


def test_variance_promotion_mixes_a_fixed_order_with_weighted_draws():
    live = VariancePromotion(pool=8, share=0.0).open(STREAM)
    live.begin_wave(8)
    assert len({live.next()[1].key for _ in range(8)}) == 8  # one cycle of the permutation visits all
    rule = VariancePromotion(pool=8, variance=1.0, diversity=0.0)
    np.testing.assert_allclose(rule.score(np.array([0, 0.5, 1]), np.ones(3)), [0, 0.25, 0])


def test_self_bleu_of_equal_and_of_disjoint_answers():
    assert diversity([[1, 2, 3, 4]] * 3) == pytest.approx(0.0)
    # disjoint answers of 4 tokens: no match of any order, each count smoothed to 0.1
    precision = (0.1 / 4 * 0.1 / 3 * 0.1 / 2) ** (1 / 3)
    assert diversity([[1, 2, 3, 4], [5, 6, 7, 8]]) == pytest.approx(1 - precision)
    assert diversity([[1, 2]]) == 0.0


def test_self_bleu_of_a_short_answer_has_a_brevity_penalty():
    """[1,2] against [1,2,3]: 1-grams 2/2, 2-grams 1/1, no 3-gram (0.1/1); penalty e^(1 − 3/2). And [1,2,3] against [1,2]:
    2/3, 1/2, 0.1/1, no penalty."""
    a = math.exp(1 - 3 / 2) * (1 * 1 * 0.1) ** (1 / 3)
    b = (2 / 3 * 1 / 2 * 0.1) ** (1 / 3)
    assert diversity([[1, 2], [1, 2, 3]]) == pytest.approx(1 - (a + b) / 2)


@given(st.floats(0, 2), st.floats(0, 1), st.floats(0, 500))
@example(0.0, 0.0, 100.0)  # it never moves back
def test_the_window_moves_as_the_paper_writes(accuracy, angle, center):
    rule = SlidingWindow(best=2.0)
    step = 500 * math.tanh(2 * (accuracy / 2 - 0.5)) + 500 * math.tanh(2 * angle)
    assert rule.moved(center, accuracy, angle) == pytest.approx(center + min(max(step, 0), 1000))
    assert rule.moved(center, accuracy, angle) >= center


def test_stages_never_issue_a_task_of_a_later_stage():
    live = Stages(groups=10, window=4, solved=2.0, review=0.3).open(STREAM)
    stages = []
    for n in range(40):
        _, task = live.next()
        assert task.difficulty <= live.stage + 1
        stages.append(live.stage)
        live.observe(group_of(task, [0, 1], n))
    assert stages == sorted(stages) and stages[-1] == 2


def test_shares_of_sets_hold_exactly():
    sampler = piece("sampler", "sets,weights=0.5/0.3/0.2").open(STREAM)
    counts = Counter(sampler.next()[1].difficulty for _ in range(100))
    assert counts == {1: 50, 2: 30, 3: 20}


@given(st.integers(0, 2**31), st.integers(1, 6))
def test_weighted_draws_without_replacement_are_distinct_and_in_proportion(seed, count):
    weights = np.array([0.0, 1, 2, 3, 4, 1e-9, 50])
    drawn = draw_by_weight(weights, count, np.random.default_rng(seed))
    assert len(set(drawn.tolist())) == count and 0 not in drawn


def test_first_weighted_draws_are_in_proportion():
    weights, rng = np.array([1.0, 2.0, 5.0]), np.random.default_rng(1)
    first = Counter(int(draw_by_weight(weights, 2, rng)[0]) for _ in range(4000))
    for i, w in enumerate(weights):
        assert first[i] / 4000 == pytest.approx(w / 8, abs=0.03)
