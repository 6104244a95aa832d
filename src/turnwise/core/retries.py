"""What a fault of the machine ended is done again, from the same seeds, after a pause. Knows neither episodes nor scorers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from turnwise.core.records import Group

# seconds before each further attempt: a burst of other programs is over by the last one, and a limit is named soon enough
PAUSES = (0.5, 2.0, 8.0)
LOST_SHARE = 0.01  # that the machine may fail for good before a run or evaluation stops: below, it hardly biases them
Result = TypeVar("Result")


async def tried(
    first: Awaitable[Result], again: Callable[[], Awaitable[Result]], lost: Callable[[Result], object]
) -> Result:
    """The result of ``first``, or of ``again`` where it was ``lost``; that of the last attempt may be lost, too."""
    result = await first
    for pause in PAUSES:
        if not lost(result):
            break
        await asyncio.sleep(pause)
        result = await again()
    return result


def lost_in(group: Group) -> str:
    """How the machine failed a trajectory of the group; empty where it failed none."""
    return next((t.reason for t in group.trajectories if t.lost), "")


def given_up(group: Group, reason: str) -> Group:
    """The group as nothing to be used: what the machine fails may depend on what the policy did, and so do the rest."""
    return replace(group, trajectories=tuple(t.failed(reason, lost=True) for t in group.trajectories))
