"""Vines: trajectories that continue one state of another, credited in sets. Elsewhere another term decides.

Does not know how the states were chosen: trajectories that fork from the same place are vines of one state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnwise.algebra.gae import GAE
from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.ratio import moved
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.credit.forks import ForkTerm, ForkTree
from turnwise.credit.multi_reward import rescale_to_unit
from turnwise.credit.stratified import SameFact
from turnwise.maths import segments
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

MIX = (0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D, 0x1B03738712FAD5C9)  # odd constants of a 64-bit hash


@dataclass(frozen=True)
class VineSetAdvantage(ForkTerm):
    """A = mean of f over a vine's sets − mean of f over all sets of its state, in its first turn and ``window`` turns after it;
    ``otherwise`` in all other turns. f(set) = mean return of its members, rescaled from [bottom, top] to [0, 1], times the share
    of distinct ones, 0 if all are equal.

    Of the vines of a state ``sets`` random sets of ``size`` are drawn; fewer vines form one set. A vine in no set gets
    ``otherwise``. Seeds of trajectories decide, so packing does not matter."""

    compares_peers = True

    size: int = number(4, least=1)
    sets: int = number(4, least=1)
    window: int = number(5, least=0)
    bottom: float = number(0.0, below="top")
    top: float = 1.0
    otherwise: Term = field(default_factory=GAE)
    same: SameFact = field(default_factory=lambda: SameFact("key", "words"))

    @property
    def reads(self) -> frozenset[Signal]:
        return self.otherwise.reads

    def __call__(self, batch: Batch) -> Field:
        credit, counted = self.set_credit(batch)
        near = batch.tree.index(TURN, TRAJECTORY) <= self.window
        return where(counted.at(TURN) & near, credit.at(TURN), self.otherwise(batch))

    def set_credit(self, batch: Batch) -> tuple[Field, Field]:
        """The advantage of each vine, and whether it is in a set. At TRAJECTORY."""
        tree, state = batch.tree, same_start(batch)
        value = rescale_to_unit(Field(tree, TRAJECTORY, ForkTree(batch).outcome()), self.bottom, self.top)
        equal = Partition.by(tree, TRAJECTORY, state.label, self.same(batch).label)
        one = lambda x: Field(tree, TRAJECTORY, x.to(value.x.dtype))  # noqa: E731
        drawn = [one(members) for members in draw_sets(batch, state, self.size, self.sets)]
        f = [set_value(value, members, state, equal) for members in drawn]
        baseline, times = sum(f[1:], f[0]) / len(f), sum(drawn[1:], drawn[0])
        paid = [members * (found - baseline) for members, found in zip(drawn, f)]
        return sum(paid[1:], paid[0]) / times.clamp(low=1.0), (times > 0) & (batch.parent >= 0)


def same_start(batch: Batch) -> Partition:
    """Trajectories of a group that fork from one place; those that start at the prompt are one class."""
    token = batch.fork_token if batch.fork_token is not None else batch.fork * 0
    return Partition.by(batch.tree, TRAJECTORY, batch.group, batch.parent, batch.fork, token)


def draw_sets(batch: Batch, peers: Partition, size: int, sets: int) -> list[Tensor]:
    """For each set, which trajectories are its members: ``size`` random ones of every class, or all of fewer. [K] bool each."""
    by_seed = torch.argsort(batch.seed.x, stable=True)
    found = []
    for n in range(sets):
        order = by_seed[torch.argsort(_hashed(batch.seed.x, n)[by_seed], stable=True)]
        rank = segments.rank_within(peers.label[order], peers.count)
        found.append(torch.empty_like(order).index_copy(0, order, rank) < size)
    return found


def _hashed(seed: Tensor, number: int) -> Tensor:
    x = (seed + (number + 1) * MIX[0] % 2**62) * MIX[1]
    x = (x ^ (x >> 29)) * MIX[2]
    return x ^ (x >> 32)


def set_value(value: Field, members: Field, state: Partition, equal: Partition) -> Field:
    """f of each state's set: the mean value of its members times the share of distinct ones, 0 if all of several are equal."""
    count = members.sum(state).clamp(low=1.0)
    distinct = (members / members.sum(equal).clamp(low=1.0)).sum(state)
    several = (count > 1.5) & (distinct < 1.5)
    return (value * members).sum(state) / count * where(several, 0.0, distinct / count)


@dataclass(frozen=True)
class BehaviourKL(Penalty):
    """KL(μ‖π) from the sampler to the policy, by the estimator ρ − 1 − log ρ over what the sampler drew."""

    def __call__(self, view: MicroBatchView) -> Field:
        log = moved(view)
        return log.exp() - 1 - log


__all__ = ["BehaviourKL", "VineSetAdvantage", "draw_sets", "same_start", "set_value"]
