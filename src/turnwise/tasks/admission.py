"""Admission: which finished groups are trained on. A predicate that answers with the reason of a refusal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from turnwise.data import Group


class Admission(Protocol):
    def __call__(self, group: Group) -> str:
        """Empty to admit; otherwise why not."""
        ...


@dataclass(frozen=True)
class Everything:
    """Every group that has a trajectory."""

    def __call__(self, group: Group) -> str:
        return ""


@dataclass(frozen=True)
class Spread:
    """Only groups whose rewards differ: all right or all wrong teaches nothing (dynamic sampling draws another)."""

    least: float = 1e-6

    def __call__(self, group: Group) -> str:
        rewards = [t.reward for t in group.trajectories]
        return "" if max(rewards) - min(rewards) > self.least else "no spread of rewards"
