"""Rollout strategies: how the trajectories of a group are sampled.

``begin`` opens all sessions of a group synchronously, before anything is awaited, so that a generator knows the whole batch of
sessions; the coroutine it returns plays the episodes. Knows sessions and trajectories; no engine, no environment, no loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from turnwise.core.protocols import Session
from turnwise.core.records import Group, Status, Task, Trajectory
from turnwise.errors import RecipeError


class EpisodeRunner(Protocol):
    """Plays one episode: trajectory id, task, session → trajectory. Never raises for an error of the environment."""

    def __call__(
        self, key: str, task: Task, session: Session, temperature_scale: float = 1.0, **more: Any
    ) -> Coroutine[Any, Any, Trajectory]:
        """``temperature_scale`` multiplies the sampling temperature; a value other than 1 is recorded as guidance. ``more``:
        ``fork_from``, a fork point to start from; ``fork_points``, a list that receives those of this episode; ``with_hint``,
        whether the prompt contains the environment's hint."""
        ...


StepMetrics = Mapping[str, float]
"""Metrics of the last training step (entropy, success ...); empty before the first."""


class OpenSession(Protocol):
    """Opens the i-th session of a group; its ``draft`` uses the same random numbers, possibly at lower precision."""

    def __call__(self, i: int, draft: bool = False) -> Session: ...


class Strategy(Protocol):
    """Interface: how the episodes of a group are produced."""

    def begin(
        self,
        group: str,
        task: Task,
        size: int,
        open_session: OpenSession,
        play: EpisodeRunner,
        last_metrics: StepMetrics,
    ) -> Coroutine[Any, Any, Group]: ...


@dataclass(frozen=True)
class Independent:
    """Samples all trajectories independently and concurrently."""

    def begin(
        self,
        group: str,
        task: Task,
        size: int,
        open_session: OpenSession,
        play: EpisodeRunner,
        last_metrics: StepMetrics,
    ) -> Coroutine[Any, Any, Group]:
        return _play_all(group, task, [open_session(i) for i in range(size)], [1.0] * size, play)


@dataclass(frozen=True)
class EntropyControl:
    """Independent, with ``share`` of each group sampled at a temperature scaled by ``hot`` while the policy's entropy is at most
    ``target``, by ``cold`` above it.

    Training on samples of a higher temperature raises the entropy, on those of a lower one reduces it."""

    target: float = 0.5
    hot: float = 1.2
    cold: float = 0.8
    share: float = 0.25

    def __post_init__(self) -> None:
        if not (0 < self.cold <= 1 <= self.hot and 0 <= self.share < 1):
            raise RecipeError(f"need 0 < cold <= 1 <= hot and 0 <= share < 1, got {self}")

    def begin(
        self,
        group: str,
        task: Task,
        size: int,
        open_session: OpenSession,
        play: EpisodeRunner,
        last_metrics: StepMetrics,
    ) -> Coroutine[Any, Any, Group]:
        scale = self.hot if last_metrics.get("entropy", 0.0) <= self.target else self.cold
        scaled = int(size * self.share)
        scales = [1.0] * (size - scaled) + [scale] * scaled
        return _play_all(group, task, [open_session(i) for i in range(size)], scales, play)


@dataclass(frozen=True)
class Branch:
    """Samples ``trunks`` independent trajectories, then forks the other trajectories of the group from their turns.

    ``where`` selects the turns: ``surprise`` takes those whose first tokens had the lowest log-probability (a sampled estimate
    of the entropy there), ``even`` spreads the forks over the turns, ``every`` assigns them to all turns in order, from the
    first on. A fork at a trunk's first turn would be another trunk, so that turn is excluded."""

    trunks: int = 2
    where: str = "surprise"
    looks: int = 4  # tokens at the start of a turn whose log-probability counts

    requirements = frozenset({"forks"})

    def __post_init__(self) -> None:
        if self.trunks < 1 or self.where not in FORK_RULES:
            raise RecipeError(f"need trunks >= 1 and where one of {', '.join(FORK_RULES)}; got {self}")

    def begin(
        self,
        group: str,
        task: Task,
        size: int,
        open_session: OpenSession,
        play: EpisodeRunner,
        last_metrics: StepMetrics,
    ) -> Coroutine[Any, Any, Group]:
        return self._grow(group, task, [open_session(i) for i in range(size)], play)

    async def _grow(self, group: str, task: Task, sessions: list[Session], play: EpisodeRunner) -> Group:
        trunk_sessions, fork_sessions = sessions[: self.trunks], sessions[self.trunks :]
        for session in fork_sessions:
            session.park()  # they generate nothing before the trunks have ended
        fork_points: list[list[Any]] = [[] for _ in trunk_sessions]
        trunks = await asyncio.gather(
            *(play(f"{group}.{i}", task, s, fork_points=fork_points[i]) for i, s in enumerate(trunk_sessions))
        )
        indices = range(len(trunk_sessions), len(sessions))
        origins = self._select(trunks, fork_points, len(fork_sessions)) or [None] * len(
            fork_sessions
        )  # None: more trunks
        plays = [play(f"{group}.{i}", task, s, fork_from=f) for i, s, f in zip(indices, fork_sessions, origins)]
        return Group(group, task, (*trunks, *await asyncio.gather(*plays)))

    def _select(self, trunks: list[Trajectory], fork_points: list[list[Any]], count: int) -> list[Any]:
        """``count`` fork points, with repetition; none if no trajectory got beyond its first turn."""
        surprise = lambda turn: -sum(turn.logp[: self.looks]) / max(1, len(turn.logp[: self.looks]))  # noqa: E731
        candidates = [
            (surprise(turn), point)
            for trunk, points in zip(trunks, fork_points)
            if trunk.status != Status.FAILED
            for turn, point in list(zip(trunk.turns, points))[1:]
        ]
        if not candidates or not count:
            return []
        if self.where == "surprise":
            candidates.sort(key=lambda pair: -pair[0])
        elif self.where == "even":
            step = len(candidates) / min(count, len(candidates))
            candidates = [candidates[int(i * step)] for i in range(min(count, len(candidates)))]
        return [candidates[i % len(candidates)][1] for i in range(count)]


@dataclass(frozen=True)
class Hinted:
    """Independent; a group without a success gets ``more`` further trajectories (0: as many as the group), sampled with the
    environment's hint in the prompt. Their records do not contain the hint; only their log-probabilities depend on it."""

    more: int = 0

    requirements = frozenset({"hints"})

    def __post_init__(self) -> None:
        if self.more < 0:
            raise RecipeError(f"{self.more} hinted trajectories; write 0 (as many as plain ones) or a positive number")

    def begin(
        self,
        group: str,
        task: Task,
        size: int,
        open_session: OpenSession,
        play: EpisodeRunner,
        last_metrics: StepMetrics,
    ) -> Coroutine[Any, Any, Group]:
        return self._grow(group, task, [open_session(i) for i in range(size + (self.more or size))], size, play)

    async def _grow(self, group: str, task: Task, sessions: list[Session], size: int, play: EpisodeRunner) -> Group:
        for session in sessions[size:]:
            session.park()  # they generate nothing before the others have ended
        plain = await _play_all(group, task, sessions[:size], [1.0] * size, play)
        if _all_failed(plain):
            spare = enumerate(sessions[size:], start=size)
            hinted = await asyncio.gather(*(play(f"{group}.{i}", task, s, with_hint=True) for i, s in spare))
            return Group(group, task, (*plain.trajectories, *hinted))
        for session in sessions[size:]:
            session.close()
        return plain


def _all_failed(group: Group) -> bool:
    """Whether no trajectory succeeded although at least one was played: a hint does not repair a broken environment."""
    played = [t for t in group.trajectories if t.status != Status.FAILED]
    return bool(played) and not any(t.reward > 0 if t.success is None else t.success for t in played)


FORK_RULES = ("surprise", "even", "every")
DRAFT_TOKENS = "draft_tokens"


@dataclass(frozen=True)
class DraftSelection:
    """Samples ``drafts`` trajectories (0: four times the group) cheaply, selects the best and the worst by reward, half of the
    group each, and resamples those exactly with the same random numbers. Only these are kept; the fact ``draft`` holds the
    reward of the draft."""

    drafts: int = 0

    def __post_init__(self) -> None:
        if self.drafts < 0:
            raise RecipeError(f"{self.drafts} drafts; write 0 (four times the group) or a positive number")

    def check_group_size(self, size: int) -> None:
        """Raise if a group of ``size`` needs more trajectories than there are drafts."""
        if 0 < self.drafts < size:
            raise RecipeError(f"{self.drafts} drafts for groups of {size}; write at least as many, or 0")

    def begin(
        self,
        group: str,
        task: Task,
        size: int,
        open_session: OpenSession,
        play: EpisodeRunner,
        last_metrics: StepMetrics,
    ) -> Coroutine[Any, Any, Group]:
        self.check_group_size(size)
        count = self.drafts or 4 * size
        cheap, exact = ([open_session(i, draft) for i in range(count)] for draft in (True, False))
        return self._grow(group, task, cheap, exact, size, play)

    async def _grow(
        self, group: str, task: Task, cheap: list[Session], exact: list[Session], size: int, play: EpisodeRunner
    ) -> Group:
        for session in exact:
            session.park()  # they generate nothing before the drafts have ended
        drafts = await asyncio.gather(*(play(f"{group}.draft{i}", task, s) for i, s in enumerate(cheap)))
        extremes = sorted(_extremes([t.reward for t in drafts if t.status != Status.FAILED], size))
        valid = [i for i, t in enumerate(drafts) if t.status != Status.FAILED]
        failed = [i for i in range(len(drafts)) if i not in valid]
        kept = [valid[k] for k in extremes] + failed[: size - len(extremes)]
        for i, session in enumerate(exact):
            if i not in kept:
                session.close()
        played = await asyncio.gather(*(play(f"{group}.{i}", task, exact[i]) for i in kept))
        share = sum(t.sampled for t in drafts) / max(1, len(kept))  # the cost of the drafts, divided among the kept
        facts = lambda i: {"draft": float(drafts[i].reward), DRAFT_TOKENS: share}  # noqa: E731
        return Group(group, task, tuple(replace(t, facts={**t.facts, **facts(i)}) for i, t in zip(kept, played)))


def _extremes(values: list[float], size: int) -> list[int]:
    """The indices of the best and the worst half of ``size`` values; ties go to the lower index."""
    order = sorted(range(len(values)), key=lambda i: -values[i])
    best = (size + 1) // 2
    return order if len(order) <= size else [*order[:best], *order[len(order) - (size - best) :]]


async def _play_all(group: str, task: Task, sessions: list[Session], scales: list[float], play: EpisodeRunner) -> Group:
    one = lambda i, s, x: play(f"{group}.{i}", task, s) if x == 1 else play(f"{group}.{i}", task, s, x)  # noqa: E731
    plays = (one(i, s, x) for i, (s, x) in enumerate(zip(sessions, scales)))
    return Group(group, task, tuple(await asyncio.gather(*plays)))
