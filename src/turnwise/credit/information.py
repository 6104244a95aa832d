"""Information: what a turn tells, about the gold answer or to the policy itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from turnwise.algebra.piece import check
from turnwise.algebra.ratio import behaviour
from turnwise.algebra.term import Term
from turnwise.algebra.value import ends
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact
from turnwise.credit.voters import neighbour


@dataclass(frozen=True)
class AnswerRise(Term):
    """rₖ = pₖ₊₁ − pₖ, by how much a turn raises the probability p of the gold answer (the geometric mean of its tokens);
    the last turn earns ``weight`` · R instead. At TURN."""

    weight: float = 1.0

    def __post_init__(self) -> None:
        check(self.weight >= 0, f"the weight of the answer is {self.weight}; write a number >= 0")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.ANSWER})

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"answer"})

    def __call__(self, batch: Batch) -> Field:
        p = batch[Signal.ANSWER].exp()
        last = Field(batch.tree, TURN, ends(batch, TURN))
        return where(last, self.weight * batch.reward.sum(TRAJECTORY), neighbour(p, 1, 0.0) - p)


@dataclass(frozen=True)
class FeedbackGain(Term):
    """Iₖ = mean over the tokens of turn k + 1 of log μ(y) − log π(y | the environment's answer to turn k masked): how much the
    answer to a turn changed what was said next. It is credited to the turn that asked. At TOKEN.

    ``shared``: divided among the tokens of turn k. Exactly 0 where nothing was answered, nothing of the answer was masked, or
    nothing said afterwards."""

    shared: bool = True
    answered: Term = field(default_factory=lambda: Fact("feedback", TURN, missing=1.0))

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.BLIND})

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"feedback"})

    def __call__(self, batch: Batch) -> Field:
        told = (behaviour(batch) - batch[Signal.BLIND]).mean(TURN)  # 0 for a turn without tokens
        told = where(masked(batch), told, 0.0)  # else two readings of one text, apart by rounding
        gain = where(self.answered(batch) > 0.5, neighbour(told, 1, 0.0), 0.0)
        return gain.at(TOKEN) / batch.tree.size(TOKEN, TURN) if self.shared else gain.at(TOKEN)


def masked(batch: Batch) -> Field:
    """Whether anything of what stands between a turn and the tokens sampled before it was masked. Every turn, where nobody
    recorded what was. At TURN."""
    s, tree = batch.sequences, batch.tree
    if s.blind is None:
        return tree.full(TURN, True, torch.bool)
    found = torch.zeros(tree.count(TURN), dtype=torch.bool, device=tree.device)
    place = (s.blind != s.ids).nonzero().squeeze(1)
    token = torch.searchsorted(s.at, place)  # the first one sampled behind it
    place, token = place[token < s.at.numel()], token[token < s.at.numel()]
    inside = lambda at: torch.searchsorted(s.start, at, right=True)  # noqa: E731
    token = token[inside(place) == inside(s.at[token])]
    found[tree.parents[0][token]] = True
    return Field(tree, TURN, found)


@dataclass(frozen=True)
class AmongPresent(Term):
    """(v − mean)/(std + ε) among the values of a group that are not 0; what is 0 stays 0."""

    value: Term
    eps: float = 1e-6

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch)
        present = v.abs() > 0
        peers = Partition.by(batch.tree, v.level, batch.group, present)
        return where(present, (v - v.mean(peers)) / (v.std(peers) + self.eps), 0.0)


@dataclass(frozen=True)
class NoLouder(Term):
    """c · term, c = min(1, max(std of ``than``, 1)/std of ``term``) over all tokens of the batch."""

    term: Term
    than: Term

    def __call__(self, batch: Batch) -> Field:
        a, other = self.term(batch), self.than(batch).at(TOKEN)
        loud = a.at(TOKEN).std(BATCH)
        c = where(loud > 0, other.std(BATCH).clamp(low=1.0) / where(loud > 0, loud, 1.0), 1.0)
        return c.clamp(high=1.0) * a


@dataclass(frozen=True)
class WhereAlike(Term):
    """g · term, g = σ(−std of R in the group / temperature): ½ where outcomes do not differ, soon 0 where they do."""

    term: Term
    temperature: float = 0.05

    def __post_init__(self) -> None:
        check(self.temperature > 0, f"the gate's temperature is {self.temperature}; write a positive number")

    def __call__(self, batch: Batch) -> Field:
        spread = batch.reward.sum(TRAJECTORY).std(GROUP)
        return (-1.0 / self.temperature * spread).map(torch.sigmoid) * self.term(batch)


@dataclass(frozen=True)
class Fading(Term):
    """exp(−rate · t) · term, t batches so far."""

    term: Term
    rate: float = 0.0

    def __post_init__(self) -> None:
        check(self.rate >= 0, f"the rate is {self.rate}; write a number >= 0")

    def __call__(self, batch: Batch) -> Field:
        return (-self.rate * batch["clock"]).exp() * self.term(batch)


__all__ = ["AmongPresent", "AnswerRise", "Fading", "FeedbackGain", "NoLouder", "WhereAlike", "masked"]
