"""Replay: which past trajectories are mixed into a step. A piece is frozen data; ``open`` returns the live buffer.

    missing_demonstrations · mix · observe · state_dict · load_state_dict · metrics

A buffer stores ids, never trajectories: it reads them from the ledger when it mixes them in, so a checkpoint stays small and
a resumed run has the same buffer. A replayed trajectory has the origin REPLAY; its facts hold its ``age`` in steps and the mean
``advantage`` it had when it was fresh. Knows no tokens, no losses, no files.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from turnwise.core.batch import prefix
from turnwise.core.limits import Declared, number
from turnwise.core.records import Group, Origin, Task, Trajectory
from turnwise.core.stateful import Stateful
from turnwise.errors import RecipeError
from turnwise.tasks.samplers import weighted_permutation

if TYPE_CHECKING:
    from turnwise.store.shared_pool import SharedPool

FRESH = "fresh"  # fact of a trajectory that holds one turn sampled again
Entry = list[Any]  # [trajectory id, step in which it was sampled, mean advantage]


@dataclass(frozen=True)
class ReplaySources:
    """What a run gives to a live buffer."""

    read: Callable[
        [str], Trajectory | None
    ]  # a stored trajectory by its id, without a parent; None: tokens were pruned
    find_demonstration: Callable[[Task], Trajectory | None]
    seed: int
    open_pool: Callable[[str, int], SharedPool] | None = None  # of a folder; a reader sees its last so many groups

    def load(self, entry: Entry, step: int) -> Trajectory | None:
        """The stored trajectory as replayed data: with its origin, its age and the advantage it had."""
        key, sampled_at, advantage = entry
        trajectory = self.read(key)
        if trajectory is None:
            return None
        facts = {**trajectory.facts, "age": step - sampled_at, "advantage": advantage}
        return replace(trajectory, origin=Origin.REPLAY, facts=facts)


@dataclass
class LiveReplay(Stateful):
    """The state of a replay buffer in a run; as it stands, one that stores nothing."""

    sources: ReplaySources
    rule: Any

    def missing_demonstrations(self, groups: Sequence[Group]) -> list[Task]:
        """The tasks for which ``mix`` needs a demonstration."""
        return []

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The groups of a step with replayed trajectories added."""
        return list(groups)

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        """Store from fresh groups; ``credited`` holds the mean advantage of each trajectory by id."""

    def metrics(self) -> dict[str, float]:
        return {}


class Replay(Declared):
    """Interface: a replay piece of a recipe. A subclass names the class of its live buffer in ``live``."""

    live: ClassVar[type[LiveReplay]] = LiveReplay
    requires: ClassVar[frozenset[str]] = frozenset()
    idle_without: ClassVar[frozenset[str]] = frozenset()

    def open(self, sources: ReplaySources) -> LiveReplay:
        return self.live(sources, self)


class NoReplay(Replay):
    """No replay: a step trains only on its own rollouts."""


def policy_trajectories(group: Group) -> list[Trajectory]:
    """The trajectories that the policy sampled for this step."""
    return [t for t in group.trajectories if t.origin == Origin.POLICY]


def stored_metrics(entries: Iterable[Entry]) -> dict[str, float]:
    """How many entries there are, and the steps in which the oldest and the newest were sampled."""
    steps = [int(entry[1]) for entry in entries]
    ages = {"replay/oldest_step": float(min(steps)), "replay/newest_step": float(max(steps))} if steps else {}
    return {"replay/stored": float(len(steps)), **ages}


# ------------------------------------------------------------------- by task


@dataclass
class _ByTask(LiveReplay):
    """Entries by task key, oldest first; tasks are ordered by their latest success."""

    stored: dict[str, list[Entry]] = field(default_factory=dict)
    saved = ("stored",)

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        mixed = []
        for group in groups:
            replayed = self.replayed(group, step) if self.rule.fails(group) else None
            if replayed is None:
                mixed.append(group)
                continue
            # instead of the first trajectory that no other forks from, or in addition
            parents = {t.fork.parent for t in group.trajectories if t.fork is not None}
            free = [t.id for t in group.trajectories if t.id not in parents]
            gone = free[0] if free and self.rule.instead else None
            mixed.append(replace(group, trajectories=(replayed, *(t for t in group.trajectories if t.id != gone))))
        return mixed

    def replayed(self, group: Group, step: int) -> Trajectory | None:
        """A random entry whose tokens are still stored."""
        entries = self.stored.get(group.task.key, [])
        rng = random.Random(f"{self.sources.seed}/{step}/{group.task.key}")
        loaded = (self.sources.load(entry, step) for entry in rng.sample(entries, len(entries)))
        return next((t for t in loaded if t is not None), None)

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        for group in groups:
            chosen = self.rule.stores(group, group.task.key in self.stored)
            if chosen:
                past = self.stored.pop(group.task.key, [])
                entries = past + [[t.id, step, credited.get(t.id, 0.0)] for t in chosen]
                self.stored[group.task.key] = entries[-self.rule.capacity :]
        for key in list(self.stored)[: -self.rule.tasks]:
            del self.stored[key]

    def metrics(self) -> dict[str, float]:
        entries = [entry for entries in self.stored.values() for entry in entries]
        return {"replay/tasks": float(len(self.stored)), **stored_metrics(entries)}


class SuccessBuffer(Replay):
    """Up to ``capacity`` past successes per task (reward above ``least``), first in, first out. A group that fails (reward std
    below ``spread`` and mean below ``mean``) gets one of them, ``instead`` of its first rollout or in addition."""

    live = _ByTask
    capacity: int = number(8, least=1)
    least: float = 0.1
    spread: float = number(0.05, least=0)
    mean: float = 0.2
    instead: bool = True
    tasks: int = number(4096, least=1)  # stored at most

    def stores(self, group: Group, stored: bool) -> list[Trajectory]:
        return [t for t in policy_trajectories(group) if t.reward > self.least]

    def fails(self, group: Group) -> bool:
        rewards = [t.reward for t in policy_trajectories(group)]
        if not rewards:
            return False
        mean = sum(rewards) / len(rewards)
        spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        return spread < self.spread and mean < self.mean


@dataclass
class _ExpertCache(_ByTask):
    """The policy's latest success; the demonstration where there is none."""

    def missing_demonstrations(self, groups: Sequence[Group]) -> list[Task]:
        return [g.task for g in groups if g.task.key not in self.stored and self.rule.fails(g)]

    def replayed(self, group: Group, step: int) -> Trajectory | None:
        return super().replayed(group, step) or self.sources.find_demonstration(group.task)


class ExpertCache(Replay):
    """One trajectory per task: the policy's latest success, or an expert's until there is one: one that came with a group (a
    planned episode), which is stored, or a demonstration. A group without a reward above ``least`` gets it, ``instead`` of its
    first rollout or in addition."""

    live = _ExpertCache
    least: float = 0.0
    instead: bool = True
    tasks: int = number(65536, least=1)  # stored at most

    requires: ClassVar = frozenset({"demonstrations"})
    capacity: ClassVar = 1

    def planned(self, group: Group) -> list[Trajectory]:
        """Expert data that came with the group and succeeded."""
        return [t for t in group.trajectories if t.origin == Origin.EXPERT and t.reward > self.least]

    def stores(self, group: Group, stored: bool) -> list[Trajectory]:
        successes = [t for t in policy_trajectories(group) if t.reward > self.least]
        if not successes and not stored:
            successes = [t for t in self.planned(group) if t.id.startswith(f"{group.id}.")]  # those in the ledger
        return successes[:1]

    def fails(self, group: Group) -> bool:
        """Whether no sampled trajectory has a reward above ``least``, and no expert's came with the group."""
        rewards = [t.reward for t in policy_trajectories(group)]
        return bool(rewards) and max(rewards) <= self.least and not self.planned(group)


# ------------------------------------------------------------------ of any task


@dataclass
class _Pool(LiveReplay):
    """Trajectories of any task, oldest first."""

    stored: list[Entry] = field(default_factory=list)
    saved = ("stored",)

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        if self.rule.oldest:
            self.stored = [entry for entry in self.stored if step - entry[1] <= self.rule.oldest]
        count = round(self.rule.share * sum(len(policy_trajectories(group)) for group in groups))
        weights = [self.rule.weight(entry[2]) for entry in self.stored]
        replayed: list[Group] = []
        for i in weighted_permutation(weights, random.Random(f"{self.sources.seed}/{step}")):
            if len(replayed) == count:
                break
            trajectory = self.sources.load(self.stored[i], step)
            if trajectory is not None:
                replayed.append(Group(f"replay/{trajectory.id}", trajectory.task, (trajectory,)))
        return [*groups, *replayed]

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        fresh = [(t, credited.get(t.id, 0.0)) for group in groups for t in policy_trajectories(group)]
        self.stored += [[t.id, step, a] for t, a in fresh if math.isfinite(a) and self.rule.takes(t, a)]
        self.stored = self.stored[-self.rule.size :]

    def metrics(self) -> dict[str, float]:
        return stored_metrics(self.stored)


class RecentBuffer(Replay):
    """Trajectories of the last ``oldest`` steps with an advantage above ``above`` and at least ``tools`` tool calls, at most
    ``size`` of them. Each step adds random ones as groups of one, up to ``share`` times the number of fresh trajectories."""

    live = _Pool
    oldest: int = number(10, least=1)
    size: int = number(2048, least=1)
    share: float = number(0.5, above=0, why="replayed rows for each fresh one")
    above: float = 0.0
    tools: int = 0

    def takes(self, trajectory: Trajectory, advantage: float) -> bool:
        return advantage > self.above and sum(turn.tool_calls for turn in trajectory.turns) >= self.tools

    def weight(self, advantage: float) -> float:
        return 1.0


class WeightedPool(Replay):
    """The last ``size`` trajectories whose advantage was not zero. Each step samples ``share`` times the number of fresh ones,
    with weight |A|^``power``, as groups of one. ``oldest`` limits their age in steps; 0: no limit."""

    live = _Pool
    size: int = number(2048, least=1)
    share: float = number(0.5, above=0, why="replayed rows for each fresh one")
    power: float = number(1.0, least=0)
    oldest: int = number(0, least=0)

    def takes(self, trajectory: Trajectory, advantage: float) -> bool:
        return abs(advantage) > 1e-6

    def weight(self, advantage: float) -> float:
        return abs(advantage) ** self.power


# ---------------------------------------------------------------- whole batches


@dataclass
class _Batches(LiveReplay):
    stored: list[list[Any]] = field(default_factory=list)  # [group id, entries of its trajectories], oldest first
    saved = ("stored",)

    def ended(self, step: int) -> bool:
        return bool(self.rule.until) and step >= self.rule.until

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        if self.ended(step):
            self.stored = []
            return list(groups)
        self.stored = [[key, entries] for key, entries in self.stored if step - int(entries[0][1]) < self.rule.window]
        count = round(self.rule.share / (1 - self.rule.share) * len(groups))
        replayed: list[Group] = []
        for key, entries in random.Random(f"{self.sources.seed}/{step}").sample(self.stored, len(self.stored)):
            if len(replayed) == count:
                break
            loaded = [self.sources.load(entry, step) for entry in entries]
            members = tuple(t for t in loaded if t is not None)
            if len(members) == len(entries):  # statistics of a part of a group would be others
                replayed.append(Group(f"replay/{key}", members[0].task, members))
        return [*groups, *replayed]

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        if self.ended(step + 1) or self.rule.window == 1:
            return
        for group in groups:
            entries = [[t.id, step, credited.get(t.id, 0.0)] for t in policy_trajectories(group)]
            if entries:
                self.stored.append([group.id, entries])
        self.stored = self.stored[-self.rule.size :]

    def metrics(self) -> dict[str, float]:
        entries = [entry for _, entries in self.stored for entry in entries]
        return {"replay/groups": float(len(self.stored)), **stored_metrics(entries)}


class PastBatches(Replay):
    """The batches of the last ``window`` − 1 steps, each group with all of its trajectories. A share ``share`` of the groups of
    each step are past ones, drawn at random without replacement, in addition to the fresh ones; fewer while there are not enough.
    From step ``until`` on there is no replay; 0: it does not end."""

    live = _Batches
    share: float = number(0.4, least=0, below=1, why="the part of a step that is replayed")
    window: int = number(2, least=1)
    until: int = number(0, least=0)
    size: int = number(4096, least=1)  # groups at most


# ------------------------------------------------------- experts and other runs


@dataclass
class _ExpertItems(LiveReplay):
    def missing_demonstrations(self, groups: Sequence[Group]) -> list[Task]:
        return [group.task for group in groups] if self.rule.share else []

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        mixed = []
        for group in groups:
            expert = self.sources.find_demonstration(group.task)
            rng = random.Random(f"{self.sources.seed}/{step}/{group.id}")
            parents = {t.fork.parent for t in group.trajectories if t.fork is not None}
            items = list(group.trajectories)
            for i, t in enumerate(group.trajectories):
                # a trajectory that others fork from stays: its turns are their context
                free = t.origin == Origin.POLICY and t.id not in parents
                if expert is not None and rng.random() < self.rule.share and free:
                    items[i] = replace(expert, id=f"{group.id}/expert{i}")
            mixed.append(replace(group, trajectories=tuple(items)))
        return mixed


class ExpertItems(Replay):
    """Each rollout of a group is replaced with probability ``share`` by the demonstration of its task, if it has one. The draw
    depends on the seed, the step and the task alone."""

    live = _ExpertItems
    share: float = number(0.5, least=0, most=1)

    requires: ClassVar = frozenset({"demonstrations"})


@dataclass
class _Shared(LiveReplay):
    mixed: int = 0  # groups of other runs in the last step
    available: int = 0
    saved = ("name",)

    def __post_init__(self) -> None:
        assert self.sources.open_pool is not None
        self.pool = self.sources.open_pool(self.rule.folder, self.rule.capacity)
        self.name = self.rule.sender or f"seed-{self.sources.seed:x}"

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        others = [(who, g) for who, g in self.pool.read(self.name, step) if sum(t.reward for t in g.trajectories)]
        self.mixed, self.available = min(self.rule.foreign, len(others)), len(others)
        foreign = []
        for sender, group in random.Random(f"{self.sources.seed}/{step}").sample(others, self.mixed):
            members = []  # replayed data under ids that cannot be ours
            for t in group.trajectories:
                fork = t.fork and replace(t.fork, parent=f"{sender}/{t.fork.parent}")
                members.append(replace(t, id=f"{sender}/{t.id}", origin=Origin.REPLAY, fork=fork))
            foreign.append(Group(f"{sender}/{group.id}", group.task, tuple(members)))
        return [*groups, *foreign]

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        sampled = [replace(g, trajectories=tuple(policy_trajectories(g))) for g in groups]
        self.pool.write(self.name, step, [g for g in sampled if g.trajectories])

    def metrics(self) -> dict[str, float]:
        counts = {f"replay/pool_{name}": float(n) for name, n in self.pool.counts().items()}
        return {"replay/foreign": float(self.mixed), "replay/stored": float(self.available), **counts}


class SharedExperience(Replay):
    """Writes the groups of each step to the pool in ``folder``, and adds ``foreign`` groups of other runs to each step: at random
    among the last ``capacity``, without those whose total reward is 0. ``sender`` names this run; empty: by its seed."""

    live = _Shared
    idle_without: ClassVar = frozenset({"other runs"})
    folder: str = ""
    foreign: int = number(4, least=0, why="groups of other runs a step")
    sender: str = ""
    capacity: int = number(256, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.folder:
            raise RecipeError("a shared pool needs a folder; write folder=PATH")


# ------------------------------------------------------------------ fresh actions


class FreshActions(Replay):
    """``count`` turns of the present policy at the state of each turn of a step, replayed ones included; no environment answers
    them (``data/mixing.py`` samples them). Each is a trajectory of one turn without a reward, a fork of the recorded one with
    the fact ``fresh``. ``replay``: the buffer underneath."""

    replay: Replay = NoReplay()
    count: int = number(1, least=0)

    @property
    def requires(self) -> frozenset[str]:  # type: ignore[override]
        return self.replay.requires

    def open(self, sources: ReplaySources) -> LiveReplay:
        return self.replay.open(sources)


def inline_fork(trajectory: Trajectory, load: Callable[[str], Trajectory]) -> Trajectory:
    """The trajectory without a parent: the prefix it shared is part of its first context."""
    if trajectory.fork is None:
        return trajectory
    ancestors, child = dict[str, Trajectory](), trajectory
    while child.fork is not None:
        child = load(child.fork.parent)
        ancestors[child.id] = child
    first, *later = trajectory.turns
    if not first.restart:
        shared = tuple(prefix(trajectory, ancestors))
        masked = (*shared, *first.masked_context) if first.masked_context else ()
        first = replace(first, context=(*shared, *first.context), masked_context=masked)
    return replace(trajectory, fork=None, turns=(first, *later))


def trajectory_reader(load: Callable[[str], Trajectory]) -> Callable[[str], Trajectory | None]:
    """``load`` reads the ledger. The reader returns None for a trajectory whose tokens, or whose parent's, were pruned."""

    def read(key: str) -> Trajectory | None:
        trajectory = inline_fork(load(key), load)
        return trajectory if trajectory.sampled and trajectory.turns[0].context else None

    return read
