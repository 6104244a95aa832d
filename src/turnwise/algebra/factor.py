"""Factors: weights that multiply a gate, without a gradient of their own. Which tokens matter more, whatever the ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turnwise.algebra.entropy import NormalisedEntropy
from turnwise.algebra.piece import Now, Piece, Whole, check
from turnwise.algebra.ratio import LOG_RATIO_LIMIT, behaviour, mismatch
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, Field, Level, where
from turnwise.core.signals import Signal


class Factor(Piece):
    """Interface: a weight for each token of a micro-batch, detached."""

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        raise NotImplementedError


@dataclass(frozen=True)
class Truncated(Factor):
    """min(π_prox/μ, cap): corrects for a sampler that is not the learner's policy; a token's ratio or a whole product."""

    cap: float = 2.0
    level: Level = TOKEN

    def __post_init__(self) -> None:
        check(self.cap > 0, f"the cap is {self.cap}; write a positive number, or inf for none")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.PROXIMAL})

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return mismatch(now, self.level).exp().clamp(high=self.cap)


@dataclass(frozen=True)
class ExpAdvantage(Factor):
    """exp(A / temperature): good trajectories weigh more than bad ones; no advantage makes it infinite."""

    temperature: float = 1.0

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return (adv / self.temperature).clamp(high=LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True)
class EntropyChange(Factor):
    """Damps the tokens that would change the entropy most.

    Ω = (A/π_old) π (1 − π)(log π + H);  linear: from ``high`` at the least |Ω| of the step down to ``low`` at the most;
    exponential: clip(exp(−k|Ω|), low, 1), k = −ln(low) / max(|Ω|max, 0.02)."""

    low: float = 0.8
    high: float = 1.2
    form: str = "linear"

    def __post_init__(self) -> None:
        check(0 < self.low <= self.high, f"need 0 < low <= high, got {self.low}, {self.high}")
        check(self.form in ("linear", "exponential"), f"no form {self.form!r}; write linear or exponential")

    @property
    def foresight(self) -> frozenset[Signal]:
        return frozenset({Signal.LOGP, Signal.ENTROPY})

    def plan(self, whole: Whole) -> dict[object, Field]:
        p, old = (x.exp().clamp(low=1e-8) for x in (whole.logp, behaviour(whole.batch)))
        size = (whole.advantage / old * p * (1 - p) * (p.log() + whole[Signal.ENTROPY])).abs()
        most = size.max(BATCH)
        if self.form == "exponential":
            k = -math.log(self.low) / most.clamp(low=0.02)
            return {self: (-k * size).exp().clamp(self.low, 1.0)}
        least, flat = size.min(BATCH), 0.5 * (self.low + self.high)
        share = (size - least) / where(most > least, most - least, 1.0)
        return {self: where(most > least, self.high - share * (self.high - self.low), flat)}

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return now[self]


@dataclass(frozen=True)
class Divergent(Factor):
    """|y| softmaxₜ(d H̄^κ / τ) over the tokens of a trajectory: credit goes where the policy left the reference and is unsure.

    d is the squared Hellinger distance, H̄ the entropy over log |V|. The mean over a trajectory is 1."""

    kappa: float = 1.0
    tau: float = 0.5
    vocabulary: int = 0  # 0: as many as the policy has, told by the learner

    @property
    def foresight(self) -> frozenset[Signal]:
        return frozenset({Signal.HELLINGER, Signal.ENTROPY})

    def plan(self, whole: Whole) -> dict[object, Field]:
        size = self.vocabulary or float(whole.batch["vocabulary"].item)
        unsure = whole[Signal.ENTROPY] / math.log(size)
        score = whole[Signal.HELLINGER] * unsure.clamp(low=0.0) ** self.kappa / self.tau
        score = (score - score.max(TRAJECTORY)).exp()
        return {self: score / score.mean(TRAJECTORY)}

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return now[self]


@dataclass(frozen=True)
class Redistribution(Factor):
    """1 + β h where it applies: uncertain tokens (h > 0) count more once they move, sure ones (h ≤ 0) less while they rest.

    h in [−1, 1] is the normalised entropy; resting means ρ inside (1 − low/2, 1 + high/2) of the adapted clip."""

    entropy: NormalisedEntropy
    beta: float = 1.0
    alpha: float = 1.0
    low: float = 0.2
    high: float = 0.2

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        h = now[self.entropy]
        low, high = self.entropy.bounds(h, self.low, self.high, self.alpha)
        at = rho.detach()
        rests = (at > 1 - low / 2) & (at < 1 + high / 2)
        applies = where(h > 0, where(rests, 0.0, 1.0), where(rests, 1.0, 0.0)).to(h.x.dtype)
        return 1 + self.beta * h * applies


__all__ = [
    "Divergent", "EntropyChange", "ExpAdvantage", "Factor", "Redistribution", "Truncated",
]  # fmt: skip
