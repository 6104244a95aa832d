"""Strategies: how a group is grown.

``begin`` opens its sessions at once, before anything is awaited, so that a generator knows the whole wave; the coroutine
it returns plays the episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.data import Group, Task, Trajectory
from turnwise.ports import Session

Play = Callable[[str, Task, Session], Coroutine[Any, Any, Trajectory]]
"""One episode: trajectory id, task, session → trajectory. Never raises for what an environment does."""


class Strategy(Protocol):
    def begin(
        self, group: str, task: Task, size: int, open_session: Callable[[int], Session], play: Play
    ) -> Coroutine[Any, Any, Group]: ...


@dataclass(frozen=True)
class Independent:
    """Every trajectory on its own, all at once."""

    def begin(
        self, group: str, task: Task, size: int, open_session: Callable[[int], Session], play: Play
    ) -> Coroutine[Any, Any, Group]:
        sessions = [open_session(i) for i in range(size)]

        async def grow() -> Group:
            played = await asyncio.gather(*(play(f"{group}.{i}", task, s) for i, s in enumerate(sessions)))
            return Group(group, task, tuple(played))

        return grow()
