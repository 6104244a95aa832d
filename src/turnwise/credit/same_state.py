"""Credit among turns that start in the same state, share recent states or take the same transition. Does not define
states."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.peers import Peers
from turnwise.algebra.piece import check
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import number
from turnwise.credit.peers import shift_turns
from turnwise.maths.lazy_torch import torch

UNKNOWN, BEFORE = -1, -2  # a state that was not recorded, and the time before the first turn
SAME = 1e-9  # a smaller distance from the mean counts as 0, so that rounding does not decide


@dataclass(frozen=True)
class SameRecentStates(Peers):
    """Turns of one task with the same last ``states`` states, the present one included: sₖ₋ₙ₊₁ … sₖ.

    A turn with a shorter history, or an unknown state in it, has no peers."""

    requires = frozenset({"state"})

    states: int = number(1, above=0, why="1 for the present one alone")

    def __call__(self, batch: Batch) -> Partition:
        return turns_with_same_keys(batch, *(shift_turns(batch.state, -k, UNKNOWN) for k in range(self.states)))


@dataclass(frozen=True)
class SameTransition(Peers):
    """Turns of one task with the same transition (state, action, next state) and the same ``window`` states before it.

    Positions before the first turn are equal to each other. A turn with an unknown state in any of these has no peers."""

    requires = frozenset({"state"})

    window: int = number(3, least=0)

    def __call__(self, batch: Batch) -> Partition:
        tree = batch.tree
        last = tree.size(TURN, TRAJECTORY) - tree.index(TURN, TRAJECTORY) <= 1
        after = where(last, batch.end, shift_turns(batch.state, 1, UNKNOWN))
        past = (shift_turns(batch.state, -k, BEFORE) for k in range(1, self.window + 1))
        return turns_with_same_keys(batch, batch.state, batch.action, after, *past)


def turns_with_same_keys(batch: Batch, *keys: Field) -> Partition:
    """Turns of one task with equal keys; a turn with an unknown key has no peers."""
    unknown = torch.stack([key.x == UNKNOWN for key in keys]).any(0)
    unique = torch.where(unknown, 1 + torch.arange(unknown.numel(), device=unknown.device), 0)
    return Partition.by(batch.tree, TURN, batch.group, *keys, unique)


@dataclass(frozen=True)
class PeerTrajectoryMean(Term):
    """Aₖ = mean of ``term`` over the trajectories with a turn among the ``peers`` of turn k, each counted once.

    A step that all trajectories share gets their mean; after they diverge each keeps its own credit."""

    term: Term
    peers: Peers

    def __call__(self, batch: Batch) -> Field:
        a, tree, peers = self.term(batch).at(TURN), batch.tree, self.peers(batch)
        visits = Partition.by(tree, TURN, peers.label, tree.ancestor(TURN, TRAJECTORY))
        weight = 1.0 / a.peer_count(visits)
        return (weight * a).sum(peers) / weight.sum(peers)


@dataclass(frozen=True)
class HierarchyOfGroups(Term):
    """A = Σₙ wₙ Aₙ / (Σₙ wₙ + ε), wₙ = (n + 1)^α: ``value`` against peers with the same last n states, n = 1 … history
    + 1; a longer shared history weighs more.

    Aₙ = (v − mean)/(population std + ε), or without ``scale`` v − mean. Levels without peers, or with v at the mean,
    get no weight. ``with_episode`` adds the term ``episode`` as level 0."""

    requires = frozenset({"state"})
    compares_peers = True

    value: Term
    history: int = number(2, least=0)
    alpha: float = number(1.0, least=0)
    scale: bool = True
    with_episode: bool = False
    episode: Term = field(default_factory=Standardise)
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        finite = self.alpha * math.log(self.history + 2) < 700
        check(finite, f"alpha is {self.alpha}; write a number for which (history + 2)^alpha is finite")

    def __call__(self, batch: Batch) -> Field:
        batch = replace(batch, reward=batch.reward.to(torch.float64))
        value = self.value(batch)
        levels = [(n, self._among(value, SameRecentStates(n)(batch))) for n in range(1, self.history + 2)]
        if self.with_episode:
            a = self.episode(batch).at(TURN)
            levels.append((0, where(a.abs() > SAME, a, 0.0)))
        weights = [where(a.abs() > 0, (n + 1.0) ** self.alpha, 0.0) for n, a in levels]
        total = sum((w * a for w, (_, a) in zip(weights, levels)), 0.0 * value)
        return total / (sum(weights, 0.0 * value) + self.eps)

    def _among(self, value: Field, peers: Partition) -> Field:
        centred = value - value.mean(peers)
        a = centred / (value.std(peers, 0) + self.eps) if self.scale else centred
        return where(centred.abs() > SAME, a, 0.0)


__all__ = ["HierarchyOfGroups", "PeerTrajectoryMean", "SameRecentStates", "SameTransition", "turns_with_same_keys"]
