"""The rows that :class:`~turnwise.inspector.queries.RunReader` returns: plain records, without the content of a trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turnwise.core.records import Task


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One row of ``metrics.jsonl``: the numbers of a step by name; None where a number was not finite."""

    step: int
    time: float
    values: Mapping[str, float | None]

    def __getitem__(self, name: str) -> float | None:
        return self.values.get(name)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group as the ledger counts it, without its trajectories' content."""

    id: str
    task: Task
    state: str  # in_flight, finished, trained, dropped
    step: int  # of its last transition
    reason: str  # why it was dropped
    version: int  # of the policy when it was issued
    void: bool  # undone by a resume
    trajectories: int
    tokens: int
    reward: float | None  # mean
    reward_low: float | None
    reward_high: float | None
    success: float | None  # share


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One trajectory without its tokens and messages."""

    id: str
    group: str
    task: Task
    state: str  # of its group
    step: int  # of its group
    version: int
    status: str  # finished, truncated, failed
    reason: str
    reward: float | None
    success: bool | None
    turns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class FlowRow:
    """How many groups of one step ended in one state, for one reason."""

    step: int
    state: str
    reason: str
    groups: int
    without_spread: int  # whose trajectories all have the same reward


@dataclass(frozen=True, slots=True)
class TaskRow:
    """The trajectories of one task in one step."""

    task: str  # its key
    step: int
    trajectories: int
    successes: int | None
    reward: float | None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The trajectories that one step trained on or dropped: how many, their reward, how many succeeded."""

    step: int
    trajectories: int
    tokens: int
    reward: float  # mean
    deviation: float  # standard deviation of the reward
    judged: int  # with a verdict
    successes: int
    best: float  # highest reward
    at_best: int  # trajectories that have it


@dataclass(frozen=True, slots=True)
class MessageRow:
    """One message of a run: what it told its user, and when."""

    step: int
    time: float
    level: str
    text: str
    name: str = ""
