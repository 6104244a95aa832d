"""Baselines and scales: what a trajectory is compared with, and what its distance from that is divided by."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from turnwise.algebra.piece import check
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, Field, Partition, where
from turnwise.core.signals import Signal
from turnwise.credit.multi_reward import component
from turnwise.credit.order import lower_median
from turnwise.credit.selectors import Rows


@dataclass(frozen=True)
class FromMiddle(Term):
    """A = (R − m)/(d + ε) with m the median of the group and d that of |R − m|, each a member's own (of an even number, the
    lower of the middle two): one outlier moves neither.

    ``rescale`` multiplies what is not 0 by members over members that are not 0; ``fallback`` takes d = 1 where it is 0 (it
    is whenever most agree, and then the others get ±1/ε)."""

    eps: float = 1e-3
    rescale: bool = False
    fallback: bool = False

    def __post_init__(self) -> None:
        check(self.eps > 0, f"eps is {self.eps}; write a positive number")

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        r = component(batch, None)
        gap = r - lower_median(batch, r)
        spread = lower_median(batch, gap.abs())
        a = gap / ((where(spread > 0, spread, 1.0) if self.fallback else spread) + self.eps)
        if not self.rescale:
            return a
        moved = where(a.abs() > 0, 1.0, 0.0).sum(GROUP)
        return a * (a.peers(GROUP) / moved.clamp(low=1.0))


@dataclass(frozen=True)
class Middle(Rows):
    """Those whose outcome is the (lower) median of their group: at least one of each."""

    def of(self, batch: Batch) -> Field:
        r = component(batch, None)
        return (r - lower_median(batch, r)).map(lambda gap: gap == 0)


@dataclass(frozen=True)
class OverMeanDeviation(Term):
    """A = (v − mean)/(mean |v − mean| + ε) among the group: every group moves the policy alike, whatever its success rate.

    ``summed`` is n (v − mean)/(Σ |v − mean| + ε): the same, with an ε that is n times smaller."""

    value: Term = field(default_factory=Outcome)
    eps: float = 1e-4
    summed: bool = False

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch).to(torch.float64)
        gap = v - v.mean(GROUP)
        eps = self.eps / v.peers(GROUP) if self.summed else self.eps
        return gap / (gap.abs().mean(GROUP) + eps)


@dataclass(frozen=True)
class HardFirst(Term):
    """A ← λA, λ = B softmax(−p/softness) over the B groups whose outcomes differ, 0 for the others; p is the mean of ``accuracy``
    in the group (None: of the outcome; a p of 0 counts as 1: there, only other rewards vary).

    ``valid_tokens`` multiplies by all tokens over those of the B groups: a token mean then runs over these alone."""

    term: Term
    softness: float = 2.0
    accuracy: str | None = None
    valid_tokens: bool = True

    def __post_init__(self) -> None:
        check(self.softness > 0, f"the softness is {self.softness}; write a positive number")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset() if self.accuracy is None else frozenset({f"reward {self.accuracy}"})

    def __call__(self, batch: Batch) -> Field:
        outcome, p = component(batch, None), component(batch, self.accuracy).mean(GROUP)
        differ = outcome.max(GROUP) - outcome.min(GROUP) > 1e-9
        score = where(differ, -where(p.abs() > 1e-12, p, 1.0) / self.softness, -torch.inf)
        top = where(score.max(BATCH) > -torch.inf, score.max(BATCH), 0.0)
        share = (score - top).exp()
        weight = share / share.mean(BATCH).clamp(low=1e-300) * where(differ, 1.0, 0.0).mean(BATCH)
        if self.valid_tokens:
            tokens = batch.tree.size(TOKEN, GROUP).to(torch.float64)
            counted = where(differ, tokens, 0.0).sum(BATCH)
            weight = weight * where(counted > 0, tokens.sum(BATCH) / counted.clamp(low=1.0), 1.0)
        return weight * self.term(batch)


# ------------------------------------------------------------------ predictions


@dataclass(frozen=True)
class FromOthersPrediction(Term):
    """A = R − mean of what a probe predicts from the *other* rollouts of the group: independent of this one, so unbiased.

    ``normalise``: then (A − mean)/(std + ε) over the batch. A lone rollout has no baseline: it gets 0 and stays out of the
    batch's mean and std."""

    normalise: bool = True
    eps: float = 1e-6

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.PROBE})

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        r, probe = component(batch, None), batch[Signal.PROBE].to(torch.float64)
        some = r.peers(GROUP).at(TRAJECTORY) > 1
        a = where(some, r - probe.leave_one_out(GROUP), 0.0)
        if not self.normalise:
            return a
        peers = Partition.by(batch.tree, TRAJECTORY, some.to(torch.int64))
        return (a - a.mean(peers)) / (a.std(peers) + self.eps)


@dataclass(frozen=True)
class FromPrediction(Term):
    """A = R − V, V what a probe expects of the task: the mean of its predictions from the other rollouts of the group (so that
    none has a part in its own baseline), or from this one where it is alone."""

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.PROBE})

    def __call__(self, batch: Batch) -> Field:
        r, probe = component(batch, None), batch[Signal.PROBE].to(torch.float64)
        return r - where(r.peers(GROUP) > 1, probe.leave_one_out(GROUP), probe)


__all__ = [
    "FromMiddle", "FromOthersPrediction", "FromPrediction", "HardFirst", "Middle", "OverMeanDeviation",
]  # fmt: skip
