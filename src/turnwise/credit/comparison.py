"""Losses beyond a single pair: pairs compared with pairs, and an answer with its revisions. Does not know where pairs
come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import MicroBatchView
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.credit.fact import Fact
from turnwise.credit.pairs import LabelledPairs, PairSelector
from turnwise.credit.preference import (
    LogRatioScore,
    TrajectoryScore,
    chosen_and_rejected,
    mean_over_pairs,
    ranking_metrics,
)
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

NAN = float("nan")
ANSWER, REVISES_REJECTED, REVISES_CHOSEN = 0, 1, 2  # the fact ``revises``


@dataclass(frozen=True)
class GapOrderLoss(Penalty):
    """−log σ(m − m′), m = β(s(chosen) − s(rejected)), mean over all ordered couples of pairs of one ``family`` in which
    the first has the larger ``gap``: a larger quality gap must have a larger margin. ``family`` and ``gap`` are facts.
    At BATCH."""

    requires = frozenset({"fact family", "fact gap"})

    beta: float = 0.1
    pairs: PairSelector = field(default_factory=LabelledPairs)
    score: TrajectoryScore = field(default_factory=LogRatioScore)

    couples_trajectories = True

    def __call__(self, view: MicroBatchView) -> Field:
        sign = self.pairs.sign(view.batch)
        chosen, rejected = chosen_and_rejected(self.score(view), sign)
        has_pair = (where(sign > 0, 1.0, 0.0).sum(GROUP) > 0).x
        margin = self.beta * (chosen - rejected).x[has_pair]
        family, gap = (Fact(name, missing=NAN)(view.batch).max(GROUP).x[has_pair] for name in ("family", "gap"))
        ordered = (family[:, None] == family[None, :]) & (gap[:, None] > gap[None, :])
        cost = -torch.nn.functional.logsigmoid(margin[:, None] - margin[None, :])[ordered]
        return Field(view.batch.tree, BATCH, (cost.sum() / max(1, cost.numel())).reshape(1))


@dataclass(frozen=True)
class RevisionGroups(PairSelector):
    """Groups of six: chosen and rejected (fact ``chosen`` 1, 0), each as an answer, as a revision of the rejected and
    as a revision of the chosen (fact ``revises`` 0, 1, 2)."""

    requires = frozenset({"pairs", "fact revises"})

    def role(self, batch: Batch, chosen: int, revises: int) -> Field:
        """Trajectories with these values of the facts ``chosen`` and ``revises``."""
        chosen_fact, revises_fact = Fact("chosen", missing=-1.0)(batch), Fact("revises", missing=0.0)(batch)
        return chosen_fact.map(lambda x: x == chosen) & revises_fact.map(lambda x: x == revises)

    def complete(self, batch: Batch) -> Field:
        """Groups that hold each of the six exactly once. At GROUP."""
        complete = batch.group.map(lambda x: batch.tree.size(TRAJECTORY, GROUP).x == 6)
        for chosen in (0, 1):
            for revises in (ANSWER, REVISES_REJECTED, REVISES_CHOSEN):
                count = where(self.role(batch, chosen, revises), 1.0, 0.0).sum(GROUP)
                complete = complete & count.map(lambda n: n == 1)
        return complete

    def select(self, batch: Batch) -> Field:
        return self.complete(batch).at(TRAJECTORY)

    def sign(self, batch: Batch) -> Field:
        """+1 for the chosen answer, −1 for the rejected answer, 0 for revisions."""
        winner, loser = (where(self.role(batch, chosen, ANSWER), 1.0, 0.0) for chosen in (1, 0))
        return where(self.complete(batch), winner - loser, 0.0)


@dataclass(frozen=True)
class RevisionLoss(Penalty):
    """(1 − α)(½ − (β/2)[r(w|l) − r(l|w) + r(w) − r(l)])² + α[(½ − β[r(w|l) − r(l|l)])² + (½ − β[r(w|w) − r(l|w)])²]

    w, l: chosen and rejected; r(a|b): the score of a as a revision of b, r(a) as an answer. The first part trains
    answers that leave little to revise, the second trains the reviser: one network, two prompts. At GROUP."""

    beta: float = 0.1
    alpha: float = number(0.5, least=0, most=1)
    score: TrajectoryScore = field(default_factory=LogRatioScore)
    pairs: RevisionGroups = field(default_factory=RevisionGroups)

    couples_trajectories = True

    def __call__(self, view: MicroBatchView) -> Field:
        score = self.score(view)
        part = lambda chosen, revises: where(self.pairs.role(view.batch, chosen, revises), score, 0.0).sum(GROUP)  # noqa: E731
        (w, l), (w_l, l_l), (w_w, l_w) = ((part(1, b), part(0, b)) for b in (ANSWER, REVISES_REJECTED, REVISES_CHOSEN))  # noqa: E741
        answers = (0.5 - self.beta / 2 * (w_l - l_w + w - l)) ** 2
        reviser = (0.5 - self.beta * (w_l - l_l)) ** 2 + (0.5 - self.beta * (w_w - l_w)) ** 2
        return (1 - self.alpha) * answers + self.alpha * reviser

    def metrics(self, view: MicroBatchView) -> Mapping[str, Tensor]:
        return mean_over_pairs(ranking_metrics(view, self.pairs, self.score))


__all__ = ["GapOrderLoss", "RevisionGroups", "RevisionLoss"]
