"""Pairs: which two trajectories of a group are compared, and how often a trajectory wins against the rest of its group.

A labelled pair is a group of two whose facts ``chosen`` are 1 and 0. Each side has its own context, so two answers to one
prompt and one answer under two prompts are both pairs. Other pairs are formed among the sampled trajectories of a group.
Knows no loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.algebra.piece import check
from turnwise.algebra.reward import NamedReward
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome, SumOverTrajectory
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TRAJECTORY, Field, Partition, where
from turnwise.credit.fact import Fact
from turnwise.credit.selectors import BestOfGroup, FromOrigin, Selector
from turnwise.errors import nearest
from turnwise.maths.lazy_torch import torch


class PairSelector(Selector):
    """Interface: at most one pair per group."""

    def sign(self, batch: Batch) -> Field:
        """+1 for the chosen, −1 for the rejected, 0 for the others. At TRAJECTORY."""
        raise NotImplementedError

    def select(self, batch: Batch) -> Field:
        return self.sign(batch).abs() > 0


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class LabelledAnswers(PairSelector):
    """Every trajectory with the fact ``chosen``, 1 (good) or 0 (bad): both sides of a pair, or answers without another side."""

    requires = frozenset({"pairs", "labels"})

    def sign(self, batch: Batch) -> Field:
        label = Fact("chosen", missing=-1.0)(batch)
        return where(label.map(lambda x: x == 1), 1.0, where(label.map(lambda x: x == 0), -1.0, 0.0))


@dataclass(frozen=True)
class BestWorstPairs(PairSelector):
    """The best and the worst of the selected trajectories of a group, where they differ."""

    value: Term = field(default_factory=Outcome)
    selector: Selector = field(default_factory=lambda: FromOrigin("policy"))

    def sign(self, batch: Batch) -> Field:
        value = self.value(batch).to(torch.float64)
        top, bottom = (
            where(BestOfGroup(self.selector, term).select(batch), 1.0, 0.0) for term in (self.value, -1.0 * self.value)
        )
        gap = ((top - bottom) * value).sum(GROUP)
        return where(gap > 0, top - bottom, 0.0)


SOURCES: dict[str, PairSelector] = {"told": LabelledPairs(), "formed": BestWorstPairs()}


def pairs_from(source: str) -> PairSelector:
    """``told``: pairs labelled by the data; ``formed``: the best and the worst of each group."""
    check(source in SOURCES, f"no source of pairs {source!r}; {nearest(source, SOURCES)}")
    return SOURCES[source]


LABELLED: dict[str, PairSelector] = {"told": LabelledAnswers(), "formed": BestWorstPairs()}


def labelled_from(source: str) -> PairSelector:
    """As ``pairs_from``, and answers of the data that are labelled one by one."""
    check(source in LABELLED, f"no source of labelled answers {source!r}; {nearest(source, LABELLED)}")
    return LABELLED[source]


ANSWERS: dict[str, Selector] = {"told": FromOrigin("expert"), "formed": FromOrigin("policy")}


def answers_from(source: str) -> Selector:
    """Whose answers are picked from: ``told`` are those of the data, ``formed`` the policy's own."""
    check(source in ANSWERS, f"no source of answers {source!r}; {nearest(source, ANSWERS)}")
    return ANSWERS[source]


@dataclass(frozen=True)
class ChosenSide(Selector):
    """The chosen trajectory of each pair."""

    pairs: PairSelector

    def select(self, batch: Batch) -> Field:
        return self.pairs.sign(batch) > 0


# ------------------------------------------------------------------ comparisons


@dataclass(frozen=True)
class WinRate(Term):
    """Mean of P(this trajectory is preferred to another of its group), from the facts ``beats_0``, ``beats_1`` ..., one
    per other; without them the larger value wins and a tie is ½. 0 without others. At TRAJECTORY."""

    compares_peers = True

    value: Term = field(default_factory=Outcome)

    def __call__(self, batch: Batch) -> Field:
        ranked = self._ranked(batch)
        names = sorted(name for name in batch.facts if name.startswith("beats_"))
        if not names:
            return ranked
        recorded = torch.stack([Fact(name, missing=torch.nan)(batch).x for name in names])
        count = (~recorded.isnan()).sum(0)
        rate = recorded.nansum(0) / count.clamp(min=1)
        return Field(batch.tree, TRAJECTORY, torch.where(count > 0, rate.to(ranked.x.dtype), ranked.x))

    def _ranked(self, batch: Batch) -> Field:
        """(number with a smaller value + ½ of the ties) / number of others: the mean rank among equals."""
        value, tree = self.value(batch), batch.tree
        equal = Partition.by(tree, TRAJECTORY, batch.group, torch.unique(value.x, return_inverse=True)[1])
        sizes = torch.bincount(equal.label, minlength=equal.count).double()  # classes are in order of group, then value
        before = (sizes.cumsum(0) - sizes)[equal.label]
        n = tree.size(TRAJECTORY, GROUP).to(torch.float64)
        group_start = Field(tree, GROUP, n.x.cumsum(0) - n.x)
        rank = Field(tree, TRAJECTORY, before + (sizes[equal.label] - 1) / 2) - group_start
        return (rank / (n - 1).clamp(low=1)).to(value.x.dtype)


@dataclass(frozen=True)
class DirectionalReward(Term):
    """vᵀr: the named rewards of a trajectory along the direction v its prompt asks for, the facts ``toward_NAME``."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        check(bool(self.names), "no reward is named; write at least one")

    @property
    def requires(self) -> frozenset[str]:
        each = {f"{kind}{name}" for name in self.names for kind in ("reward ", "fact toward_")}
        return frozenset(
            each | {f"ratings {' '.join(self.names)}"}
        )  # in this order: the data source draws directions over them

    def __call__(self, batch: Batch) -> Field:
        parts = [Fact(f"toward_{name}")(batch) * SumOverTrajectory(NamedReward(name))(batch) for name in self.names]
        return sum(parts[1:], parts[0])


__all__ = [
    "BestWorstPairs", "ChosenSide", "DirectionalReward", "LabelledAnswers", "LabelledPairs", "PairSelector", "WinRate",
    "answers_from", "labelled_from", "pairs_from",
]  # fmt: skip
