"""Experience that runs share through a pool: each writes its groups and trains on some of the others'. Knows no database."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from turnwise.core.records import Group, Origin
from turnwise.data.replay.base import (
    EmptyReplay,
    FindDemonstration,
    LiveReplay,
    ReadTrajectory,
    policy_trajectories,
    require,
)


class GroupPool(Protocol):
    """A pool of groups that several runs write and read."""

    def write(self, sender: str, step: int, groups: Sequence[Group]) -> None: ...

    def read(self, reader: str, step: int) -> list[tuple[str, Group]]: ...

    def counts(self) -> dict[str, int]: ...


OpenPool = Callable[[str, int], GroupPool]
"""Opens the pool in a folder; a reader sees the last so many groups."""


@dataclass(frozen=True)
class SharedExperience:
    """Writes the groups of each step to the pool in ``folder``, and adds ``foreign`` groups of other runs to each step: at random
    among the last ``capacity``, without those whose total reward is 0. ``sender`` names this run; empty: by its seed."""

    folder: str
    foreign: int = 4
    sender: str = ""
    capacity: int = 256

    requires: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        require(bool(self.folder), "a shared pool needs a folder; write folder=PATH")
        require(self.foreign >= 0, f"foreign is {self.foreign}; write 0 or more groups of other runs a step")
        require(self.capacity >= 1, f"capacity is {self.capacity}; write at least 1 group")

    def open(self, read: ReadTrajectory, find_demonstration: FindDemonstration, seed: int) -> LiveReplay:
        raise NotImplementedError("a shared pool is opened by open_with")

    def open_with(self, open_pool: OpenPool, seed: int) -> LiveReplay:
        return _Shared(open_pool(self.folder, self.capacity), seed, self, self.sender or f"seed-{seed:x}")


@dataclass
class _Shared(EmptyReplay):
    pool: GroupPool
    seed: int
    rule: SharedExperience
    name: str
    mixed: int = 0  # groups of other runs in the last step
    available: int = 0

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        others = [(who, g) for who, g in self.pool.read(self.name, step) if sum(t.reward for t in g.trajectories)]
        count = min(self.rule.foreign, len(others))
        chosen = random.Random(f"{self.seed}/{step}").sample(others, count)
        self.mixed, self.available = count, len(others)
        return [*groups, *(_as_foreign(who, group) for who, group in chosen)]

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        own = [replace(g, trajectories=tuple(policy_trajectories(g))) for g in groups]
        self.pool.write(self.name, step, [g for g in own if g.trajectories])

    def metrics(self) -> dict[str, float]:
        counts = {f"replay/pool_{name}": float(n) for name, n in self.pool.counts().items()}
        return {"replay/foreign": float(self.mixed), "replay/stored": float(self.available), **counts}

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.name = state["name"]


def _as_foreign(sender: str, group: Group) -> Group:
    """A group of another run: replayed data under ids that cannot be ours."""
    key = lambda name: f"{sender}/{name}"  # noqa: E731
    members = (
        replace(
            t,
            id=key(t.id),
            origin=Origin.REPLAY,
            fork=None if t.fork is None else replace(t.fork, parent=key(t.fork.parent)),
        )
        for t in group.trajectories
    )
    return Group(key(group.id), group.task, tuple(members))
