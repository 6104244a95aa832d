"""Sets of trajectories: credit for what several of them are together, and for how far a group agrees."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from turnwise.algebra.gate import Clip, Gate
from turnwise.algebra.peers import Kin
from turnwise.algebra.piece import Now, Whole, check
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TRAJECTORY, Field, where
from turnwise.credit.multi_reward import Unit, component
from turnwise.credit.stratified import Told
from turnwise.maths import segments


@dataclass(frozen=True)
class SetValue(Term):
    """A = mean of f over the sets a trajectory is in − mean of f over all sets of ``size`` of its group, with
    f(set) = mean reward · share of distinct members: who explores is credited along with who succeeds.

    A group smaller than ``size`` forms one set. In closed form: with n of N drawn, keys c of m_c members each, and the
    chances a(m), b(m) that n − 1 of N − 1, n − 2 of N − 2 others miss m given ones,
    n² E[f | i] = rᵢ (K − Σ_{c≠cᵢ} a) + (n−1)/(N−1) Σ_{j≠i} rⱼ (K − Σ_{c≠cᵢ,cⱼ} b), and the mean over i is that over sets."""

    size: int = 4
    same: Kin = field(default_factory=lambda: Told("key", "words"))
    value: Term = field(default_factory=Unit)

    def __post_init__(self) -> None:
        check(self.size >= 1, f"sets of {self.size}; write a size of at least 1")

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        tree, r, same = batch.tree, self.value(batch).to(torch.float64), self.same(batch)
        members = r.peers(GROUP).at(TRAJECTORY).x
        drawn = members.clamp(max=self.size)
        alike = segments.size(same.label, same.count)[same.label].to(members.dtype)
        one = lambda x: Field(tree, TRAJECTORY, x)  # noqa: E731
        each = one(1 / alike)  # Σ over the members of a group of 1/m_c h(m_c) is Σ over its keys of h
        missed, missed_twice = (one(missing(members - k, alike, drawn - k)) for k in (1, 2))
        keys = each.sum(GROUP)
        alone = keys - (each * missed).sum(GROUP) + missed
        both = keys - (each * missed_twice).sum(GROUP) + missed_twice
        others = both * (r.sum(GROUP) - r) + (r * missed_twice).sum(GROUP) - (r * missed_twice).sum(same)
        chance = one((drawn - 1) / (members - 1).clamp(min=1))
        f = (r * alone + chance * others) / one(drawn**2)
        return f - f.mean(GROUP)


def missing(total: Tensor, marked: Tensor, drawn: Tensor) -> Tensor:
    """C(total − marked, drawn)/C(total, drawn): the chance that none of the marked is drawn. 1 where nothing is drawn."""
    free = total - marked
    possible = (drawn > 0) & (free >= drawn)
    n, m, k = (torch.where(possible, x, 1.0) for x in (total, free, drawn))
    log = torch.lgamma(m + 1) - torch.lgamma(m - k + 1) - torch.lgamma(n + 1) + torch.lgamma(n - k + 1)
    return torch.where(possible, log.exp(), (drawn <= 0).to(total.dtype))


# ------------------------------------------------------------------- agreement


def disagreement(batch: Batch, same: Kin) -> Field:
    """H = −Σ p log₂ p over the answers of a group, in bits. At GROUP."""
    peers = same(batch)
    ones = batch.tree.full(TRAJECTORY, 1.0, torch.float64)
    share = ones.peers(peers) / ones.peers(GROUP)
    return -share.map(torch.log2).mean(GROUP)


@dataclass(frozen=True)
class Disputed(Term):
    """wA, w = σ(k (H − b)) with H how far the answers of the group disagree: siblings are compared where they differ.

    ``forced``: w = 0 where A is 0. With ``across`` it is the other part, (1 − w) across: where they agree, another comparison."""

    term: Term
    same: Kin = field(default_factory=lambda: Told("answer"))
    b: float = 0.5
    k: float = 1.0
    forced: bool = False
    across: Term | None = None

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch)
        w = (self.k * (disagreement(batch, self.same) - self.b)).map(torch.sigmoid)
        if self.forced:
            w = where(a.abs() > 1e-9, w, 0.0)
        return w * a if self.across is None else (1 - w) * self.across(batch)


@dataclass(frozen=True)
class SureGroups(Term):
    """A = z-score over the tasks of the batch of mean R · (1 − κH), κ = (1 − 1/n)/log₂ n: for all members of a group alike,
    more where they are right and agree. A lone task gets 0. At GROUP."""

    same: Kin = field(default_factory=lambda: Told("answer"))
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        r = component(batch, None)
        n = r.peers(GROUP)
        kappa = where(n > 1, (1 - 1 / n) / n.clamp(low=2.0).map(torch.log2), 0.0)
        value = r.mean(GROUP) * (1 - kappa * disagreement(batch, self.same))
        return (value - value.mean(BATCH)) / (value.std(BATCH) + self.eps)


@dataclass(frozen=True)
class ClipParts(Gate):
    """The advantage is a sum, and each part is clipped by its own sign: w = s clip(ρ; part) + (1 − s) clip(ρ; rest), s = part/A.

    ``part`` is planned over whole groups; the rest is what the credited A has besides. The gain is that of two clipped
    objectives; where the parts cancel exactly, nothing is gained."""

    part: Term
    low: float = 0.2
    high: float = 0.2

    def __post_init__(self) -> None:
        Clip(self.low, self.high)  # its own words for bad bounds

    def plan(self, whole: Whole) -> dict[object, Field]:
        return {self: self.part(whole.batch)}

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        clip, part = Clip(self.low, self.high), now[self].to(adv.x.dtype)
        share = where(adv.abs() > 0, part / where(adv.abs() > 0, adv, 1.0), 1.0)
        return share * clip(rho, part, now) + (1 - share) * clip(rho, adv - part, now)


__all__ = ["ClipParts", "Disputed", "SetValue", "SureGroups", "disagreement", "missing"]
