"""The collector: issues groups of rollouts, waits for them, and admits or drops them. Knows no loss and no environment.

Staleness k: at most (k + 1)·B groups are outstanding (running, ready or in training), so a group is never trained on more
than k steps after it was issued. k = 0 is synchronous: groups are issued in waves, and the next wave begins when the last
has ended, so a run does not depend on how long tools take.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from turnwise.core.protocols import Generator, GroupScorer, LedgerProtocol, Session
from turnwise.core.records import Group, Status, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.errors import EnvironmentFault
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.scoring import MAX_REWARD, scored_play
from turnwise.rollout.strategies import EpisodeRunner, GroupRequest
from turnwise.training.staleness import StalenessPolicy
from turnwise.training.task_feed import TaskFeed

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
    staleness: int = 0
    max_draws: int = 8
    scorer: GroupScorer | None = None  # rewards beside the environment's
    to_reissue: deque[tuple[str, Task]] = field(default_factory=deque)  # in flight when the resumed run was stopped
    ready: deque[Group] = field(default_factory=deque)
    running: dict[asyncio.Task[Group], str] = field(default_factory=dict)
    issued_in: dict[str, int] = field(default_factory=dict)  # the step of each outstanding group
    training: int = 0  # groups the learner holds at this moment
    dropped: Counter[str] = field(default_factory=Counter)
    failed_in_a_row: int = 0
    last_metrics: dict[str, float] = field(default_factory=dict)  # of the last step; adaptive strategies read them

    def issue(self, step: int) -> None:
        """Issue as many groups as staleness allows."""
        outstanding = len(self.running) + len(self.ready) + self.training
        count = StalenessPolicy(self.staleness).admit(len(self.running), outstanding, self.recipe.budget.groups)
        scored_alone = self.scorer is not None and self.recipe.reads_rewards
        play = scored_play(self.play, self.scorer) if self.scorer and scored_alone else self.play
        for order in self.sampler.orders(max(0, count), self.to_reissue):
            self.ledger.issue(order.key, order.task, step, self.generator.version)
            open_session = partial(self._open, order.number)
            request = GroupRequest(order.key, order.task, order.size, open_session, play, self.last_metrics, step)
            grow = self.sampler.grow(order, request, self.recipe.strategy)
            grow = self._scored(grow, self.scorer) if self.scorer and not scored_alone else grow
            self.running[asyncio.ensure_future(grow)] = order.key
            self.issued_in[order.key] = step

    async def _scored(self, grow: Coroutine[Any, Any, Group], scorer: GroupScorer) -> Group:
        """The group with the rewards of ``scorer``: while it is scored, other groups are still sampled."""
        return await scorer.score(await grow)

    def _open(self, number: str, i: int, draft: bool = False) -> Session:
        """The i-th session of a group. A draft uses the random numbers of the exact sample it stands for."""
        seed = stable_seed(self.seed, "sample", number, i)
        return self.generator.open(seed, draft=True) if draft else self.generator.open(seed)

    async def collect_step(self, step: int) -> list[Group]:
        """The groups of one step, oldest first. Fewer than the budget when too many had to be dropped."""
        count, finished = self.recipe.budget.groups, 0
        while finished < count * self.max_draws:
            self.issue(step)
            if self._next_groups(count, step) is not None:
                break
            until = asyncio.FIRST_COMPLETED if self.staleness else asyncio.ALL_COMPLETED  # a wave is admitted as one
            done, _ = await asyncio.wait(self.running, return_when=until)
            raise_if_lost(self.generator)
            for task in sorted(done, key=lambda t: _order(self.running[t])):
                key = self.running.pop(task)
                self._finish(key, task.result(), step)
                finished += 1
        oldest_first = sorted(self.ready, key=lambda g: _order(g.id))
        chosen = set(self._next_groups(count, step) or [g.id for g in oldest_first[:count]])
        groups = [g for g in oldest_first if g.id in chosen]
        self.ready = deque(g for g in oldest_first if g.id not in chosen)
        self.training = len(groups)
        for key in chosen:
            self.issued_in.pop(key, None)
        return groups

    def _next_groups(self, count: int, step: int) -> list[str] | None:
        """The groups to train on next; None: one that cannot be overtaken any longer is not ready."""
        ready = [g.id for g in self.ready]
        outstanding = sorted([*self.running.values(), *ready], key=_order)
        issued = {key: self.issued_in.get(key, step) for key in outstanding}  # a resumed run: from now on
        return StalenessPolicy(self.staleness).select(issued, ready, count, step)

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
        admitted = self.recipe.admission(kept)
        if isinstance(admitted, str):
            self._drop(key, admitted, step)
        else:
            self.ready.append(admitted)

    def _drop(self, key: str, reason: str, step: int) -> None:
        self.dropped[reason] += 1
        self.ledger.drop(key, reason, step)

    async def stop(self) -> None:
        """Cancel what is in flight. The ledger keeps it as in flight, so that a resume issues it again."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)


def _order(key: str) -> tuple[int, str]:
    """Draw order. Training in order of completion would let timing change results."""
    return int(key.split("~")[0]), key


def raise_if_lost(generator: Generator) -> None:
    """Stop where the servers of a generator are gone, before the episodes that this ended are counted as failed."""
    fatal = getattr(generator, "fatal", None)
    if fatal is not None:
        raise fatal


def usable(group: Group) -> tuple[Group, list[str]]:
    """The part of a group that can be trained on, and why the rest cannot. A fork whose parent failed has lost its prefix."""
    good: list[Trajectory] = []
    kept = [t for t in group.trajectories if not _why_unusable(t)]
    while len(kept) != len(good):  # a dropped fork drops its own forks in the next pass
        good, ids = kept, {t.id for t in kept}
        kept = [t for t in good if t.fork is None or t.fork.parent in ids]
    if len(good) == len(group.trajectories):
        return group, []
    ids = {t.id for t in good}
    reasons = [_why_unusable(t) or "it forks from one that failed" for t in group.trajectories if t.id not in ids]
    return replace(group, trajectories=tuple(good)), reasons


def _why_unusable(trajectory: Trajectory) -> str:
    if trajectory.status == Status.FAILED:
        return trajectory.reason or "it failed without a reason"
    if not trajectory.sampled:
        return trajectory.reason or "nothing was sampled"
    if not abs(trajectory.reward) <= MAX_REWARD:
        return f"its reward {trajectory.reward:g} is outside the range of float32; scale rewards to about 1"
    return ""
