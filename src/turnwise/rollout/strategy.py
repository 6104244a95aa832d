"""Strategies: how a group is grown.

``begin`` opens its sessions at once, before anything is awaited, so that a generator knows the whole wave; the coroutine
it returns plays the episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.data import Group, Task, Trajectory
from turnwise.errors import RecipeError
from turnwise.ports import Session


class Play(Protocol):
    """One episode: trajectory id, task, session → trajectory. Never raises for what an environment does."""

    def __call__(self, key: str, task: Task, session: Session, heat: float = 1.0) -> Coroutine[Any, Any, Trajectory]:
        """``heat`` multiplies the sampling temperature; other than 1 it is noted as guidance."""
        ...


Pulse = Mapping[str, float]
"""What the last training step measured (entropy, success ...); empty before the first."""


class Strategy(Protocol):
    def begin(
        self, group: str, task: Task, size: int, open_session: Callable[[int], Session], play: Play, pulse: Pulse
    ) -> Coroutine[Any, Any, Group]: ...


@dataclass(frozen=True)
class Independent:
    """Every trajectory on its own, all at once."""

    def begin(
        self, group: str, task: Task, size: int, open_session: Callable[[int], Session], play: Play, pulse: Pulse
    ) -> Coroutine[Any, Any, Group]:
        return _together(group, task, [open_session(i) for i in range(size)], [1.0] * size, play)


@dataclass(frozen=True)
class Thermostat:
    """Independent, but a share of each group is sampled hotter while the entropy is below ``target``, colder above it.

    What is learned from hot samples raises the entropy, from cold ones lowers it."""

    target: float = 0.5
    hot: float = 1.2
    cold: float = 0.8
    share: float = 0.25

    def __post_init__(self) -> None:
        if not (0 < self.cold <= 1 <= self.hot and 0 <= self.share < 1):
            raise RecipeError(f"need 0 < cold <= 1 <= hot and 0 <= share < 1, got {self}")

    def begin(
        self, group: str, task: Task, size: int, open_session: Callable[[int], Session], play: Play, pulse: Pulse
    ) -> Coroutine[Any, Any, Group]:
        heat = self.hot if pulse.get("entropy", 0.0) <= self.target else self.cold
        tempered = int(size * self.share)
        heats = [1.0] * (size - tempered) + [heat] * tempered
        return _together(group, task, [open_session(i) for i in range(size)], heats, play)


async def _together(group: str, task: Task, sessions: list[Session], heats: list[float], play: Play) -> Group:
    plain = lambda i, s, h: play(f"{group}.{i}", task, s) if h == 1 else play(f"{group}.{i}", task, s, h)  # noqa: E731
    plays = (plain(i, s, h) for i, (s, h) in enumerate(zip(sessions, heats)))
    return Group(group, task, tuple(await asyncio.gather(*plays)))
