"""Methods without a critic: a trajectory is compared with its siblings, or with nothing."""

from __future__ import annotations

from turnwise.algebra.advantage import LeaveOneOut, Outcome, Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.gate import Clip, Open
from turnwise.algebra.penalty import KL, Weighted
from turnwise.algebra.ratio import Importance, OnPolicy
from turnwise.algebra.reward import Environment, Overlong
from turnwise.levels import TOKEN, TRAJECTORY
from turnwise.recipe import Recipe
from turnwise.tasks.admission import Spread


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
    Deviation: no KL in the reward; verifiable rewards do without it.
    Sure of: the formula (official-lineage code).
    """
    return Recipe(advantage=LeaveOneOut(), ratio=OnPolicy(), gate=Open(), aggregate=Sum(TRAJECTORY))


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
