"""Demonstrations beside the policy's own episodes: of the very task where somebody can show it, else of any.

    a player of the environment      plays each task of the step
    rows that name their tasks       the row is told again in the environment, which pays it; where it does not go through
                                     word for word, the row counts as written: its own reward, or 1
    rows without tasks               groups of their own, a share of the batch, every pass in a new seeded order

Knows no tokens of the policy and no loss.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from turnwise.core.protocols import Action
from turnwise.core.records import Group, Origin, Sampling, Status, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.data.dataset import Row, Script
from turnwise.data.tokenize import Speaker
from turnwise.errors import EnvironmentFault
from turnwise.rollout.episode import Episode, Limits
from turnwise.rollout.scripted import Scripted, play_script
from turnwise.tasks.listed import place

TOGETHER = 64  # episodes at once
AS_WRITTEN = "as written"
CUT = "context window"  # how an episode says that it did not fit: half a demonstration is none


@dataclass(frozen=True)
class Stage:
    """Where demonstrations are played."""

    open: Callable[[Task], Any]
    speaker: Speaker
    limits: Limits

    def expert(self, played: Trajectory) -> Trajectory:
        """Nobody knows its behaviour policy; it is judged at the temperature of the run's."""
        heat = self.speaker.temperature
        turns = tuple(replace(turn, logp=(), mass=(), version=(), temperature=heat) for turn in played.turns)
        return replace(played, turns=turns, origin=Origin.EXPERT)


class Showing(Protocol):
    """Who can show a task."""

    async def show(self, task: Task, step: int) -> Trajectory | None: ...


@dataclass(frozen=True)
class Player:
    """A scripted player of the environment: oracle, demonstrator."""

    name: str
    stage: Stage

    async def show(self, task: Task, step: int) -> Trajectory | None:
        stage, key = self.stage, f"{self.name}:{task.key}"
        played = await play_script(self.name, stage.open(task), key, task, stage.speaker.renderer, stage.limits)
        return stage.expert(played)


@dataclass(frozen=True)
class Named:
    """Rows that name their tasks; of several for one task, each step takes one by lot."""

    rows: Mapping[str, Sequence[Row]]
    stage: Stage

    async def show(self, task: Task, step: int) -> Trajectory | None:
        rows = self.rows.get(task.key, ())
        if not rows:
            return None
        row = rows[stable_seed(task.key, step) % len(rows)]
        key, script = f"row{row.line}:{task.key}", row.scripts[0]
        played = await told_again(script, key, task, self.stage)
        return played or replace(self.stage.speaker.trajectory(script, key, task), reason=AS_WRITTEN)


async def told_again(script: Script, key: str, task: Task, stage: Stage) -> Trajectory | None:
    """What the environment answers and pays if the assistant says the same; None where it is another dialogue."""
    words = iter(script.turns)

    def act() -> Action:
        try:
            return Action(next(words))
        except StopIteration:
            raise EnvironmentFault("the demonstration ends before the episode") from None

    renderer = stage.speaker.renderer
    session = Scripted(act, renderer)
    played = await Episode(key, task, stage.open(task), session, renderer, Sampling(), stage.limits).run()
    begins = [m["content"] for m in played.messages[: len(script.before)]] == [m["content"] for m in script.before]
    if played.status == Status.FAILED or len(played.turns) != len(script.turns) or not begins:
        return None
    return replace(stage.expert(played), facts=script.facts)


@dataclass
class Demonstrations:
    """The live source. ``loose``: rows without a task; ``showing``: who shows a given one."""

    seed: int
    share: float = 0.2
    showing: Showing | None = None
    loose: Sequence[Group] = ()
    drawn: int = 0
    prepared: dict[str, Trajectory] = field(default_factory=dict)
    counted: Counter[str] = field(default_factory=Counter)  # in the last step

    async def prepare(self, tasks: Sequence[Task], step: int) -> None:
        """Have these tasks shown; what nobody can show is counted, not made up."""
        self.prepared, self.counted = {}, Counter()
        showing, wanted = self.showing, list({task.key: task for task in tasks}.values())
        if showing is None:
            return
        for i in range(0, len(wanted), TOGETHER):
            some = wanted[i : i + TOGETHER]
            found = await asyncio.gather(*(showing.show(task, step) for task in some), return_exceptions=True)
            for task, shown in zip(some, found):
                self._note(task, shown)

    def _note(self, task: Task, shown: Trajectory | BaseException | None) -> None:
        if isinstance(shown, BaseException) and not isinstance(shown, Exception):
            raise shown  # an interrupt is nobody's demonstration
        if isinstance(shown, Exception):
            self.counted[f"missing: {type(shown).__name__}: {shown}"] += 1
        elif shown is None or shown.status == Status.FAILED or not shown.sampled or shown.reason == CUT:
            self.counted[f"missing: {shown.reason if shown else 'no row of this task'}"] += 1
        else:
            self.prepared[task.key] = shown
            self.counted[shown.reason if shown.reason == AS_WRITTEN else "played"] += 1

    def of(self, task: Task) -> Trajectory | None:
        return self.prepared.get(task.key)

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        """Each group with the demonstration of its task; then loose rows as groups of their own."""
        mixed = [_with(group, self.of(group.task)) for group in groups]
        rows = sum(len(group.trajectories) for group in groups)
        wanted = round(rows * self.share / (1 - self.share)) if self.loose else 0
        while wanted > 0:
            mixed.append(self._next())
            wanted -= len(mixed[-1].trajectories)
        return mixed

    def _next(self) -> Group:
        n, self.drawn = self.drawn, self.drawn + 1
        group = self.loose[place(self.seed, n, len(self.loose))]
        members = tuple(replace(t, id=f"demo{n}:{t.id}") for t in group.trajectories)
        return Group(f"demo{n}:{group.id}", group.task, members)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drawn = int(state["drawn"])

    def metrics(self) -> dict[str, float]:
        return {f"demos/{what[:60]}": float(n) for what, n in self.counted.items()}


def _with(group: Group, shown: Trajectory | None) -> Group:
    return group if shown is None else replace(group, trajectories=(*group.trajectories, shown))


__all__ = ["Demonstrations", "Named", "Player", "Showing", "Stage", "told_again"]
