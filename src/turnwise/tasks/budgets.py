"""Budgets: how many groups a step trains on, and how many trajectories a group has."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.errors import RecipeError


@dataclass(frozen=True)
class Fixed:
    """``groups`` tasks a step, ``size`` trajectories each."""

    groups: int = 8
    size: int = 8

    def __post_init__(self) -> None:
        if self.groups < 1 or self.size < 1:
            raise RecipeError(f"a budget of {self.groups} groups of {self.size}; both must be at least 1")
