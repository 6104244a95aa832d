"""Baselines without a critic: a trajectory is compared with its siblings, or with nothing."""

from __future__ import annotations

from turnwise.algebra.advantage import LeaveOneOut, Standardise, Whiten
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.gate import Cap, Clip, Geometric, Open
from turnwise.algebra.penalty import KL, Weighted
from turnwise.algebra.ratio import Importance, OnPolicy, PerToken
from turnwise.algebra.reward import Drift, Environment, OnTokens, Overlong
from turnwise.algebra.value import Outcome, ReturnToGo, Total
from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.credit.trajectories import WithIdeal
from turnwise.recipes.kind import Kind
from turnwise.recipes.recipe import Recipe
from turnwise.tasks.admission import NotPerfect, Spread

KIND = Kind.OBJECTIVE


def reinforce() -> Recipe:
    """REINFORCE: the reward of an episode moves every token of it.

    ∇J = E[ R · Σₜ ∇ log π(yₜ) ]

    Paper: Williams, Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning, 1992.
    Settings: no baseline, no ratio, sum over the tokens of a trajectory, mean over trajectories.
    Sure of: the formula (textbook).
    """
    return Recipe(advantage=Outcome(), ratio=OnPolicy(), gate=Open(), aggregate=Sum(TRAJECTORY))


def rloo() -> Recipe:
    """RLOO: the mean of the *other* trajectories of the group is an unbiased baseline.

    Aᵢ = Rᵢ − 1/(G−1) Σ_{j≠i} Rⱼ;  ∇J = E[ Aᵢ Σₜ ∇ log π(yₜ) ]

    Paper: Back to Basics: Revisiting REINFORCE-Style Optimization for RLHF, arXiv 2402.14740.
    Settings: G 2-4 and a k1 KL of 0.03 inside the reward in the paper's preference runs.
    Deviation: no KL in the reward (`rloo_kl` has it); verifiable rewards do without it.
    Sure of: the formula (official-lineage code).
    """
    return Recipe(advantage=LeaveOneOut(), ratio=OnPolicy(), gate=Open(), aggregate=Sum(TRAJECTORY))


def rloo_kl(beta: float = 0.03) -> Recipe:
    """RLOO with a KL: the k1 estimate to the reference is part of the reward, as in the paper's preference runs.

    Rᵢ ← Rᵢ − β Σₜ (log π_old − log π_ref);  A and gradient as RLOO

    Paper: Back to Basics: Revisiting REINFORCE-Style Optimization for RLHF, arXiv 2402.14740.
    Settings: G 2-4, beta 0.03.
    Sure of: the formula (official-lineage code).
    """
    outcome = Outcome() + beta * Total(Drift())
    return Recipe(advantage=LeaveOneOut(outcome), ratio=OnPolicy(), gate=Open(), aggregate=Sum(TRAJECTORY))


def grpo(clip: float = 0.2, beta: float = 0.04) -> Recipe:
    """GRPO: the z-score of the reward inside its group is the advantage of every token.

    Aᵢ = (Rᵢ − mean) / (std + ε);  J = 1/G Σᵢ 1/|yᵢ| Σₜ [ min(ρₜAᵢ, clip(ρₜ, 1±clip)Aᵢ) − β k3ₜ ]

    Paper: DeepSeekMath, arXiv 2402.03300.
    Settings: G 64, clip 0.2, beta 0.04, one update per batch. Later practice: beta 0 to 0.001, G 8-16.
    Deviation: a group of one gets advantage 0, not its raw reward.
    Sure of: the formula (official-lineage code), the constants (paper text).
    """
    return Recipe(advantage=Standardise(), gate=Clip(clip, clip), penalties=(Weighted(beta, KL("k3")),))


def dr_grpo(clip: float = 0.2, length: float = 64) -> Recipe:
    """Dr.GRPO: GRPO without its two biased normalisers, 1/|y| and 1/std.

    Aᵢ = Rᵢ − mean;  J = 1/(G·L) Σᵢ Σₜ min(ρₜAᵢ, clip(ρₜ, 1±clip)Aᵢ),  L a constant

    Paper: Understanding R1-Zero-Like Training, arXiv 2503.20783.
    Settings: G 8, clip 0.2, no KL, L = the generation budget (3000 tokens there; 64 here, small models speak briefly).
    Sure of: the formula (official code).
    """
    return Recipe(advantage=Standardise(scale=False), gate=Clip(clip, clip), aggregate=Sum(TRAJECTORY, length=length))


def dapo(low: float = 0.2, high: float = 0.28, limit: int = 192, cache: int = 64, dual: float | None = None) -> Recipe:
    """DAPO: wider upper clip, no group without signal, every token alike, a soft penalty on overlong answers.

    J = 1/Σ|yᵢ| Σᵢ Σₜ min(ρₜAᵢ, clip(ρₜ, 1−low, 1+high)Aᵢ);  R ← R + clip((limit − cache − n)/cache, −1, 0);
    groups with equal rewards are dropped and others drawn until the batch is full

    Paper: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv 2503.14476.
    Settings: low 0.2, high 0.28, G 16, 16 updates per batch, limit 20480, cache 4096, dual clip 10 in its scripts.
    Deviation: limit and cache scaled to laptop answers; one update per batch unless asked for more.
    Sure of: the formula (official code and paper text).
    """
    return Recipe(
        advantage=Standardise(),
        gate=Clip(low, high, dual),
        aggregate=Mean(TOKEN),
        reward=Environment() + Overlong(limit, cache),
        admission=Spread(),
    )


def gspo(low: float = 3e-4, high: float = 4e-4) -> Recipe:
    """GSPO: the reward belongs to the whole sequence, so the ratio and the clip do too.

    sᵢ = exp( 1/|yᵢ| Σₜ log ρₜ );  J = 1/G Σᵢ min(sᵢAᵢ, clip(sᵢ, 1−low, 1+high)Aᵢ)

    Paper: Group Sequence Policy Optimization, arXiv 2507.18071.
    Settings: low 3e-4, high 4e-4, four mini-batches per rollout batch, no KL.
    Sure of: the formula (official team, code in two public trainers).
    """
    return Recipe(advantage=Standardise(), ratio=Importance(TRAJECTORY, cap=10.0), gate=Clip(low, high))


def gspo_token(low: float = 3e-4, high: float = 4e-4) -> Recipe:
    """GSPO-token: the ratio of the whole sequence with each token's own gradient, so advantages may differ inside it.

    sᵢₜ = sg[sᵢ] · πₜ/sg[πₜ];  J = 1/G Σᵢ 1/|yᵢ| Σₜ min(sᵢₜAₜ, clip(sᵢₜ, 1−low, 1+high)Aₜ)

    Paper: Group Sequence Policy Optimization, arXiv 2507.18071.
    Settings: low 3e-4, high 4e-4, no KL.
    Sure of: the formula (official team, code in two public trainers).
    """
    ratio = PerToken(Importance(TRAJECTORY), cap=10.0)
    return Recipe(advantage=Standardise(), ratio=ratio, gate=Clip(low, high))


def gmpo(low: float = 0.4, high: float = 0.4) -> Recipe:
    """GMPO: the geometric mean of token ratios, each clipped in log space on its harmful side.

    cₜ = min(lₜ, high) where A > 0, max(lₜ, −low) where A < 0;  J = mean of Aᵢ exp( 1/|yᵢ| Σₜ cₜ )

    Paper: Geometric-Mean Policy Optimization, arXiv 2507.20673.
    Settings: low and high 0.4, no KL in the main setting.
    Sure of: the formula (official code).
    """
    return Recipe(advantage=Standardise(), gate=Geometric(low, high))


def cispo(high: float = 5.0) -> Recipe:
    """CISPO: the importance *weight* is capped, not the surrogate, so no token ever loses its gradient.

    ∇J = 1/Σ|yᵢ| Σᵢ Σₜ sg[min(ρₜ, high)] Aᵢ ∇ log πₜ

    Paper: MiniMax-M1, arXiv 2506.13585.
    Settings: only an upper cap; 5 in later studies (the paper does not print it), no KL.
    Sure of: the formula (paper text, code in three public trainers), the cap (later practice).
    """
    return Recipe(advantage=Standardise(), gate=Cap(high), aggregate=Mean(TOKEN))


def reinforce_pp(clip: float = 0.2, beta: float = 1e-2, gamma: float = 1.0) -> Recipe:
    """REINFORCE++: no critic and no group; token returns with the KL inside, whitened over the whole batch.

    uₜ = rₜ − β (log π_old − log π_ref);  Aₜ = whiten( Σ_{s≥t} γ^{s−t} uₛ );  clipped ratio, token mean

    Paper: REINFORCE++: Stabilizing Critic-Free Policy Optimization, arXiv 2501.03262.
    Settings: gamma 1, clip 0.2, beta 1e-3 to 1e-2.
    Sure of: the formula (official-lineage code).
    """
    return Recipe(
        advantage=Whiten(ReturnToGo(gamma, TOKEN)),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        reward=OnTokens() + beta * Drift(),
    )


def reinforce_pp_baseline(clip: float = 0.2, beta: float = 1e-2) -> Recipe:
    """REINFORCE++-baseline: the group mean as baseline, the scale from the whole batch, the KL as a k2 loss.

    Aᵢ = whiten( Rᵢ − mean );  J = 1/Σ|yᵢ| Σ [ min(ρₜAᵢ, clip(ρₜ)Aᵢ) − β ½(log π − log π_ref)² ]

    Paper: REINFORCE++: Stabilizing Critic-Free Policy Optimization, arXiv 2501.03262.
    Settings: clip 0.2, beta 1e-3 to 1e-2.
    Sure of: the formula (official-lineage code).
    """
    return Recipe(
        advantage=Whiten(Standardise(scale=False)),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        penalties=(Weighted(beta, KL("k2")),),
    )


def two_sided_grpo(clip: float = 0.2, delta: float = 4.0) -> Recipe:
    """Two-sided GRPO: a ratio that explodes on a bad answer is bounded as well.

    J = 1/G Σᵢ 1/|yᵢ| Σₜ min( min(ρₜ, δ)Aᵢ, clip(ρₜ, 1±clip)Aᵢ )

    Paper: INTELLECT-2, arXiv 2505.07291; the same effect as the dual clip of arXiv 1912.09729.
    Settings: clip 0.2, delta above 1 + clip (4 here), no KL.
    Sure of: the formula (code in a public trainer), delta (ours).
    """
    return Recipe(advantage=Standardise(), gate=Clip(clip, clip, dual=delta))


def ngrpo(best: float = 1.0, low: float = 0.16, high: float = 0.24) -> Recipe:
    """NGRPO: a virtual perfect answer joins the statistics of each group, so that a group that failed as a whole still learns.

    Aᵢ = (Rᵢ − mean S)/(std S + ε), S = {R₁ … R_G, best};  clip(ρ, 1−low, 1+high), token mean; perfect groups dropped

    Paper: NGRPO: Negative-enhanced Group Relative Policy Optimization, arXiv 2509.18851.
    Settings: best 1, low 0.16, high 0.24, G 8, no KL.
    Sure of: the formula (official code).
    """
    return Recipe(advantage=WithIdeal(best), gate=Clip(low, high), aggregate=Mean(TOKEN), admission=NotPerfect(best))
