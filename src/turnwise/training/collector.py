"""The rollout side of the loop: issues groups, watches them finish, admits them.

Staleness k: at most (k + 1)·B groups are out (running, ready or being trained on), so a group is never trained on more
than k steps after it was issued. k = 0 is synchronous, and then groups are issued in waves: the next wave begins when the
last has ended, which makes a run independent of how long tools take.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from functools import partial

from turnwise.core.protocols import Generator, Ledger, Session
from turnwise.core.records import Group, Status, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.errors import EnvironmentFault
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.strategies import Play
from turnwise.tasks.samplers import LiveSampler

FAILED_IN_A_ROW = 16  # groups without a single usable trajectory before the run stops and says why


@dataclass
class Collector:
    recipe: Recipe
    generator: Generator
    sampler: LiveSampler
    ledger: Ledger
    play: Play
    seed: int
    staleness: int = 0
    max_draws: int = 8
    again: deque[tuple[str, Task]] = field(default_factory=deque)  # owed after a resume
    ready: deque[Group] = field(default_factory=deque)
    running: dict[asyncio.Task[Group], str] = field(default_factory=dict)
    training: int = 0  # groups the learner holds at this moment
    dropped: Counter[str] = field(default_factory=Counter)
    barren: int = 0
    pulse: dict[str, float] = field(default_factory=dict)  # what the last step measured, for strategies that look

    def pump(self, step: int) -> None:
        """Issue as many groups as staleness allows."""
        if self.staleness == 0 and self.running:
            return
        out = len(self.running) + len(self.ready) + self.training
        for _ in range((self.staleness + 1) * self.recipe.budget.groups - out):
            key, task = self.again.popleft() if self.again else self._draw()
            self.ledger.issue(key, task, step, self.generator.version)
            number = key.split("~")[0]
            open_session = partial(self._open, number)
            grow = self.recipe.strategy.begin(key, task, self.recipe.budget.size, open_session, self.play, self.pulse)
            self.running[asyncio.ensure_future(grow)] = key

    def _open(self, number: str, i: int, draft: bool = False) -> Session:
        """The i-th session of a group. A draft draws the random numbers of its exact twin."""
        seed = stable_seed(self.seed, "sample", number, i)
        return self.generator.open(seed, draft=True) if draft else self.generator.open(seed)

    def _draw(self) -> tuple[str, Task]:
        number, task = self.sampler.next()
        return str(number), task

    async def gather(self, step: int) -> list[Group]:
        """The groups of one step, oldest first. Fewer than asked for when too many had to be dropped."""
        wanted, drawn = self.recipe.budget.groups, 0
        while drawn < wanted * self.max_draws:
            self.pump(step)
            if self._due(wanted):
                break
            whom = asyncio.FIRST_COMPLETED if self.staleness else asyncio.ALL_COMPLETED  # a wave is settled as one
            done, _ = await asyncio.wait(self.running, return_when=whom)
            for task in sorted(done, key=lambda t: _order(self.running[t])):
                key = self.running.pop(task)
                drawn += self._settle(key, task.result(), step)
        oldest_first = sorted(self.ready, key=lambda g: _order(g.id))
        chosen, self.ready = oldest_first[:wanted], deque(oldest_first[wanted:])
        self.training = len(chosen)
        return chosen

    def _due(self, wanted: int) -> bool:
        """Whether the oldest groups that are out are all ready. Were a slow one overtaken, its age would have no bound."""
        running = set(self.running.values())
        oldest = sorted([*running, *(g.id for g in self.ready)], key=_order)[:wanted]
        return len(oldest) == wanted and not running & set(oldest)

    def _settle(self, key: str, group: Group, step: int) -> int:
        """Store a finished group, then admit or drop it."""
        self.ledger.finish(group, step)
        whole, reasons = usable(group)
        for reason in reasons:
            self.dropped[f"trajectory: {reason}"] += 1
        if not whole.trajectories:
            self.barren += 1
            self._drop(key, f"every trajectory failed: {reasons[0]}", step)
            if self.barren >= FAILED_IN_A_ROW:
                raise EnvironmentFault(
                    f"{self.barren} groups in a row had no usable trajectory; the last: {reasons[0]}"
                )
            return 1
        self.barren = 0
        self.sampler.observe(whole)
        admitted = self.recipe.admission(whole)
        if isinstance(admitted, str):
            self._drop(key, admitted, step)
        else:
            self.ready.append(admitted)
        return 1

    def _drop(self, key: str, reason: str, step: int) -> None:
        self.dropped[reason] += 1
        self.ledger.drop(key, reason, step)

    async def stop(self) -> None:
        """Cancel what is in flight; the ledger keeps it as in flight, to be issued again on resume."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)


def _order(key: str) -> tuple[int, str]:
    """Draw order: what finishes first must not be trained on first, or timing would leak into results."""
    return int(key.split("~")[0]), key


def usable(group: Group) -> tuple[Group, list[str]]:
    """The part of a group that can be trained on, and why the rest cannot. A fork whose parent failed lost its prefix."""
    good: list[Trajectory] = []
    kept = [t for t in group.trajectories if t.status != Status.FAILED and t.sampled]
    while len(kept) != len(good):  # forks of forks fall one after another
        good, ids = kept, {t.id for t in kept}
        kept = [t for t in good if t.fork is None or t.fork.parent in ids]
    if len(good) == len(group.trajectories):
        return group, []
    ids = {t.id for t in good}
    reasons = [t.reason or "nothing was sampled" for t in group.trajectories if t.id not in ids]
    return replace(group, trajectories=tuple(good)), reasons
