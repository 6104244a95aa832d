"""The training data of a step: a source of groups, with replayed and expert data mixed in. Knows no episode and no loss."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.core.records import Group, Task, Trajectory
from turnwise.data.replay import LiveReplay
from turnwise.data.resampling import TurnResampler


class StatefulSampler(Protocol):
    """The part of a live sampler that a checkpoint and a log need."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class GroupSource(Protocol):
    """Where the groups of a step come from: rollouts, or the rows of a file."""

    @property
    def synchronous(self) -> bool:
        """Whether no rollouts run while the learner works."""
        ...

    training: int  # groups the learner holds at this moment
    dropped: Counter[str]
    to_reissue: deque[tuple[str, Task]]  # groups in flight when the run was stopped
    ready: deque[Group]
    last_metrics: dict[str, float]  # of the last training step

    @property
    def sampler(self) -> StatefulSampler: ...

    def issue(self, step: int) -> None: ...

    def restore(self, finished: Sequence[Group], step: int) -> None: ...

    async def collect_step(self, step: int) -> list[Group]: ...

    async def stop(self) -> None: ...


class DemonstrationSource(Protocol):
    """Expert trajectories, of given tasks or of any."""

    async def prepare(self, tasks: Sequence[Task], step: int) -> None: ...

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


@dataclass
class Mixture:
    """What a step trains on besides its own rollouts: a replay buffer, demonstrations, turns that are sampled again.

    A buffer that asks for demonstrations places them itself; otherwise each group gets the demonstration of its task."""

    replay: LiveReplay
    demonstrations: DemonstrationSource | None = None
    replay_places_them: bool = False  # the buffer, not the group, decides where demonstrations go
    resampler: TurnResampler | None = None

    async def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        mixed = await self._recorded(groups, step)
        return mixed if self.resampler is None else await self.resampler.add(mixed, step)

    async def _recorded(self, groups: Sequence[Group], step: int) -> list[Group]:
        if self.demonstrations is not None:
            all_tasks = [group.task for group in groups]
            tasks = self.replay.missing_demonstrations(groups) if self.replay_places_them else all_tasks
            await self.demonstrations.prepare(tasks, step)
        mixed = self.replay.mix(groups, step)
        if self.demonstrations is None or self.replay_places_them:
            return mixed
        return self.demonstrations.mix(mixed, step)

    def observe(self, groups: Sequence[Group], credited: Mapping[str, float], step: int) -> None:
        self.replay.observe(groups, credited, step)

    def state_dict(self) -> dict[str, Any]:
        state = {} if self.demonstrations is None else {"shows": self.demonstrations.state_dict()}
        return {"replay": self.replay.state_dict(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.replay.load_state_dict(state["replay"])
        if self.demonstrations is not None:
            self.demonstrations.load_state_dict(state["shows"])

    def metrics(self) -> dict[str, float]:
        return {**self.replay.metrics(), **({} if self.demonstrations is None else self.demonstrations.metrics())}


def mixed_in(mixed: Sequence[Group], fresh: Sequence[Group]) -> list[Trajectory]:
    """The trajectories of ``mixed`` that are not among those of ``fresh``."""
    fresh_ids = {t.id for group in fresh for t in group.trajectories}
    return [t for group in mixed for t in group.trajectories if t.id not in fresh_ids]
