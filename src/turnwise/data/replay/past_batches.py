"""Whole batches of older policies: the groups of the last steps, each with all of its trajectories. Knows no loss."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from turnwise.core.records import Group
from turnwise.data.replay.base import (
    EmptyReplay,
    Entry,
    FindDemonstration,
    LiveReplay,
    ReadTrajectory,
    ages,
    load_entry,
    policy_trajectories,
    require,
)

StoredGroup = list[Any]  # [group id, entries of its trajectories]


@dataclass(frozen=True)
class PastBatches:
    """The batches of the last ``window`` − 1 steps. A share ``share`` of the groups of each step are past ones, drawn at random
    without replacement, in addition to the fresh ones; fewer while there are not enough. From step ``until`` on there is no
    replay; 0: it does not end."""

    share: float = 0.4
    window: int = 2
    until: int = 0
    size: int = 4096  # groups at most

    requires: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        require(
            0 <= self.share < 1, f"share is {self.share}; write a number in [0, 1): the part of a step that is replayed"
        )
        require(
            self.window >= 1 and self.size >= 1,
            f"a window of {self.window} policies, {self.size} groups; write at least 1",
        )
        require(self.until >= 0, f"until is {self.until}; write 0 (no end) or a step")

    def open(self, read: ReadTrajectory, find_demonstration: FindDemonstration, seed: int) -> LiveReplay:
        return _Batches(read, seed, self)


@dataclass
class _Batches(EmptyReplay):
    """Groups, oldest first."""

    read: ReadTrajectory
    seed: int
    rule: PastBatches
    stored: list[StoredGroup] = field(default_factory=list)

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        if self._ended(step):
            self.stored = []
            return list(groups)
        self.stored = [g for g in self.stored if step - _sampled_at(g) < self.rule.window]
        count = round(self.rule.share / (1 - self.rule.share) * len(groups))
        replayed: list[Group] = []
        for key, entries in random.Random(f"{self.seed}/{step}").sample(self.stored, len(self.stored)):
            if len(replayed) == count:
                break
            loaded = [load_entry(self.read, entry, step) for entry in entries]
            members = tuple(t for t in loaded if t is not None)
            if len(members) == len(entries):  # statistics of a part of a group would be others
                replayed.append(Group(f"replay/{key}", members[0].task, members))
        return [*groups, *replayed]

    def _ended(self, step: int) -> bool:
        return bool(self.rule.until) and step >= self.rule.until

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        if self._ended(step + 1) or self.rule.window == 1:
            return
        for group in groups:
            entries: list[Entry] = [[t.id, step, credited.get(t.id, 0.0)] for t in policy_trajectories(group)]
            if entries:
                self.stored.append([group.id, entries])
        self.stored = self.stored[-self.rule.size :]

    def state_dict(self) -> dict[str, Any]:
        return {"stored": self.stored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stored = [[key, [list(entry) for entry in entries]] for key, entries in state["stored"]]

    def metrics(self) -> dict[str, float]:
        entries = [entry for _, entries in self.stored for entry in entries]
        return {"replay/stored": float(len(entries)), "replay/groups": float(len(self.stored)), **ages(entries)}


def _sampled_at(group: StoredGroup) -> int:
    return int(group[1][0][1])
