"""Takes recorded turns again: the present policy samples another turn at the same state, for critics to judge.

A resampled turn is a trajectory of its own that forks from the recorded one before the turn. No environment answers it, so it
has no reward and no successor. Knows ids and sessions; no environment and no loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from turnwise.core.batch import prefix
from turnwise.core.protocols import Generator, Session
from turnwise.core.records import Completion, Fork, Group, Sampling, Stop, Trajectory, Turn
from turnwise.core.seeds import stable_seed
from turnwise.data.replay import FRESH


@dataclass
class TurnResampler:
    """Samples ``count`` turns at the state of every recorded turn that has tokens."""

    generator: Generator
    sampling: Sampling
    count: int
    seed: int

    async def add(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The groups with the resampled turns. Opens all sessions before the first token is decoded."""
        drawn = [self._states(group, step) for group in groups]
        sessions = [[self.generator.open(stable_seed(self.seed, "fresh", one.id)) for one, _ in rows] for rows in drawn]
        pairs = [(s, ids) for rows, opened in zip(drawn, sessions) for (_, ids), s in zip(rows, opened)]
        completions = iter(await asyncio.gather(*(self._sample(session, ids) for session, ids in pairs)))
        out = []
        for group, rows in zip(groups, drawn):
            taken = [(one, next(completions)) for one, _ in rows]
            more = [_with_turn(one, c) for one, c in taken if c.tokens and c.stop != Stop.CANCELLED]
            out.append(replace(group, trajectories=(*group.trajectories, *more)))
        return out

    async def _sample(self, session: Session, ids: list[int]) -> Completion:
        """One turn. Its session closes at once: a deterministic generator waits for open ones."""
        try:
            return await session.generate(ids, self.sampling)
        finally:
            session.close()

    def _states(self, group: Group, step: int) -> list[tuple[Trajectory, list[int]]]:
        """For each turn to sample, a fork with the recorded turn in its place, and the ids it reads."""
        by_id, rows = {t.id: t for t in group.trajectories}, list[tuple[Trajectory, list[int]]]()
        for t in group.trajectories:
            for k, turn in enumerate(t.turns):
                for j in range(self.count if turn.tokens else 0):
                    key = f"{t.id}/fresh-{step}.{k}.{j}"
                    one = Trajectory(key, t.task, (turn,), fork=Fork(t.id, k), facts={FRESH: 1.0}, guidance=t.guidance)
                    rows.append((one, prefix(one, by_id)))
        return rows


def _with_turn(one: Trajectory, completion: Completion) -> Trajectory:
    """The fork with the turn that was sampled instead. Its context belongs to the recorded trajectory."""
    turn = one.turns[0]
    taken = Turn(
        context=(),
        tokens=tuple(completion.tokens),
        logp=tuple(completion.logp),
        mass=() if not any(completion.mass) else tuple(completion.mass),
        kept=() if not any(completion.kept) else tuple(completion.kept),
        version=tuple(completion.version),
        agent=turn.agent,
        state=turn.state,
        stop=completion.stop,
        temperature=turn.temperature,
        seconds_generating=completion.seconds,
    )
    return replace(one, turns=(taken,))


__all__ = ["TurnResampler"]
