"""Methods with a critic: a value head says how well it stands before each token."""

from __future__ import annotations

from turnwise.algebra.advantage import GAE, LambdaReturn, Whiten
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.gate import Clip
from turnwise.algebra.penalty import CriticError, Weighted
from turnwise.algebra.ratio import Importance, PerToken
from turnwise.levels import TOKEN, TRAJECTORY, TURN
from turnwise.recipe import Recipe


def ppo(
    clip: float = 0.2, gamma: float = 1.0, lam: float = 0.95, value_clip: float = 0.5, value_weight: float = 1.0
) -> Recipe:
    """PPO: a critic, generalised advantages over the sampled tokens of all turns, a clipped ratio for each token.

    J = 1/N Σₜ min(ρₜAₜ, clip(ρₜ, 1±clip)Aₜ) − c ½ 1/N Σₜ max((v−G)², (clip(v, v_old±value_clip)−G)²)

    Paper: Proximal Policy Optimization Algorithms, arXiv 1707.06347.
    Settings: clip 0.2, gamma 1, lambda 0.95 to 1, value clip 0.5, advantages whitened over the batch.
    Sure of: the formula (official-lineage code).
    """
    return Recipe(
        advantage=Whiten(GAE(gamma, lam)),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        penalties=(Weighted(value_weight, CriticError(LambdaReturn(gamma, lam), value_clip), Mean(TOKEN)),),
    )


def turn_ppo(
    clip: float = 0.2, gamma: float = 1.0, lam: float = 1.0, value_clip: float = 0.5, value_weight: float = 1.0
) -> Recipe:
    """Turn-PPO: the ratio is judged a turn at a time, as an agent acts; each token keeps its own advantage.

    wᵏ = exp( 1/nₖ Σ_{t∈turn k} log ρₜ );  wₜ = sg[wᵏ] · πₜ/sg[πₜ];  J = mean over trajectories of 1/|y| Σₜ clipped(wₜ, Aₜ)

    Paper: ST-PPO: Stabilized Off-Policy PPO for Multi-Turn Agents Training, arXiv 2511.20718 (its first ingredient).
    Settings: clip 0.2, gamma and lambda 1, several epochs of mini-batches.
    Deviation: the paper leaves open whether the turn ratio is differentiated as a whole; here each token has its own gradient.
    Sure of: the turn ratio (paper text), the routing of the gradient (reconstructed).
    """
    return Recipe(
        advantage=Whiten(GAE(gamma, lam)),
        ratio=PerToken(Importance(TURN)),
        gate=Clip(clip, clip),
        aggregate=Mean(TRAJECTORY),
        penalties=(Weighted(value_weight, CriticError(LambdaReturn(gamma, lam), value_clip), Mean(TOKEN)),),
    )
