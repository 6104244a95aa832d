"""Preferences: which two trajectories of a group are compared, how each side is scored, and the loss of a pair.

A labelled pair is a group of two whose facts ``chosen`` are 1 and 0. Each side has its own context, so two answers to one
prompt and one answer under two prompts are both pairs. Other pairs are formed among the sampled trajectories of a group.
The losses couple trajectories: they are differentiated over the whole step, before it is split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import NOTHING, MicroBatchView, Piece
from turnwise.algebra.value import Outcome
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact
from turnwise.credit.selectors import BestOfGroup, FromOrigin, Selector
from turnwise.maths.lazy_torch import torch, without_gradient

if TYPE_CHECKING:
    from torch import Tensor


def logsigmoid(x: Tensor) -> Tensor:
    """log σ(x), without underflow."""
    return torch.nn.functional.logsigmoid(x)


# ---------------------------------------------------------------------- pairs


class PairSelector(Selector):
    """Interface: at most one pair per group."""

    def sign(self, batch: Batch) -> Field:
        """+1 for the chosen, −1 for the rejected, 0 for the others. At TRAJECTORY."""
        raise NotImplementedError

    def select(self, batch: Batch) -> Field:
        return self.sign(batch).abs() > 0


class LabelledPairs(PairSelector):
    """Groups of two, one with the fact ``chosen`` 1 and one with 0. ``having``, ``without``: the name of another fact
    that the pair must, or must not, carry (0 counts as absent)."""

    having: str = ""
    without: str = ""

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"pairs"} | ({f"fact {self.having}"} if self.having else set()))

    def sign(self, batch: Batch) -> Field:
        label = Fact("chosen", missing=-1.0)(batch)
        chosen, rejected = (where(label.map(lambda x: x == 1), 1.0, 0.0), where(label.map(lambda x: x == 0), 1.0, 0.0))
        one_each = (chosen.sum(GROUP) * rejected.sum(GROUP)).map(lambda n: n == 1)
        pair = one_each & label.peer_count(GROUP).map(lambda n: n == 2)
        for name, expected in ((self.having, True), (self.without, False)):
            if name:
                recorded = Fact(name, missing=0.0)(batch).abs().max(GROUP) > 0
                pair = pair & (recorded if expected else ~recorded)
        return where(pair, chosen - rejected, 0.0)


class BestWorstPairs(PairSelector):
    """The best and the worst of the sampled trajectories of a group, where they differ."""

    def sign(self, batch: Batch) -> Field:
        best, worst = (BestOfGroup(FromOrigin("policy"), by) for by in (Outcome(), -1.0 * Outcome()))
        top, bottom = (where(one.select(batch), 1.0, 0.0) for one in (best, worst))
        gap = ((top - bottom) * Outcome()(batch).to(torch.float64)).sum(GROUP)
        return where(gap > 0, top - bottom, 0.0)


PAIRS: dict[str, PairSelector] = {"told": LabelledPairs(), "formed": BestWorstPairs()}
"""``told``: pairs labelled by the data; ``formed``: the best and the worst of each group."""


class ChosenSide(Selector):
    """The chosen trajectory of each pair."""

    pairs: PairSelector

    def select(self, batch: Batch) -> Field:
        return self.pairs.sign(batch) > 0


# ---------------------------------------------------------------------- scores


class TrajectoryScore(Piece):
    """Interface: one differentiable score per trajectory."""

    def __call__(self, view: MicroBatchView) -> Field:
        raise NotImplementedError


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


# ---------------------------------------------------------------------- losses


class PairLoss(Piece):
    """Interface: the loss of each pair from the scores w of the chosen and l of the rejected."""

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        raise NotImplementedError


class LogisticLoss(PairLoss):
    """−log σ(β(w − l) − margin)."""

    beta: float = number(above=0)
    margin: float = 0.0

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -logsigmoid(self.beta * (chosen - rejected) - self.margin)


class SeparateLogisticLoss(PairLoss):
    """−log σ(βw − shift) − log σ(shift − βl): classifies each side by itself."""

    beta: float
    shift: float = 0.0

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -logsigmoid(self.beta * chosen - self.shift) - logsigmoid(self.shift - self.beta * rejected)


# ----------------------------------------------------------------- the pair loss


def chosen_and_rejected(score: Field, sign: Field) -> tuple[Field, Field]:
    """The scores of chosen and rejected, at GROUP; 0 where there is no pair."""
    side = lambda keep: where(keep, score, 0.0).sum(GROUP)  # noqa: E731
    return side(sign > 0), side(sign < 0)


class PreferenceLoss(Penalty):
    """loss(s(chosen), s(rejected)) of each pair. At GROUP; average it by group over the rows of ``pairs``."""

    couples_trajectories = True
    loss: PairLoss
    score: TrajectoryScore = field(default_factory=LogRatioScore)
    pairs: PairSelector = field(default_factory=LabelledPairs)

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
