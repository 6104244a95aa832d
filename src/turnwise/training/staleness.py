"""How far rollouts may be ahead of training: which groups are issued, and which are trained on next.

With the limit k, at most (k + 1)·B groups are outstanding, and a group is trained on at most k steps after it was issued. k = 0
is synchronous. Until its last step a slow group may be overtaken by later ones; from then on training waits for it. Knows steps
and groups; neither tasks nor losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StalenessPolicy:
    """``limit``: the most steps between the issue of a group and the step that trains on it."""

    limit: int

    @property
    def synchronous(self) -> bool:
        return self.limit == 0

    def admit(self, running: int, outstanding: int, per_step: int) -> int:
        """How many groups to issue now. ``outstanding``: running, ready or in training. Synchronous rollouts come in waves: none
        is issued while one runs."""
        if self.synchronous and running:
            return 0
        return max(0, (self.limit + 1) * per_step - outstanding)

    def select(self, issued: Mapping[str, int], ready: Sequence[str], count: int, step: int) -> list[str] | None:
        """The groups to train on in ``step``, of those that are ``ready``; None: wait for another. ``issued``: the step in which
        each outstanding group was issued, oldest first."""
        available = set(ready)
        if self.synchronous:
            oldest = list(issued)[:count]
            return oldest if len(oldest) == count and set(oldest) <= available else None
        chosen = [key for key in issued if key in available][:count]
        if len(chosen) < count:
            return None
        taken = set(chosen)
        left = [at for key, at in issued.items() if key not in taken]
        nothing_to_wait_for = len(available) == len(issued)  # a step that trained on fewer groups left more than fit
        return chosen if nothing_to_wait_for or self._in_time(left, count, step + 1) else None

    def _in_time(self, left: Sequence[int], count: int, step: int) -> bool:
        """Whether groups issued in the steps ``left`` can all be trained on in time from ``step`` on, ``count`` in a step."""
        return all(position < (at + self.limit - step + 1) * count for position, at in enumerate(sorted(left)))
