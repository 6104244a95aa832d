"""The page of the truth about credit: what it groups, what it names, and its rank correlation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from experiments import credit_truth

REPORT = {
    "environment": "guess", "difficulty": [1], "policy": "cold start, 60 steps", "success": 0.25, "tasks": 8, "batches": 3,
    "group": 8, "turns": 700, "known": 0.99, "forks": 0, "states": 80, "unlisted": 0.004, "seed": 0, "commit": "abc",
    "rows": [
        {"method": "the true advantage", "note": "", "correlation": [1, 1, 1], "exact": [0.9, 0.8, 0.95]},
        {"method": "grpo", "note": "", "correlation": [0.2, 0.1, 0.3], "exact": [0.4, 0.3, 0.5]},
        {"method": "dapo", "note": "", "correlation": [0.2, 0.1, 0.3], "exact": [0.4, 0.3, 0.5]},
        {"method": "mars", "note": "", "correlation": [None, None, None], "exact": [0.1, 0, 0.2]},
        {"method": "ppo", "note": "needs a trained critic"}, {"method": "gae", "note": "needs a trained critic"},
    ],
}  # fmt: skip


def test_equal_credits_share_a_line_and_nothing_is_left_out():
    lines = credit_truth.table(REPORT).splitlines()
    assert [line for line in lines if "`grpo`, `dapo`" in line and "0.20 [0.10, 0.30]" in line]
    assert len(lines) == 2 + 3 and any("`mars` | – |" in line for line in lines)
    assert credit_truth.without(REPORT) == "- needs a trained critic: `ppo`, `gae`"
    text = credit_truth.page([REPORT], "# Title", [])
    assert text.startswith("# Title") and all(f"`{row['method']}`" in text for row in REPORT["rows"][1:])


def test_bias_is_not_shown_where_luck_may_be_all():
    row = {"method": "grpo", "note": "", "correlation": [0.2, 0.1, 0.3], "bias": [-0.7, -12.0, 0.3]}
    for high, cells in ((1.02, "0.90 [0.80, 1.02] | – |"), (0.95, "0.90 [0.80, 0.95] | -0.70 [-12.00, 0.30] |")):
        assert cells in credit_truth.table(REPORT | {"rows": [row | {"luck": [0.9, 0.8, high]}]})


def test_rank_correlation_by_hand():
    """Ranks 1 2 3 against 1 3 2: 1 − 6·2/(3·8) = ½."""
    assert credit_truth.rank_correlation(np.array([1.0, 2, 9]), np.array([0.0, 5, 4])) == pytest.approx(0.5)
    assert math.isnan(credit_truth.rank_correlation(np.ones(3), np.arange(3.0)))


def learning_row(method, seed, *values, **other):
    curve = [[0, 0, 0.0, 0.0], *([5 * n, 160 * n, 0.0, value] for n, value in enumerate(values, 1))]
    settings = {"env": "guess", "difficulty": [1], "method": method, "seed": seed, **other}
    return {"bed": "b", "settings": settings, "trainer": "", "arguments": {}, "measured": {"curve": curve}}


def test_what_was_learned_is_the_mean_success_over_each_run_of_a_plain_method():
    rows = [learning_row("grpo", 0, 0.5, 1.0), learning_row("grpo", 1, 0.0, 0.5), learning_row("grpo", 2, 1.0, credit="mars")]
    rows += [{**learning_row("grpo", 3, 1.0), "trainer": "late"}, learning_row("grpo", 4, 1.0, env="nim")]
    assert credit_truth.learned(rows, "guess") == {("b", "1"): {"grpo": {0: 0.75, 1: 0.25}}}


def test_a_prediction_is_published_with_its_methods_seeds_and_interval():
    """Scores 0.1 < 0.2 < 0.3 learn in that order in every seed: 1 [1, 1]; one order of six, or its reverse: p = 1/3."""
    report = REPORT | {"rows": [{"method": m, "note": "", "correlation": [x, 0, 1]} for m, x in zip("abc", (0.1, 0.2, 0.3))]}
    rows = [learning_row(m, seed, x + seed / 100) for seed in range(4) for m, x in zip("abc", (0.2, 0.5, 0.9))]
    line = credit_truth.predictions([report], rows).splitlines()[-1]
    assert "1.00 [1.00, 1.00] | 0.3" in line and "| 3 | 4 | correlation |" in line and "[b](b.md), difficulty 1" in line
    assert "n = 0" in credit_truth.predictions([report], rows[:9])
    mixed = np.array([[0.2, 0.9], [0.5, 0.5], [0.9, 0.2]])
    assert credit_truth.prediction(np.arange(3.0), mixed)[1:3] == (-1.0, 1.0)


def test_the_rows_of_the_evidence_are_read():
    beds = credit_truth.learned(credit_truth.evidence_rows.read(credit_truth.ROWS), "keydoor")
    assert len(beds["door", "1"]["grpo"]) >= credit_truth.SEEDS
