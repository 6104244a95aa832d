"""Comparisons beyond a pair: pairs with each other, and an answer with its revisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.functional import logsigmoid

from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import Now, check
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TRAJECTORY, Field, where
from turnwise.credit.fact import Fact
from turnwise.credit.pairs import Pairs, ToldPairs
from turnwise.credit.preference import LogRatio, Score, averages, ranking, sides

NAN = float("nan")
ANSWERS, OF_REJECTED, OF_CHOSEN = 0, 1, 2  # the fact ``revises``


@dataclass(frozen=True)
class WiderGap(Penalty):
    """−log σ(m − m′), m = β(s(chosen) − s(rejected)), mean over all couples of pairs of one ``family`` in which the first has
    the larger ``gap``: what is better by more must be preferred by more. Facts tell family and gap. At BATCH."""

    beta: float = 0.1
    pairs: Pairs = field(default_factory=ToldPairs)
    score: Score = field(default_factory=LogRatio)

    couples = True

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"fact family", "fact gap"})

    def __call__(self, now: Now) -> Field:
        sign = self.pairs.sign(now.batch)
        good, bad = sides(self.score(now), sign)
        there = (where(sign > 0, 1.0, 0.0).sum(GROUP) > 0).x
        margin = self.beta * (good - bad).x[there]
        family, gap = (Fact(name, missing=NAN)(now.batch).max(GROUP).x[there] for name in ("family", "gap"))
        couple = (family[:, None] == family[None, :]) & (gap[:, None] > gap[None, :])
        cost = -logsigmoid(margin[:, None] - margin[None, :])[couple]
        return Field(now.batch.tree, BATCH, (cost.sum() / max(1, cost.numel())).reshape(1))


@dataclass(frozen=True)
class Revisions(Pairs):
    """Groups of six: chosen and rejected (fact ``chosen`` 1, 0), each as an answer and as a revision of the rejected and of the
    chosen (fact ``revises`` 0, 1, 2)."""

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"pairs", "fact revises"})

    def role(self, batch: Batch, chosen: int, revises: int) -> Field:
        said, given = Fact("chosen", missing=-1.0)(batch), Fact("revises", missing=0.0)(batch)
        return said.map(lambda x: x == chosen) & given.map(lambda x: x == revises)

    def complete(self, batch: Batch) -> Field:
        """Groups that have each of the six, once. At GROUP."""
        found = batch.group.map(lambda x: batch.tree.size(TRAJECTORY, GROUP).x == 6)
        for chosen in (0, 1):
            for revises in (ANSWERS, OF_REJECTED, OF_CHOSEN):
                count = where(self.role(batch, chosen, revises), 1.0, 0.0).sum(GROUP)
                found = found & count.map(lambda n: n == 1)
        return found

    def of(self, batch: Batch) -> Field:
        return self.complete(batch).at(TRAJECTORY)

    def sign(self, batch: Batch) -> Field:
        """Of the answers."""
        good, bad = (where(self.role(batch, chosen, ANSWERS), 1.0, 0.0) for chosen in (1, 0))
        return where(self.complete(batch), good - bad, 0.0)


@dataclass(frozen=True)
class Revised(Penalty):
    """(1 − α)(½ − (β/2)[r(w|l) − r(l|w) + r(w) − r(l)])² + α[(½ − β[r(w|l) − r(l|l)])² + (½ − β[r(w|w) − r(l|w)])²]

    w, l: chosen and rejected; r(a|b): the score of a as a revision of b, r(a) as an answer. The first part teaches the
    answers that leave least to revise, the second the reviser: one network, two prompts. At GROUP."""

    beta: float = 0.1
    alpha: float = 0.5
    score: Score = field(default_factory=LogRatio)
    pairs: Revisions = field(default_factory=Revisions)

    couples = True

    def __post_init__(self) -> None:
        check(0 <= self.alpha <= 1, f"alpha is {self.alpha}; write a number in [0, 1]")

    def __call__(self, now: Now) -> Field:
        score = self.score(now)
        part = lambda chosen, revises: where(self.pairs.role(now.batch, chosen, revises), score, 0.0).sum(GROUP)  # noqa: E731
        (w, l), (w_l, l_l), (w_w, l_w) = ((part(1, b), part(0, b)) for b in (ANSWERS, OF_REJECTED, OF_CHOSEN))  # noqa: E741
        answers = (0.5 - self.beta / 2 * (w_l - l_w + w - l)) ** 2
        reviser = (0.5 - self.beta * (w_l - l_l)) ** 2 + (0.5 - self.beta * (w_w - l_w)) ** 2
        return (1 - self.alpha) * answers + self.alpha * reviser

    def tells(self, now: Now) -> Mapping[str, Tensor]:
        return averages(ranking(now, self.pairs, self.score))


__all__ = ["Revised", "Revisions", "WiderGap"]
