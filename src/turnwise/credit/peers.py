"""Peers of turns and tokens: partitions that are neither a level nor simply the same turn index or agent. Knows no
baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnwise.algebra.peers import Peers
from turnwise.algebra.piece import check
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Level, Partition
from turnwise.core.limits import choice
from turnwise.maths import segments
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

UNITS = {"turn": TURN, "trajectory": TRAJECTORY}
POOLS = {"batch": BATCH, "task": GROUP, "trajectory": TRAJECTORY}


@dataclass(frozen=True)
class SameTask(Peers):
    """All of a task: each trajectory once (``unit="trajectory"``), or once per turn, so that long episodes weigh more.
    ``mark``: turns with and without the mark are separate peers (not with ``unit="trajectory"``)."""

    unit: str = choice(*UNITS, default="trajectory")
    mark: Term | None = None

    def __call__(self, batch: Batch) -> Partition:
        level = UNITS[self.unit]
        keys = () if self.mark is None or level == TRAJECTORY else (self.mark(batch) > 0.5,)
        return Partition.by(batch.tree, level, batch.group, *keys)


@dataclass(frozen=True)
class SameAgent(Peers):
    """Turns of one agent in one game: a game is the task (``group``), or all tasks of a kind (``domain``)."""

    game: str = choice("group", "domain")

    def __call__(self, batch: Batch) -> Partition:
        game = batch.group if self.game == "group" else batch.domain
        return Partition.by(batch.tree, TURN, game, batch.agent)


@dataclass(frozen=True)
class SameTokenIndex(Peers):
    """The t-th sampled tokens of a task's trajectories; ``apart`` False: all sampled tokens of the task."""

    apart: bool = True

    def __call__(self, batch: Batch) -> Partition:
        index = batch.tree.index(TOKEN, TRAJECTORY)
        return Partition.by(batch.tree, TOKEN, batch.group, index if self.apart else index * 0)


@dataclass(frozen=True)
class RandomGroups(Peers):
    """Random groups of ``size`` turns from the batch, a task or a trajectory. −1: one group of all."""

    size: int = 16
    within: str = choice(*POOLS, default="batch")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.size == -1 or self.size > 0, f"size is {self.size}; write a positive number of turns, or -1 for all")

    def __call__(self, batch: Batch) -> Partition:
        tree, pool = batch.tree, POOLS[self.within]
        label = tree.ancestor(TURN, pool)
        order = random_order(batch, TURN)
        rank = torch.empty_like(label)
        rank[order] = segments.rank_within(label[order], tree.count(pool))
        size = self.size if self.size > 0 else 1 + rank.numel()
        return Partition.by(tree, TURN, label, rank // size)


def random_order(batch: Batch, level: Level) -> Tensor:
    """The items of a level in random order; the trajectory seed breaks ties, so that packing does not matter."""
    by_seed = torch.argsort(batch.seed.at(level).x, stable=True)
    return by_seed[torch.argsort(batch.uniform_draws(level).x[by_seed], stable=True)]


def shift_turns(value: Field, by: int, missing: float) -> Field:
    """For each turn, the value ``by`` turns later (earlier if negative) in its trajectory; ``missing`` where there is
    none."""
    tree = value.tree
    index = tree.index(TURN, TRAJECTORY).x + by
    exists = (index >= 0) & (index < tree.size(TURN, TRAJECTORY).at(TURN).x)
    return value.map(lambda x: torch.where(exists, torch.roll(x, -by), missing))  # turns of a trajectory are adjacent


__all__ = ["RandomGroups", "SameAgent", "SameTask", "SameTokenIndex", "random_order", "shift_turns"]
