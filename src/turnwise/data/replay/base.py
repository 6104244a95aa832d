"""What replay pieces have in common. A piece is frozen data; ``open`` returns the live buffer.

    missing_demonstrations · mix · observe · state_dict · load_state_dict · metrics

A buffer stores ids, never trajectories: it reads them from the ledger when it mixes them in, so a checkpoint stays small and
a resumed run has the same buffer. A replayed trajectory has the origin REPLAY; its facts hold its ``age`` in steps and the mean
``advantage`` it had when it was fresh. Knows no tokens, no losses, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from turnwise.core.records import Group, Origin, Task, Trajectory
from turnwise.errors import RecipeError

ReadTrajectory = Callable[[str], Trajectory | None]
"""Reads a stored trajectory by its id, without a parent; None if its tokens were pruned."""

FindDemonstration = Callable[[Task], Trajectory | None]
"""The demonstration of a task; None if there is none."""

Entry = list[Any]  # [trajectory id, step in which it was sampled, mean advantage]


class LiveReplay(Protocol):
    """The state of a replay buffer in a run."""

    def missing_demonstrations(self, groups: Sequence[Group]) -> list[Task]:
        """The tasks for which ``mix`` needs a demonstration."""
        ...

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The groups of a step with replayed trajectories added."""
        ...

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        """Store from fresh groups; ``credited`` holds the mean advantage of each trajectory by id."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class Replay(Protocol):
    """A replay piece of a recipe: frozen data that opens a live buffer."""

    @property
    def requires(self) -> frozenset[str]: ...

    def open(self, read: ReadTrajectory, find_demonstration: FindDemonstration, seed: int) -> LiveReplay: ...


def require(ok: bool, message: str) -> None:
    """Raise a ``RecipeError`` unless ``ok``."""
    if not ok:
        raise RecipeError(message)


@dataclass(frozen=True)
class NoReplay:
    """No replay: a step trains only on its own rollouts."""

    requires: ClassVar[frozenset[str]] = frozenset()

    def open(self, read: ReadTrajectory, find_demonstration: FindDemonstration, seed: int) -> LiveReplay:
        return EmptyReplay()


@dataclass
class EmptyReplay:
    """A buffer that stores nothing; others override what they need."""

    def missing_demonstrations(self, groups: Sequence[Group]) -> list[Task]:
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


def ages(entries: Sequence[Entry]) -> dict[str, float]:
    """The steps in which the oldest and the newest entry were sampled."""
    steps = [int(entry[1]) for entry in entries]
    return {"replay/oldest_step": float(min(steps)), "replay/newest_step": float(max(steps))} if steps else {}


def policy_trajectories(group: Group) -> list[Trajectory]:
    """The trajectories that the policy sampled for this step."""
    return [t for t in group.trajectories if t.origin == Origin.POLICY]


def load_entry(read: ReadTrajectory, entry: Entry, step: int) -> Trajectory | None:
    """The stored trajectory as replayed data: with its origin, its age and the advantage it had."""
    key, sampled_at, advantage = entry
    trajectory = read(key)
    if trajectory is None:
        return None
    facts = {**trajectory.facts, "age": step - sampled_at, "advantage": advantage}
    return replace(trajectory, origin=Origin.REPLAY, facts=facts)


def with_trajectory(group: Group, trajectory: Trajectory, instead: bool) -> Group:
    """The group with one more trajectory, ``instead`` of the first one that no other forks from."""
    parents = {t.fork.parent for t in group.trajectories if t.fork is not None}
    replaced = next((t.id for t in group.trajectories if instead and t.id not in parents), None)
    kept = [t for t in group.trajectories if t.id != replaced]
    return replace(group, trajectories=(trajectory, *kept))
