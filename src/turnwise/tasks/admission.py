"""Admission: which finished groups are trained on, and which of their trajectories. Knows rewards; no token and no loss."""

from __future__ import annotations

import zlib
from dataclasses import replace

from turnwise.core.limits import Declared
from turnwise.core.records import Group


class Admission(Declared):
    """Interface: the group or a subset of it; or, if it is rejected, the reason."""

    def __call__(self, group: Group) -> Group | str:
        raise NotImplementedError


class AdmitAll(Admission):
    """Admits every group that has a trajectory."""

    def __call__(self, group: Group) -> Group | str:
        return group


class Spread(Admission):
    """Admits only groups whose rewards differ by more than ``least``: equal rewards give no gradient (dynamic sampling)."""

    least: float = 1e-6

    def __call__(self, group: Group) -> Group | str:
        rewards = [t.reward for t in group.trajectories]
        return group if max(rewards) - min(rewards) > self.least else "no spread of rewards"


class NotPerfect(Admission):
    """Rejects groups in which every trajectory already has the best reward."""

    best: float = 1.0

    def __call__(self, group: Group) -> Group | str:
        return group if min(t.reward for t in group.trajectories) < self.best else "all perfect"


class AfterDraws(Admission):
    """Rejects the first ``draws`` groups that a sampler drew, those of a profiling pass: until then the policy stays as it is."""

    draws: int

    def __call__(self, group: Group) -> Group | str:
        return group if int(group.id.split("~")[0]) >= self.draws else "profiling"


class Balance(Admission):
    """Admits at most as many trajectories below the group's mean reward as there are at or above it; which of the surplus are
    dropped is decided by a hash of their ids."""

    def __call__(self, group: Group) -> Group | str:
        mean = sum(t.reward for t in group.trajectories) / len(group.trajectories)
        below = [t for t in group.trajectories if t.reward < mean - 1e-9]
        below.sort(key=lambda t: zlib.crc32(t.id.encode()))
        surplus = {t.id for t in below[: max(0, 2 * len(below) - len(group.trajectories))]}
        return replace(group, trajectories=tuple(t for t in group.trajectories if t.id not in surplus))
