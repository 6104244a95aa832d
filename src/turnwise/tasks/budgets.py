"""Budgets: how many groups a step trains on, and how many trajectories each group has. Knows no task."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.errors import RecipeError


@dataclass(frozen=True)
class Fixed:
    """``groups`` groups per step, ``size`` trajectories per group."""

    groups: int = 8
    size: int = 8

    def __post_init__(self) -> None:
        if self.groups < 1 or self.size < 1:
            raise RecipeError(f"a budget of {self.groups} groups of {self.size}; both must be at least 1")
