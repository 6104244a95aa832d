"""Values of single tokens: Q from the policy's own logits and a value head, or from a head with an output for each token.
Knows no network and no decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import MicroBatchView, StepView
from turnwise.algebra.value import is_last, token_reward
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.maths import returns
from turnwise.maths.lazy_torch import torch


def following(value: Field, batch: Batch) -> Field:
    """For each token the value at the next token of its trajectory, 0 after the last one."""
    return value.map(lambda x: torch.where(is_last(batch, TOKEN), 0.0, torch.roll(x, -1)))


@dataclass(frozen=True)
class ConservativeQError(Penalty):
    """(Q − r − γ Q̄(s′, a*))², Q(s, a) = α (log π(a) − max log π) + V(s), a* the token that the reference would take at s′;
    the bar: before the batch. The policy of Q at temperature α is π itself.

    ``ranks_by`` and ``rank`` order finished answers by Σ Q(s, a) − γ V(s′), the rewards that Q implies."""

    reads = frozenset({Signal.VALUE, Signal.MODE_LOGP, Signal.OLD_VALUE, Signal.REFERENCE_MODE_GAP})
    ranks_by = frozenset({Signal.LOGP, Signal.MODE_LOGP, Signal.VALUE})

    alpha: float = number(1.0, above=0, why="the temperature of Q")
    gamma: float = number(1.0, least=0, most=1)

    def plan(self, view: StepView) -> dict[object, Field]:
        batch = view.batch
        after = following(self.alpha * batch[Signal.REFERENCE_MODE_GAP] + batch[Signal.OLD_VALUE], batch)
        return {self: token_reward(batch).to(after.x.dtype) + self.gamma * after}

    def __call__(self, view: MicroBatchView) -> Field:
        return (self.q(view) - view[self]) ** 2

    def q(self, view: MicroBatchView | Mapping[Signal, Field]) -> Field:
        return self.alpha * (view[Signal.LOGP] - view[Signal.MODE_LOGP]) + view[Signal.VALUE]

    def rank(self, batch: Batch) -> Field:
        """Of several answers the one with the largest number is to be taken. At TRAJECTORY."""
        after = following(batch[Signal.VALUE], batch)
        return (self.q(batch.columns) - self.gamma * after).sum(TRAJECTORY)


@dataclass(frozen=True)
class ActionValueError(Penalty):
    """(Q − G)², Gₜ = rₜ + γ ((1 − λ) Q̄ₜ₊₁ + λ Gₜ₊₁) over the sampled tokens of a trajectory; Q̄: the value before the batch."""

    reads = frozenset({Signal.ACTION_VALUE, Signal.OLD_ACTION_VALUE})

    gamma: float = number(1.0, least=0, most=1)
    lam: float = number(0.95, least=0, most=1)

    def plan(self, view: StepView) -> dict[object, Field]:
        batch, old = view.batch, view.batch[Signal.OLD_ACTION_VALUE]
        last = is_last(batch, TOKEN)
        r = token_reward(batch).to(old.x.dtype) + self.gamma * (1 - self.lam) * following(old, batch)
        return {self: r.map(lambda x: returns.discounted(x, self.gamma * self.lam, last))}

    def __call__(self, view: MicroBatchView) -> Field:
        return (view[Signal.ACTION_VALUE] - view[self]) ** 2


__all__ = ["ActionValueError", "ConservativeQError", "following"]
