"""Critic-free policy gradients: the baseline comes from the group or the batch, or there is none."""

from __future__ import annotations

from dataclasses import replace

from turnwise.algebra.advantage import LeaveOneOut, Standardise, Whiten
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.control import Passes
from turnwise.algebra.gate import CappedWeight, Clip, Gate
from turnwise.algebra.penalty import KL, WeightedPenalty
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.ratio import Importance, OnPolicy, PerToken
from turnwise.algebra.reward import EnvironmentReward, NegativeReferenceKL, OnLastToken, OverlongPenalty
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome, ReturnToGo, SumOverTrajectory
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, Field, where
from turnwise.credit.fact import Fact
from turnwise.maths.lazy_torch import torch
from turnwise.recipes.recipe import Kind, Recipe
from turnwise.rollout.strategies import GREEDY_REWARD, GreedyBaseline
from turnwise.tasks.admission import NotPerfect, Spread

KIND = Kind.OBJECTIVE


def reinforce() -> Recipe:
    """REINFORCE: policy gradient with the return of an episode on each of its tokens, without a baseline.

    ∇J = E[ R · Σₜ ∇ log π(yₜ) ]

    Paper: Williams, Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning, 1992.
    Settings: no baseline, no ratio, sum over the tokens of a trajectory, mean over trajectories."""
    return Recipe(advantage=Outcome(), ratio=OnPolicy(), aggregate=Sum(TRAJECTORY))


def rloo() -> Recipe:
    """RLOO: leave-one-out baseline, the mean return of the *other* trajectories of the group; unbiased.

    Aᵢ = Rᵢ − 1/(G−1) Σ_{j≠i} Rⱼ;  ∇J = E[ Aᵢ Σₜ ∇ log π(yₜ) ]

    Paper: Back to Basics: Revisiting REINFORCE-Style Optimization for RLHF, arXiv 2402.14740.
    Settings: G 2-4 and a k1 KL of 0.03 inside the reward in the paper's preference runs.
    Deviation: no KL in the reward (`rloo_kl` has it); verifiable rewards do without it."""
    return Recipe(advantage=LeaveOneOut(), ratio=OnPolicy(), aggregate=Sum(TRAJECTORY))


def rloo_kl(beta: float = 0.03) -> Recipe:
    """RLOO with KL: leave-one-out baseline with a k1 KL penalty to the reference inside the reward.

    Rᵢ ← Rᵢ − β Σₜ (log π_old − log π_ref);  A and gradient as RLOO

    Paper: Back to Basics: Revisiting REINFORCE-Style Optimization for RLHF, arXiv 2402.14740.
    Settings: G 2-4, beta 0.03."""
    return replace(rloo(), advantage=LeaveOneOut(Outcome() + beta * SumOverTrajectory(NegativeReferenceKL())))


def grpo(clip: float = 0.2, beta: float = 0.04) -> Recipe:
    """GRPO: the group z-score of the return is the advantage of every token; clipped token ratio, KL to the reference.

    Aᵢ = (Rᵢ − mean) / (std + ε);  J = 1/G Σᵢ 1/|yᵢ| Σₜ [ min(ρₜAᵢ, clip(ρₜ, 1±clip)Aᵢ) − β k3ₜ ]

    Paper: DeepSeekMath, arXiv 2402.03300.
    Settings: G 64, clip 0.2, beta 0.04, one update per batch. Later practice: beta 0 to 0.001, G 8-16.
    Deviation: a group of one gets advantage 0, not its raw reward."""
    return Recipe(advantage=Standardise(), gate=Clip(clip, clip), penalties=(WeightedPenalty(beta, KL("k3")),))


def dr_grpo(clip: float = 0.2, length: float = 64) -> Recipe:
    """Dr.GRPO: GRPO without its two biased normalisers, 1/|y| and 1/std.

    Aᵢ = Rᵢ − mean;  J = 1/(G·L) Σᵢ Σₜ min(ρₜAᵢ, clip(ρₜ, 1±clip)Aᵢ),  L a constant

    Paper: Understanding R1-Zero-Like Training, arXiv 2503.20783.
    Settings: G 8, clip 0.2, no KL, L = the generation budget (3000 tokens in the paper; 64 here, for the short answers
    of small models)."""
    return Recipe(advantage=Standardise(scale=False), gate=Clip(clip, clip), aggregate=Sum(TRAJECTORY, length=length))


def dapo(low: float = 0.2, high: float = 0.28, limit: int = 192, cache: int = 64, dual: float | None = 10.0) -> Recipe:
    """DAPO: GRPO with a wider upper clip, dynamic sampling, a token-level mean and a soft overlong penalty.

    J = 1/Σ|yᵢ| Σᵢ Σₜ min(ρₜAᵢ, clip(ρₜ, 1−low, 1+high)Aᵢ);  R ← R + clip((limit − cache − n)/cache, −1, 0);
    groups with equal rewards are dropped and others sampled until the batch is full

    Paper: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv 2503.14476.
    Settings: low 0.2, high 0.28, G 16, 16 updates per batch, limit 20480, cache 4096, dual clip 10 in its scripts.
    Deviation: limit and cache scaled to short answers; 4 steps for a batch in place of 16."""
    return Recipe(
        advantage=Standardise(),
        gate=Clip(low, high, dual),
        aggregate=Mean(TOKEN),
        reward=EnvironmentReward() + OverlongPenalty(limit, cache),
        admission=Spread(),
        control=Passes(minibatches=4),
    )


def gspo(low: float = 3e-4, high: float = 4e-4) -> Recipe:
    """GSPO: sequence-level importance ratio (geometric mean of the token ratios) and sequence-level clipping.

    sᵢ = exp( 1/|yᵢ| Σₜ log ρₜ );  J = 1/G Σᵢ min(sᵢAᵢ, clip(sᵢ, 1−low, 1+high)Aᵢ)

    Paper: Group Sequence Policy Optimization, arXiv 2507.18071.
    Settings: low 3e-4, high 4e-4, four mini-batches per rollout batch, no KL."""
    return Recipe(
        advantage=Standardise(),
        ratio=Importance(TRAJECTORY, cap=10.0),
        gate=Clip(low, high),
        control=Passes(minibatches=4),
    )


def gspo_token(low: float = 3e-4, high: float = 4e-4) -> Recipe:
    """GSPO-token: sequence-level ratio with token-level gradients, so that advantages may differ between tokens.

    sᵢₜ = sg[sᵢ] · πₜ/sg[πₜ];  J = 1/G Σᵢ 1/|yᵢ| Σₜ min(sᵢₜAₜ, clip(sᵢₜ, 1−low, 1+high)Aₜ)

    Paper: Group Sequence Policy Optimization, arXiv 2507.18071.
    Settings: low 3e-4, high 4e-4, no KL."""
    return replace(gspo(low, high), ratio=PerToken(Importance(TRAJECTORY), cap=10.0))


class GeometricMeanClip(Gate):
    """w = exp( mean over the trajectory of clipped log ρ ): each token is clipped in log space, on one side
    by the sign of A."""

    low: float = 0.4
    high: float = 0.4

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        sequence = adv if adv.level >= TRAJECTORY else adv.mean(TRAJECTORY)
        log_rho = rho.log()
        clipped = where(sequence > 0, log_rho.clamp(high=self.high), log_rho.clamp(low=-self.low))
        return where(sequence.map(lambda a: a != 0), clipped, log_rho).mean(TRAJECTORY).exp()


def gmpo(low: float = 0.4, high: float = 0.4) -> Recipe:
    """GMPO: geometric mean of the token ratios, each clipped in log space on the side the advantage pushes to.

    cₜ = min(lₜ, high) where A > 0, max(lₜ, −low) where A < 0;  J = mean of Aᵢ exp( 1/|yᵢ| Σₜ cₜ )

    Paper: Geometric-Mean Policy Optimization, arXiv 2507.20673.
    Settings: low and high 0.4, no KL in the main setting."""
    return Recipe(advantage=Standardise(), gate=GeometricMeanClip(low, high), control=Passes(minibatches=4))


def cispo(high: float = 5.0) -> Recipe:
    """CISPO: caps and detaches the importance weight instead of clipping the surrogate, so every token keeps a gradient.

    ∇J = 1/Σ|yᵢ| Σᵢ Σₜ sg[min(ρₜ, high)] Aᵢ ∇ log πₜ

    Paper: MiniMax-M1, arXiv 2506.13585.
    Settings: only an upper cap; 5 in later studies (the paper does not print it), no KL."""
    return Recipe(
        advantage=Standardise(), gate=CappedWeight(high), aggregate=Mean(TOKEN), control=Passes(minibatches=4)
    )


def reinforce_pp(clip: float = 0.2, beta: float = 1e-2, gamma: float = 1.0) -> Recipe:
    """REINFORCE++: token-level returns with the KL in the reward, whitened over the batch; no critic, no group.

    uₜ = rₜ − β (log π_old − log π_ref);  Aₜ = whiten( Σ_{s≥t} γ^{s−t} uₛ );  clipped ratio, token mean

    Paper: REINFORCE++: Stabilizing Critic-Free Policy Optimization, arXiv 2501.03262.
    Settings: gamma 1, clip 0.2, beta 1e-3 to 1e-2."""
    return Recipe(
        advantage=Whiten(ReturnToGo(gamma, TOKEN)),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        reward=OnLastToken() + beta * NegativeReferenceKL(),
    )


def reinforce_pp_baseline(clip: float = 0.2, beta: float = 1e-2) -> Recipe:
    """REINFORCE++-baseline: group-mean baseline, whitening over the batch, and a k2 KL loss.

    Aᵢ = whiten( Rᵢ − mean );  J = 1/Σ|yᵢ| Σ [ min(ρₜAᵢ, clip(ρₜ)Aᵢ) − β ½(log π − log π_ref)² ]

    Paper: REINFORCE++: Stabilizing Critic-Free Policy Optimization, arXiv 2501.03262.
    Settings: clip 0.2, beta 1e-3 to 1e-2."""
    return Recipe(
        advantage=Whiten(Standardise(scale=False)),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        penalties=(WeightedPenalty(beta, KL("k2")),),
    )


def two_sided_grpo(clip: float = 0.2, delta: float = 4.0) -> Recipe:
    """Two-sided GRPO: GRPO with an upper bound on the ratio for negative advantages as well (dual clip).

    J = 1/G Σᵢ 1/|yᵢ| Σₜ min( min(ρₜ, δ)Aᵢ, clip(ρₜ, 1±clip)Aᵢ )

    Paper: INTELLECT-2, arXiv 2505.07291; the same effect as the dual clip of arXiv 1912.09729.
    Settings: clip 0.2, delta above 1 + clip (4 here), no KL."""
    return Recipe(advantage=Standardise(), gate=Clip(clip, clip, dual=delta), control=Passes(minibatches=4))


class StandardiseWithVirtualBest(Term):
    """The z-score in a group extended by a virtual member with value ``best``: a group that failed as a whole still
    learns."""

    best: float = 1.0
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        v = batch.reward.sum(TRAJECTORY)
        n = v.peer_count(GROUP)
        mean = (v.sum(GROUP) + self.best) / (n + 1)
        squares = ((v - mean) ** 2).sum(GROUP) + (self.best - mean) ** 2
        return (v - mean) / ((squares / n) ** 0.5 + self.eps)


def ngrpo(best: float = 1.0, low: float = 0.16, high: float = 0.24) -> Recipe:
    """NGRPO: adds a virtual perfect answer to the group statistics, so that a group that failed as a whole still learns.

    Aᵢ = (Rᵢ − mean S)/(std S + ε), S = {R₁ … R_G, best};  clip(ρ, 1−low, 1+high), token mean; perfect groups dropped

    Paper: NGRPO: Negative-enhanced Group Relative Policy Optimization, arXiv 2509.18851.
    Settings: best 1, low 0.16, high 0.24, G 8, no KL."""
    credit = StandardiseWithVirtualBest(best)
    return Recipe(
        advantage=credit,
        gate=Clip(low, high),
        aggregate=Mean(TOKEN),
        admission=NotPerfect(best),
        control=Passes(minibatches=4),
    )


class LengthWeightedBaseline(Term):
    """A = R − Σ n R / Σ n over the group, n the tokens of a trajectory: the baseline of least variance when the squared norm
    of a trajectory's score grows with its length. A trajectory alone has no baseline."""

    compares_peers = True

    def __call__(self, batch: Batch) -> Field:
        v = batch.reward.sum(TRAJECTORY)
        n = batch.tree.size(TOKEN, TRAJECTORY).to(v.x.dtype)
        baseline = (n * v).sum(GROUP) / n.sum(GROUP).clamp(low=1.0)
        return v - where(v.peer_count(GROUP) > 1, baseline, 0.0)


def opo(clip: float = 0.2) -> Recipe:
    """OPO: the reward baseline of least variance, a mean weighted by length.

    Aᵢ = Rᵢ − Σⱼ |yⱼ| Rⱼ / Σⱼ |yⱼ|;  token mean of the clipped surrogate

    Paper: On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585.
    Settings: exact on-policy updates, so the clip (0.2) never acts; no KL, no entropy bonus."""
    return Recipe(advantage=LengthWeightedBaseline(), gate=Clip(clip, clip), aggregate=Mean(TOKEN))


def remax() -> Recipe:
    """ReMax: the baseline is the return of one greedy rollout of the same task, which is not trained on.

    A = R(y) − R(ȳ), ȳ greedy;  ∇J = E[ A Σₜ ∇ log π(yₜ) ]

    Paper: ReMax: A Simple, Effective, and Efficient RL Method for Aligning LLMs, arXiv 2310.10505.
    Settings: one sampled and one greedy rollout by prompt; here the group size says how many are sampled.
    Deviation: no KL inside the reward. The whole return stands on each token; released code takes the reward to go, which is
    the same where only the outcome is rewarded."""
    lead = Outcome() - Fact(GREEDY_REWARD)
    return Recipe(advantage=lead, ratio=OnPolicy(), aggregate=Sum(TRAJECTORY), strategy=GreedyBaseline())


class BestAboveSecond(Term):
    """A = (largest − second largest)/(std + ε) for the best of a group, 0 for the others; the first of equals is the best.

    The gradient of the expected maximum of a group. ``scale=False`` leaves the division out."""

    compares_peers = True
    scale: bool = True
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        v = batch.reward.sum(TRAJECTORY)
        top = v.max(GROUP)
        at_top = where(v >= top, 1.0, 0.0)
        others = where(v >= top, -torch.inf, v).max(GROUP)
        lonely = at_top.sum(GROUP).map(lambda n: n == 1) & (others > -torch.inf)
        gap = where(lonely, top - where(lonely, others, 0.0), 0.0).to(v.x.dtype)
        gain = at_top.to(v.x.dtype) * gap
        return gain / (v.std(GROUP) + self.eps) if self.scale else gain


def grpo_passk(clip: float = 0.2, scale: bool = True, eps: float = 1e-6) -> Recipe:
    """GRPO for pass@k: only the best trajectory of a group is credited, with its lead over the second best.

    A = (max R − second max R)/(std + ε) for the best, 0 for the others

    Paper: Optimizing Language Models for Inference Time Objectives using Reinforcement Learning, arXiv 2503.19595.
    Settings: k is the group size; scale False leaves the division by std out."""
    return Recipe(advantage=BestAboveSecond(scale=scale, eps=eps), gate=Clip(clip, clip), aggregate=Mean(TOKEN))


class ScaleByInformative(Term):
    """A · n/m, n all trajectories of the batch and m those whose group has spread: the average counts only informative groups."""

    value: Term

    def __call__(self, batch: Batch) -> Field:
        outcome = Outcome()(batch)
        spread = where(outcome.max(GROUP) > outcome.min(GROUP), 1.0, 0.0).at(TRAJECTORY).x
        return self.value(batch) * (spread.numel() / max(1.0, float(spread.sum())))


def gpg() -> Recipe:
    """GPG: REINFORCE with the group's mean as baseline, rescaled by the share of groups that carry a gradient.

    A = α (R − mean), α = trajectories / trajectories in groups with spread;  ∇J = token mean of A ∇ log π

    Paper: GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning, arXiv 2504.02546.
    Settings: no std, no clip, no KL.
    Deviation: α counts groups with spread as the paper does; a public trainer counts non-zero rewards."""
    return Recipe(advantage=ScaleByInformative(Standardise(scale=False)), ratio=OnPolicy(), aggregate=Mean(TOKEN))
