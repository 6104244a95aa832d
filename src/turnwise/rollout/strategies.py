"""Strategies: how a group is grown.

``begin`` opens its sessions at once, before anything is awaited, so that a generator knows the whole wave; the coroutine
it returns plays the episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from turnwise.core.protocols import Session
from turnwise.core.records import Group, Status, Task, Trajectory
from turnwise.errors import RecipeError


class Play(Protocol):
    """One episode: trajectory id, task, session → trajectory. Never raises for what an environment does."""

    def __call__(
        self, key: str, task: Task, session: Session, heat: float = 1.0, **more: Any
    ) -> Coroutine[Any, Any, Trajectory]:
        """``heat`` multiplies the sampling temperature; other than 1 it is noted as guidance. ``more``: ``begin``, a moment
        to fork from; ``moments``, a list that takes those of this episode; ``hinted``, whether the environment gives a hint."""
        ...


Pulse = Mapping[str, float]
"""What the last training step measured (entropy, success ...); empty before the first."""


class Open(Protocol):
    """Opens the i-th session of a group; a ``draft`` of it draws the same random numbers, perhaps in cheaper arithmetic."""

    def __call__(self, i: int, draft: bool = False) -> Session: ...


class Strategy(Protocol):
    def begin(
        self, group: str, task: Task, size: int, open_session: Open, play: Play, pulse: Pulse
    ) -> Coroutine[Any, Any, Group]: ...


@dataclass(frozen=True)
class Independent:
    """Every trajectory on its own, all at once."""

    def begin(
        self, group: str, task: Task, size: int, open_session: Open, play: Play, pulse: Pulse
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
        self, group: str, task: Task, size: int, open_session: Open, play: Play, pulse: Pulse
    ) -> Coroutine[Any, Any, Group]:
        heat = self.hot if pulse.get("entropy", 0.0) <= self.target else self.cold
        tempered = int(size * self.share)
        heats = [1.0] * (size - tempered) + [heat] * tempered
        return _together(group, task, [open_session(i) for i in range(size)], heats, play)


@dataclass(frozen=True)
class Branch:
    """``trunks`` independent trajectories; the rest of the group forks from them, before a turn, where they were unsure.

    A fork is placed by ``where``: ``surprise`` takes the turns whose first tokens had the smallest log-probability (a sampled
    estimate of the entropy there), ``even`` spreads the forks over the turns, ``every`` puts as many on each turn as there
    are, from the first on. A trunk's first turn is no place to fork from: that would be another trunk."""

    trunks: int = 2
    where: str = "surprise"
    looks: int = 4  # tokens at the beginning of a turn that are looked at

    asks = frozenset({"forks"})

    def __post_init__(self) -> None:
        if self.trunks < 1 or self.where not in PLACES:
            raise RecipeError(f"need trunks >= 1 and where one of {', '.join(PLACES)}; got {self}")

    def begin(
        self, group: str, task: Task, size: int, open_session: Open, play: Play, pulse: Pulse
    ) -> Coroutine[Any, Any, Group]:
        return self._grow(group, task, [open_session(i) for i in range(size)], play)

    async def _grow(self, group: str, task: Task, sessions: list[Session], play: Play) -> Group:
        trunks, rest = sessions[: self.trunks], sessions[self.trunks :]
        for session in rest:
            session.park()  # they do not ask before the trunks have ended
        kept: list[list[Any]] = [[] for _ in trunks]
        grown = await asyncio.gather(
            *(play(f"{group}.{i}", task, s, moments=kept[i]) for i, s in enumerate(trunks))
        )  # fmt: skip
        places = self._places(grown, kept, len(rest))
        names = range(len(trunks), len(sessions))
        begins = places or [None] * len(rest)  # nowhere to fork from: more trunks
        plays = [play(f"{group}.{i}", task, s, begin=m) for i, s, m in zip(names, rest, begins)]
        return Group(group, task, (*grown, *await asyncio.gather(*plays)))

    def _places(self, grown: list[Trajectory], kept: list[list[Any]], wanted: int) -> list[Any]:
        """The moments to fork from, as many as wanted; none where no trajectory got beyond its first turn."""
        doubt = lambda turn: -sum(turn.logp[: self.looks]) / max(1, len(turn.logp[: self.looks]))  # noqa: E731
        open_to = [
            (doubt(turn), moment)
            for trunk, moments in zip(grown, kept)
            if trunk.status != Status.FAILED
            for turn, moment in list(zip(trunk.turns, moments))[1:]
        ]
        if not open_to or not wanted:
            return []
        if self.where == "surprise":
            open_to.sort(key=lambda pair: -pair[0])
        elif self.where == "even":
            step = len(open_to) / min(wanted, len(open_to))
            open_to = [open_to[int(i * step)] for i in range(min(wanted, len(open_to)))]
        return [open_to[i % len(open_to)][1] for i in range(wanted)]


@dataclass(frozen=True)
class Hinted:
    """Independent; a group of which none succeeds gets ``more`` trajectories (0: as many again) played with the environment's
    hint in sight. Their records know the hint only by their log-probabilities."""

    more: int = 0

    asks = frozenset({"hints"})

    def __post_init__(self) -> None:
        if self.more < 0:
            raise RecipeError(f"{self.more} hinted trajectories; write 0 (as many as plain ones) or a positive number")

    def begin(
        self, group: str, task: Task, size: int, open_session: Open, play: Play, pulse: Pulse
    ) -> Coroutine[Any, Any, Group]:
        return self._grow(group, task, [open_session(i) for i in range(size + (self.more or size))], size, play)

    async def _grow(self, group: str, task: Task, sessions: list[Session], size: int, play: Play) -> Group:
        for session in sessions[size:]:
            session.park()  # they do not ask before the others have ended
        plain = await _together(group, task, sessions[:size], [1.0] * size, play)
        if _stuck(plain):
            rest = enumerate(sessions[size:], start=size)
            helped = await asyncio.gather(*(play(f"{group}.{i}", task, s, hinted=True) for i, s in rest))
            return Group(group, task, (*plain.trajectories, *helped))
        for session in sessions[size:]:
            session.close()
        return plain


def _stuck(group: Group) -> bool:
    """Whether nobody succeeded, though somebody got to the end: a hint does not mend an environment that is broken."""
    played = [t for t in group.trajectories if t.status != Status.FAILED]
    return bool(played) and not any(t.reward > 0 if t.success is None else t.success for t in played)


PLACES = ("surprise", "even", "every")
DRAFT_TOKENS = "draft_tokens"


@dataclass(frozen=True)
class Screened:
    """``drafts`` (0: four times the group) are sampled cheaply; the best and the worst of them, half of the group each, are
    sampled again exactly, with the same random numbers, and only those are kept. What the draft earned is the fact ``draft``."""

    drafts: int = 0

    def __post_init__(self) -> None:
        if self.drafts < 0:
            raise RecipeError(f"{self.drafts} drafts; write 0 (four times the group) or a positive number")

    def suits(self, size: int) -> None:
        """Refuses groups it cannot grow."""
        if 0 < self.drafts < size:
            raise RecipeError(f"{self.drafts} drafts for groups of {size}; write at least as many, or 0")

    def begin(
        self, group: str, task: Task, size: int, open_session: Open, play: Play, pulse: Pulse
    ) -> Coroutine[Any, Any, Group]:
        self.suits(size)
        count = self.drafts or 4 * size
        cheap, exact = ([open_session(i, draft) for i in range(count)] for draft in (True, False))
        return self._grow(group, task, cheap, exact, size, play)

    async def _grow(
        self, group: str, task: Task, cheap: list[Session], exact: list[Session], size: int, play: Play
    ) -> Group:
        for session in exact:
            session.park()  # they do not ask before the drafts have ended
        seen = await asyncio.gather(*(play(f"{group}.draft{i}", task, s) for i, s in enumerate(cheap)))
        chosen = sorted(_extremes([t.reward for t in seen if t.status != Status.FAILED], size))
        whole = [i for i, t in enumerate(seen) if t.status != Status.FAILED]
        kept = [whole[k] for k in chosen] + [i for i in range(len(seen)) if i not in whole][: size - len(chosen)]
        for i, session in enumerate(exact):
            if i not in kept:
                session.close()
        played = await asyncio.gather(*(play(f"{group}.{i}", task, exact[i]) for i in kept))
        share = sum(t.sampled for t in seen) / max(1, len(kept))  # what exploring cost, shared out
        facts = lambda i: {"draft": float(seen[i].reward), DRAFT_TOKENS: share}  # noqa: E731
        told = [replace(t, facts={**t.facts, **facts(i)}) for i, t in zip(kept, played)]
        return Group(group, task, tuple(told))


def _extremes(values: list[float], size: int) -> list[int]:
    """Where the best half and the worst half of ``size`` values stand; of equals the first."""
    order = sorted(range(len(values)), key=lambda i: -values[i])
    best = (size + 1) // 2
    return order if len(order) <= size else [*order[:best], *order[len(order) - (size - best) :]]


async def _together(group: str, task: Task, sessions: list[Session], heats: list[float], play: Play) -> Group:
    plain = lambda i, s, h: play(f"{group}.{i}", task, s) if h == 1 else play(f"{group}.{i}", task, s, h)  # noqa: E731
    plays = (plain(i, s, h) for i, (s, h) in enumerate(zip(sessions, heats)))
    return Group(group, task, tuple(await asyncio.gather(*plays)))
