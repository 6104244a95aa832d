"""Generalised advantage estimation, and the λ-return that the critic regresses to.

The recursion itself is ``maths/returns.py``; this module does not know how the critic is trained.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.term import Term
from turnwise.algebra.value import is_last, token_reward
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, Field, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.maths import returns


@dataclass(frozen=True)
class GAE(Term):
    """δₜ = rₜ + γ vₜ₊₁ − vₜ,  Aₜ = δₜ + γλ Aₜ₊₁, over the *sampled* tokens of a trajectory; context is skipped.

    A turn's reward is on its last token. ``bootstrap``: the value after the last token of a truncated episode is the value
    before it (extended GAE); otherwise it is 0. At TOKEN."""

    reads = frozenset({Signal.OLD_VALUE})

    gamma: float = number(1.0, least=0, most=1)
    lam: float = number(0.95, least=0, most=1)
    bootstrap: bool = False

    def __call__(self, batch: Batch) -> Field:
        v, last = batch[Signal.OLD_VALUE], is_last(batch, TOKEN)
        r = token_reward(batch).to(v.x.dtype)
        if self.bootstrap:
            r = r + where(batch.truncated.at(TOKEN) & Field(batch.tree, TOKEN, last), self.gamma * v, 0.0)
        return v.map(lambda x: returns.gae(r.x, x, self.gamma, self.lam, last))


@dataclass(frozen=True)
class LambdaReturn(Term):
    """The critic's regression target: A + v, with A from GAE. At TOKEN."""

    reads = frozenset({Signal.OLD_VALUE})

    gamma: float = 1.0
    lam: float = 0.95

    def __call__(self, batch: Batch) -> Field:
        return GAE(self.gamma, self.lam)(batch) + batch[Signal.OLD_VALUE]


__all__ = ["GAE", "LambdaReturn"]
