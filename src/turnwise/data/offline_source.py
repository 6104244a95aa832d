"""An offline source behind the collector's interface: groups from a file, no rollouts.

Every epoch visits the groups in a new seeded order; draw n depends on the seed and n alone, so a resumed run continues
exactly. Each use of a group is its own group in the ledger, under the number of its draw; the rows stay in their file.
A tenth of the prompts, selected by content, is held out and ranked before and after training. Knows no loss and no model.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from turnwise.core.protocols import LedgerProtocol
from turnwise.core.records import Group, Task
from turnwise.core.stateful import Stateful
from turnwise.errors import SettingError
from turnwise.tasks.task_source import shuffled_index

HELD_OUT_ONE_IN = 10  # prompts
MIN_GROUPS = 20  # below this many groups none is held out


@dataclass
class ShuffledSampler(Stateful):
    """Which group is used next; has the methods of a live sampler."""

    count: int
    seed: int
    drawn: int = 0
    saved = ("drawn",)

    def next(self) -> tuple[int, int]:
        n, self.drawn = self.drawn, self.drawn + 1
        return n, shuffled_index(self.seed, n, self.count)

    def metrics(self) -> dict[str, float]:
        return {"passes_over_data": self.drawn / self.count}


@dataclass
class OfflineSource:
    """Serves ``size`` stored groups per step."""

    groups: Sequence[Group]
    size: int
    sampler: ShuffledSampler
    ledger: LedgerProtocol
    synchronous: bool = True
    training: int = 0
    last_metrics: dict[str, float] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    to_reissue: deque[tuple[str, Task]] = field(default_factory=deque)  # always empty: nothing is ever in flight
    ready: deque[Group] = field(default_factory=deque)

    def issue(self, step: int) -> None:
        """Does nothing: stored groups need no rollout."""

    def restore(self, finished: Sequence[Group], step: int) -> None:
        """Does nothing: a stored group is drawn in the step that trains on it."""

    async def collect_step(self, step: int) -> list[Group]:
        drawn = []
        for _ in range(self.size):
            n, index = self.sampler.next()
            key, group = str(n), self.groups[index]
            self.ledger.issue(key, group.task, step, step)
            self.ledger.finish(Group(key, group.task, ()), step)  # without rollouts: the rows stay in their file
            members = tuple(replace(t, id=f"{key}.{i}") for i, t in enumerate(group.trajectories))
            drawn.append(Group(key, group.task, members))
        return drawn

    async def stop(self) -> None:
        pass


def split_held_out(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """(training groups, held-out groups): about a tenth, whole prompts at a time; none of fewer than ``MIN_GROUPS``, and no
    prompt that would take more than half of the groups."""
    if not groups:
        raise SettingError("there is nothing to learn from; give at least one row")
    if len(groups) < MIN_GROUPS:
        return list(groups), []
    by_prompt: dict[int, list[Group]] = {}
    for group in groups:
        by_prompt.setdefault(zlib.crc32(repr(group.trajectories[0].turns[0].context).encode()), []).append(group)
    held_out: list[Group] = []
    for prompt_hash in sorted(by_prompt):
        if len(held_out) >= len(groups) // HELD_OUT_ONE_IN:
            break
        if len(held_out) + len(by_prompt[prompt_hash]) <= len(groups) // 2:
            held_out += by_prompt[prompt_hash]
    held_out_ids = {group.id for group in held_out}
    return [group for group in groups if group.id not in held_out_ids], held_out
