"""Demonstrations beside the policy's own episodes: of the same task where one exists, otherwise of any task.

    a scripted policy of the environment  plays each task of the step
    rows that name their tasks            the row's turns are replayed in the environment, which rewards them; if the
                                          dialogue does not match word for word, the row counts as written: its own
                                          reward, or 1
    rows without tasks                    groups of their own, a share of the batch, in a new seeded order every epoch

Knows no tokens of the policy and no loss.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.core.protocols import Action
from turnwise.core.records import Group, Limit, Sampling, Status, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.core.stateful import Stateful
from turnwise.data.dataset import DatasetRow, Example
from turnwise.data.tokenize import DialogueTokenizer
from turnwise.errors import EnvironmentFault
from turnwise.rollout.episode import Episode, EpisodeLimits
from turnwise.rollout.scripted import ScriptedSession, as_expert, play_scripted
from turnwise.tasks.task_source import shuffled_index

CONCURRENT_EPISODES = 64
AS_WRITTEN = "as written"  # the reason of a trajectory that is taken from its row without a replay


@dataclass(frozen=True)
class DemonstrationContext:
    """What playing a demonstration needs."""

    make_environment: Callable[[Task], Any]
    tokenizer: DialogueTokenizer
    limits: EpisodeLimits


@dataclass(frozen=True)
class ScriptedDemonstrator:
    """Plays a scripted policy of the environment: ``oracle`` or ``demonstrator``."""

    name: str
    context: DemonstrationContext

    async def demonstrate(self, task: Task, step: int) -> Trajectory | None:
        context, key = self.context, f"{self.name}:{task.key}"
        environment, renderer = context.make_environment(task), context.tokenizer.renderer
        played = await play_scripted(self.name, environment, key, task, renderer, context.limits)
        # an expert is scored at the temperature of the run's policy
        return as_expert(played, temperature=context.tokenizer.temperature)


@dataclass(frozen=True)
class RowDemonstrator:
    """Rows that name their tasks; where a task has several, each step uses a random one, where it has none, none."""

    rows: Mapping[str, Sequence[DatasetRow]]
    context: DemonstrationContext

    async def demonstrate(self, task: Task, step: int) -> Trajectory | None:
        rows = self.rows.get(task.key, ())
        if not rows:
            return None
        row = rows[stable_seed(task.key, step) % len(rows)]
        key, example = f"row{row.line}:{task.key}", row.examples[0]
        replayed = await replay_in_environment(example, key, task, self.context)
        return replayed or replace(self.context.tokenizer.trajectory(example, key, task), reason=AS_WRITTEN)


async def replay_in_environment(
    example: Example, key: str, task: Task, context: DemonstrationContext
) -> Trajectory | None:
    """The episode in which the assistant says what ``example`` says, with the environment's observations and rewards; None
    where the prompt or the number of turns differs."""
    texts = iter(example.turns)

    def act() -> Action:
        try:
            return Action(next(texts))
        except StopIteration:
            raise EnvironmentFault("the demonstration ends before the episode") from None

    renderer = context.tokenizer.renderer
    session, environment = ScriptedSession(act, renderer), context.make_environment(task)
    played = await Episode(key, task, environment, session, renderer, Sampling(), context.limits).run()
    prompt = [m["content"] for m in played.messages[: len(example.prompt)]]
    same_prompt = prompt == [m["content"] for m in example.prompt]
    if played.status == Status.FAILED or len(played.turns) != len(example.turns) or not same_prompt:
        return None
    return replace(as_expert(played, temperature=context.tokenizer.temperature), facts=example.facts)


@dataclass
class Demonstrations(Stateful):
    """The live source. ``taskless`` holds groups of rows without a task; ``demonstrator`` demonstrates a given task."""

    seed: int
    share: float = 0.2
    demonstrator: ScriptedDemonstrator | RowDemonstrator | None = None
    taskless: Sequence[Group] = ()
    drawn: int = 0
    prepared: dict[str, Trajectory] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)  # of the last step
    saved = ("drawn",)

    async def prepare(self, tasks: Sequence[Task], step: int) -> None:
        """Obtain demonstrations of these tasks; a missing one is counted with its reason."""
        self.prepared, self.counts = {}, Counter()
        demonstrator, distinct = self.demonstrator, list({task.key: task for task in tasks}.values())
        if demonstrator is None:
            return
        for i in range(0, len(distinct), CONCURRENT_EPISODES):
            batch = distinct[i : i + CONCURRENT_EPISODES]
            outcomes = await asyncio.gather(
                *(demonstrator.demonstrate(task, step) for task in batch), return_exceptions=True
            )
            for task, outcome in zip(batch, outcomes):
                if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
                    raise outcome  # an interrupt must end the run
                if isinstance(outcome, Exception):
                    self.counts[f"missing: {type(outcome).__name__}: {outcome}"] += 1
                elif (
                    outcome is None
                    or outcome.status == Status.FAILED
                    or not outcome.sampled
                    or outcome.limit == Limit.CONTEXT  # a demonstration without its end teaches to stop
                ):
                    self.counts[f"missing: {outcome.reason if outcome else 'no row of this task'}"] += 1
                else:
                    self.prepared[task.key] = outcome
                    self.counts[outcome.reason if outcome.reason == AS_WRITTEN else "played"] += 1

    def for_task(self, task: Task) -> Trajectory | None:
        return self.prepared.get(task.key)

    def mix(self, groups: Sequence[Group], step: int) -> list[Group]:
        """Each group with the demonstration of its task; then taskless rows as groups of their own."""
        mixed = []
        for group in groups:
            shown = self.for_task(group.task)
            mixed.append(group if shown is None else replace(group, trajectories=(*group.trajectories, shown)))
        rollouts = sum(len(group.trajectories) for group in groups)
        missing = round(rollouts * self.share / (1 - self.share)) if self.taskless else 0
        while missing > 0:
            n, self.drawn = self.drawn, self.drawn + 1
            group = self.taskless[shuffled_index(self.seed, n, len(self.taskless))]
            # the number of the draw keeps ids apart: one row may be drawn twice in a step
            members = tuple(replace(t, id=f"demo{n}:{t.id}") for t in group.trajectories)
            mixed.append(Group(f"demo{n}:{group.id}", group.task, members))
            missing -= len(members)
        return mixed

    def metrics(self) -> dict[str, float]:
        return {f"demos/{outcome[:60]}": float(n) for outcome, n in self.counts.items()}
