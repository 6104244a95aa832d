"""Masks: which tokens are trained on. In a gate (``gate.where(mask)``) a masked token has no gradient but counts in the average;
as the ``keep`` of a recipe it does not count either.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.piece import MicroBatchView, Piece, StepView, text
from turnwise.algebra.ratio import Ratio, behaviour, mismatch, moved
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, Field, Level, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.maths.lazy_torch import torch


class Mask(Piece):
    """Interface: True where a token is trained on. Never differentiated."""

    reason = ""  # why tokens are dropped: a planned mask that says it has its dropped tokens counted in the metrics

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        return Both(self, other)


@dataclass(frozen=True)
class Both(Mask):
    """What both masks let through."""

    left: Mask
    right: Mask

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return self.left(rho, adv, view) & self.right(rho, adv, view)

    def as_text(self) -> str:
        return f"{text(self.left)} & {text(self.right)}"


@dataclass(frozen=True)
class AllTokens(Mask):
    """Every token."""

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return rho.map(lambda x: torch.ones_like(x, dtype=torch.bool))


# ------------------------------------------------------------------- by ratio


@dataclass(frozen=True)
class OneSided(Mask):
    """Masks a token once its ratio has moved far enough in the direction of A: A ≥ 0 keeps ρ ≤ 1 + high, A ≤ 0 keeps ρ ≥ 1 − low.

    ``ratio``: test this ratio instead of the objective's."""

    low: float = 0.2
    high: float = 0.2
    ratio: Ratio | None = None

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        at = rho if self.ratio is None else self.ratio(view).detach()
        return ((adv >= 0) & (at <= 1 + self.high)) | ((adv <= 0) & (at >= 1 - self.low))


@dataclass(frozen=True)
class TwoSided(Mask):
    """1 − low ≤ ρ ≤ 1 + high, whatever the sign of A."""

    low: float = 0.2
    high: float = 0.2

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return (rho >= 1 - self.low) & (rho <= 1 + self.high)


@dataclass(frozen=True)
class InsideOrFarOutside(Mask):
    """Two-sided, and also far outside where A points back: A ≥ 0 and ρ ≤ 1 − far_low, or A ≤ 0 and ρ ≥ 1 + far_high."""

    low: float = 0.2
    high: float = 0.2
    far_low: float = 0.6
    far_high: float = 2.0

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        inside = (rho >= 1 - self.low) & (rho <= 1 + self.high)
        return inside | ((adv >= 0) & (rho <= 1 - self.far_low)) | ((adv <= 0) & (rho >= 1 + self.far_high))


@dataclass(frozen=True)
class TotalVariation(Mask):
    """A > 0 needs p − p_μ ≤ high, else p − p_μ ≥ −low: a distance of probabilities, which does not penalise rare tokens more."""

    low: float
    high: float

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        step = view.logp.detach().exp() - behaviour(view.batch).exp()
        return where(adv > 0, step <= self.high, step >= -self.low)


@dataclass(frozen=True)
class BinaryKL(Mask):
    """KL of (p_μ, 1 − p_μ) from (p, 1 − p) at most ``limit``, or the update moves back toward p_μ."""

    limit: float

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        p, old = (x.exp().clamp(1e-8, 1 - 1e-8) for x in (view.logp.detach(), behaviour(view.batch)))
        kl = old * (old / p).log() + (1 - old) * ((1 - old) / (1 - p)).log()
        away = where(adv > 0, view.logp.detach() > behaviour(view.batch), view.logp.detach() < behaviour(view.batch))
        return (kl <= self.limit) | ~away


# ---------------------------------------------------------------- by mismatch


@dataclass(frozen=True)
class MismatchWithin(Mask):
    """low ≤ π_prox/μ ≤ high: learner and sampler agree. By token, by the product or by the geometric mean over a level."""

    reads = frozenset({Signal.PROXIMAL})

    low: float = number(least=0, most="high")
    high: float = number(least=0)
    level: Level = TOKEN
    mean: bool = False

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        log = mismatch(view).mean(self.level) if self.mean else mismatch(view, self.level)
        return (log.exp() >= self.low) & (log.exp() <= self.high)


@dataclass(frozen=True)
class MismatchKLBelow(Mask):
    """Trajectories whose mean k3 of learner against sampler, mean (ρ − 1 − log ρ), is at most ``limit``."""

    reads = frozenset({Signal.PROXIMAL})

    limit: float = 1e-2

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return mismatch(view).map(lambda x: torch.expm1(x) - x).mean(TRAJECTORY) <= self.limit


@dataclass(frozen=True)
class TokenVeto(Mask):
    """Trajectories in which no token has π_prox/μ below ``floor``."""

    reads = frozenset({Signal.PROXIMAL})

    floor: float = 1e-4

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return mismatch(view).exp().min(TRAJECTORY) >= self.floor


@dataclass(frozen=True)
class OffPolicySequenceMask(Mask):
    """Masks trajectories with A < 0 that have become unlikely, mean (log μ − log π) > limit; keeps all others."""

    reads_before_step = frozenset({Signal.LOGP})

    limit: float = 0.5

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        decrease = -moved(view).detach().mean(TRAJECTORY)
        sequence = adv if adv.level >= TRAJECTORY else adv.mean(TRAJECTORY)
        return ~((sequence < 0) & (decrease > self.limit))


# ---------------------------------------------------------- of the whole step


@dataclass(frozen=True)
class InformativeGroups(Mask):
    """Groups whose rewards differ."""

    least: float = 1e-6

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        outcome = view.batch.reward.sum(TRAJECTORY)
        return outcome.max(GROUP) - outcome.min(GROUP) > self.least


@dataclass(frozen=True)
class SmallPredictedChange(Mask):
    """Tokens whose next update, to second order in the output layer, changes objective and policy only a little.

    m_H = A²s₁ + ½A·A²(s₁² − s₂ + s₃²),  m_F = ½A²s₁²;  kept where |m_H| < objective and m_F < policy.
    s₁ = Σv²q, s₂ = Σπv²q², s₃ = Σπvq with v = onehot − π, q = lr·P·h² (P the optimiser's preconditioner)."""

    reads_before_step = frozenset(
        {Signal.PREDICTED_LOGP_CHANGE, Signal.PREDICTED_LOGIT_SQUARE, Signal.PREDICTED_LOGIT_MEAN}
    )

    objective: float = 1e-2
    policy: float = 1e-4

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        s1, s2, s3 = (
            view[s] for s in (Signal.PREDICTED_LOGP_CHANGE, Signal.PREDICTED_LOGIT_SQUARE, Signal.PREDICTED_LOGIT_MEAN)
        )
        a2 = adv * adv
        gain = a2 * s1 + 0.5 * adv * a2 * (s1 * s1 - s2 + s3 * s3)
        return (gain.abs() < self.objective) & (0.5 * a2 * s1 * s1 < self.policy)


@dataclass(frozen=True)
class CovarianceClip(Mask):
    """All but a few tokens, drawn at random among those whose (A − mean A)(log π − mean log π) is in (low, high)
    and which a clip of ``clip_low``, ``clip_high`` would not mask anyway."""

    reads_before_step = frozenset({Signal.LOGP})

    fraction: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    clip_low: float = 1.0
    clip_high: float = 1.0

    def plan(self, view: StepView) -> dict[object, Field]:
        adv, rho = view.advantage.at(TOKEN), view.ratio.at(TOKEN)
        cov = covariance(view)
        clipped = ((adv > 0) & (rho > 1 + self.clip_high)) | ((adv < 0) & (rho < 1 - self.clip_low))
        candidates = (cov > self.low) & (cov < self.high) & ~clipped
        n = quota(self.fraction, cov)
        draws = torch.where(candidates.x, view.batch.uniform_draws().x, torch.inf)
        drawn = torch.zeros_like(candidates.x)
        drawn[torch.argsort(draws, stable=True)[:n]] = True
        return {self: Field(cov.tree, TOKEN, ~(drawn & candidates.x))}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view[self]


@dataclass(frozen=True)
class HighestEntropy(Mask):
    """The tokens whose entropy is at least its (1 − share)-quantile over the step: the points where the
    policy decides how to go on."""

    reads_before_step = frozenset({Signal.ENTROPY})

    share: float = number(0.2, above=0, most=1, why="which part of the tokens is trained on")

    def plan(self, view: StepView) -> dict[object, Field]:
        entropy = view[Signal.ENTROPY].detach()
        if not entropy.x.numel():
            return {self: entropy.map(lambda x: x.bool())}
        bound = torch.quantile(entropy.x.double(), 1 - self.share)
        return {self: entropy.map(lambda x: x.double() >= bound)}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view[self]


def quota(fraction: float, tokens: Field) -> int:
    """The number of tokens of a fraction: 0 for 0, otherwise at least one."""
    return max(1, int(fraction * tokens.x.numel())) if fraction else 0


def covariance(view: StepView) -> Field:
    """(A − mean A)(log π − mean log π) of each token, means over the step: the covariance that lowers the entropy."""
    a, logp = view.advantage.at(TOKEN), view.logp.detach()
    return (a - a.mean(BATCH)) * (logp - logp.mean(BATCH))


__all__ = [
    "AllTokens", "BinaryKL", "Both", "CovarianceClip", "HighestEntropy", "InformativeGroups", "InsideOrFarOutside", "Mask",
    "MismatchKLBelow", "MismatchWithin", "OffPolicySequenceMask", "OneSided", "SmallPredictedChange", "TokenVeto",
    "TotalVariation", "TwoSided", "covariance", "quota",
]  # fmt: skip
