"""Groups whose episodes were cancelled and have yet to end: their clean-up goes on beside the run. Knows neither the reason nor
the ledger.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

from turnwise.core.protocols import Session
from turnwise.core.records import Group
from turnwise.rollout.strategies.base import close


@dataclass
class CancelledGroups:
    """Cancels groups, and closes what they leave open once they have ended."""

    tasks: set[asyncio.Task[Group]] = field(default_factory=set)

    def cancel(self, task: asyncio.Task[Group], sessions: list[Session]) -> None:
        """Cancel without waiting. ``sessions``: all that the group opened; some may not have begun an episode yet."""
        self.tasks.add(task)
        task.cancel()
        task.add_done_callback(partial(self._ended, sessions))

    def _ended(self, sessions: list[Session], task: asyncio.Task[Group]) -> None:
        self.tasks.discard(task)
        close(sessions)
        if not task.cancelled():
            task.exception()  # else asyncio reports that nobody read it

    async def wait(self) -> None:
        """Wait until all have ended."""
        await asyncio.gather(*self.tasks, return_exceptions=True)
