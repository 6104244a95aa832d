"""An offline source behind the collector's interface: groups from a file, no rollouts.

Every pass over the groups is in a new seeded order; the n-th draw depends on the seed and n alone, so a resumed run goes on
exactly. Each use is a group of its own in the ledger, under the number of its draw; the rows stay in their file.
A tenth of the prompts is held back, by content, to be ranked before and after. Knows no loss and no model.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.core.protocols import Ledger
from turnwise.core.records import Group, Task
from turnwise.errors import SettingError
from turnwise.tasks.listed import place

HELD_BACK = 10  # one prompt in so many
FEWEST = 20  # groups below which none is held back


@dataclass
class Draws:
    """Which group next; the verbs of a live sampler."""

    count: int
    seed: int
    drawn: int = 0

    def next(self) -> tuple[int, int]:
        n, self.drawn = self.drawn, self.drawn + 1
        return n, place(self.seed, n, self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = int(state["drawn"])

    def metrics(self) -> dict[str, float]:
        return {"passes_over_data": self.drawn / self.count}


@dataclass
class Shelf:
    groups: Sequence[Group]
    size: int  # groups a step
    sampler: Draws
    ledger: Ledger
    staleness: int = 0
    training: int = 0
    pulse: dict[str, float] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    again: deque[tuple[str, Task]] = field(default_factory=deque)  # nothing is ever in flight: always empty
    ready: deque[Group] = field(default_factory=deque)

    def pump(self, step: int) -> None:
        """There is nothing to wait for."""

    async def gather(self, step: int) -> list[Group]:
        return [self._take(step) for _ in range(self.size)]

    def _take(self, step: int) -> Group:
        n, index = self.sampler.next()
        key, group = str(n), self.groups[index]
        self.ledger.issue(key, group.task, step, step)
        self.ledger.finish(Group(key, group.task, ()), step)
        members = tuple(replace(t, id=f"{key}.{i}") for i, t in enumerate(group.trajectories))
        return Group(key, group.task, members)

    async def stop(self) -> None:
        pass


def held_back(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """What is learned from, and the tenth of the prompts that is not; nothing is held back of very few."""
    if not groups:
        raise SettingError("there is nothing to learn from; give at least one row")
    if len(groups) < FEWEST:
        return list(groups), []
    lots: dict[int, list[Group]] = {}
    for group in groups:
        lots.setdefault(zlib.crc32(repr(group.trajectories[0].turns[0].context).encode()), []).append(group)
    kept: list[Group] = []
    for lot in sorted(lots):
        if len(kept) >= len(groups) // HELD_BACK:
            break
        kept += lots[lot]
    chosen = {group.id for group in kept}
    return [group for group in groups if group.id not in chosen], kept
