"""Masks: which tokens are trained on. In a gate (``gate.where(mask)``) a masked token has no gradient but counts in the average;
as the ``keep`` of a recipe it does not count either.
"""

from __future__ import annotations

from turnwise.algebra.piece import MicroBatchView, Piece, text
from turnwise.algebra.ratio import Ratio, mismatch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, Field, Level
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.maths.lazy_torch import torch


class Mask(Piece):
    """Interface: True where a token is trained on. Never differentiated."""

    reason = ""  # why tokens are dropped: a planned mask that says it has its dropped tokens counted in the metrics

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view[self]  # a mask that depends on the whole step is its plan

    def __and__(self, other: Mask) -> Mask:
        return Both(self, other)


class Both(Mask):
    """What both masks let through."""

    left: Mask
    right: Mask

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return self.left(rho, adv, view) & self.right(rho, adv, view)

    def as_text(self) -> str:
        return f"{text(self.left)} & {text(self.right)}"


class AllTokens(Mask):
    """Every token."""

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return rho.map(lambda x: torch.ones_like(x, dtype=torch.bool))


class OneSided(Mask):
    """A token is masked once its ratio has moved far in the direction of A: A ≥ 0 keeps ρ ≤ 1 + high, A ≤ 0 keeps ρ ≥ 1 − low."""

    low: float = 0.2
    high: float = 0.2
    # test this ratio instead of the objective's
    ratio: Ratio | None = None

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        at = rho if self.ratio is None else self.ratio(view).detach()
        return ((adv >= 0) & (at <= 1 + self.high)) | ((adv <= 0) & (at >= 1 - self.low))


class MismatchWithin(Mask):
    """low ≤ π_prox/μ ≤ high (``inverse``: of μ/π_prox), by token, by the product or by the geometric mean over a level."""

    reads = frozenset({Signal.PROXIMAL})
    low: float = number(least=0, most="high")
    high: float = number(least=0)
    level: Level = TOKEN
    mean: bool = False
    inverse: bool = False

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        log = mismatch(view).mean(self.level) if self.mean else mismatch(view, self.level)
        log = -1.0 * log if self.inverse else log
        return (log.exp() >= self.low) & (log.exp() <= self.high)


class InformativeGroups(Mask):
    """Groups whose rewards differ."""

    least: float = 1e-6

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        outcome = view.batch.reward.sum(TRAJECTORY)
        return outcome.max(GROUP) - outcome.min(GROUP) > self.least
