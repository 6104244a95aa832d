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
    text = credit_truth.page([REPORT], "# Title")
    assert text.startswith("# Title") and all(f"`{row['method']}`" in text for row in REPORT["rows"][1:])


def test_rank_correlation_by_hand():
    """Ranks 1 2 3 against 1 3 2: 1 − 6·2/(3·8) = ½."""
    assert credit_truth.rank_correlation(np.array([1.0, 2, 9]), np.array([0.0, 5, 4])) == pytest.approx(0.5)
    assert math.isnan(credit_truth.rank_correlation(np.ones(3), np.arange(3.0)))


def test_learned_rows_are_ratios_to_grpo_of_the_same_seed():
    ratios = credit_truth.learned("credit_lookup.jsonl", 0.6)
    assert ratios["grpo"] == [0.0] * 5 and set(map(len, ratios.values())) == {5}
