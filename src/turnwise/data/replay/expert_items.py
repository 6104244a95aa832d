"""Expert trajectories in the place of rollouts, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from turnwise.core.records import Group, Origin, Task, Trajectory
from turnwise.data.replay.base import EmptyReplay, FindDemonstration, LiveReplay, ReadTrajectory, require


@dataclass(frozen=True)
class ExpertItems:
    """Each rollout of a group is replaced with probability ``share`` by the demonstration of its task, if it has one. The draw
    depends on the seed, the step and the task alone."""

    share: float = 0.5

    requires: ClassVar[frozenset[str]] = frozenset({"demonstrations"})

    def __post_init__(self) -> None:
        require(0 <= self.share <= 1, f"the share is {self.share}; write a number in [0, 1]")

    def open(self, read: ReadTrajectory, find_demonstration: FindDemonstration, seed: int) -> LiveReplay:
        return _Items(find_demonstration, seed, self.share)


@dataclass
class _Items(EmptyReplay):
    find_demonstration: FindDemonstration
    seed: int
    share: float

    def missing_demonstrations(self, groups: Sequence[Group]) -> list[Task]:
        return [group.task for group in groups] if self.share else []

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        return [self._mixed(group, step) for group in groups]

    def _mixed(self, group: Group, step: int) -> Group:
        expert, rng = self.find_demonstration(group.task), random.Random(f"{self.seed}/{step}/{group.id}")
        if expert is None:
            return group
        parents = {t.fork.parent for t in group.trajectories if t.fork is not None}
        items: list[Trajectory] = []
        for number, t in enumerate(group.trajectories):
            drawn = rng.random() < self.share and t.origin == Origin.POLICY and t.id not in parents
            items.append(replace(expert, id=f"{group.id}/expert{number}") if drawn else t)
        return replace(group, trajectories=tuple(items))
