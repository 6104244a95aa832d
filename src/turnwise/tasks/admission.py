"""Admission: which finished groups are trained on, and which of their trajectories."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Protocol

from turnwise.core.records import Group


class Admission(Protocol):
    def __call__(self, group: Group) -> Group | str:
        """The group, or what is left of it; or in words why it is refused."""
        ...


@dataclass(frozen=True)
class Everything:
    """Every group that has a trajectory."""

    def __call__(self, group: Group) -> Group | str:
        return group


@dataclass(frozen=True)
class Spread:
    """Only groups whose rewards differ: all right or all wrong teaches nothing (dynamic sampling draws another)."""

    least: float = 1e-6

    def __call__(self, group: Group) -> Group | str:
        rewards = [t.reward for t in group.trajectories]
        return group if max(rewards) - min(rewards) > self.least else "no spread of rewards"


@dataclass(frozen=True)
class NotPerfect:
    """Not the groups in which everyone got the best reward already."""

    best: float = 1.0

    def __call__(self, group: Group) -> Group | str:
        return group if min(t.reward for t in group.trajectories) < self.best else "all perfect"


@dataclass(frozen=True)
class Balance:
    """No more bad trajectories (below the group's mean) than good ones: the surplus is dropped, by a lot of its ids."""

    def __call__(self, group: Group) -> Group | str:
        rewards = [t.reward for t in group.trajectories]
        if max(rewards) - min(rewards) <= 1e-9:
            return group
        mean = sum(rewards) / len(rewards)
        bad = sorted((t for t in group.trajectories if t.reward < mean), key=lambda t: zlib.crc32(t.id.encode()))
        surplus = {t.id for t in bad[: max(0, len(bad) - sum(r > mean for r in rewards))]}
        return replace(group, trajectories=tuple(t for t in group.trajectories if t.id not in surplus))
