"""Trajectories of earlier steps, read back so that each stands alone: a forked one takes its parent's part along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from turnwise.core.batch import prefix
from turnwise.core.records import Trajectory


def alone(trajectory: Trajectory, stored: Callable[[str], Trajectory]) -> Trajectory:
    """The same trajectory without its parent: what it shared stands in its first context."""
    if trajectory.fork is None:
        return trajectory
    family, child = dict[str, Trajectory](), trajectory
    while child.fork is not None:
        child = stored(child.fork.parent)
        family[child.id] = child
    first, *rest = trajectory.turns
    if not first.restart:
        shared = tuple(prefix(trajectory, family))
        blind = (*shared, *first.blind) if first.blind else ()
        first = replace(first, context=(*shared, *first.context), blind=blind)
    return replace(trajectory, fork=None, turns=(first, *rest))


def reader(stored: Callable[[str], Trajectory]) -> Callable[[str], Trajectory | None]:
    """``stored`` reads the ledger. None for a trajectory whose tokens, or whose parent's, were pruned."""

    def read(key: str) -> Trajectory | None:
        found = alone(stored(key), stored)
        return found if found.sampled and found.turns[0].context else None

    return read
