"""How far rollouts may be ahead of training: which groups are issued, which are trained on next, and which come too late.

With the limit k, at most (k + 1)·B groups are outstanding, and never more than the remaining steps can train on. k = 0 is
synchronous. Until its last step a slow group may be overtaken by later ones. Then training waits for it (``wait``), drops it
(``drop``), or goes on and trains on it whenever it ends (``keep``). With the first two no token that is trained on was sampled
more than k policy versions before. Knows steps, versions and groups; neither tasks nor losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnwise.config.staleness import CONTINUOUS, DROP, KEEP, WAIT, parse_staleness
from turnwise.core.records import Group
from turnwise.observe.run_health import TOO_OLD


@dataclass(frozen=True)
class StalenessPolicy:
    """``limit``: the most policy versions between the oldest token of a group and the step that trains on it. ``late``: what
    happens to a group that would exceed it, or how a synchronous run samples. A group that still runs counts from the step in
    which it was issued."""

    limit: int
    late: str = WAIT

    @classmethod
    def parse(cls, setting: int | str) -> StalenessPolicy:
        return cls(*parse_staleness(setting))

    @property
    def synchronous(self) -> bool:
        return self.limit == 0

    @property
    def deterministic(self) -> bool:
        """Whether batches of the generator may not depend on how long environments take: it samples the next turns once all
        have answered."""
        return self.synchronous and self.late != CONTINUOUS

    @property
    def bounded(self) -> bool:
        """Whether the limit holds for every token that is trained on."""
        return self.late != KEEP

    @property
    def reason(self) -> str:
        """Why the ledger says that a group was evicted."""
        return f"{TOO_OLD} {self.limit} allows"

    def capacity(self, per_step: int, steps: int = 0) -> int:
        """The most groups that are outstanding at any time. ``steps``: that the run still takes; 0: its end is not known."""
        return per_step * (min(self.limit + 1, steps) if steps else self.limit + 1)

    def admit(self, running: int, outstanding: int, per_step: int, trainable: int | None = None) -> int:
        """How many groups to issue now. ``outstanding``: running, ready or in training. ``trainable``: how many groups the step
        that is trained now and all later ones take together; None: the end is not known. Synchronous rollouts come in waves:
        none is issued while one runs."""
        if self.synchronous and running:
            return 0
        most = self.capacity(per_step)
        return max(0, (most if trainable is None else min(most, trainable)) - outstanding)

    def select(self, oldest: Mapping[str, int], ready: Sequence[str], count: int, step: int) -> list[str] | None:
        """The groups to train on in ``step``, of those that are ``ready``; None: wait for another. ``oldest``: of each
        outstanding group, the version of its oldest token, or the step in which it was issued; in draw order."""
        available = set(ready)
        if self.synchronous:
            first = list(oldest)[:count]
            return first if len(first) == count and set(first) <= available else None
        chosen = sorted((key for key in oldest if key in available), key=lambda key: oldest[key])[:count]
        if len(chosen) < count:
            return None
        taken = set(chosen)
        left = [at for key, at in oldest.items() if key not in taken]
        nothing_to_wait_for = len(available) == len(oldest)  # a step that trained on fewer groups left more than fit
        waits = self.late == WAIT and not nothing_to_wait_for and not self._in_time(left, count, step + 1)
        return None if waits else chosen

    def evict(self, oldest: Mapping[str, int], step: int) -> list[str]:
        """The groups that would be too old in ``step``. Where training waits, there are none but after a step that trained on
        fewer groups than planned, or where a server sampled with older weights than it should."""
        if self.synchronous or not self.bounded:
            return []
        return [key for key, at in oldest.items() if step - at > self.limit]

    def _in_time(self, left: Sequence[int], count: int, step: int) -> bool:
        """Whether groups as old as ``left`` can all be trained on in time from ``step`` on, ``count`` in a step."""
        return all(position < (at + self.limit - step + 1) * count for position, at in enumerate(sorted(left)))

    def check(self, groups: Sequence[Group], step: int) -> None:
        """Assert the limit for every token that ``step`` trains on."""
        if self.synchronous or not self.bounded:
            return
        for group in groups:
            age = step - oldest_version(group, step)
            assert age <= self.limit, f"step {step} would train on tokens of group {group.id}, {age} versions old"


def oldest_version(group: Group, default: int) -> int:
    """The version of the policy that sampled its oldest token; ``default`` where no token has one."""
    versions = (min(turn.version) for t in group.trajectories for turn in t.turns if len(turn.version))
    return int(min(versions, default=default))


__all__ = ["CONTINUOUS", "DROP", "KEEP", "WAIT", "StalenessPolicy", "oldest_version"]
