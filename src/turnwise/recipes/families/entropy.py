"""Entropy control: preserve the entropy, distribute credit by it, or keep it in a band."""

from __future__ import annotations

from turnwise.algebra.adaptive_clip import EntropyClip
from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.entropy import NormalisedEntropy
from turnwise.algebra.factor import DampEntropyChange, EntropyRedistribution, ReferenceDivergence
from turnwise.algebra.gate import ByGuidance, Clip, NoGate, ScoreFunction
from turnwise.algebra.mask import CovarianceClip, HighestEntropy
from turnwise.algebra.penalty import EntropyBand, HighCovarianceDrift, NegativeEntropy, WeightedPenalty
from turnwise.algebra.reward import EnvironmentReward
from turnwise.algebra.value import Outcome, SpreadTo
from turnwise.algebra.weight import DecayingWeight
from turnwise.core.levels import TOKEN
from turnwise.credit.confidence import TailConfidenceClip, UncertaintyShaped
from turnwise.credit.fact import Fact
from turnwise.credit.segments import PaidAtEnd
from turnwise.credit.trajectories import FallbackAboveLimit, GuidedAdvantage
from turnwise.recipes.kind import Kind
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.strategies import EntropyControl
from turnwise.rollout.strategies.confidence import PRUNED, BranchRule, ConfidenceTree
from turnwise.tasks.admission import Spread

KIND = Kind.OBJECTIVE


def clip_cov(
    fraction: float = 2e-4, low: float = 1.0, high: float = 5.0, clip_low: float = 1.0, clip_high: float = 1.0
) -> Recipe:
    """Clip-Cov: masks a small random share of the tokens with high covariance of A and log π, which lower the entropy.

    cov = (A − mean A)(log π − mean log π); fraction of all tokens, with cov in (low, high), is silenced

    Paper: The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617.
    Settings: fraction 2e-4, window (1, 5), the clip opened to 1/1.
    Deviation: means over the whole step, not the micro-batch.
    Sure of: the formula (official code).
    """
    gate = Clip(clip_low, clip_high).where(CovarianceClip(fraction, low, high, clip_low, clip_high))
    return Recipe(advantage=Standardise(), gate=gate, aggregate=Mean(TOKEN))


def forking_tokens(share: float = 0.2, low: float = 0.2, high: float = 0.28) -> Recipe:
    """Forking tokens: the policy gradient of the tokens with the highest entropy alone.

    no gradient where H < its (1 − share)-quantile over the step; masked tokens still count in the token mean

    Paper: Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective RL for LLM Reasoning, arXiv 2506.01939.
    Settings: share 0.2, clip 0.2/0.28, groups without spread re-sampled, no KL.
    Deviation: without the soft overlong penalty of its runs.
    Sure of: the rule (paper text), the average (released code of a public trainer).
    """
    gate = Clip(low, high).where(HighestEntropy(share))
    return Recipe(advantage=Standardise(), gate=gate, aggregate=Mean(TOKEN), admission=Spread())


def kl_cov(fraction: float = 2e-3, beta: float = 1.0) -> Recipe:
    """KL-Cov: a KL penalty on the tokens with the highest covariance of A and log π; no clip.

    J = token mean of ρA − β |log π − log μ| on the top fraction by covariance

    Paper: The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617.
    Settings: fraction 2e-3 (7B), 2e-4 (32B), beta 1.
    Deviation: means over the whole step, not the micro-batch.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=Standardise(),
        gate=NoGate(),
        aggregate=Mean(TOKEN),
        penalties=(WeightedPenalty(beta, HighCovarianceDrift(fraction)),),
    )


def steer(
    least: float = 0.8,
    most: float = 1.2,
    form: str = "linear",
    low: float = 0.2,
    high: float = 0.28,
    dual: float = 10.0,
) -> Recipe:
    """STEER: down-weights tokens whose update would change the entropy most, in either direction.

    Ω = (A/π_old) π(1−π)(log π + H);  L = W(|Ω|) · clipped(ρ, A),  W falls from most to least

    Paper: Rethinking Entropy Interventions in RLVR: An Entropy Change Perspective, arXiv 2510.10150.
    Settings: 0.8 to 1.2 (linear) or 0.8 to 1 (exponential), clip 0.2/0.28, dual 10.
    Deviation: extremes over the whole step, not the micro-batch.
    Sure of: the formula (official code).
    """
    gate = Clip(low, high, dual) * DampEntropyChange(least, most, form)
    return Recipe(advantage=Standardise(), gate=gate, aggregate=Mean(TOKEN))


def hapo(
    quantile: float = 0.8,
    alpha: float = 1.0,
    beta: float = 1.0,
    low: float = 0.2,
    high: float = 0.2,
    dual: float = 10.0,
) -> Recipe:
    """HAPO: clip range and advantage of each token scale with its entropy.

    A over all *tokens* of a group; low·(1 − αh) below and high·(1 + αh) above; A ← A(1 + βh) where it applies

    Paper: From Uniform to Heterogeneous: Tailoring Policy Optimization to Every Token's Nature, arXiv 2509.16591.
    Settings: quantile 0.8, alpha and beta 1, clip 0.2, dual 10.
    Deviation: the paper's intent for low-entropy tokens, not its code (where that branch never fires); entropies before the
    first update; the adaptive sampling temperature is left out.
    Sure of: the formula (official code and its page, which conflict).
    """
    entropy = NormalisedEntropy(quantile)
    tokens = Standardise(SpreadTo(TOKEN, Outcome()), correction=0)
    return Recipe(
        advantage=FallbackAboveLimit(tokens, 5.0, Standardise()),
        gate=EntropyClip(entropy, alpha, low, high, dual) * EntropyRedistribution(entropy, beta, alpha, low, high),
        aggregate=Mean(TOKEN),
        admission=Spread(),
    )


def aepo(
    target: float = 0.5, hot: float = 1.2, cold: float = 0.8, share: float = 0.25, alpha: float = 1.0, clip: float = 0.2
) -> Recipe:
    """AEPO (arbitrary entropy): holds the entropy by imitating successes that are sampled at another temperature.

    ∇J = ∇J_GRPO + α E_{y ~ π^T}[ 1[y beats its group] ∇ log π(y) ],  T hot where H ≤ target, else cold

    Paper: Arbitrary Entropy Policy Optimization: Entropy Is Controllable in Reinforcement Fine-tuning, arXiv 2510.08141.
    Settings: hot 1.2, cold 0.8, target 0.5 (0.75 best in its sweep), no KL.
    Deviation: the tempered samples are part of each group instead of overwriting the first rows of the batch.
    Sure of: the mechanics (official code), the objective (paper text), alpha (unspecified).
    """
    return Recipe(
        advantage=GuidedAdvantage(alpha),
        gate=ByGuidance(guided=ScoreFunction(), plain=Clip(clip, clip)),
        strategy=EntropyControl(target, hot, cold, share),
    )


def epo(
    weight: float = 1e-3, alpha: float = 0.1, low: float = 0.0, high: float = 2.0, clip: float = 0.2, half: int = 50
) -> Recipe:
    """EPO: entropy bonus, and a penalty for leaving a band around the past entropy at the same turn.

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
            WeightedPenalty(weight, NegativeEntropy()),
            WeightedPenalty(DecayingWeight(weight, half), EntropyBand(low, high, alpha)),
        ),
    )


def dgpo(kappa: float = 1.0, tau: float = 0.5, clip: float = 0.2) -> Recipe:
    """DGPO (distribution): distributes the advantage to tokens that diverge from the reference and have high entropy.

    Aₜ = A · |y| softmaxₜ(d (H/log|V|)^κ / τ),  d = 1 − Σ√(π π_ref)

    Paper: DGPO: Distribution Guided Policy Optimization for fine-grained credit assignment, arXiv 2605.03327.
    Settings: kappa 1, tau 0.5, clip 0.2, no KL.
    Sure of: the formula (third-party rendering of the paper).
    """
    return Recipe(advantage=Standardise(), gate=Clip(clip, clip) * ReferenceDivergence(kappa, tau))


def echo(
    boost: float = 0.1,
    bonus: float = 0.0,
    least: float = 0.05,
    most: float = 0.2,
    steep: float = 4.0,
    tail: int = 16,
    trunks: int = 4,
    high: float = 3.5,
    confident: float = 1.2,
) -> Recipe:
    """ECHO (test-time RL): trees at uncertain tokens, pruned online; credit and clip by confidence. Add --reward majority.

    A(1 + boost·S), S = clip(z(H) + z(1 − p), ±2);  clip 1 ± ε, ε = least + (most − least)·σ(steep·(1 − mean p of the tail))

    Paper: Entropy-Confidence Hybrid Optimization for Test-Time RL, arXiv 2602.02150.
    Settings: boost 0.1, no bonus, clip 0.05 to 0.2, steep 4, 32 rollouts, branches at H ≥ 3.5 and C ≤ 1.2.
    Deviation: p is the probability of the sampled token, its other published choice. C is measured above its minimum ln 5: as
    printed it is at least 1.61, and its thresholds 1.2, 1.0 and 0.4 could never be met. Entropies are those of the whole
    vocabulary. Branches sample their first token and are opened when their parent has ended; only branches are pruned, never
    trunks, and pruning never pays. Where to branch depends on the model: set high and confident.
    Sure of: the formulas (official code).
    """
    return Recipe(
        advantage=UncertaintyShaped(Standardise(), boost, bonus),
        gate=TailConfidenceClip(least, most, steep, tail),
        reward=EnvironmentReward() + PaidAtEnd(Fact(PRUNED, missing=0.0)),
        strategy=ConfidenceTree(trunks, BranchRule(high, confident=confident)),
    )
