"""Rewards by the mode that a trajectory chose, where forced rollouts of its group have tried all of them."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.credit.fact import Fact
from turnwise.maths.lazy_torch import torch


@dataclass(frozen=True)
class CheapestModePays(Term):
    """R for the cheapest mode, mode 0, and on hard tasks; R·(1 − p^α) for another mode on an easy one. A task is easy if forced
    rollouts of mode 0 succeed at a rate of at least ``easy``; p is the success rate of all forced rollouts. R is an outcome
    between 0 and 1; without forced rollouts every mode gets it. At TRAJECTORY."""

    alpha: float = number(2.0, above=0)
    easy: float = number(0.5, above=0, most=1)

    def __call__(self, batch: Batch) -> Field:
        outcome = batch.reward.sum(TRAJECTORY)
        mode, forced = Fact("mode", missing=0.0)(batch), Fact("forced", missing=0.0)(batch) > 0.5
        cheapest = mode.map(lambda x: x == 0)
        right, every = where(outcome > 0, 1.0, 0.0), where(forced, 1.0, 0.0)
        cheap = where(cheapest, every, 0.0)
        rate = lambda rows: (rows * right).sum(GROUP) / rows.sum(GROUP).clamp(low=1.0)  # noqa: E731
        charged = 1 - rate(every).map(lambda p: torch.pow(p, self.alpha))
        factor = where(rate(cheap) >= self.easy, where(cheapest, 1.0, charged), 1.0)
        return outcome * factor


__all__ = ["CheapestModePays"]
