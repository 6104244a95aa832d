"""Pairs: which two trajectories of a group are compared, and how often one beats its siblings.

A pair told by data is a group of two whose facts ``chosen`` are 1 and 0; each side has a context of its own, so two
answers to one prompt and one answer under two prompts are pairs alike. A pair of the policy's own is formed in a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from turnwise.algebra.piece import check
from turnwise.algebra.reward import Named
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome, Total
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TRAJECTORY, Field, Partition, where
from turnwise.credit.fact import Fact
from turnwise.credit.selectors import Best, From, Rows
from turnwise.errors import nearest


class Pairs(Rows):
    """Interface: at most one pair in each group."""

    def sign(self, batch: Batch) -> Field:
        """+1 for the chosen, −1 for the rejected, 0 for others. At TRAJECTORY."""
        raise NotImplementedError

    def of(self, batch: Batch) -> Field:
        return self.sign(batch).abs() > 0


@dataclass(frozen=True)
class ToldPairs(Pairs):
    """Groups of two, one with the fact ``chosen`` 1 and one with 0. ``having``, ``without``: the name of another fact that
    must, or must not, be told of the pair (0 counts as not told)."""

    having: str = ""
    without: str = ""

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"pairs"} | ({f"fact {self.having}"} if self.having else set()))

    def sign(self, batch: Batch) -> Field:
        said = Fact("chosen", missing=-1.0)(batch)
        good, bad = (where(said.map(lambda x: x == 1), 1.0, 0.0), where(said.map(lambda x: x == 0), 1.0, 0.0))
        one_each = (good.sum(GROUP) * bad.sum(GROUP)).map(lambda n: n == 1)
        pair = one_each & said.peers(GROUP).map(lambda n: n == 2)
        for name, wanted in ((self.having, True), (self.without, False)):
            if name:
                told = Fact(name, missing=0.0)(batch).abs().max(GROUP) > 0
                pair = pair & (told if wanted else ~told)
        return where(pair, good - bad, 0.0)


@dataclass(frozen=True)
class FormedPairs(Pairs):
    """The best and the worst of a group's own rows, where they differ."""

    value: Term = field(default_factory=Outcome)
    rows: Rows = field(default_factory=lambda: From("policy"))

    def sign(self, batch: Batch) -> Field:
        value = self.value(batch).to(torch.float64)
        top, bottom = (where(Best(self.rows, term).of(batch), 1.0, 0.0) for term in (self.value, -1.0 * self.value))
        gap = ((top - bottom) * value).sum(GROUP)
        return where(gap > 0, top - bottom, 0.0)


SOURCES: dict[str, Pairs] = {"told": ToldPairs(), "formed": FormedPairs()}


def pairs_of(source: str) -> Pairs:
    """``told`` by the data, or ``formed`` of the best and the worst of each group."""
    check(source in SOURCES, f"no pairs {source!r}; {nearest(source, SOURCES)}")
    return SOURCES[source]


ANSWERS: dict[str, Rows] = {"told": From("expert"), "formed": From("policy")}


def answers_of(source: str) -> Rows:
    """Among whose answers one is picked: those ``told`` by the data, or ``formed`` by the policy itself."""
    check(source in ANSWERS, f"no answers {source!r}; {nearest(source, ANSWERS)}")
    return ANSWERS[source]


@dataclass(frozen=True)
class Chosen(Rows):
    """The better side of each pair."""

    pairs: Pairs

    def of(self, batch: Batch) -> Field:
        return self.pairs.sign(batch) > 0


# ------------------------------------------------------------------ comparisons


@dataclass(frozen=True)
class WinRate(Term):
    """The mean of P(this one is preferred to another of its group), as the facts ``beats_0``, ``beats_1`` ... tell it, one for
    each of the others; told nothing, the larger value wins and a tie is ½. Alone it is 0. At TRAJECTORY."""

    value: Term = field(default_factory=Outcome)

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        ranked = self._ranked(batch)
        names = sorted(name for name in batch.facts if name.startswith("beats_"))
        if not names:
            return ranked
        said = torch.stack([Fact(name, missing=torch.nan)(batch).x for name in names])
        told = (~said.isnan()).sum(0)
        rate = said.nansum(0) / told.clamp(min=1)
        return Field(batch.tree, TRAJECTORY, torch.where(told > 0, rate.to(ranked.x.dtype), ranked.x))

    def _ranked(self, batch: Batch) -> Field:
        """How many have less, and half of those who have as much, over the number of others: the mean rank of equals."""
        value, tree = self.value(batch), batch.tree
        equal = Partition.by(tree, TRAJECTORY, batch.group, torch.unique(value.x, return_inverse=True)[1])
        sizes = torch.bincount(equal.label, minlength=equal.count).double()  # classes are in order of group, then value
        before = (sizes.cumsum(0) - sizes)[equal.label]
        n = tree.size(TRAJECTORY, GROUP).to(torch.float64)
        first = Field(tree, GROUP, n.x.cumsum(0) - n.x)
        rank = Field(tree, TRAJECTORY, before + (sizes[equal.label] - 1) / 2) - first
        return (rank / (n - 1).clamp(low=1)).to(value.x.dtype)


@dataclass(frozen=True)
class Along(Term):
    """vᵀr: the named rewards of a trajectory along the direction its prompt asks for, the facts ``toward_NAME``."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        check(bool(self.names), "no rewards named; write at least one")

    @property
    def wants(self) -> frozenset[str]:
        each = {f"{kind}{name}" for name in self.names for kind in ("reward ", "fact toward_")}
        return frozenset(each | {f"ratings {' '.join(self.names)}"})  # in their order, for who draws the directions

    def __call__(self, batch: Batch) -> Field:
        parts = [Fact(f"toward_{name}")(batch) * Total(Named(name))(batch) for name in self.names]
        return sum(parts[1:], parts[0])


__all__ = ["Along", "Chosen", "FormedPairs", "Pairs", "ToldPairs", "WinRate", "answers_of", "pairs_of"]
