"""Replay: which past data is mixed into a step. A piece is frozen data; ``open`` gives the live buffer with its verbs.

    lacks · mix · observe · state_dict · load_state_dict · metrics

A buffer keeps ids, never rows: rows are read back from the ledger when they are mixed in, so a checkpoint stays small and
a resumed run holds the very same buffer. What it mixes in says so itself: its origin is REPLAY, its facts tell its ``age``
in steps and the mean ``advantage`` it was credited with when it was fresh. Knows no tokens, no losses, no files.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from turnwise.core.records import Group, Origin, Task, Trajectory
from turnwise.errors import RecipeError

Read = Callable[[str], Trajectory | None]
"""A stored trajectory by its id, standing alone; None where its tokens are gone."""

Shown = Callable[[Task], Trajectory | None]
"""The demonstration of a task, where there is one."""

Entry = list[Any]  # [trajectory id, step it was fresh in, mean advantage]


class LiveReplay(Protocol):
    def lacks(self, groups: Sequence[Group]) -> list[Task]:
        """The tasks of which ``mix`` would like to see a demonstration."""
        ...

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The groups of a step with past data among them."""
        ...

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        """Fresh groups, and the mean advantage of each of their trajectories by its id."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class Replay(Protocol):
    wants: ClassVar[frozenset[str]]

    def open(self, read: Read, shown: Shown, seed: int) -> LiveReplay: ...


def check(ok: bool, message: str) -> None:
    if not ok:
        raise RecipeError(message)


# ------------------------------------------------------------------- the kinds


@dataclass(frozen=True)
class Nothing:
    """Only what was sampled for this step."""

    wants: ClassVar[frozenset[str]] = frozenset()

    def open(self, read: Read, shown: Shown, seed: int) -> LiveReplay:
        return _Empty()


@dataclass(frozen=True)
class SuccessBuffer:
    """A few past successes of each task (rewarded above ``least``), oldest out first. A group that fails, its rewards nearly
    alike (std < ``spread``) and low (mean < ``mean``), gets one of them, ``instead`` of its first rollout or beside it."""

    capacity: int = 8
    least: float = 0.1
    spread: float = 0.05
    mean: float = 0.2
    instead: bool = True
    tasks: int = 4096  # remembered at most

    wants: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check(self.capacity >= 1 and self.tasks >= 1, f"a buffer of {self.capacity} successes; write at least 1")
        check(self.spread >= 0, f"spread is {self.spread}; write 0 or more")

    def open(self, read: Read, shown: Shown, seed: int) -> LiveReplay:
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
    """What was credited above ``above`` in the last ``oldest`` steps and called at least ``tools`` tools; of at most ``size``
    rows a random few join each step as groups of one, up to ``share`` of the fresh rows."""

    oldest: int = 10
    size: int = 2048
    share: float = 0.5
    above: float = 0.0
    tools: int = 0

    wants: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check(
            self.oldest >= 1 and self.size >= 1, f"a buffer of {self.size} rows, {self.oldest} steps; write at least 1"
        )
        check(self.share > 0, f"share is {self.share}; write a positive number: replayed rows for each fresh one")

    def open(self, read: Read, shown: Shown, seed: int) -> LiveReplay:
        return _Pool(read, seed, self)

    def takes(self, trajectory: Trajectory, advantage: float) -> bool:
        return advantage > self.above and sum(turn.tool_calls for turn in trajectory.turns) >= self.tools

    def weight(self, advantage: float) -> float:
        return 1.0


@dataclass(frozen=True)
class WeightedPool:
    """Every past row whose credit was not zero, the last ``size`` of them; each step draws ``share`` of its fresh rows from
    it, a row with weight |A|^``power``, as groups of one. ``oldest`` 0: none is ever too old."""

    size: int = 2048
    share: float = 0.5
    power: float = 1.0
    oldest: int = 0

    wants: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check(self.size >= 1, f"a pool of {self.size} rows; write at least 1")
        check(self.share > 0, f"share is {self.share}; write a positive number: replayed rows for each fresh one")
        check(self.power >= 0 and self.oldest >= 0, f"power is {self.power}, oldest {self.oldest}; write 0 or more")

    def open(self, read: Read, shown: Shown, seed: int) -> LiveReplay:
        return _Pool(read, seed, self)

    def takes(self, trajectory: Trajectory, advantage: float) -> bool:
        return abs(advantage) > 1e-6

    def weight(self, advantage: float) -> float:
        return abs(advantage) ** self.power


@dataclass(frozen=True)
class ExpertCache:
    """One trace of each task: an expert's, until the policy's own latest success takes its place. A group in which nobody was
    rewarded (above ``least``) gets it, ``instead`` of its first rollout or beside it."""

    least: float = 0.0
    instead: bool = True
    tasks: int = 65536  # remembered at most

    wants: ClassVar[frozenset[str]] = frozenset({"demonstrations"})

    def __post_init__(self) -> None:
        check(self.tasks >= 1, f"a cache of {self.tasks} tasks; write at least 1")

    def open(self, read: Read, shown: Shown, seed: int) -> LiveReplay:
        return _Cache(read, shown, self)

    def fails(self, group: Group) -> bool:
        rewards = [t.reward for t in group.trajectories if t.origin == Origin.POLICY]
        return bool(rewards) and max(rewards) <= self.least


# ------------------------------------------------------------------------ live


@dataclass
class _Empty:
    def lacks(self, groups: Sequence[Group]) -> list[Task]:
        return []

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        return list(groups)

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}


@dataclass
class _ByTask(_Empty):
    """Successes by the task's key, oldest first; tasks in the order of their last success."""

    read: Read
    seed: int
    rule: SuccessBuffer
    stored: dict[str, list[Entry]] = field(default_factory=dict)

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        return [self._helped(group, step) if self.rule.fails(group) else group for group in groups]

    def _helped(self, group: Group, step: int) -> Group:
        entries = self.stored.get(group.task.key, [])
        dice = random.Random(f"{self.seed}/{step}/{group.task.key}")
        for entry in dice.sample(entries, len(entries)):  # the first that is still there
            row = recalled(self.read, entry, step)
            if row is not None:
                return joined(group, row, self.rule.instead)
        return group

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        for group in groups:
            good = [t for t in own(group) if t.reward > self.rule.least]
            if good:
                past = self.stored.pop(group.task.key, [])
                entries = past + [[t.id, step, credited.get(t.id, 0.0)] for t in good]
                self.stored[group.task.key] = entries[-self.rule.capacity :]
        for key in list(self.stored)[: -self.rule.tasks]:
            del self.stored[key]

    def state_dict(self) -> dict[str, Any]:
        return {"stored": self.stored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stored = {key: [list(entry) for entry in entries] for key, entries in state["stored"].items()}

    def metrics(self) -> dict[str, float]:
        return {"replay/stored": float(sum(map(len, self.stored.values()))), "replay/tasks": float(len(self.stored))}


@dataclass
class _Pool(_Empty):
    """Rows of any task, oldest first."""

    read: Read
    seed: int
    rule: RecentBuffer | WeightedPool
    stored: list[Entry] = field(default_factory=list)

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        self._age(step)
        wanted = round(self.rule.share * sum(len(own(group)) for group in groups))
        found: list[Group] = []
        for entry in self._drawn(step):
            if len(found) == wanted:
                break
            row = recalled(self.read, entry, step)
            if row is not None:
                found.append(Group(f"replay/{row.id}", row.task, (row,)))
        return [*groups, *found]

    def _age(self, step: int) -> None:
        if self.rule.oldest:
            self.stored = [entry for entry in self.stored if step - entry[1] <= self.rule.oldest]

    def _drawn(self, step: int) -> list[Entry]:
        """All of them in a weighted random order: the k-th is drawn from those the first k − 1 left over."""
        dice = random.Random(f"{self.seed}/{step}")
        lots = [math.log(1.0 - dice.random()) / max(self.rule.weight(entry[2]), 1e-30) for entry in self.stored]
        return [self.stored[i] for i in sorted(range(len(lots)), key=lambda i: -lots[i])]

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        fresh = [(t, credited.get(t.id, 0.0)) for group in groups for t in own(group)]
        self.stored += [[t.id, step, a] for t, a in fresh if math.isfinite(a) and self.rule.takes(t, a)]
        self.stored = self.stored[-self.rule.size :]

    def state_dict(self) -> dict[str, Any]:
        return {"stored": self.stored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stored = [list(entry) for entry in state["stored"]]

    def metrics(self) -> dict[str, float]:
        return {"replay/stored": float(len(self.stored))}


@dataclass
class _Cache(_Empty):
    """The last own success by the task's key; before the first, the expert's."""

    read: Read
    shown: Shown
    rule: ExpertCache
    stored: dict[str, Entry] = field(default_factory=dict)

    def lacks(self, groups: Sequence[Group]) -> list[Task]:
        return [g.task for g in groups if g.task.key not in self.stored and self.rule.fails(g)]

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        return [self._helped(group, step) if self.rule.fails(group) else group for group in groups]

    def _helped(self, group: Group, step: int) -> Group:
        entry = self.stored.get(group.task.key)
        row = recalled(self.read, entry, step) if entry else None
        row = row or self.shown(group.task)
        return group if row is None else joined(group, row, self.rule.instead)

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        for group in groups:
            good = [t for t in own(group) if t.reward > self.rule.least]
            if good:
                self.stored.pop(group.task.key, None)
                self.stored[group.task.key] = [good[0].id, step, credited.get(good[0].id, 0.0)]
        for key in list(self.stored)[: -self.rule.tasks]:
            del self.stored[key]

    def state_dict(self) -> dict[str, Any]:
        return {"stored": self.stored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stored = {key: list(entry) for key, entry in state["stored"].items()}

    def metrics(self) -> dict[str, float]:
        return {"replay/stored": float(len(self.stored))}


# --------------------------------------------------------------------- helpers


def own(group: Group) -> list[Trajectory]:
    """What the policy sampled for this very step."""
    return [t for t in group.trajectories if t.origin == Origin.POLICY]


def recalled(read: Read, entry: Entry, step: int) -> Trajectory | None:
    """A stored row as past data: where it comes from, how old it is, what it was credited with."""
    key, stored, advantage = entry
    row = read(key)
    if row is None:
        return None
    facts = {**row.facts, "age": step - stored, "advantage": advantage}
    return replace(row, origin=Origin.REPLAY, facts=facts)


def joined(group: Group, row: Trajectory, instead: bool) -> Group:
    """The group with one row more, ``instead`` of its first that nobody forks from."""
    parents = {t.fork.parent for t in group.trajectories if t.fork is not None}
    free = next((t.id for t in group.trajectories if instead and t.id not in parents), None)
    kept = [t for t in group.trajectories if t.id != free]
    return replace(group, trajectories=(row, *kept))


__all__ = [
    "ExpertCache", "LiveReplay", "Nothing", "Read", "RecentBuffer", "Replay", "Shown", "SuccessBuffer", "WeightedPool",
]  # fmt: skip
