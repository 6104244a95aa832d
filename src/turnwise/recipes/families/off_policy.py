"""Group-relative REINFORCE off-policy, stabilised by a mask, a regulariser or the choice of data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from turnwise.algebra.advantage import SoftBaseline, Standardise
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.control import Passes
from turnwise.algebra.gate import CappedWeight, Factor, Gate, ScoreFunction, score_function
from turnwise.algebra.mask import Mask, OneSided
from turnwise.algebra.penalty import NegativeLogLikelihood, SquaredLogRatio, WeightedPenalty
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.ratio import LOG_RATIO_LIMIT, Importance, OnPolicy, Product
from turnwise.algebra.value import Constant
from turnwise.core.levels import TOKEN, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.recipes.recipe import Kind, Recipe
from turnwise.tasks.admission import Balance

KIND = Kind.OBJECTIVE

BASELINES = {"mean": True, "soft": False}
INF = float("inf")

# group-relative REINFORCE: no ratio, no clip, no std; what each method of this family changes
REINFORCE = Recipe(advantage=Standardise(scale=False), ratio=OnPolicy(), gate=ScoreFunction(), aggregate=Mean(TOKEN))


def rec_one_side(low: float = 0.2, high: float = 0.2, cap: float = INF) -> Recipe:
    """REC-OneSide: importance-weighted REINFORCE; masks tokens whose ratio already moved far in the direction of A.

    ∇J = token mean of A w ∇ log π, kept where A ≥ 0 and ρ ≤ 1+high, or A ≤ 0 and ρ ≥ 1−low;  w = min(ρ, cap)

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203.
    Settings: bounds 0.2; the wider 0.6/2.0 train faster. the unweighted variants (NoIS) match it in the paper."""
    gate = CappedWeight(cap).where(OneSided(low, high))
    return Recipe(advantage=Standardise(scale=False), gate=gate, aggregate=Mean(TOKEN))


class TwoSided(Mask):
    """1 − low ≤ ρ ≤ 1 + high, whatever the sign of A; and far outside where A points back: A ≥ 0 and ρ ≤ 1 − far_low, or
    A ≤ 0 and ρ ≥ 1 + far_high (inf: never)."""

    low: float = 0.2
    high: float = 0.2
    far_low: float = math.inf
    far_high: float = math.inf

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        inside = (rho >= 1 - self.low) & (rho <= 1 + self.high)
        return inside | ((adv >= 0) & (rho <= 1 - self.far_low)) | ((adv <= 0) & (rho >= 1 + self.far_high))


def rec_two_side(low: float = 0.2, high: float = 0.2, cap: float = INF) -> Recipe:
    """REC-TwoSide: importance-weighted REINFORCE; masks tokens whose ratio is outside the window.

    ∇J = token mean of A w ∇ log π, kept where 1−low ≤ ρ ≤ 1+high

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203.
    Settings: bounds 0.2."""
    return replace(rec_one_side(), gate=CappedWeight(cap).where(TwoSided(low, high)))


def rec_ring(
    low: float = 0.2, high: float = 0.2, far_low: float = 0.6, far_high: float = 2.0, cap: float = INF
) -> Recipe:
    """REC-Ring: two-sided mask that re-admits tokens far outside where A pulls them back.

    kept where 1−low ≤ ρ ≤ 1+high, or A ≥ 0 and ρ ≤ 1−far_low, or A ≤ 0 and ρ ≥ 1+far_high

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203.
    Settings: bounds 0.2, far bounds 0.6 and 2.0."""
    return replace(rec_one_side(), gate=CappedWeight(cap).where(TwoSided(low, high, far_low, far_high)))


def rec_sequence(low: float = 3e-4, high: float = 4e-4) -> Recipe:
    """REC-GSPO: one-sided mask on the geometric-mean ratio of the whole trajectory, without importance weights.

    ∇J = mean of 1/|y| Σ A ∇ log π, kept where A ≥ 0 and s ≤ 1+high, or A ≤ 0 and s ≥ 1−low

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203.
    Settings: bounds 3e-4 and 4e-4."""
    gate = ScoreFunction().where(OneSided(low, high))
    return Recipe(advantage=Standardise(scale=False), ratio=Importance(TRAJECTORY), gate=gate)


class ExpAdvantage(Factor):
    """exp(A / temperature): higher advantages get larger weights; the exponent is capped so that the weight stays finite."""

    temperature: float = 1.0

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return (adv / self.temperature).clamp(high=LOG_RATIO_LIMIT).exp()


def red_weight(softness: float = 1.0) -> Recipe:
    """RED-Weight: REINFORCE with trajectories weighted by exp(A/softness).

    ∇J = token mean of A exp(A/softness) ∇ log π

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203.
    Settings: softness 1."""
    return replace(REINFORCE, gate=ScoreFunction() * ExpAdvantage(softness))


def red_drop() -> Recipe:
    """RED-Drop: drops surplus negative trajectories of a group before the advantages are computed.

    ∇J = token mean of A ∇ log π over what is left, A = R − mean of what is left

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203.
    Settings: none."""
    return replace(REINFORCE, admission=Balance())


def kimi_opmd(tau: float = 0.1) -> Recipe:
    """Kimi OPMD: REINFORCE with a squared log-ratio penalty to the sampler, no ratio and no clip.

    J = token mean of A log π − τ (log π − log μ)²

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203, after Kimi k1.5.
    Settings: tau 0.1 (its ½ absorbed)."""
    return replace(REINFORCE, penalties=(WeightedPenalty(tau, SquaredLogRatio()),))


def rep_forward(tau: float = 0.1) -> Recipe:
    """REP (forward KL): group-relative REINFORCE plus a likelihood term on all samples.

    J = token mean of A log π + τ log π

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203.
    Settings: tau 0.1."""
    return replace(REINFORCE, penalties=(WeightedPenalty(tau, NegativeLogLikelihood()),))


def asym_re(tau: float = 0.1) -> Recipe:
    """AsymRE: REINFORCE with the baseline lowered by τ, so that off-policy data emphasises positive examples.

    A = R − (mean − τ);  ∇J = token mean of A ∇ log π

    Paper: Asymmetric REINFORCE for Off-Policy RL, arXiv 2506.20520.
    Settings: tau 0.1; shifts the other way collapsed in all of its seeds."""
    return replace(REINFORCE, advantage=Standardise(scale=False) + Constant(tau))


def opmd(tau: float = 1.0, baseline: Literal["mean", "soft"] = "mean") -> Recipe:
    """OPMD: REINFORCE with the group's mean, or a soft maximum of its returns, as baseline.

    A = R − mean, or R − τ log mean exp(R/τ);  ∇J = token mean of A ∇ log π / (1 + τ)

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203 (its original version).
    Settings: tau 1, baseline mean."""
    return replace(REINFORCE, advantage=SoftBaseline(tau, shrink=True, mean=BASELINES[baseline]))


class GammaWeight(Gate):
    """w = sg[ρᵏ exp(λ(1 − ρ))] with the gradient of log π: 1 at ρ = 1, falling on both sides; (k, λ) by the sign of A."""

    rise: float = number(2.0, least=0)
    decay: float = number(3.0, least=0)
    rise_negative: float = number(3.0, least=0)
    decay_negative: float = number(2.0, least=0)

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        at = rho.detach().at(TOKEN)
        good = adv.at(TOKEN) >= 0
        power, decay = where(good, self.rise, self.rise_negative), where(good, self.decay, self.decay_negative)
        log = power * at.clamp(low=1e-8).log() + decay * (1 - at)
        return log.exp() * score_function(view)


def vespo(rise: float = 2.0, decay: float = 3.0, rise_negative: float = 3.0, decay_negative: float = 2.0) -> Recipe:
    """VESPO: a smooth weight of the sequence ratio instead of a clip, falling on both sides of 1.

    φ(w) = w^k exp(λ(1 − w)), w = Πₜ ρₜ, (k, λ) by the sign of A;  ∇J = token mean of sg[φ] A ∇ log π

    Paper: VESPO: Variational Sequence-Level Soft Policy Optimization, 2026.
    Settings: k 2 and λ 3 where A ≥ 0, k 3 and λ 2 where A < 0."""
    gate = GammaWeight(rise, decay, rise_negative, decay_negative)
    return Recipe(
        advantage=Standardise(),
        ratio=Product(TRAJECTORY),
        gate=gate,
        aggregate=Mean(TOKEN),
        control=Passes(minibatches=4),
    )
