"""Named pieces beside numbers that released functions gave, run outside this repository; the records name files and commits."""

from __future__ import annotations

import numpy as np
import pytest

from turnwise.rollout.strategies.tree import BranchRule
from turnwise.tasks.pool_samplers import SlidingWindow


def test_echo_branches_as_wide_as_its_controller():
    """DeepConfBranchController._compute_branch_width, entropy and group confidence."""
    released = [
        (3.5, 1.2, 3), (3.5, 0.6, 4), (4.2, 1.2, 4), (4.2, 2.4, 3), (2.0, 1.2, 2), (6.0, 0.1, 4), (3.7, 1.1, 3), (1.0, 1.2, 1),
        (3.6, 2.0, 2),
    ]  # fmt: skip
    assert [BranchRule().width(h, c) for h, c, _ in released] == [width for *_, width in released]


def test_gain_rl_draws_and_moves_as_its_trainer():
    """gaussian_sample_list with 8 indices, centre 2 and deviation 3; update_dataset with an accuracy of 0, 0.8 ... 2 of 2."""
    drawn = [0.13900752, 0.16421799, 0.17359939, 0.16421799, 0.13900752, 0.10529335, 0.07136884, 0.04328739]
    weights = SlidingWindow(width=3.0).weight(np.arange(8), 2.0)
    assert (weights / weights.sum()).tolist() == pytest.approx(drawn, abs=1e-8)
    moves = [0.0, 0.0, 0.0, 98.68766021728516, 268.5248107910156, 380.7970886230469]
    window = SlidingWindow(best=2.0)
    assert [window.moved(7.0, a) - 7.0 for a in (0.0, 0.8, 1.0, 1.2, 1.6, 2.0)] == pytest.approx(moves, rel=1e-6)
