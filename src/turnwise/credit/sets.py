"""Sets of trajectories: credit for the diversity of a set, and weights by how far the answers of a group disagree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnwise.algebra.gate import Clip, Gate
from turnwise.algebra.peers import Peers
from turnwise.algebra.piece import MicroBatchView, StepView
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.credit.multi_reward import UnitOutcome, named_reward
from turnwise.credit.stratified import SameFact
from turnwise.maths import segments
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SetAdvantage(Term):
    """A = mean of f over the sets a trajectory is in − mean of f over all sets of ``size`` of its group, with
    f(set) = mean reward · share of distinct members: exploring members are credited together with successful ones.

    A group smaller than ``size`` forms one set. In closed form: with n of N drawn, classes c of m_c equal members each,
    and a(m), b(m) the probabilities that n − 1 of N − 1 and n − 2 of N − 2 others contain none of m given ones, n² E[f
    | i] = rᵢ (K − Σ_{c≠cᵢ} a) + (n−1)/(N−1) Σ_{j≠i} rⱼ (K − Σ_{c≠cᵢ,cⱼ} b), K the number of classes; its mean over i is
    the mean over all sets."""

    compares_peers = True

    size: int = number(4, least=1)
    same: Peers = field(default_factory=lambda: SameFact("key", "words"))
    value: Term = field(default_factory=UnitOutcome)

    def __call__(self, batch: Batch) -> Field:
        tree, r, same = batch.tree, self.value(batch).to(torch.float64), self.same(batch)
        members = r.peer_count(GROUP).at(TRAJECTORY).x
        drawn = members.clamp(max=self.size)
        class_size = segments.size(same.label, same.count)[same.label].to(members.dtype)
        one = lambda x: Field(tree, TRAJECTORY, x)  # noqa: E731
        each = one(1 / class_size)  # Σ over the members of a group of 1/m_c h(m_c) is Σ over its keys of h
        missed, missed_twice = (one(miss_probability(members - k, class_size, drawn - k)) for k in (1, 2))
        keys = each.sum(GROUP)
        with_one = keys - (each * missed).sum(GROUP) + missed
        with_two = keys - (each * missed_twice).sum(GROUP) + missed_twice
        others = with_two * (r.sum(GROUP) - r) + (r * missed_twice).sum(GROUP) - (r * missed_twice).sum(same)
        pair_probability = one((drawn - 1) / (members - 1).clamp(min=1))
        f = (r * with_one + pair_probability * others) / one(drawn**2)
        return f - f.mean(GROUP)


def miss_probability(total: Tensor, marked: Tensor, drawn: Tensor) -> Tensor:
    """C(total − marked, drawn)/C(total, drawn): the probability that none of the marked is drawn. 1 where nothing is
    drawn."""
    unmarked = total - marked
    possible = (drawn > 0) & (unmarked >= drawn)
    n, m, k = (torch.where(possible, x, 1.0) for x in (total, unmarked, drawn))
    log = torch.lgamma(m + 1) - torch.lgamma(m - k + 1) - torch.lgamma(n + 1) + torch.lgamma(n - k + 1)
    return torch.where(possible, log.exp(), (drawn <= 0).to(total.dtype))


# ------------------------------------------------------------------- agreement


def answer_entropy(batch: Batch, same: Peers) -> Field:
    """H = −Σ p log₂ p over the distinct answers of a group, in bits. At GROUP."""
    peers = same(batch)
    ones = batch.tree.full(TRAJECTORY, 1.0, torch.float64)
    share = ones.peer_count(peers) / ones.peer_count(GROUP)
    return -share.map(torch.log2).mean(GROUP)


@dataclass(frozen=True)
class DisagreementWeighted(Term):
    """wA, w = σ(k (H − b)), H the entropy of the group's answers: comparison within the group counts where answers
    differ.

    ``forced``: w = 0 where A is 0. With ``across`` the result is (1 − w) · across, for the groups that agree."""

    term: Term
    same: Peers = field(default_factory=lambda: SameFact("answer"))
    b: float = 0.5
    k: float = 1.0
    forced: bool = False
    across: Term | None = None

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch)
        w = (self.k * (answer_entropy(batch, self.same) - self.b)).map(torch.sigmoid)
        if self.forced:
            w = where(a.abs() > 1e-9, w, 0.0)
        return w * a if self.across is None else (1 - w) * self.across(batch)


@dataclass(frozen=True)
class ConsistencyAdvantage(Term):
    """A = z-score over the tasks of the batch of mean R · (1 − κH), κ = (1 − 1/n)/log₂ n: equal for all members of a
    group, larger where they are right and agree. A batch of one task gets 0. At GROUP."""

    same: Peers = field(default_factory=lambda: SameFact("answer"))
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        r = named_reward(batch, None)
        n = r.peer_count(GROUP)
        kappa = where(n > 1, (1 - 1 / n) / n.clamp(low=2.0).map(torch.log2), 0.0)
        value = r.mean(GROUP) * (1 - kappa * answer_entropy(batch, self.same))
        return (value - value.mean(BATCH)) / (value.std(BATCH) + self.eps)


@dataclass(frozen=True)
class ClipEachPart(Gate):
    """Clips each part of a sum advantage by its own sign: w = s clip(ρ; part) + (1 − s) clip(ρ; A − part), s = part/A.

    ``part`` is planned over whole groups. The objective is the sum of two clipped objectives; where the parts cancel
    exactly, it is 0."""

    part: Term
    low: float = number(0.2, least=0, most=1, why="ratios below 1 − low are cut")
    high: float = number(0.2, least=0, why="ratios above 1 + high are cut")

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: self.part(view.batch)}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        clip, part = Clip(self.low, self.high), view[self].to(adv.x.dtype)
        share = where(adv.abs() > 0, part / where(adv.abs() > 0, adv, 1.0), 1.0)
        return share * clip(rho, part, view) + (1 - share) * clip(rho, adv - part, view)


__all__ = [
    "ClipEachPart", "ConsistencyAdvantage", "DisagreementWeighted", "SetAdvantage", "answer_entropy",
    "miss_probability",
]  # fmt: skip
