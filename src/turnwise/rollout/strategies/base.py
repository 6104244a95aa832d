"""What a strategy is given and what it returns. Knows sessions and trajectories; no engine, no environment, no loss."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from turnwise.core.limits import Declared
from turnwise.core.protocols import Session
from turnwise.core.records import Group, Origin, Status, Task, Trajectory


class EpisodeRunner(Protocol):
    """Plays one episode: trajectory id, task, session → trajectory. Never raises for an error of the environment."""

    def __call__(
        self, key: str, task: Task, session: Session, temperature_scale: float = 1.0, **more: Any
    ) -> Coroutine[Any, Any, Trajectory]:
        """``temperature_scale`` multiplies the sampling temperature; a value other than 1 is recorded as guidance. ``more``:
        ``fork_from``, a fork point to start from; ``fork_points``, a list that receives those of this episode; ``with_hint``,
        whether the prompt contains the environment's hint; ``support``, other help; ``max_turns``, a limit of its own;
        ``wording``, which wording of the task to show."""
        ...


StepMetrics = Mapping[str, float]
"""Metrics of the last training step (entropy, success ...); empty before the first."""


class OpenSession(Protocol):
    """Opens the i-th session of a group; its ``draft`` uses the same random numbers, possibly at lower precision."""

    def __call__(self, i: int, draft: bool = False) -> Session: ...


@dataclass(frozen=True)
class GroupRequest:
    """One group to grow: ``size`` trajectories of ``task``. ``step`` counts training steps."""

    group: str
    task: Task
    size: int
    open_session: OpenSession
    play: EpisodeRunner
    last_metrics: StepMetrics = field(default_factory=dict)
    step: int = 0

    def sessions(self, count: int | None = None, begin: int = 0) -> list[Session]:
        """Open sessions ``begin``, ``begin`` + 1 ...; as many as the group has trajectories unless told otherwise."""
        return [self.open_session(begin + i) for i in range(self.size if count is None else count)]

    def key(self, i: int) -> str:
        """The id of the i-th trajectory."""
        return f"{self.group}.{i}"

    def grown(self, trajectories: Sequence[Trajectory]) -> Group:
        return Group(self.group, self.task, tuple(trajectories))

    async def play_all(self, sessions: Sequence[Session], first: int = 0, **more: Any) -> list[Trajectory]:
        """Play one episode in each session, concurrently; ids are numbered from ``first``."""
        plays = (self.play(self.key(first + i), self.task, s, **more) for i, s in enumerate(sessions))
        return list(await asyncio.gather(*plays))


class Strategy(Declared):
    """Interface: how the episodes of a group are produced. ``begin`` opens all sessions synchronously, before anything is
    awaited, so that a generator knows the whole batch of sessions; the coroutine it returns plays the episodes. A subclass plays
    them in ``grow``."""

    requirements: ClassVar[frozenset[str]] = frozenset()  # what the environment must provide
    reads_rewards: ClassVar[bool] = False  # rewards of some trajectories are read before others are played
    shifts_logits: ClassVar[bool] = False  # only the generator of this process can sample so

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self.grow(request, request.sessions())

    async def grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        raise NotImplementedError


def park(sessions: Sequence[Session]) -> None:
    """Mark sessions idle until they generate: nobody waits for them."""
    for session in sessions:
        session.park()


def close(sessions: Sequence[Session]) -> None:
    """Close sessions that no episode will use."""
    for session in sessions:
        session.close()


def succeeded(trajectory: Trajectory) -> bool:
    """The environment's verdict; a positive reward where it gives none. An episode that broke has not succeeded."""
    return trajectory.status != Status.FAILED and trajectory.solved


def all_failed(trajectories: Sequence[Trajectory]) -> bool:
    """Whether no trajectory succeeded although at least one was played: a hint does not repair a broken environment."""
    played = [t for t in trajectories if t.status != Status.FAILED and t.origin == Origin.POLICY]
    return bool(played) and not any(map(succeeded, played))
