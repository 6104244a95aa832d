"""Failed attempts are tried again from the turn that went wrong, with a hint that the record does not contain."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from turnwise.core.limits import choice, number
from turnwise.core.protocols import Session
from turnwise.core.records import Group, Status, Trajectory
from turnwise.rollout.episode_start import ForkPoint
from turnwise.rollout.strategies.base import GroupRequest, Strategy, close, park, succeeded
from turnwise.rollout.strategies.tree import GrownEpisode
from turnwise.rollout.support import Support

DIAGNOSES = ("verifier", "surprise", "start")
RETRY = 400_000  # index of the first session of a retry that replaces an attempt


def first_error(episode: GrownEpisode, diagnosis: str) -> ForkPoint | None:
    """The turn to try again. ``verifier``: the first after which the solution was not nearer; ``surprise``: the one with the
    least likely first tokens; ``start``: the first turn. None where the attempt has no turn."""
    points = episode.points[: len(episode.trajectory.turns)]
    if not points or episode.trajectory.status == Status.FAILED:
        return None
    if diagnosis == "start":
        return points[0]
    if diagnosis == "verifier":
        left = [point.remaining for point in episode.points]
        for point, now, then in zip(points, left, [*left[1:], None]):
            if now is None or then is None or then >= now:
                return point
        return points[-1]
    surprise = [sum(episode.uncertainty(i, 4)) / max(1, len(episode.uncertainty(i, 4))) for i in range(len(points))]
    return points[surprise.index(max(surprise))]


async def attempt(request: GroupRequest, i: int, session: Session) -> GrownEpisode:
    """Play one episode and keep the points at which it can be forked."""
    points = list[ForkPoint]()
    trajectory = await request.play(request.key(i), request.task, session, fork_points=points)
    return GrownEpisode(trajectory, points)


class HintedRetry(Strategy):
    """Half of a group are attempts. Each failed one is forked at the turn that ``diagnosis`` finds and continued with hints up to
    ``tier``, which the record does not contain; where an attempt succeeded, its partner is another attempt. ``AfterLastFork``
    and similar credit train only on what differs."""

    tier: int = number(1, least=1)
    diagnosis: str = choice(*DIAGNOSES)

    requirements = frozenset({"forks", "hints"})
    reads_rewards = True

    async def grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        count = (request.size + 1) // 2
        park(sessions[count:])
        tried = await asyncio.gather(*(attempt(request, i, s) for i, s in enumerate(sessions[:count])))
        plays = []
        for i, (episode, session) in enumerate(zip(tried, sessions[count:]), start=count):
            point = None if succeeded(episode.trajectory) else first_error(episode, self.diagnosis)
            more: dict[str, Any] = {"fork_from": point} if point is not None else {}
            more |= {"support": Support(tier=self.tier, recorded=False)} if point is not None else {}
            plays.append(request.play(request.key(i), request.task, session, **more))
        return request.grown([*(g.trajectory for g in tried), *await asyncio.gather(*plays)])


class RepairedAttempts(Strategy):
    """All of a group are attempts. Up to ``repairs`` failed ones are continued from their first error with hints up to ``tier``;
    a repair that succeeds takes the place of its attempt, with the attempt's own turns before the error."""

    repairs: int = number(1, least=0)
    tier: int = number(1, least=1)
    diagnosis: str = choice(*DIAGNOSES)

    requirements = frozenset({"forks", "hints"})
    reads_rewards = True

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self._grow(request, request.sessions(), request.sessions(self.repairs, RETRY))

    async def _grow(self, request: GroupRequest, sessions: list[Session], spare: list[Session]) -> Group:
        park(spare)
        tried = await asyncio.gather(*(attempt(request, i, s) for i, s in enumerate(sessions)))
        members = [g.trajectory for g in tried]
        broken = [(i, first_error(g, self.diagnosis)) for i, g in enumerate(tried) if not succeeded(g.trajectory)]
        chosen = [(i, point) for i, point in broken if point is not None][: self.repairs]
        close(spare[len(chosen) :])
        support = Support(tier=self.tier, recorded=False)
        plays = [
            request.play(request.key(RETRY + i), request.task, s, fork_from=point, support=support)
            for (i, point), s in zip(chosen, spare)
        ]
        for (i, point), repair in zip(chosen, await asyncio.gather(*plays)):
            if succeeded(repair) and point is not None:
                members[i] = grafted(members[i], repair, point)
        return request.grown(members)


def grafted(parent: Trajectory, child: Trajectory, point: ForkPoint) -> Trajectory:
    """``child`` with the turns of ``parent`` before the fork as its own: one trajectory, which needs no parent in its group."""
    assert point.token == 0, "only forks before a turn are grafted"
    first = replace(child.turns[0], context=parent.turns[point.turn].context, restart=parent.turns[point.turn].restart)
    return replace(child, fork=None, turns=(*parent.turns[: point.turn], first, *child.turns[1:]))
