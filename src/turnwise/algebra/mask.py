"""Masks: which tokens take part. In a gate (``gate.where(mask)``) a masked token gives no gradient but is counted;
as the ``keep`` of a recipe it is not counted either."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turnwise.algebra.piece import Now, Piece, Whole, check, text
from turnwise.algebra.ratio import Ratio, behaviour, mismatch, moved
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, Field, Level, where
from turnwise.core.signals import Signal


class Mask(Piece):
    """Interface: True where a token takes part. Never differentiated."""

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        return Both(self, other)


@dataclass(frozen=True)
class Both(Mask):
    left: Mask
    right: Mask

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return self.left(rho, adv, now) & self.right(rho, adv, now)

    def written(self) -> str:
        return f"{text(self.left)} & {text(self.right)}"


@dataclass(frozen=True)
class All(Mask):
    """Every token."""

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return rho.map(lambda x: torch.ones_like(x, dtype=torch.bool))


# ------------------------------------------------------------------- by ratio


@dataclass(frozen=True)
class OneSided(Mask):
    """Out once the ratio has moved far enough in the direction A wants: A ≥ 0 needs ρ ≤ 1 + high, A ≤ 0 ρ ≥ 1 − low.

    ``ratio``: judge another ratio than the objective's own."""

    low: float = 0.2
    high: float = 0.2
    ratio: Ratio | None = None

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        at = rho if self.ratio is None else self.ratio(now).detach()
        return ((adv >= 0) & (at <= 1 + self.high)) | ((adv <= 0) & (at >= 1 - self.low))


@dataclass(frozen=True)
class TwoSided(Mask):
    """1 − low ≤ ρ ≤ 1 + high, whatever the sign of A."""

    low: float = 0.2
    high: float = 0.2

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return (rho >= 1 - self.low) & (rho <= 1 + self.high)


@dataclass(frozen=True)
class Ring(Mask):
    """Two-sided, and again far outside, where A pulls back: A ≥ 0 and ρ ≤ 1 − far_low, or A ≤ 0 and ρ ≥ 1 + far_high."""

    low: float = 0.2
    high: float = 0.2
    far_low: float = 0.6
    far_high: float = 2.0

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        inside = (rho >= 1 - self.low) & (rho <= 1 + self.high)
        return inside | ((adv >= 0) & (rho <= 1 - self.far_low)) | ((adv <= 0) & (rho >= 1 + self.far_high))


@dataclass(frozen=True)
class TotalVariation(Mask):
    """A > 0 needs p − p_μ ≤ high, else p − p_μ ≥ −low: a distance of probabilities, fair to rare tokens."""

    low: float
    high: float

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        step = now.logp.detach().exp() - behaviour(now.batch).exp()
        return where(adv > 0, step <= self.high, step >= -self.low)


@dataclass(frozen=True)
class BinaryKL(Mask):
    """KL of (p_μ, 1 − p_μ) from (p, 1 − p) at most ``limit``, or the move is back toward p_μ."""

    limit: float

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        p, old = (x.exp().clamp(1e-8, 1 - 1e-8) for x in (now.logp.detach(), behaviour(now.batch)))
        kl = old * (old / p).log() + (1 - old) * ((1 - old) / (1 - p)).log()
        away = where(adv > 0, now.logp.detach() > behaviour(now.batch), now.logp.detach() < behaviour(now.batch))
        return (kl <= self.limit) | ~away


# ---------------------------------------------------------------- by mismatch


@dataclass(frozen=True)
class Agreeing(Mask):
    """low ≤ π_prox/μ ≤ high: where learner and sampler agree. By token, by the product or by the geometric mean of a level."""

    low: float
    high: float
    level: Level = TOKEN
    mean: bool = False

    def __post_init__(self) -> None:
        check(0 <= self.low <= self.high, f"need 0 <= low <= high, got {self.low}, {self.high}")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.PROXIMAL})

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        log = mismatch(now).mean(self.level) if self.mean else mismatch(now, self.level)
        return (log.exp() >= self.low) & (log.exp() <= self.high)


@dataclass(frozen=True)
class SmallMismatch(Mask):
    """Trajectories whose mean k3 of learner against sampler, mean (ρ − 1 − log ρ), is at most ``limit``."""

    limit: float = 1e-2

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.PROXIMAL})

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return mismatch(now).map(lambda x: torch.expm1(x) - x).mean(TRAJECTORY) <= self.limit


@dataclass(frozen=True)
class NoVeto(Mask):
    """Trajectories in which no token has π_prox/μ below ``floor``."""

    floor: float = 1e-4

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.PROXIMAL})

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return mismatch(now).exp().min(TRAJECTORY) >= self.floor


@dataclass(frozen=True)
class NotLeft(Mask):
    """Bad trajectories (A < 0) that the policy has already left, mean (log μ − log π) > limit, are out; good ones stay."""

    limit: float = 0.5

    @property
    def foresight(self) -> frozenset[Signal]:
        return frozenset({Signal.LOGP})

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        left = -moved(now).detach().mean(TRAJECTORY)
        sequence = adv if adv.level >= TRAJECTORY else adv.mean(TRAJECTORY)
        return ~((sequence < 0) & (left > self.limit))


# ---------------------------------------------------------- of the whole step


@dataclass(frozen=True)
class Informative(Mask):
    """Groups whose rewards differ."""

    least: float = 1e-6

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        outcome = now.batch.reward.sum(TRAJECTORY)
        return outcome.max(GROUP) - outcome.min(GROUP) > self.least


@dataclass(frozen=True)
class Predictable(Mask):
    """Tokens whose coming step, to second order in the last layer, changes objective and policy only a little.

    m_H = A²s₁ + ½A·A²(s₁² − s₂ + s₃²),  m_F = ½A²s₁²;  kept where |m_H| < objective and m_F < policy.
    s₁ = Σv²q, s₂ = Σπv²q², s₃ = Σπvq with v = onehot − π, q = lr·P·h² (P the optimiser's preconditioner)."""

    objective: float = 1e-2
    policy: float = 1e-4

    @property
    def foresight(self) -> frozenset[Signal]:
        return frozenset({Signal.PUSH, Signal.PUSH_SQUARE, Signal.PUSH_MEAN})

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        s1, s2, s3 = (now[s] for s in (Signal.PUSH, Signal.PUSH_SQUARE, Signal.PUSH_MEAN))
        a2 = adv * adv
        gain = a2 * s1 + 0.5 * adv * a2 * (s1 * s1 - s2 + s3 * s3)
        return (gain.abs() < self.objective) & (0.5 * a2 * s1 * s1 < self.policy)


@dataclass(frozen=True)
class OutsideCovariance(Mask):
    """All but a few tokens, drawn by lot among those whose (A − mean A)(log π − mean log π) lies in (low, high)
    and which a clip of ``clip_low``, ``clip_high`` would not silence anyway."""

    fraction: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    clip_low: float = 1.0
    clip_high: float = 1.0

    @property
    def foresight(self) -> frozenset[Signal]:
        return frozenset({Signal.LOGP})

    def plan(self, whole: Whole) -> dict[object, Field]:
        adv, rho = whole.advantage.at(TOKEN), whole.ratio.at(TOKEN)
        cov = covariance(whole)
        silent = ((adv > 0) & (rho > 1 + self.clip_high)) | ((adv < 0) & (rho < 1 - self.clip_low))
        candidates = (cov > self.low) & (cov < self.high) & ~silent
        n = quota(self.fraction, cov)
        lots = torch.where(candidates.x, whole.batch.lots().x, torch.inf)
        drawn = torch.zeros_like(candidates.x)
        drawn[torch.argsort(lots, stable=True)[:n]] = True
        return {self: Field(cov.tree, TOKEN, ~(drawn & candidates.x))}

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return now[self]


def quota(fraction: float, tokens: Field) -> int:
    """How many tokens a fraction stands for: none for 0, otherwise at least one."""
    return max(1, int(fraction * tokens.x.numel())) if fraction else 0


def covariance(whole: Whole) -> Field:
    """(A − mean A)(log π − mean log π) of each token, means over the step: what makes entropy fall."""
    a, logp = whole.advantage.at(TOKEN), whole.logp.detach()
    return (a - a.mean(BATCH)) * (logp - logp.mean(BATCH))


__all__ = [
    "Agreeing", "All", "BinaryKL", "Both", "Informative", "Mask", "NoVeto", "NotLeft", "OneSided", "OutsideCovariance",
    "Predictable", "Ring", "SmallMismatch", "TotalVariation", "TwoSided", "covariance", "quota",
]  # fmt: skip
