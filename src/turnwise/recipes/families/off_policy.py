"""Group-relative REINFORCE as an off-policy method: what stabilises it is a mask, a penalty or the choice of data."""

from __future__ import annotations

from turnwise.algebra.advantage import SoftBaseline, Standardise
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.factor import ExpAdvantage
from turnwise.algebra.gate import Cap, Score
from turnwise.algebra.mask import OneSided, Ring, TwoSided
from turnwise.algebra.penalty import Nearness, NegativeLogLikelihood, Weighted
from turnwise.algebra.ratio import Importance, OnPolicy
from turnwise.algebra.value import Constant
from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.recipes.kind import Kind
from turnwise.recipes.recipe import Recipe
from turnwise.tasks.admission import Balance

KIND = Kind.OBJECTIVE

INF = float("inf")


def rec_one_side(low: float = 0.2, high: float = 0.2, cap: float = INF) -> Recipe:
    """REC-OneSide: tokens are masked once the ratio has gone far enough in the direction of A; weighted by it.

    ∇J = token mean of A w ∇ log π, kept where A ≥ 0 and ρ ≤ 1+high, or A ≤ 0 and ρ ≥ 1−low;  w = min(ρ, cap)

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203.
    Settings: bounds 0.2; the wider 0.6/2.0 train faster. the unweighted variants (NoIS) match it in the paper.
    Sure of: the formula (official code).
    """
    gate = Cap(cap).where(OneSided(low, high))
    return Recipe(advantage=Standardise(scale=False), gate=gate, aggregate=Mean(TOKEN))


def rec_two_side(low: float = 0.2, high: float = 0.2, cap: float = INF) -> Recipe:
    """REC-TwoSide: tokens are masked wherever the ratio has left the window.

    ∇J = token mean of A w ∇ log π, kept where 1−low ≤ ρ ≤ 1+high

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203.
    Settings: bounds 0.2.
    Sure of: the formula (official code).
    """
    gate = Cap(cap).where(TwoSided(low, high))
    return Recipe(advantage=Standardise(scale=False), gate=gate, aggregate=Mean(TOKEN))


def rec_ring(
    low: float = 0.2, high: float = 0.2, far_low: float = 0.6, far_high: float = 2.0, cap: float = INF
) -> Recipe:
    """REC-Ring: two-sided, and tokens far outside take part again where A pulls them back.

    kept where 1−low ≤ ρ ≤ 1+high, or A ≥ 0 and ρ ≤ 1−far_low, or A ≤ 0 and ρ ≥ 1+far_high

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203.
    Settings: bounds 0.2, far bounds 0.6 and 2.0.
    Sure of: the formula (official code).
    """
    gate = Cap(cap).where(Ring(low, high, far_low, far_high))
    return Recipe(advantage=Standardise(scale=False), gate=gate, aggregate=Mean(TOKEN))


def rec_sequence(low: float = 3e-4, high: float = 4e-4) -> Recipe:
    """REC-GSPO: the one-sided mask judged on the geometric mean of the whole trajectory, no weight.

    ∇J = mean of 1/|y| Σ A ∇ log π, kept where A ≥ 0 and s ≤ 1+high, or A ≤ 0 and s ≥ 1−low

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203.
    Settings: bounds 3e-4 and 4e-4.
    Sure of: the formula (official code).
    """
    gate = Score().where(OneSided(low, high))
    return Recipe(advantage=Standardise(scale=False), ratio=Importance(TRAJECTORY), gate=gate)


def red_weight(softness: float = 1.0) -> Recipe:
    """RED-Weight: good trajectories weigh more, exp(A/softness).

    ∇J = token mean of A exp(A/softness) ∇ log π

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203.
    Settings: softness 1.
    Sure of: the formula (official code).
    """
    gate = Score() * ExpAdvantage(softness)
    return Recipe(advantage=Standardise(scale=False), ratio=OnPolicy(), gate=gate, aggregate=Mean(TOKEN))


def red_drop() -> Recipe:
    """RED-Drop: where a group has more bad than good trajectories, surplus bad ones are dropped before comparing.

    ∇J = token mean of A ∇ log π over what is left, A = R − mean of what is left

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203.
    Settings: none.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=Standardise(scale=False),
        ratio=OnPolicy(),
        gate=Score(),
        aggregate=Mean(TOKEN),
        admission=Balance(),
    )


def kimi_opmd(tau: float = 0.1) -> Recipe:
    """Kimi OPMD: no ratio and no clip; a squared log-ratio keeps the policy near the one that sampled.

    J = token mean of A log π − τ (log π − log μ)²

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203, after Kimi k1.5.
    Settings: tau 0.1 (its ½ absorbed).
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=Standardise(scale=False),
        ratio=OnPolicy(),
        gate=Score(),
        aggregate=Mean(TOKEN),
        penalties=(Weighted(tau, Nearness()),),
    )


def rep_forward(tau: float = 0.1) -> Recipe:
    """REP (forward KL): group-relative REINFORCE with a little imitation of everything that was sampled.

    J = token mean of A log π + τ log π

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203.
    Settings: tau 0.1.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=Standardise(scale=False),
        ratio=OnPolicy(),
        gate=Score(),
        aggregate=Mean(TOKEN),
        penalties=(Weighted(tau, NegativeLogLikelihood()),),
    )


def asym_re(tau: float = 0.1) -> Recipe:
    """AsymRE: the baseline is lowered a little, so that old data pushes more up than down.

    A = R − (mean − τ);  ∇J = token mean of A ∇ log π

    Paper: Asymmetric REINFORCE for Off-Policy RL, arXiv 2506.20520.
    Settings: tau 0.1; shifts the other way collapsed in all of its seeds.
    Sure of: the formula (official code).
    """
    advantage = Standardise(scale=False) + Constant(tau)
    return Recipe(advantage=advantage, ratio=OnPolicy(), gate=Score(), aggregate=Mean(TOKEN))


def opmd(tau: float = 1.0) -> Recipe:
    """OPMD: the baseline is a soft maximum of the group's rewards.

    A = R − τ log mean exp(R/τ);  ∇J = token mean of A ∇ log π / (1 + τ)

    Paper: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203 (its original version).
    Settings: tau 1.
    Sure of: the formula (official code).
    """
    advantage = SoftBaseline(tau, shrink=True)
    return Recipe(advantage=advantage, ratio=OnPolicy(), gate=Score(), aggregate=Mean(TOKEN))
