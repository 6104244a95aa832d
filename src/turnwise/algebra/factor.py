"""Factors: weights that multiply a gate and carry no gradient. They weight tokens independently of the gate's own limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turnwise.algebra.entropy import NormalisedEntropy
from turnwise.algebra.piece import MicroBatchView, Piece, StepView
from turnwise.algebra.ratio import LOG_RATIO_LIMIT, behaviour, mismatch
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, Field, Level, where
from turnwise.core.limits import choice, number
from turnwise.core.signals import Signal


class Factor(Piece):
    """Interface: a weight for each token of a micro-batch, detached."""

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        raise NotImplementedError


@dataclass(frozen=True)
class TruncatedImportance(Factor):
    """min(π_prox/μ, cap): corrects the mismatch between sampler and learner, by token or by the product over a level."""

    reads = frozenset({Signal.PROXIMAL})

    cap: float = number(2.0, above=0, why="inf for none")
    level: Level = TOKEN

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return mismatch(view, self.level).exp().clamp(high=self.cap)


@dataclass(frozen=True)
class ExpAdvantage(Factor):
    """exp(A / temperature): higher advantages get larger weights; the exponent is capped so that the weight stays finite."""

    temperature: float = 1.0

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return (adv / self.temperature).clamp(high=LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True)
class DampEntropyChange(Factor):
    """Smaller weights for the tokens whose update would change the entropy most.

    Ω = (A/π_old) π (1 − π)(log π + H);  linear: from ``high`` at the smallest |Ω| of the step down to ``low`` at the largest;
    exponential: clip(exp(−k|Ω|), low, 1), k = −ln(low) / max(|Ω|max, 0.02)."""

    reads_before_step = frozenset({Signal.LOGP, Signal.ENTROPY})

    low: float = number(0.8, above=0, most="high")
    high: float = 1.2
    form: str = choice("linear", "exponential")

    def plan(self, view: StepView) -> dict[object, Field]:
        p, old = (x.exp().clamp(low=1e-8) for x in (view.logp, behaviour(view.batch)))
        size = (view.advantage / old * p * (1 - p) * (p.log() + view[Signal.ENTROPY])).abs()
        largest = size.max(BATCH)
        if self.form == "exponential":
            k = -math.log(self.low) / largest.clamp(low=0.02)
            return {self: (-k * size).exp().clamp(self.low, 1.0)}
        smallest, flat = size.min(BATCH), 0.5 * (self.low + self.high)
        share = (size - smallest) / where(largest > smallest, largest - smallest, 1.0)
        return {self: where(largest > smallest, self.high - share * (self.high - self.low), flat)}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view[self]


@dataclass(frozen=True)
class ReferenceDivergence(Factor):
    """|y| softmaxₜ(d H̄^κ / τ) over the tokens of a trajectory: more weight where the policy
    differs from the reference and is uncertain.

    d is the squared Hellinger distance, H̄ the entropy over log |V|. The mean over a trajectory is 1."""

    reads_before_step = frozenset({Signal.HELLINGER, Signal.ENTROPY})

    kappa: float = 1.0
    tau: float = 0.5
    vocabulary: int = 0  # 0: the policy's own, from the learner

    def plan(self, view: StepView) -> dict[object, Field]:
        size = self.vocabulary or float(view.batch[Column.VOCABULARY_SIZE].item)
        uncertainty = view[Signal.ENTROPY] / math.log(size)
        score = view[Signal.HELLINGER] * uncertainty.clamp(low=0.0) ** self.kappa / self.tau
        score = (score - score.max(TRAJECTORY)).exp()
        return {self: score / score.mean(TRAJECTORY)}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view[self]


@dataclass(frozen=True)
class EntropyRedistribution(Factor):
    """1 + β h where it applies: uncertain tokens (h > 0) weigh more once their ratio has moved, certain ones
    (h ≤ 0) less while it has not.

    h in [−1, 1] is the normalised entropy; unmoved means ρ inside (1 − low/2, 1 + high/2) of the adapted clip."""

    entropy: NormalisedEntropy
    beta: float = 1.0
    alpha: float = 1.0
    low: float = 0.2
    high: float = 0.2

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        h = view[self.entropy]
        low, high = self.entropy.bounds(h, self.low, self.high, self.alpha)
        at = rho.detach()
        unmoved = (at > 1 - low / 2) & (at < 1 + high / 2)
        applies = where(h > 0, where(unmoved, 0.0, 1.0), where(unmoved, 1.0, 0.0)).to(h.x.dtype)
        return 1 + self.beta * h * applies


__all__ = [
    "DampEntropyChange", "EntropyRedistribution", "ExpAdvantage", "Factor", "ReferenceDivergence",
    "TruncatedImportance",
]  # fmt: skip
