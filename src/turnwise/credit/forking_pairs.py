"""Pairs of single turns: where a good and a bad trajectory of a group take different actions for the first time, in one state.

Both share the states and actions before that turn, so the two turns are answers to the same history. Knows no loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.algebra.piece import MicroBatchView
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field, where
from turnwise.core.signals import Signal
from turnwise.credit.pairs import BestWorstPairs, PairSelector
from turnwise.credit.preference import TrajectoryScore
from turnwise.maths.lazy_torch import torch

UNKNOWN = -1  # a state that was not recorded


@dataclass(frozen=True)
class ForkingTurnPairs(PairSelector):
    """The pairs of ``pairs`` whose trajectories fork: at the first turn with another state or action, the state is the same
    and known, and both turns have tokens."""

    requires = frozenset({"state"})

    pairs: PairSelector = field(default_factory=BestWorstPairs)

    def sign(self, batch: Batch) -> Field:
        forks = where(self.forking_turns(batch), 1.0, 0.0).sum(TRAJECTORY)
        return self.pairs.sign(batch) * forks

    def forking_turns(self, batch: Batch) -> Field:
        """True for the two turns of each pair that are compared. At TURN."""
        sign = self.pairs.sign(batch).x
        sides = {1: (sign > 0).nonzero().squeeze(1).tolist(), -1: (sign < 0).nonzero().squeeze(1).tolist()}
        group = batch.tree.parents[2].tolist()
        rejected = {group[i]: i for i in sides[-1]}
        sizes = batch.tree.size(TURN, TRAJECTORY).x
        begin = (sizes.cumsum(0) - sizes).tolist()
        columns = (batch.state.x.tolist(), batch.action.x.tolist(), batch.tree.size(TOKEN, TURN).x.tolist())
        chosen = torch.zeros(batch.tree.count(TURN), dtype=torch.bool, device=sign.device)
        for i in sides[1]:
            j = rejected[group[i]]
            at = _first_difference(columns, begin[i], begin[j], int(min(sizes[i], sizes[j])))
            if at is not None:
                chosen[[begin[i] + at, begin[j] + at]] = True
        return Field(batch.tree, TURN, chosen)


def _first_difference(columns: tuple[list[int], list[int], list[int]], a: int, b: int, turns: int) -> int | None:
    """The turn index at which two trajectories fork; None if they do not."""
    state, action, tokens = columns
    for k in range(turns):
        if state[a + k] != state[b + k] or state[a + k] == UNKNOWN:
            return None
        if action[a + k] != action[b + k]:
            return k if tokens[a + k] and tokens[b + k] else None
    return None


@dataclass(frozen=True)
class ForkingTurnScore(TrajectoryScore):
    """s = Σ over the forking turn of log π − log π_ref; 0 for a trajectory without one."""

    reads = frozenset({Signal.REFERENCE})

    pairs: ForkingTurnPairs

    def __call__(self, view: MicroBatchView) -> Field:
        return where(self.pairs.forking_turns(view.batch), view.logp - view[Signal.REFERENCE], 0.0).sum(TRAJECTORY)


__all__ = ["ForkingTurnPairs", "ForkingTurnScore"]
