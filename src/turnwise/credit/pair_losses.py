"""Further losses of pairs and labelled answers: classification with noise, anchored, blended, sorted, prospect-theoretic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import MicroBatchView, check
from turnwise.core.levels import BATCH, GROUP, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.credit.pairs import LabelledAnswers, LabelledPairs, PairSelector
from turnwise.credit.preference import (
    LogRatioScore,
    PairLoss,
    TrajectoryScore,
    chosen_and_rejected,
    logsigmoid,
    mean_over_pairs,
    ranking_metrics,
)
from turnwise.errors import nearest
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


# ---------------------------------------------------------------------- of one pair


@dataclass(frozen=True)
class ReverseKLLoss(PairLoss):
    """KL(q ‖ p) of two outcomes: q = (σ(βd), σ(−βd)) is the policy's, p = (1 − ε, ε) the label's."""

    beta: float
    eps: float = number(1e-3, above=0, below=1, why="the label's probability of being wrong")

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        right, wrong = (logsigmoid(sign * self.beta * (chosen - rejected)) for sign in (1, -1))
        return right.exp() * (right - math.log(1 - self.eps)) + wrong.exp() * (wrong - math.log(self.eps))


@dataclass(frozen=True)
class NoiseContrastiveLoss(PairLoss):
    """−log σ(βw) − ½ log σ(−βw) − ½ log σ(−βl): each side is told apart from the reference, so the chosen cannot fall."""

    beta: float

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        w, r = self.beta * chosen, self.beta * rejected
        return -logsigmoid(w) - 0.5 * (logsigmoid(-w) + logsigmoid(-r))


@dataclass(frozen=True)
class AnchoredUpLoss(PairLoss):
    """1 − σ(βw) + σ(βl): the chosen rises and the rejected falls, each against the reference."""

    beta: float

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return torch.sigmoid(-self.beta * chosen) + torch.sigmoid(self.beta * rejected)


@dataclass(frozen=True)
class AnchoredDownLoss(PairLoss):
    """σ(βw) + 1 − σ(β(w − l)): both fall, the rejected more; for data worse than the model."""

    beta: float

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return torch.sigmoid(self.beta * chosen) + torch.sigmoid(-self.beta * (chosen - rejected))


ANCHORS: dict[str, Callable[[float], PairLoss]] = {"zero": AnchoredUpLoss, "down": AnchoredDownLoss}


def anchored_loss(anchor: str, beta: float) -> PairLoss:
    """``zero``: the chosen rises, the rejected falls; ``down``: both fall, the rejected more."""
    check(anchor in ANCHORS, f"no anchor {anchor!r}; {nearest(anchor, ANCHORS)}")
    return ANCHORS[anchor](beta)


@dataclass(frozen=True)
class BlendedLoss(PairLoss):
    """(1 − m)(−log σ(x)) + m exp(−x), x = βd, m = σ(x/τ): logistic for wrong orders, exponential for right ones."""

    beta: float
    tau: float = number(0.05, above=0)

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        x = self.beta * (chosen - rejected)
        blend = torch.sigmoid(x / self.tau)
        return -logsigmoid(x) * (1 - blend) + torch.exp(-x) * blend


@dataclass(frozen=True)
class LogOddsScore(TrajectoryScore):
    """s = log p/(1 − p), p the geometric mean of the token probabilities; without a reference."""

    def __call__(self, view: MicroBatchView) -> Field:
        mean = view.logp.mean(TRAJECTORY).clamp(high=-1e-6)
        return mean - mean.map(lambda x: torch.log(-torch.expm1(x)))


# ---------------------------------------------------------------------- of the whole step


@dataclass(frozen=True)
class SortedPreferenceLoss(Penalty):
    """Loss of sorted scores: the k-th smallest of one side against the k-th smallest of the other, over all pairs of a step.

    First-order stochastic dominance instead of an order within each pair. ``paired``: the margins of the policy against the
    margins of the reference; otherwise the chosen against the rejected."""

    reads = frozenset({Signal.REFERENCE})

    loss: PairLoss
    paired: bool = True
    pairs: PairSelector = field(default_factory=LabelledPairs)

    couples_trajectories = True

    def __call__(self, view: MicroBatchView) -> Field:
        sign = self.pairs.sign(view.batch)
        policy, frozen = (chosen_and_rejected(x.sum(TRAJECTORY), sign) for x in (view.logp, view[Signal.REFERENCE]))
        if self.paired:
            left, right = policy[0] - policy[1], frozen[0] - frozen[1]
        else:
            left, right = policy[0] - frozen[0], policy[1] - frozen[1]
        real = (where(sign > 0, 1.0, 0.0).sum(GROUP) > 0).x
        costs = torch.zeros_like(left.x)
        costs[real] = self.loss(left.x[real].sort().values, right.x[real].sort().values)
        return Field(left.tree, GROUP, costs)

    def metrics(self, view: MicroBatchView) -> Mapping[str, Tensor]:
        return mean_over_pairs(ranking_metrics(view, self.pairs, LogRatioScore()))


@dataclass(frozen=True)
class ProspectLoss(Penalty):
    """λ_D (1 − σ(β(s − z))) of a chosen trajectory, λ_U (1 − σ(β(z − s))) of a rejected one; z = [mean of s over both]₊.

    s is the log-ratio to the reference; z, the point of no gain and no loss, has no gradient. At TRAJECTORY."""

    reads = frozenset({Signal.REFERENCE})

    beta: float = number(above=0)
    desirable: float = 1.0
    undesirable: float = 1.0
    pairs: PairSelector = field(default_factory=LabelledPairs)

    couples_trajectories = True

    def __call__(self, view: MicroBatchView) -> Field:
        sign = self.pairs.sign(view.batch)
        score = LogRatioScore()(view)
        labelled = where(sign.abs() > 0, 1.0, 0.0)
        centre = ((labelled * score.detach()).sum(BATCH) / labelled.sum(BATCH).clamp(low=1.0)).clamp(low=0.0)
        cost = (sign.to(score.x.dtype) * (score - centre)).map(lambda x: torch.sigmoid(-self.beta * x))
        return cost * where(sign > 0, self.desirable, self.undesirable)

    def metrics(self, view: MicroBatchView) -> Mapping[str, Tensor]:
        pairs = LabelledPairs() if isinstance(self.pairs, LabelledAnswers) else self.pairs
        return mean_over_pairs(ranking_metrics(view, pairs, LogRatioScore()))


__all__ = [
    "AnchoredDownLoss", "AnchoredUpLoss", "BlendedLoss", "LogOddsScore", "NoiseContrastiveLoss", "ProspectLoss",
    "ReverseKLLoss", "SortedPreferenceLoss", "anchored_loss",
]  # fmt: skip
