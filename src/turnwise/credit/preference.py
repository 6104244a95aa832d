"""Preference losses: how each side of a pair is scored, and the loss of a pair. Does not know where pairs come from.

The losses couple trajectories: they are differentiated over the whole step, before it is split into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import NOTHING, MicroBatchView, Piece, check
from turnwise.algebra.ratio import behaviour
from turnwise.core.levels import GROUP, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.credit.pairs import LabelledPairs, PairSelector
from turnwise.errors import nearest
from turnwise.maths.gradients import without_gradient
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def logsigmoid(x: Tensor) -> Tensor:
    """log σ(x), without underflow."""
    return torch.nn.functional.logsigmoid(x)


# ---------------------------------------------------------------------- scores


class TrajectoryScore(Piece):
    """Interface: one differentiable score per trajectory."""

    def __call__(self, view: MicroBatchView) -> Field:
        raise NotImplementedError


@dataclass(frozen=True)
class LogRatioScore(TrajectoryScore):
    """s = Σₜ log π − log π_ref, the implicit reward. ``mean``: mean over tokens instead of the sum; ``reference``
    False: log π alone."""

    mean: bool = False
    reference: bool = True

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.REFERENCE}) if self.reference else NOTHING

    def __call__(self, view: MicroBatchView) -> Field:
        x = view.logp - view[Signal.REFERENCE] if self.reference else view.logp
        return x.mean(TRAJECTORY) if self.mean else x.sum(TRAJECTORY)


@dataclass(frozen=True)
class MixedReferenceScore(TrajectoryScore):
    """s = Σₜ log π − (τ/η) log π_ref − (1 − τ/η) log μ: a reference between the frozen policy and the sampler μ."""

    eta: float = number(above=0)
    tau: float = number(least=0, most="eta")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.REFERENCE}) if self.tau else NOTHING

    def __call__(self, view: MicroBatchView) -> Field:
        share = self.tau / self.eta
        x = view.logp - (1 - share) * behaviour(view.batch)
        return (x - share * view[Signal.REFERENCE] if self.tau else x).sum(TRAJECTORY)


# ---------------------------------------------------------------------- losses


class PairLoss(Piece):
    """Interface: the loss of each pair from the scores w of the chosen and l of the rejected."""

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class LogisticLoss(PairLoss):
    """−log σ(β(w − l) − margin)."""

    beta: float = number(above=0)
    margin: float = 0.0

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -logsigmoid(self.beta * (chosen - rejected) - self.margin)


@dataclass(frozen=True)
class HingeLoss(PairLoss):
    """max(0, 1 − β(w − l))."""

    beta: float

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (1 - self.beta * (chosen - rejected)).clamp(min=0.0)


@dataclass(frozen=True)
class SquaredMarginLoss(PairLoss):
    """(w − l − 1/(2β))²: regresses the margin onto a target."""

    beta: float = number(above=0)

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - rejected - 1 / (2 * self.beta)) ** 2


@dataclass(frozen=True)
class SeparateLogisticLoss(PairLoss):
    """−log σ(βw − shift) − log σ(shift − βl): classifies each side by itself."""

    beta: float
    shift: float = 0.0

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -logsigmoid(self.beta * chosen - self.shift) - logsigmoid(self.shift - self.beta * rejected)


@dataclass(frozen=True)
class SeparateSquaredLoss(PairLoss):
    """(w − 1/(2β))² + (l + 1/(2β))²: regresses each side onto its own target."""

    beta: float = number(above=0)

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - 0.5 / self.beta) ** 2 + (rejected + 0.5 / self.beta) ** 2


@dataclass(frozen=True)
class LabelSmoothed(PairLoss):
    """(1 − ε) ℓ(w, l) + ε ℓ(l, w): label smoothing for labels that may be wrong."""

    loss: PairLoss
    eps: float = number(least=0, most=1)

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        unflipped = self.loss(chosen, rejected)
        return (1 - self.eps) * unflipped + self.eps * self.loss(rejected, chosen) if self.eps else unflipped


@dataclass(frozen=True)
class FlipCorrected(PairLoss):
    """((1 − ε) ℓ(d) − ε ℓ(−d))/(1 − 2ε), d = w − l clipped to ±bound: over labels flipped at rate ε its expectation is
    the loss of the true labels. Unbounded below without ``bound``."""

    loss: PairLoss
    flip: float = number(0.1, least=0, below=0.5)
    bound: float = number(math.inf, above=0, why="inf for none")

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        d = (chosen - rejected).clamp(-self.bound, self.bound)
        zero = torch.zeros_like(d)
        return ((1 - self.flip) * self.loss(d, zero) - self.flip * self.loss(zero, d)) / (1 - 2 * self.flip)


# ----------------------------------------------------------------- the pair loss


def chosen_and_rejected(score: Field, sign: Field) -> tuple[Field, Field]:
    """The scores of chosen and rejected, at GROUP; 0 where there is no pair."""
    side = lambda keep: where(keep, score, 0.0).sum(GROUP)  # noqa: E731
    return side(sign > 0), side(sign < 0)


@dataclass(frozen=True)
class PreferenceLoss(Penalty):
    """loss(s(chosen), s(rejected)) of each pair. At GROUP; average it by group over the rows of ``pairs``."""

    loss: PairLoss
    score: TrajectoryScore = field(default_factory=LogRatioScore)
    pairs: PairSelector = field(default_factory=LabelledPairs)

    couples_trajectories = True

    def __call__(self, view: MicroBatchView) -> Field:
        chosen, rejected = chosen_and_rejected(self.score(view), self.pairs.sign(view.batch))
        return Field(chosen.tree, GROUP, self.loss(chosen.x, rejected.x))

    def metrics(self, view: MicroBatchView) -> Mapping[str, Tensor]:
        return mean_over_pairs(ranking_metrics(view, self.pairs, self.score))


@without_gradient
def ranking_metrics(view: MicroBatchView, pairs: PairSelector, score: TrajectoryScore) -> dict[str, Field]:
    """Per group, at GROUP: ``pairs``, 1 where it is a pair; the ``margin`` of the score; and whether the order is right
    by the score (``accuracy``, of the implicit reward) and by log π, summed (``ranking``) and per token
    (``ranking/mean``).

    Margin and accuracy can be high while the policy still assigns the rejected a higher probability; the ranking shows
    that."""
    sign = pairs.sign(view.batch)
    as_number = lambda one: where(one, 1.0, 0.0)  # noqa: E731
    chosen, rejected = chosen_and_rejected(score(view), sign)
    metrics = {
        "pairs": as_number(sign > 0).sum(GROUP),
        "margin": chosen - rejected,
        "accuracy": as_number(chosen > rejected),
    }
    for name, mean in (("ranking", False), ("ranking/mean", True)):
        chosen, rejected = chosen_and_rejected(LogRatioScore(mean, reference=False)(view), sign)
        metrics[name] = as_number(chosen >= rejected)
    return metrics


def mean_over_pairs(metrics: Mapping[str, Field]) -> dict[str, Tensor]:
    """The metrics of ``ranking_metrics`` as means over the pairs; empty without a pair."""
    has_pair = metrics["pairs"].x > 0
    names = [name for name in metrics if name != "pairs"] if bool(has_pair.any()) else []
    return {f"preference/{name}": metrics[name].x[has_pair].mean() for name in names}


def ideal_ranking(view: MicroBatchView, pairs: PairSelector, beta: float, agree: float) -> Field:
    """1 where even the optimum of the logistic loss ranks a pair right, at GROUP: π_ref(w)/π_ref(l) · (α/(1 − α))^{1/β}
    > 1, α = ``agree`` the share of raters who prefer the chosen."""
    check(0 < agree < 1 and beta > 0, f"need 0 < agree < 1 and beta > 0, got {agree}, {beta}")
    chosen, rejected = chosen_and_rejected(view[Signal.REFERENCE].sum(TRAJECTORY), pairs.sign(view.batch))
    shift = math.log(agree / (1 - agree)) / beta
    return where(chosen - rejected + shift > 0, 1.0, 0.0)


# ------------------------------------------------------------------------ kinds

KINDS: dict[str, tuple[Callable[[float], PairLoss], TrajectoryScore]] = {
    "sigmoid": (LogisticLoss, LogRatioScore()),
    "hinge": (HingeLoss, LogRatioScore()),
    "ipo": (SquaredMarginLoss, LogRatioScore(mean=True)),
    "bco": (SeparateLogisticLoss, LogRatioScore()),
    "sppo": (SeparateSquaredLoss, LogRatioScore()),
}


def preference_loss(kind: str, beta: float, smoothing: float, pairs: PairSelector) -> PreferenceLoss:
    """The usual losses by name, on the implicit reward."""
    check(kind in KINDS, f"no kind {kind!r}; {nearest(kind, KINDS)}")
    loss, score = KINDS[kind]
    return PreferenceLoss(LabelSmoothed(loss(beta), smoothing), score, pairs)


__all__ = [
    "KINDS", "FlipCorrected", "HingeLoss", "LabelSmoothed", "LogRatioScore", "LogisticLoss", "MixedReferenceScore",
    "PairLoss", "PreferenceLoss", "SeparateLogisticLoss", "SeparateSquaredLoss", "SquaredMarginLoss",
    "TrajectoryScore", "chosen_and_rejected", "ideal_ranking", "mean_over_pairs", "preference_loss",
    "ranking_metrics",
]  # fmt: skip
