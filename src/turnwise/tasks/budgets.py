"""Budgets: how many groups a step trains on, and how many trajectories and turns the group of each task gets.

A budget is a frozen piece; ``open`` returns its live state, which is asked once per wave of tasks. ``size`` is the mean number
of trajectories: a live budget spends exactly ``size`` × tasks of a wave wherever whole numbers allow. Knows tasks and finished
groups; no token and no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.core.records import Group, Task
from turnwise.errors import RecipeError


class LiveBudget(Protocol):
    """Interface: a budget in a run. ``rounds``: whether ``rest`` may be more than 0."""

    rounds: bool

    def sizes(self, tasks: Sequence[Task]) -> list[int]:
        """The number of trajectories for each task of a wave, at first."""
        ...

    def rest(self, tasks: Sequence[Task], groups: Sequence[Group]) -> list[int]:
        """The number of further trajectories for each task of a wave, once those at first are known. All 0: none."""
        ...

    def max_turns(self, task: Task) -> int:
        """The turn limit of an episode of this task; 0: the environment's."""
        ...

    def observe(self, group: Group) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class Budget(Protocol):
    """Interface: the frozen description of a budget."""

    @property
    def groups(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def largest(self) -> int:
        """The most trajectories that one group may get."""
        ...

    def of(self, groups: int, size: int) -> Budget:
        """This budget for so many groups with a mean of ``size`` trajectories."""
        ...

    def open(self) -> LiveBudget: ...


def check_budget(groups: int, size: int) -> None:
    """Refuse a step without a group, or groups without a rollout."""
    if groups < 1 or size < 1:
        raise RecipeError(f"a budget of {groups} groups of {size}; both must be at least 1")


@dataclass(frozen=True)
class Fixed:
    """``groups`` groups per step, ``size`` trajectories per group."""

    groups: int = 8
    size: int = 8

    def __post_init__(self) -> None:
        check_budget(self.groups, self.size)

    @property
    def largest(self) -> int:
        return self.size

    def of(self, groups: int, size: int) -> Budget:
        return Fixed(groups, size)

    def open(self) -> LiveBudget:
        return EqualSizes(self.size)


@dataclass(frozen=True)
class Wide:
    """Few tasks with ``width`` trajectories each: as many rollouts per step as the budget it replaces, and at least one task."""

    width: int = 512

    def __post_init__(self) -> None:
        check_budget(1, self.width)

    @property
    def groups(self) -> int:
        return 1

    @property
    def size(self) -> int:
        return self.width

    @property
    def largest(self) -> int:
        return self.width

    def of(self, groups: int, size: int) -> Budget:
        return Fixed(max(1, round(groups * size / self.width)), self.width)

    def open(self) -> LiveBudget:
        return EqualSizes(self.width)


@dataclass
class EqualSizes:
    """The same number for every task; also the base of other live budgets."""

    size: int

    rounds = False

    def sizes(self, tasks: Sequence[Task]) -> list[int]:
        return [self.size] * len(tasks)

    def rest(self, tasks: Sequence[Task], groups: Sequence[Group]) -> list[int]:
        return [0] * len(tasks)

    def max_turns(self, task: Task) -> int:
        return 0

    def observe(self, group: Group) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}
