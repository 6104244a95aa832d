"""Buffers of single trajectories: past successes of a task, recent good ones, an expert's until there is a success."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from turnwise.core.records import Group, Origin, Task, Trajectory
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
    with_trajectory,
)
from turnwise.tasks.samplers import weighted_permutation


@dataclass(frozen=True)
class SuccessBuffer:
    """Up to ``capacity`` past successes per task (reward above ``least``), first in, first out. A group that fails (reward std
    below ``spread`` and mean below ``mean``) gets one of them, ``instead`` of its first rollout or in addition."""

    capacity: int = 8
    least: float = 0.1
    spread: float = 0.05
    mean: float = 0.2
    instead: bool = True
    tasks: int = 4096  # stored at most

    requires: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        require(self.capacity >= 1 and self.tasks >= 1, f"a buffer of {self.capacity} successes; write at least 1")
        require(self.spread >= 0, f"spread is {self.spread}; write 0 or more")

    def open(self, read: ReadTrajectory, find_demonstration: FindDemonstration, seed: int) -> LiveReplay:
        return _ByTask(read, seed, self)

    def fails(self, group: Group) -> bool:
        rewards = [t.reward for t in group.trajectories if t.origin == Origin.POLICY]
        if not rewards:
            return False
        mean = sum(rewards) / len(rewards)
        spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1))
        return spread < self.spread and mean < self.mean


@dataclass(frozen=True)
class RecentBuffer:
    """Trajectories of the last ``oldest`` steps with an advantage above ``above`` and at least ``tools`` tool calls, at most
    ``size`` of them. Each step adds random ones as groups of one, up to ``share`` times the number of fresh trajectories."""

    oldest: int = 10
    size: int = 2048
    share: float = 0.5
    above: float = 0.0
    tools: int = 0

    requires: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        require(
            self.oldest >= 1 and self.size >= 1, f"a buffer of {self.size} rows, {self.oldest} steps; write at least 1"
        )
        require(self.share > 0, f"share is {self.share}; write a positive number: replayed rows for each fresh one")

    def open(self, read: ReadTrajectory, find_demonstration: FindDemonstration, seed: int) -> LiveReplay:
        return _Pool(read, seed, self)

    def takes(self, trajectory: Trajectory, advantage: float) -> bool:
        return advantage > self.above and sum(turn.tool_calls for turn in trajectory.turns) >= self.tools

    def weight(self, advantage: float) -> float:
        return 1.0


@dataclass(frozen=True)
class WeightedPool:
    """The last ``size`` trajectories whose advantage was not zero. Each step samples ``share`` times the number of fresh ones,
    with weight |A|^``power``, as groups of one. ``oldest`` limits their age in steps; 0: no limit."""

    size: int = 2048
    share: float = 0.5
    power: float = 1.0
    oldest: int = 0

    requires: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        require(self.size >= 1, f"a pool of {self.size} rows; write at least 1")
        require(self.share > 0, f"share is {self.share}; write a positive number: replayed rows for each fresh one")
        require(self.power >= 0 and self.oldest >= 0, f"power is {self.power}, oldest {self.oldest}; write 0 or more")

    def open(self, read: ReadTrajectory, find_demonstration: FindDemonstration, seed: int) -> LiveReplay:
        return _Pool(read, seed, self)

    def takes(self, trajectory: Trajectory, advantage: float) -> bool:
        return abs(advantage) > 1e-6

    def weight(self, advantage: float) -> float:
        return abs(advantage) ** self.power


@dataclass(frozen=True)
class ExpertCache:
    """One trajectory per task: the policy's latest success, or an expert's until there is one: one that came with a group (a
    planned episode), which is stored, or a demonstration. A group without a reward above ``least`` gets it, ``instead`` of its
    first rollout or in addition."""

    least: float = 0.0
    instead: bool = True
    tasks: int = 65536  # stored at most

    requires: ClassVar[frozenset[str]] = frozenset({"demonstrations"})

    def __post_init__(self) -> None:
        require(self.tasks >= 1, f"a cache of {self.tasks} tasks; write at least 1")

    def open(self, read: ReadTrajectory, find_demonstration: FindDemonstration, seed: int) -> LiveReplay:
        return _Cache(read, find_demonstration, self)

    def fails(self, group: Group) -> bool:
        """Whether no sampled trajectory has a reward above ``least``, and no expert's came with the group."""
        rewards = [t.reward for t in group.trajectories if t.origin == Origin.POLICY]
        return bool(rewards) and max(rewards) <= self.least and not self.planned(group)

    def planned(self, group: Group) -> list[Trajectory]:
        """Expert data that came with the group and succeeded."""
        return [t for t in group.trajectories if t.origin == Origin.EXPERT and t.reward > self.least]


# ---------------------------------------------------------------- live buffers


@dataclass
class _ByTask(EmptyReplay):
    """Successes by task key, oldest first; tasks are ordered by their latest success."""

    read: ReadTrajectory
    seed: int
    rule: SuccessBuffer
    stored: dict[str, list[Entry]] = field(default_factory=dict)

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        return [self._with_replay(group, step) if self.rule.fails(group) else group for group in groups]

    def _with_replay(self, group: Group, step: int) -> Group:
        entries = self.stored.get(group.task.key, [])
        rng = random.Random(f"{self.seed}/{step}/{group.task.key}")
        for entry in rng.sample(entries, len(entries)):  # the first whose tokens are still stored
            trajectory = load_entry(self.read, entry, step)
            if trajectory is not None:
                return with_trajectory(group, trajectory, self.rule.instead)
        return group

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        for group in groups:
            successes = [t for t in policy_trajectories(group) if t.reward > self.rule.least]
            if successes:
                past = self.stored.pop(group.task.key, [])
                entries = past + [[t.id, step, credited.get(t.id, 0.0)] for t in successes]
                self.stored[group.task.key] = entries[-self.rule.capacity :]
        for key in list(self.stored)[: -self.rule.tasks]:
            del self.stored[key]

    def state_dict(self) -> dict[str, Any]:
        return {"stored": self.stored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stored = {key: [list(entry) for entry in entries] for key, entries in state["stored"].items()}

    def metrics(self) -> dict[str, float]:
        entries = [entry for entries in self.stored.values() for entry in entries]
        return {"replay/stored": float(len(entries)), "replay/tasks": float(len(self.stored)), **ages(entries)}


@dataclass
class _Pool(EmptyReplay):
    """Trajectories of any task, oldest first."""

    read: ReadTrajectory
    seed: int
    rule: RecentBuffer | WeightedPool
    stored: list[Entry] = field(default_factory=list)

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        self._expire(step)
        count = round(self.rule.share * sum(len(policy_trajectories(group)) for group in groups))
        replayed: list[Group] = []
        for entry in self._in_random_order(step):
            if len(replayed) == count:
                break
            trajectory = load_entry(self.read, entry, step)
            if trajectory is not None:
                replayed.append(Group(f"replay/{trajectory.id}", trajectory.task, (trajectory,)))
        return [*groups, *replayed]

    def _expire(self, step: int) -> None:
        if self.rule.oldest:
            self.stored = [entry for entry in self.stored if step - entry[1] <= self.rule.oldest]

    def _in_random_order(self, step: int) -> list[Entry]:
        """All entries in a weighted random order without replacement."""
        weights = [self.rule.weight(entry[2]) for entry in self.stored]
        return [self.stored[i] for i in weighted_permutation(weights, random.Random(f"{self.seed}/{step}"))]

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        fresh = [(t, credited.get(t.id, 0.0)) for group in groups for t in policy_trajectories(group)]
        self.stored += [[t.id, step, a] for t, a in fresh if math.isfinite(a) and self.rule.takes(t, a)]
        self.stored = self.stored[-self.rule.size :]

    def state_dict(self) -> dict[str, Any]:
        return {"stored": self.stored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stored = [list(entry) for entry in state["stored"]]

    def metrics(self) -> dict[str, float]:
        return {"replay/stored": float(len(self.stored)), **ages(self.stored)}


@dataclass
class _Cache(EmptyReplay):
    """The policy's latest success by task key; the demonstration where there is none."""

    read: ReadTrajectory
    find_demonstration: FindDemonstration
    rule: ExpertCache
    stored: dict[str, Entry] = field(default_factory=dict)

    def missing_demonstrations(self, groups: Sequence[Group]) -> list[Task]:
        return [g.task for g in groups if g.task.key not in self.stored and self.rule.fails(g)]

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        return [self._with_replay(group, step) if self.rule.fails(group) else group for group in groups]

    def _with_replay(self, group: Group, step: int) -> Group:
        entry = self.stored.get(group.task.key)
        trajectory = load_entry(self.read, entry, step) if entry else None
        trajectory = trajectory or self.find_demonstration(group.task)
        return group if trajectory is None else with_trajectory(group, trajectory, self.rule.instead)

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        for group in groups:
            successes = [t for t in policy_trajectories(group) if t.reward > self.rule.least]
            if not successes and group.task.key not in self.stored:
                successes = [
                    t for t in self.rule.planned(group) if t.id.startswith(f"{group.id}.")
                ]  # those in the ledger
            if successes:
                self.stored.pop(group.task.key, None)
                self.stored[group.task.key] = [successes[0].id, step, credited.get(successes[0].id, 0.0)]
        for key in list(self.stored)[: -self.rule.tasks]:
            del self.stored[key]

    def state_dict(self) -> dict[str, Any]:
        return {"stored": self.stored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stored = {key: list(entry) for key, entry in state["stored"].items()}

    def metrics(self) -> dict[str, float]:
        return {"replay/stored": float(len(self.stored)), **ages(list(self.stored.values()))}
