"""Methods that watch the entropy: keep it, spread credit by it, or hold it within a band."""

from __future__ import annotations

from turnwise.algebra.adaptive_clip import EntropyClip
from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.entropy import NormalisedEntropy
from turnwise.algebra.factor import Divergent, EntropyChange, Redistribution
from turnwise.algebra.gate import Clip, Either, Open, Score
from turnwise.algebra.mask import OutsideCovariance
from turnwise.algebra.penalty import CovarianceDrift, EntropyBand, LowEntropy, Weighted
from turnwise.algebra.value import Each, Outcome
from turnwise.algebra.weight import Relaxing
from turnwise.core.levels import TOKEN
from turnwise.credit.trajectories import Guided, Unless
from turnwise.recipes.kind import Kind
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.strategies import Thermostat
from turnwise.tasks.admission import Spread

KIND = Kind.OBJECTIVE


def clip_cov(
    fraction: float = 2e-4, low: float = 1.0, high: float = 5.0, clip_low: float = 1.0, clip_high: float = 1.0
) -> Recipe:
    """Clip-Cov: a few of the tokens that make entropy fall, drawn by lot, give no gradient.

    cov = (A − mean A)(log π − mean log π); fraction of all tokens, with cov in (low, high), is silenced

    Paper: The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617.
    Settings: fraction 2e-4, window (1, 5), the clip opened to 1/1.
    Deviation: means over the whole step, not the micro-batch.
    Sure of: the formula (official code).
    """
    gate = Clip(clip_low, clip_high).where(OutsideCovariance(fraction, low, high, clip_low, clip_high))
    return Recipe(advantage=Standardise(), gate=gate, aggregate=Mean(TOKEN))


def kl_cov(fraction: float = 2e-3, beta: float = 1.0) -> Recipe:
    """KL-Cov: the tokens that make entropy fall most are held near the sampler; no clip.

    J = token mean of ρA − β |log π − log μ| on the top fraction by covariance

    Paper: The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617.
    Settings: fraction 2e-3 (7B), 2e-4 (32B), beta 1.
    Deviation: means over the whole step, not the micro-batch.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=Standardise(),
        gate=Open(),
        aggregate=Mean(TOKEN),
        penalties=(Weighted(beta, CovarianceDrift(fraction)),),
    )


def steer(
    least: float = 0.8,
    most: float = 1.2,
    form: str = "linear",
    low: float = 0.2,
    high: float = 0.28,
    dual: float = 10.0,
) -> Recipe:
    """STEER: tokens that would change the entropy most, up or down, weigh less.

    Ω = (A/π_old) π(1−π)(log π + H);  L = W(|Ω|) · clipped(ρ, A),  W falls from most to least

    Paper: Rethinking Entropy Interventions in RLVR: An Entropy Change Perspective, arXiv 2510.10150.
    Settings: 0.8 to 1.2 (linear) or 0.8 to 1 (exponential), clip 0.2/0.28, dual 10.
    Deviation: extremes over the whole step, not the micro-batch.
    Sure of: the formula (official code).
    """
    gate = Clip(low, high, dual) * EntropyChange(least, most, form)
    return Recipe(advantage=Standardise(), gate=gate, aggregate=Mean(TOKEN))


def hapo(
    quantile: float = 0.8,
    alpha: float = 1.0,
    beta: float = 1.0,
    low: float = 0.2,
    high: float = 0.2,
    dual: float = 10.0,
) -> Recipe:
    """HAPO: the entropy of a token decides its clip range and its share of the advantage.

    A over all *tokens* of a group; low·(1 − αh) below and high·(1 + αh) above; A ← A(1 + βh) where it applies

    Paper: From Uniform to Heterogeneous: Tailoring Policy Optimization to Every Token's Nature, arXiv 2509.16591.
    Settings: quantile 0.8, alpha and beta 1, clip 0.2, dual 10.
    Deviation: the paper's intent for low-entropy tokens, not its code (where that branch never fires); entropies before the
    first update; the adaptive sampling temperature is left out.
    Sure of: the formula (official code and its page, which conflict).
    """
    entropy = NormalisedEntropy(quantile)
    tokens = Standardise(Each(TOKEN, Outcome()), correction=0)
    return Recipe(
        advantage=Unless(tokens, 5.0, Standardise()),
        gate=EntropyClip(entropy, alpha, low, high, dual) * Redistribution(entropy, beta, alpha, low, high),
        aggregate=Mean(TOKEN),
        admission=Spread(),
    )


def aepo(
    target: float = 0.5, hot: float = 1.2, cold: float = 0.8, share: float = 0.25, alpha: float = 1.0, clip: float = 0.2
) -> Recipe:
    """AEPO (arbitrary entropy): a share of each group is sampled hotter or colder, and its successes imitated, so that the
    entropy stays at a set point.

    ∇J = ∇J_GRPO + α E_{y ~ π^T}[ 1[y beats its group] ∇ log π(y) ],  T hot where H ≤ target, else cold

    Paper: Arbitrary Entropy Policy Optimization: Entropy Is Controllable in Reinforcement Fine-tuning, arXiv 2510.08141.
    Settings: hot 1.2, cold 0.8, target 0.5 (0.75 best in its sweep), no KL.
    Deviation: the tempered samples are part of each group instead of overwriting the first rows of the batch.
    Sure of: the mechanics (official code), the objective (paper text), alpha (unspecified).
    """
    return Recipe(
        advantage=Guided(alpha),
        gate=Either(guided=Score(), plain=Clip(clip, clip)),
        strategy=Thermostat(target, hot, cold, share),
    )


def epo(
    weight: float = 1e-3, alpha: float = 0.1, low: float = 0.0, high: float = 2.0, clip: float = 0.2, half: int = 50
) -> Recipe:
    """EPO: an entropy bonus, and a price for leaving a band around the entropy of past batches at the same turn.

    J = J_clip + λ [ H − βₖ α ([low·H̄ − H]₊ + [H − high·H̄]₊) ],  βₖ = 1 + exp(−k/half)

    Paper: EPO: Entropy-regularized Policy Optimization for LLM Agents RL, arXiv 2509.22576.
    Settings: weight 1e-3, band 0 to 2, alpha 0.05 to 0.1, half = half of the steps.
    Deviation: the hinge of the latest paper; the code's constant penalty has no gradient.
    Sure of: the formula (official code and paper text, which differ).
    """
    return Recipe(
        advantage=Standardise(),
        gate=Clip(clip, clip),
        penalties=(
            Weighted(weight, LowEntropy()),
            Weighted(Relaxing(weight, half), EntropyBand(low, high, alpha)),
        ),
    )


def dgpo(kappa: float = 1.0, tau: float = 0.5, clip: float = 0.2) -> Recipe:
    """DGPO (distribution): credit goes to the tokens where the policy has left the reference and is unsure.

    Aₜ = A · |y| softmaxₜ(d (H/log|V|)^κ / τ),  d = 1 − Σ√(π π_ref)

    Paper: DGPO: Distribution Guided Policy Optimization for fine-grained credit assignment, arXiv 2605.03327.
    Settings: kappa 1, tau 0.5, clip 0.2, no KL.
    Sure of: the formula (third-party rendering of the paper).
    """
    return Recipe(advantage=Standardise(), gate=Clip(clip, clip) * Divergent(kappa, tau))
