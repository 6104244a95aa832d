"""The training data of a step: a source of groups, with replayed and expert data mixed in. Knows no episode and no loss."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from turnwise.core.batch import prefix
from turnwise.core.protocols import Generator, Session
from turnwise.core.records import Completion, Fork, Group, Sampling, Stop, Task, Trajectory, Turn
from turnwise.core.seeds import stable_seed
from turnwise.data.demonstrations import Demonstrations
from turnwise.data.replay import FRESH, LiveReplay, NoReplay
from turnwise.rollout.episode import sampled_turn


@dataclass
class TurnResampler:
    """Samples ``count`` turns at the state of every recorded turn that has tokens."""

    generator: Generator
    sampling: Sampling
    count: int
    seed: int

    async def add(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The groups with the resampled turns. Opens all sessions before the first token is decoded."""
        drawn = [self._states(group, step) for group in groups]
        states = [state for rows in drawn for state in rows]
        sessions = [self.generator.open(stable_seed(self.seed, "fresh", one.id)) for one, _ in states]
        plays = (self._sample(session, ids, one.turns[0]) for session, (one, ids) in zip(sessions, states))
        completions = iter(await asyncio.gather(*plays))
        out = []
        for group, rows in zip(groups, drawn):
            taken = [(one, next(completions)) for one, _ in rows]
            more = [_with_turn(one, c) for one, c in taken if c.tokens and c.stop != Stop.CANCELLED]
            out.append(replace(group, trajectories=(*group.trajectories, *more)))
        return out

    async def _sample(self, session: Session, ids: list[int], turn: Turn) -> Completion:
        """One turn. Its session closes at once: a deterministic generator waits for open ones."""
        try:
            return await session.generate(ids, replace(self.sampling, grammar=turn.grammar, begun=turn.begun))
        finally:
            session.close()

    def _states(self, group: Group, step: int) -> list[tuple[Trajectory, list[int]]]:
        """For each turn to sample, a fork with the recorded turn in its place, and the ids it reads."""
        by_id, rows = {t.id: t for t in group.trajectories}, list[tuple[Trajectory, list[int]]]()
        for t in group.trajectories:
            for k, turn in enumerate(t.turns):
                for j in range(self.count if turn.tokens else 0):
                    key = f"{t.id}/fresh-{step}.{k}.{j}"
                    one = Trajectory(key, t.task, (turn,), fork=Fork(t.id, k), facts={FRESH: 1.0}, guidance=t.guidance)
                    rows.append((one, prefix(one, by_id)))
        return rows


def _with_turn(one: Trajectory, completion: Completion) -> Trajectory:
    """The fork with the turn that was sampled instead. Its context belongs to the recorded trajectory."""
    turn = one.turns[0]
    same = {name: getattr(turn, name) for name in ("agent", "state", "temperature")}
    return replace(one, turns=(sampled_turn(completion, context=(), **same),))


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


@dataclass
class Mixture:
    """What a step trains on besides its own rollouts: a replay buffer, demonstrations, turns that are sampled again.

    A buffer that asks for demonstrations places them itself; otherwise each group gets the demonstration of its task."""

    replay: LiveReplay
    demonstrations: Demonstrations | None = None
    replay_places_them: bool = False  # the buffer, not the group, decides where demonstrations go
    resampler: TurnResampler | None = None
    acted: float = 0.0  # the share of the latest step's trajectories that are not its own rollouts

    async def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        if self.demonstrations is not None:
            all_tasks = [group.task for group in groups]
            tasks = self.replay.missing_demonstrations(groups) if self.replay_places_them else all_tasks
            await self.demonstrations.prepare(tasks, step)
        mixed = self.replay.mix(groups, step)
        if self.demonstrations is not None and not self.replay_places_them:
            mixed = self.demonstrations.mix(mixed, step)
        # last, because replayed and demonstrated turns are sampled again, too
        mixed = mixed if self.resampler is None else await self.resampler.add(mixed, step)
        self.acted = len(mixed_in(mixed, groups)) / max(1, sum(len(group.trajectories) for group in mixed))
        return mixed

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
        acted = {} if type(self.replay.rule) is NoReplay else {"acted/replay": self.acted}
        shown = {} if self.demonstrations is None else self.demonstrations.metrics()
        return {**self.replay.metrics(), **shown, **acted}


def mixed_in(mixed: Sequence[Group], fresh: Sequence[Group]) -> list[Trajectory]:
    """The trajectories of ``mixed`` that are not among those of ``fresh``."""
    fresh_ids = {t.id for group in fresh for t in group.trajectories}
    return [t for group in mixed for t in group.trajectories if t.id not in fresh_ids]
