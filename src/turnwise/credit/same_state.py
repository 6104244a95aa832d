"""States: credit among turns that began in the same place, came the same way or took the same step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.peers import Kin
from turnwise.algebra.piece import check
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import TRAJECTORY, TURN, Field, Partition, where
from turnwise.credit.voters import neighbour

UNKNOWN, BEFORE = -1, -2  # a state nobody told, and what was before the first turn
SAME = 1e-9  # a return so near to the mean of its peers is at it: rounding must not decide


@dataclass(frozen=True)
class Recent(Kin):
    """Turns of one task with the same last ``states``, the present one included: sₖ₋ₙ₊₁ … sₖ.

    A turn with a shorter past, or with an unknown state in it, is alone."""

    states: int = 1

    def __post_init__(self) -> None:
        check(self.states > 0, f"the number of states is {self.states}; write 1 for the present one alone, or more")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"state"})

    def __call__(self, batch: Batch) -> Partition:
        return alike(batch, *(neighbour(batch.state, -k, UNKNOWN) for k in range(self.states)))


@dataclass(frozen=True)
class SameStep(Kin):
    """Turns of one task that take the same step, (state, action, next state), after the same ``window`` states before it.

    Before the first turn there is nothing, which is like nothing. A turn with an unknown state in any of these is alone."""

    window: int = 3

    def __post_init__(self) -> None:
        check(self.window >= 0, f"the window is {self.window}; write a number of states >= 0")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"state"})

    def __call__(self, batch: Batch) -> Partition:
        tree = batch.tree
        last = tree.size(TURN, TRAJECTORY) - tree.index(TURN, TRAJECTORY) <= 1
        after = where(last, batch.end, neighbour(batch.state, 1, UNKNOWN))
        past = (neighbour(batch.state, -k, BEFORE) for k in range(1, self.window + 1))
        return alike(batch, batch.state, batch.action, after, *past)


def alike(batch: Batch, *keys: Field) -> Partition:
    """Turns of one task with equal keys; a turn that does not know one of them is alone."""
    unknown = torch.stack([key.x == UNKNOWN for key in keys]).any(0)
    alone = torch.where(unknown, 1 + torch.arange(unknown.numel(), device=unknown.device), 0)
    return Partition.by(batch.tree, TURN, batch.group, *keys, alone)


@dataclass(frozen=True)
class Shared(Term):
    """Aₖ = mean of ``term`` over the trajectories with a turn among the ``peers`` of turn k, each counted once.

    What all took alike is neutral; where a trajectory goes its own way it keeps its own credit."""

    term: Term
    peers: Kin

    def __call__(self, batch: Batch) -> Field:
        a, tree, peers = self.term(batch).at(TURN), batch.tree, self.peers(batch)
        again = Partition.by(tree, TURN, peers.label, tree.ancestor(TURN, TRAJECTORY))
        once = 1.0 / a.peers(again)
        return (once * a).sum(peers) / once.sum(peers)


@dataclass(frozen=True)
class Nested(Term):
    """A = Σₙ wₙ Aₙ / (Σₙ wₙ + ε), wₙ = (n + 1)^α: ``value`` against peers with the same last n states, n = 1 … history + 1,
    the longer the past they share the more it weighs.

    Aₙ = (v − mean)/(population std + ε), or without ``scale`` v − mean. Levels where a turn is alone, or at the mean, do not
    weigh. ``base`` adds the term ``whole`` as level 0."""

    value: Term
    history: int = 2
    alpha: float = 1.0
    scale: bool = True
    base: bool = False
    whole: Term = field(default_factory=Standardise)
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check(self.history >= 0, f"the history is {self.history}; write a number of states >= 0")
        fits = self.alpha >= 0 and self.alpha * math.log(self.history + 2) < 700
        check(fits, f"alpha is {self.alpha}; write a number >= 0 for which (history + 2)^alpha is finite")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"state"})

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        batch = replace(batch, reward=batch.reward.to(torch.float64))
        value = self.value(batch)
        levels = [(n, self._among(value, Recent(n)(batch))) for n in range(1, self.history + 2)]
        if self.base:
            a = self.whole(batch).at(TURN)
            levels.append((0, where(a.abs() > SAME, a, 0.0)))
        weights = [where(a.abs() > 0, (n + 1.0) ** self.alpha, 0.0) for n, a in levels]
        total = sum((w * a for w, (_, a) in zip(weights, levels)), 0.0 * value)
        return total / (sum(weights, 0.0 * value) + self.eps)

    def _among(self, value: Field, peers: Partition) -> Field:
        centred = value - value.mean(peers)
        a = centred / (value.std(peers, 0) + self.eps) if self.scale else centred
        return where(centred.abs() > SAME, a, 0.0)


__all__ = ["Nested", "Recent", "SameStep", "Shared", "alike"]
