"""Aggregates: what is averaged over what. One weight for each token, computed once over the whole step,
in float64 (an objective casts it to the precision it works in).

Micro-batches and ranks then just sum. An item without tokens does not count as an item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from turnwise.algebra.term import check
from turnwise.levels import TOKEN, TRAJECTORY, Field, Level, Tree


class Aggregate(Protocol):
    def __call__(self, tree: Tree) -> Field: ...


def items(tree: Tree, level: Level) -> int:
    """How many items of a level hold at least one token."""
    return max(1, int((tree.size(TOKEN, level).x > 0).sum()))


@dataclass(frozen=True)
class Mean:
    """Mean over the tokens inside each item of the level, then over the items.

    TOKEN: every token alike. TRAJECTORY: every trajectory alike, whatever its length. GROUP: every task alike."""

    over: Level

    def __call__(self, tree: Tree) -> Field:
        inside = tree.size(TOKEN, self.over).to(torch.float64).clamp(low=1)
        return (1 / (items(tree, self.over) * inside)).at(TOKEN)


@dataclass(frozen=True)
class Sum:
    """Sum over the tokens of each item of the level, mean over the items; ``length`` divides by a constant besides.

    ``Sum(TRAJECTORY)`` weighs log π(trajectory); ``Sum(TRAJECTORY, length=L)`` is the unbiased constant-length mean."""

    over: Level = TRAJECTORY
    length: float = 1.0

    def __post_init__(self) -> None:
        check(self.length > 0, f"length is {self.length}; write a positive number of tokens")

    def __call__(self, tree: Tree) -> Field:
        return tree.full(TOKEN, 1 / (items(tree, self.over) * self.length), torch.float64)
