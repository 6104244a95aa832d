"""Hand numbers, and brute force over all subsets."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.maths.statistics import (
    Interval,
    bootstrap,
    by_group,
    majority_at_k,
    pass_at_k,
    task_means,
    wilson,
)


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            hits = [any(i < c for i in chosen) for chosen in combinations(range(n), k)]
            assert pass_at_k(n, c, k) == pytest.approx(np.mean(hits), abs=1e-12)


def test_pass_at_k_by_hand_and_vectorised():
    assert pass_at_k([10, 10, 10, 5], [0, 3, 10, 1], 5).tolist() == pytest.approx([0, 1 - 21 / 252, 1, 1])
    assert pass_at_k(torch.tensor([4]), torch.tensor([1]), 2).tolist() == [0.5]
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)  # no overflow
    for n, c, k in ((3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)):
        with pytest.raises(ValueError):
            pass_at_k(n, c, k)



def brute_majority(answers, truth, k):
    scores = []
    for chosen in combinations(range(len(answers)), k):
        votes = [answers[i] for i in chosen if answers[i] is not None]
        best = max((votes.count(a) for a in set(votes)), default=0)
        winners = {a for a in votes if votes.count(a) == best}
        scores.append(1 / len(winners) if truth in winners else 0.0)
    return np.mean(scores)


@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8), st.data())
@settings(max_examples=150, deadline=None)
def test_majority_is_the_mean_over_all_subsets(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    assert majority_at_k(answers, "a", k) == pytest.approx(brute_majority(answers, "a", k), abs=1e-12)


def test_majority_by_hand():
    assert majority_at_k(["a", "a", "b"], "a", 1) == pytest.approx(2 / 3)
    assert majority_at_k(["a", "b"], "a", 2) == 0.5  # a tie is a fair draw
    assert majority_at_k([None, None], "a", 2) == 0.0
    assert majority_at_k(["a"] * 40 + ["b"] * 24, "a", 64) == 1.0
    with pytest.raises(ValueError):
        majority_at_k(["a"], "a", 2)


def test_wilson_by_hand():
    # Newcombe 1998, table I: 81/263 -> 0.2553 to 0.3662; 0/20 -> 0 to 0.1611
    interval = wilson(81, 263)
    assert (round(interval.low, 4), round(interval.high, 4)) == (0.2553, 0.3662)
    assert (round(wilson(0, 20).low, 4), round(wilson(0, 20).high, 4)) == (0.0, 0.1611)
    assert wilson(20, 20).high == 1.0 and wilson(20, 20).low == pytest.approx(1 - 0.1611, abs=1e-4)
    assert wilson(0, 0).low == 0.0 and wilson(0, 0).high == 1.0
    for wrong in ((3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0)):
        with pytest.raises(ValueError):
            wilson(*wrong)


def test_bootstrap_is_seeded_and_clustered():
    values = np.tile([1.0, 0.0], 50).repeat(8)  # 100 tasks, 8 equal samples each
    tasks = np.arange(100).repeat(8).tolist()
    clustered, single = bootstrap(values, tasks), bootstrap(values)
    uneven = np.arange(30.0) ** 2
    assert bootstrap(uneven) == bootstrap(uneven) != bootstrap(uneven, seed=1)
    assert clustered.estimate == 0.5
    # by hand: the mean of 100 tasks of variance 1/4 has deviation 0.05; single samples would claim 0.0177
    assert clustered.high - clustered.low == pytest.approx(2 * 1.96 * 0.05, rel=0.1)
    assert single.high - single.low == pytest.approx(2 * 1.96 * 0.05 / 8**0.5, rel=0.1)


def test_bootstrap_at_the_edges():
    assert np.isnan(bootstrap([]).estimate)
    assert bootstrap([0.25]) == Interval(0.25, 0.25, 0.25)
    assert bootstrap([1, 0, 0], ["a", "b", "b"]).estimate == 0.5  # tasks weigh the same, however many samples
    assert str(Interval(0.5, 0.4, 0.6)) == "0.500 [0.400, 0.600]"


def test_groups_and_tasks():
    assert by_group([1, 0, 1, 1], [2, 1, 2, 1]) == {1: 0.5, 2: 1.0}
    counts = by_group([1, 0, 1], ["hard", "easy", "hard"], statistic=len)
    assert list(counts.items()) == [("easy", 1), ("hard", 2)]
    assert by_group([1, 0], [None, 3]) == {None: 1.0, 3: 0.0}
    assert task_means([1, 0, 4], ["x", "x", "y"]).tolist() == [0.5, 4.0]
    for call in (by_group, task_means):
        with pytest.raises(ValueError):
            call([1], ["a", "b"])
