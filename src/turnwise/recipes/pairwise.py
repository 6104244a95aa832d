"""Recipes of preference losses: no advantage, one loss of pairs. Defines no method."""

from __future__ import annotations

from typing import Literal

from turnwise.algebra.aggregate import Aggregate, Mean
from turnwise.algebra.penalty import NegativeLogLikelihood, Penalty, WeightedPenalty
from turnwise.algebra.ratio import OnPolicy
from turnwise.algebra.value import Constant
from turnwise.core.levels import GROUP, TOKEN
from turnwise.credit.preference import (
    PAIRS,
    ChosenSide,
    LogRatioScore,
    PairLoss,
    PairSelector,
    PreferenceLoss,
    TrajectoryScore,
)
from turnwise.recipes.recipe import Recipe

Source = Literal["told", "formed"]
"""Pairs labelled by the data, or formed of the best and the worst of each group."""


def penalised(cost: Penalty, rows: PairSelector, average: Aggregate | None = None) -> Recipe:
    """One loss over the rows of pairs, averaged over groups unless told otherwise."""
    penalty = WeightedPenalty(1.0, cost, average or Mean(GROUP), rows=rows)
    return Recipe(advantage=Constant(0.0), ratio=OnPolicy(), penalties=(penalty,))


def of_pairs(loss: PairLoss, pairs: Source, score: TrajectoryScore | None = None) -> Recipe:
    """The loss of the scores of both sides of each pair; the score is the log-ratio to the reference unless given."""
    selected = PAIRS[pairs]
    return penalised(PreferenceLoss(loss, score or LogRatioScore(), selected), selected)


def imitating_chosen(
    loss: PairLoss, pairs: Source, score: TrajectoryScore, weight: float = 1.0, imitation: float = 1.0
) -> Recipe:
    """A loss of pairs, and supervised learning of the chosen side."""
    selected = PAIRS[pairs]
    costs = (
        WeightedPenalty(weight, PreferenceLoss(loss, score, selected), Mean(GROUP), rows=selected),
        WeightedPenalty(imitation, NegativeLogLikelihood(), Mean(TOKEN), rows=ChosenSide(selected)),
    )
    return Recipe(advantage=Constant(0.0), ratio=OnPolicy(), penalties=costs)
