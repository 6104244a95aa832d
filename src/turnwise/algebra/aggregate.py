"""Aggregates: how token losses are averaged. One weight for each token, computed once over the whole step in float64 (the
objective casts it to its own precision).

Micro-batches and ranks then just sum. An item without kept tokens does not count.
"""

from __future__ import annotations

from turnwise.algebra.piece import Piece
from turnwise.core.levels import TRAJECTORY, Field, Level
from turnwise.core.limits import number


class Aggregate(Piece):
    """Interface: the weight of every token in the average that a step optimises."""

    def __call__(self, trained: Field) -> Field:
        """``trained``: 1 for each token that is trained on, 0 for the others, float64 at TOKEN."""
        raise NotImplementedError


class Mean(Aggregate):
    """Mean over the tokens inside each item of the level, then over the items.

    TOKEN: all tokens have equal weight. TRAJECTORY: all trajectories, whatever their length. GROUP: all tasks."""

    over: Level

    def __call__(self, trained: Field) -> Field:
        inside = trained.sum(self.over)
        return trained / (items(inside) * inside.clamp(low=1))


class Sum(Aggregate):
    """Sum over the tokens of each item of the level, mean over the items; ``length`` divides by a further constant.

    ``Sum(TRAJECTORY)`` weighs log π(trajectory); ``Sum(TRAJECTORY, length=L)`` is the unbiased constant-length mean."""

    over: Level = TRAJECTORY
    length: float = number(1.0, above=0)

    def __call__(self, trained: Field) -> Field:
        return trained / (items(trained.sum(self.over)) * self.length)


def items(inside: Field) -> float:
    """How many items have at least one kept token; ``inside``: the number of kept tokens of each."""
    return max(1.0, float((inside.x > 0).sum()))
