"""The collector: issues groups of rollouts, waits for them, and admits or drops them. Knows no loss and no environment.

``StalenessPolicy`` decides how many are outstanding (running, ready or in training), which come next and which too late.
Staleness 0 is synchronous: a wave of groups begins when the last has ended, so a run does not depend on how long tools take.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from turnwise.core.protocols import Generator, GroupScorer, LedgerProtocol, Session
from turnwise.core.records import Group, Task
from turnwise.core.seeds import stable_seed
from turnwise.errors import EnvironmentFault
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.scoring import scored_play
from turnwise.rollout.strategies import EpisodeRunner, GroupRequest
from turnwise.training.cancelled_groups import CancelledGroups
from turnwise.training.lost_generator import raise_if_lost
from turnwise.training.staleness import StalenessPolicy, oldest_version
from turnwise.training.task_feed import TaskFeed, draw_order
from turnwise.training.usable_groups import usable

FAILED_IN_A_ROW = 16  # groups without a usable trajectory before the run stops with the reason


@dataclass
class Collector:
    """The rollout side of the training loop."""

    recipe: Recipe
    generator: Generator
    sampler: TaskFeed
    ledger: LedgerProtocol
    play: EpisodeRunner
    seed: int
    staleness: int | str = 0
    max_draws: int = 8
    scorer: GroupScorer | None = None  # rewards beside the environment's
    steps: int = 0  # of the whole run: no more groups are issued than they train on; 0: its end is not known
    to_reissue: deque[tuple[str, Task]] = field(default_factory=deque)  # in flight when the resumed run was stopped
    ready: deque[Group] = field(default_factory=deque)
    running: dict[asyncio.Task[Group], str] = field(default_factory=dict)
    issued_in: dict[str, int] = field(default_factory=dict)  # step of the issue, then version of the oldest token
    sessions: dict[str, list[Session]] = field(default_factory=dict)  # opened by each running group
    cancelled: CancelledGroups = field(default_factory=CancelledGroups)
    training: int = 0  # groups the learner holds at this moment
    dropped: Counter[str] = field(default_factory=Counter)
    failed_in_a_row: int = 0
    last_metrics: dict[str, float] = field(default_factory=dict)  # of the last step; adaptive strategies read them

    def __post_init__(self) -> None:
        self.policy = StalenessPolicy.parse(self.staleness)

    def issue(self, step: int) -> None:
        """Issue as many groups as staleness allows and the remaining steps can train on."""
        outstanding, groups = len(self.running) + len(self.ready) + self.training, self.recipe.budget.groups
        trainable = self.training + (self.steps - step - bool(self.training)) * groups if self.steps else None
        count = self.policy.admit(len(self.running), outstanding, groups, trainable)
        scored_alone = self.scorer is not None and self.recipe.reads_rewards
        play = scored_play(self.play, self.scorer) if self.scorer and scored_alone else self.play
        for order in self.sampler.orders(count, self.to_reissue):
            self.ledger.issue(order.key, order.task, step, self.generator.version)
            open_session = partial(self._open, self.sessions.setdefault(order.key, []), order.number)
            request = GroupRequest(order.key, order.task, order.size, open_session, play, self.last_metrics, step)
            grow = self.sampler.grow(order, request, self.recipe.strategy)
            grow = self._scored(grow, self.scorer) if self.scorer and not scored_alone else grow
            self.running[asyncio.ensure_future(grow)] = order.key
            self.issued_in[order.key] = step

    async def _scored(self, grow: Coroutine[Any, Any, Group], scorer: GroupScorer) -> Group:
        """The group with the rewards of ``scorer``: while it is scored, other groups are still sampled."""
        return await scorer.score(await grow)

    def _open(self, opened: list[Session], number: str, i: int, draft: bool = False) -> Session:
        """The i-th session of a group. A draft uses the random numbers of the exact sample it stands for."""
        seed = stable_seed(self.seed, "sample", number, i)
        opened.append(self.generator.open(seed, draft=True) if draft else self.generator.open(seed))
        return opened[-1]

    async def collect_step(self, step: int) -> list[Group]:
        """The groups of one step, oldest first. Fewer than the budget when too many had to be dropped."""
        count, finished = self.recipe.budget.groups, 0
        draws = count * (self.max_draws - 1) + self.policy.capacity(count, max(0, self.steps - step))
        self._harvest(step)  # what has ended while the learner worked
        while finished < draws:
            self.issue(step)
            if self.policy.select(self._oldest(), [g.id for g in self.ready], count, step) is not None:
                break
            until = (
                asyncio.ALL_COMPLETED if self.policy.synchronous else asyncio.FIRST_COMPLETED
            )  # a wave is admitted as one
            await asyncio.wait(self.running, return_when=until)
            finished += self._harvest(step)
        in_order = sorted(self.ready, key=lambda g: draw_order(g.id))
        ready = [g.id for g in in_order]
        chosen = set(self.policy.select(self._oldest(), ready, count, step) or ready[:count])
        groups = [g for g in in_order if g.id in chosen]
        self.policy.check(groups, step)
        self.ready = deque(g for g in in_order if g.id not in chosen)
        self.training = len(groups)
        for key in chosen:
            self.issued_in.pop(key, None)
        self._evict(step, 1)  # nothing that they still sample could be trained on; `issue` replaces them
        return groups

    def _oldest(self) -> dict[str, int]:
        """The version of the oldest token of each outstanding group, in draw order; of a running one, the step of its issue."""
        keys = sorted([*self.running.values(), *(g.id for g in self.ready)], key=draw_order)
        return {key: self.issued_in[key] for key in keys}

    def _harvest(self, step: int) -> int:
        """Store, then admit or drop the groups that have ended; their number. Drop what is too old."""
        raise_if_lost(self.generator)
        done = sorted((task for task in self.running if task.done()), key=lambda t: draw_order(self.running[t]))
        for task in done:
            key = self.running.pop(task)
            self.sessions.pop(key, None)
            self._finish(key, task.result(), step)
        self._evict(step)
        return len(done)

    def _evict(self, step: int, ahead: int = 0) -> None:
        """Drop what would be too old ``ahead`` steps from now. Running episodes are cancelled; nobody waits for their end."""
        late = set(self.policy.evict(self._oldest(), step + ahead))
        for task in [task for task, key in self.running.items() if key in late]:
            self.sampler.forget(key := self.running.pop(task))
            self.cancelled.cancel(task, self.sessions.pop(key))
        self.ready = deque(g for g in self.ready if g.id not in late)
        for key in sorted(late, key=draw_order):
            self._drop(key, self.policy.reason, step)

    def _finish(self, key: str, group: Group, step: int) -> None:
        """Store a finished group, then admit or drop it."""
        self.ledger.finish(group, step)
        kept, reasons = usable(group)
        for reason in reasons:
            self.dropped[f"trajectory: {reason}"] += 1
        if not kept.trajectories:
            self.failed_in_a_row += 1
            self.sampler.forget(key)
            self._drop(key, f"every trajectory failed: {reasons[0]}", step)
            if self.failed_in_a_row >= FAILED_IN_A_ROW:
                raise EnvironmentFault(
                    f"{self.failed_in_a_row} groups in a row had no usable trajectory; the last: {reasons[0]}"
                )
            return
        self.failed_in_a_row = 0
        self.sampler.observe(kept)
        self._admit(kept, step)

    def restore(self, finished: Sequence[Group], step: int) -> None:
        """After a resume: the groups that had ended and were not trained on, admitted as they were then."""
        for group in finished:
            self._admit(usable(group)[0], step)

    def _admit(self, group: Group, step: int) -> None:
        admitted = self.recipe.admission(group)
        if isinstance(admitted, str):
            self._drop(group.id, admitted, step)
        else:
            self.ready.append(admitted)
            self.issued_in[group.id] = oldest_version(admitted, self.issued_in.get(group.id, 0))

    def _drop(self, key: str, reason: str, step: int) -> None:
        self.dropped[reason] += 1
        self.issued_in.pop(key, None)
        self.ledger.drop(key, reason, step)

    async def stop(self) -> None:
        """Cancel what is in flight. The ledger keeps it as in flight, so that a resume issues it again."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, self.cancelled.wait(), return_exceptions=True)


__all__ = ["FAILED_IN_A_ROW", "Collector", "raise_if_lost", "usable"]
