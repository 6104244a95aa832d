"""The collector: issues groups of rollouts, waits for them, and admits or drops them. Knows no loss and no environment.

Staleness k: at most (k + 1)·B groups are outstanding (running, ready or in training), so a group is never trained on more
than k steps after it was issued. k = 0 is synchronous: groups are issued in waves, and the next wave begins when the last
has ended, so a run does not depend on how long tools take.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from functools import partial

from turnwise.core.protocols import Generator, LedgerProtocol, Session
from turnwise.core.records import Group, Status, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.errors import EnvironmentFault
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.strategies import EpisodeRunner
from turnwise.tasks.samplers import LiveSampler

FAILED_IN_A_ROW = 16  # groups without a usable trajectory before the run stops with the reason


@dataclass
class Collector:
    """The rollout side of the training loop."""

    recipe: Recipe
    generator: Generator
    sampler: LiveSampler
    ledger: LedgerProtocol
    play: EpisodeRunner
    seed: int
    staleness: int = 0
    max_draws: int = 8
    to_reissue: deque[tuple[str, Task]] = field(default_factory=deque)  # in flight when the resumed run was stopped
    ready: deque[Group] = field(default_factory=deque)
    running: dict[asyncio.Task[Group], str] = field(default_factory=dict)
    training: int = 0  # groups the learner holds at this moment
    dropped: Counter[str] = field(default_factory=Counter)
    failed_in_a_row: int = 0
    last_metrics: dict[str, float] = field(default_factory=dict)  # of the last step; adaptive strategies read them

    def issue(self, step: int) -> None:
        """Issue as many groups as staleness allows."""
        if self.staleness == 0 and self.running:
            return
        outstanding = len(self.running) + len(self.ready) + self.training
        for _ in range((self.staleness + 1) * self.recipe.budget.groups - outstanding):
            key, task = self.to_reissue.popleft() if self.to_reissue else self._draw()
            self.ledger.issue(key, task, step, self.generator.version)
            number = key.split("~")[0]
            open_session = partial(self._open, number)
            grow = self.recipe.strategy.begin(
                key, task, self.recipe.budget.size, open_session, self.play, self.last_metrics
            )
            self.running[asyncio.ensure_future(grow)] = key

    def _open(self, number: str, i: int, draft: bool = False) -> Session:
        """The i-th session of a group. A draft uses the random numbers of the exact sample it stands for."""
        seed = stable_seed(self.seed, "sample", number, i)
        return self.generator.open(seed, draft=True) if draft else self.generator.open(seed)

    def _draw(self) -> tuple[str, Task]:
        number, task = self.sampler.next()
        return str(number), task

    async def collect_step(self, step: int) -> list[Group]:
        """The groups of one step, oldest first. Fewer than the budget when too many had to be dropped."""
        count, finished = self.recipe.budget.groups, 0
        while finished < count * self.max_draws:
            self.issue(step)
            if self._oldest_are_ready(count):
                break
            until = asyncio.FIRST_COMPLETED if self.staleness else asyncio.ALL_COMPLETED  # a wave is admitted as one
            done, _ = await asyncio.wait(self.running, return_when=until)
            for task in sorted(done, key=lambda t: _order(self.running[t])):
                key = self.running.pop(task)
                self._finish(key, task.result(), step)
                finished += 1
        oldest_first = sorted(self.ready, key=lambda g: _order(g.id))
        groups, self.ready = oldest_first[:count], deque(oldest_first[count:])
        self.training = len(groups)
        return groups

    def _oldest_are_ready(self, count: int) -> bool:
        """Whether the oldest outstanding groups are all ready. If a slow one could be overtaken, its age would be unbounded."""
        running = set(self.running.values())
        oldest = sorted([*running, *(g.id for g in self.ready)], key=_order)[:count]
        return len(oldest) == count and not running & set(oldest)

    def _finish(self, key: str, group: Group, step: int) -> None:
        """Store a finished group, then admit or drop it."""
        self.ledger.finish(group, step)
        kept, reasons = usable(group)
        for reason in reasons:
            self.dropped[f"trajectory: {reason}"] += 1
        if not kept.trajectories:
            self.failed_in_a_row += 1
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


def usable(group: Group) -> tuple[Group, list[str]]:
    """The part of a group that can be trained on, and why the rest cannot. A fork whose parent failed has lost its prefix."""
    good: list[Trajectory] = []
    kept = [t for t in group.trajectories if t.status != Status.FAILED and t.sampled]
    while len(kept) != len(good):  # a dropped fork drops its own forks in the next pass
        good, ids = kept, {t.id for t in kept}
        kept = [t for t in good if t.fork is None or t.fork.parent in ids]
    if len(good) == len(group.trajectories):
        return group, []
    ids = {t.id for t in good}
    reasons = [t.reason or "nothing was sampled" for t in group.trajectories if t.id not in ids]
    return replace(group, trajectories=tuple(good)), reasons
