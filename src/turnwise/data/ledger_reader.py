"""Stored trajectories as self-contained ones: a forked trajectory gets its parent's prefix in its first context.

Knows forks and contexts; not how the ledger stores them, nor why they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from turnwise.core.batch import prefix
from turnwise.core.records import Trajectory


def inline_fork(trajectory: Trajectory, load: Callable[[str], Trajectory]) -> Trajectory:
    """The trajectory without a parent: the prefix it shared is part of its first context."""
    if trajectory.fork is None:
        return trajectory
    ancestors, child = dict[str, Trajectory](), trajectory
    while child.fork is not None:
        child = load(child.fork.parent)
        ancestors[child.id] = child
    first, *later = trajectory.turns
    if not first.restart:
        shared = tuple(prefix(trajectory, ancestors))
        masked = (*shared, *first.masked_context) if first.masked_context else ()
        first = replace(first, context=(*shared, *first.context), masked_context=masked)
    return replace(trajectory, fork=None, turns=(first, *later))


def trajectory_reader(load: Callable[[str], Trajectory]) -> Callable[[str], Trajectory | None]:
    """``load`` reads the ledger. The reader returns None for a trajectory whose tokens, or whose parent's, were pruned."""

    def read(key: str) -> Trajectory | None:
        trajectory = inline_fork(load(key), load)
        return trajectory if trajectory.sampled and trajectory.turns[0].context else None

    return read
