"""What a step learns from: a source of groups, and past or foreign data mixed into them. Knows no episode and no loss."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.core.records import Group, Task, Trajectory
from turnwise.data.replay import LiveReplay


class Sampled(Protocol):
    """Of a live sampler, what a checkpoint and a log need."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class Source(Protocol):
    """Where the groups of a step come from: rollouts, or the rows of a file."""

    staleness: int
    training: int  # groups the learner holds at this moment
    dropped: Counter[str]
    again: deque[tuple[str, Task]]
    ready: deque[Group]
    pulse: dict[str, float]

    @property
    def sampler(self) -> Sampled: ...

    def pump(self, step: int) -> None: ...

    async def gather(self, step: int) -> list[Group]: ...

    async def stop(self) -> None: ...


class Shows(Protocol):
    """Demonstrations, of a task or of any."""

    async def prepare(self, tasks: Sequence[Task], step: int) -> None: ...

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


@dataclass
class Mixture:
    """What a step learns from besides its own rollouts: a buffer of past ones, demonstrations.

    A buffer that asks for demonstrations places them itself; otherwise each group is shown its own."""

    replay: LiveReplay
    shows: Shows | None = None
    placed: bool = False  # the buffer places the demonstrations

    async def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        if self.shows is not None:
            wanted = self.replay.lacks(groups) if self.placed else [group.task for group in groups]
            await self.shows.prepare(wanted, step)
        mixed = self.replay.mix(groups, step)
        return mixed if self.shows is None or self.placed else self.shows.mix(mixed, step)

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        self.replay.observe(groups, credited, step)

    def state_dict(self) -> dict[str, Any]:
        shown = {} if self.shows is None else {"shows": self.shows.state_dict()}
        return {"replay": self.replay.state_dict(), **shown}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.replay.load_state_dict(state["replay"])
        if self.shows is not None:
            self.shows.load_state_dict(state["shows"])

    def metrics(self) -> dict[str, float]:
        return {**self.replay.metrics(), **({} if self.shows is None else self.shows.metrics())}


def foreign(mixed: Sequence[Group], fresh: Sequence[Group]) -> list[Trajectory]:
    """What was mixed in."""
    known = {t.id for group in fresh for t in group.trajectories}
    return [t for group in mixed for t in group.trajectories if t.id not in known]
