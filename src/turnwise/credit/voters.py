"""Voters: whose numbers make up a mean, where it is neither a level nor simply the same turn index or agent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.algebra.peers import Kin
from turnwise.algebra.piece import check
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Level, Partition
from turnwise.maths import segments

ROWS = {"turn": TURN, "trajectory": TRAJECTORY}
POOLS = {"batch": BATCH, "task": GROUP, "trajectory": TRAJECTORY}


@dataclass(frozen=True)
class Voters(Kin):
    """All of a task: each trajectory once (``rows="trajectory"``), or once for each of its turns, so that long episodes weigh
    more. ``marked``: turns with and without the mark vote apart (each trajectory's one vote knows no mark)."""

    rows: str = "trajectory"
    marked: Term | None = None

    def __post_init__(self) -> None:
        check(self.rows in ROWS, f"rows is {self.rows!r}; write {' or '.join(ROWS)}")

    def __call__(self, batch: Batch) -> Partition:
        level = ROWS[self.rows]
        mark = () if self.marked is None or level == TRAJECTORY else (self.marked(batch) > 0.5,)
        return Partition.by(batch.tree, level, batch.group, *mark)


@dataclass(frozen=True)
class Roles(Kin):
    """Turns of one agent in one game: a game is the task (``group``), or all tasks of a kind (``domain``)."""

    game: str = "group"

    def __post_init__(self) -> None:
        check(self.game in ("group", "domain"), f"game is {self.game!r}; write group or domain")

    def __call__(self, batch: Batch) -> Partition:
        game = batch.group if self.game == "group" else batch.domain
        return Partition.by(batch.tree, TURN, game, batch.agent)


@dataclass(frozen=True)
class SamePlace(Kin):
    """The t-th sampled tokens of a task's trajectories."""

    def __call__(self, batch: Batch) -> Partition:
        return Partition.by(batch.tree, TOKEN, batch.group, batch.tree.index(TOKEN, TRAJECTORY))


@dataclass(frozen=True)
class Drawn(Kin):
    """Turns put together by lot, ``size`` at a time: of the batch, of a task or of a trajectory. −1: all of them."""

    size: int = 16
    within: str = "batch"

    def __post_init__(self) -> None:
        check(self.size == -1 or self.size > 0, f"size is {self.size}; write a positive number of turns, or -1 for all")
        check(self.within in POOLS, f"within is {self.within!r}; write {', '.join(POOLS)}")

    def __call__(self, batch: Batch) -> Partition:
        tree, pool = batch.tree, POOLS[self.within]
        label = tree.ancestor(TURN, pool)
        order = by_lot(batch, TURN)
        place = torch.empty_like(label)
        place[order] = segments.rank_within(label[order], tree.count(pool))
        size = self.size if self.size > 0 else 1 + place.numel()
        return Partition.by(tree, TURN, label, place // size)


def by_lot(batch: Batch, level: Level) -> Tensor:
    """The items of a level in the order of their lots; equal lots by their trajectory, so that no packing decides."""
    by_seed = torch.argsort(batch.seed.at(level).x, stable=True)
    return by_seed[torch.argsort(batch.lots(level).x[by_seed], stable=True)]


def neighbour(value: Field, by: int, missing: float) -> Field:
    """Of each turn, the value ``by`` turns later (earlier, if negative) in its trajectory; ``missing`` where there is none."""
    tree = value.tree
    place = tree.index(TURN, TRAJECTORY).x + by
    there = (place >= 0) & (place < tree.size(TURN, TRAJECTORY).at(TURN).x)
    return value.map(lambda x: torch.where(there, torch.roll(x, -by), missing))  # turns of a trajectory lie together


__all__ = ["Drawn", "Roles", "SamePlace", "Voters", "by_lot", "neighbour"]
