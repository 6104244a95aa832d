"""Corrections for a sampler that differs from the learner's policy: other kernels, other precision, older weights.

μ sampled the data, π_old is the learner's policy before the first update on it, ρ = π/π_old, mismatch = π_old/μ.
"""

from __future__ import annotations

from dataclasses import replace

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.control import Passes
from turnwise.algebra.gate import CappedWeight, Clip, TruncatedImportance
from turnwise.algebra.gradient import LayerNoise
from turnwise.algebra.mask import Mask, MismatchWithin, OneSided
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.ratio import Importance, mismatch, moved
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal
from turnwise.maths.lazy_torch import torch
from turnwise.recipes.recipe import Kind, Recipe
from turnwise.rollout.strategies import DraftSelection, Precision

KIND = Kind.OBJECTIVE

INF = float("inf")

# clipped around the learner's own policy before the update, without a correction for the sampler
LEARNERS = Recipe(advantage=Standardise(), ratio=Importance(proximal=True), gate=Clip(0.2, 0.28), aggregate=Mean(TOKEN))


def tis(cap: float = 2.0, low: float = 0.2, high: float = 0.28) -> Recipe:
    """TIS: truncated importance sampling, a token weight min(π_old/μ, cap) on the clipped loss.

    L = Σₜ min(π_old/μ, cap) · clipped(π/π_old, A)

    Paper: Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025 (a public note).
    Settings: cap 2 (1.5 to 5), on a clip of 0.2/0.28 with token mean."""
    return replace(LEARNERS, gate=Clip(low, high) * TruncatedImportance(cap))


def sequence_tis(cap: float = 2.0, low: float = 0.2, high: float = 0.28) -> Recipe:
    """Sequence TIS: truncated importance sampling with one weight per trajectory; less bias, more variance.

    L = Σₜ min(Πₛ π_old/μ, cap) · clipped(π/π_old, A)

    Paper: Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025 (a public note).
    Settings: cap 2 to 10."""
    return replace(LEARNERS, gate=Clip(low, high) * TruncatedImportance(cap, TRAJECTORY))


def mis(low: float = 0.5, high: float = 2.0) -> Recipe:
    """MIS: masked importance sampling, drops tokens whose mismatch π_old/μ is out of bounds and weights the others.

    L = mean over kept tokens of (π_old/μ) · clipped(π/π_old, A), kept where low ≤ π_old/μ ≤ high

    Paper: When Speed Kills Stability, 2025 (a public note).
    Settings: bounds 0.5 and 2; dropped tokens do not count in the mean."""
    return replace(LEARNERS, gate=Clip(0.2, 0.28) * TruncatedImportance(INF), keep=MismatchWithin(low, high))


def sequence_mis(low: float = 0.5, high: float = 2.0) -> Recipe:
    """Sequence MIS: masked importance sampling by trajectory, drops those with a product ratio out of bounds.

    L = mean over kept tokens of W · clipped(π/π_old, A), W = Πₛ π_old/μ, kept where low ≤ W ≤ high

    Paper: When Speed Kills Stability, 2025 (a public note).
    Settings: bounds 0.5 and 2."""
    return replace(
        LEARNERS,
        gate=Clip(0.2, 0.28) * TruncatedImportance(INF, TRAJECTORY),
        keep=MismatchWithin(low, high, TRAJECTORY),
    )


def icepop(low: float = 0.5, high: float = 5.0) -> Recipe:
    """IcePop: zeroes tokens whose mismatch is out of bounds on either side; they still count in the mean.

    L = mean over all tokens of (π_old/μ)·1[low ≤ π_old/μ ≤ high] · clipped(π/π_old, A)

    Paper: Ring-1T, arXiv 2510.18855.
    Settings: bounds 0.5 and 5; dropped tokens still count in the mean."""
    return replace(LEARNERS, gate=(Clip(0.2, 0.28) * TruncatedImportance(INF)).where(MismatchWithin(low, high)))


def geo_rs(low: float = 0.999, high: float = 1.001) -> Recipe:
    """Geo-RS: rejects trajectories by the geometric mean of the mismatch.

    kept where low ≤ exp(meanₜ log μ/π_old) ≤ high; no weight

    Paper: When Speed Kills Stability, 2025 (a public note).
    Settings: bounds 0.999 and 1.001; bounds that are not symmetric are those of the sampler against the learner."""
    return replace(LEARNERS, keep=MismatchWithin(low, high, TRAJECTORY, mean=True, inverse=True))


class MismatchKLBelow(Mask):
    """Trajectories whose mean k3 of learner against sampler, mean (ρ − 1 − log ρ), is at most ``limit``."""

    reads = frozenset({Signal.PROXIMAL})
    limit: float = 1e-2

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return mismatch(view).map(lambda x: torch.expm1(x) - x).mean(TRAJECTORY) <= self.limit


def k3_rs(limit: float = 1e-2) -> Recipe:
    """K3-RS: rejects trajectories by the k3 estimate of the KL between learner and sampler.

    kept where meanₜ (r − 1 − log r) ≤ limit, r = π_old/μ; no weight

    Paper: When Speed Kills Stability, 2025 (a public note).
    Settings: limit 1e-3 to 1e-2."""
    return replace(LEARNERS, keep=MismatchKLBelow(limit))


class TokenVeto(Mask):
    """Trajectories in which no token has π_prox/μ below ``floor``."""

    reads = frozenset({Signal.PROXIMAL})
    floor: float = 1e-4

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return mismatch(view).exp().min(TRAJECTORY) >= self.floor


def veto(floor: float = 1e-4, cap: float = 2.0) -> Recipe:
    """Veto: rejects a trajectory with a single token that is nearly impossible for the learner; token TIS otherwise.

    kept where minₜ π_old/μ ≥ floor

    Paper: rollout correction of a public trainer (verl), 2025.
    Settings: floor 1e-4, cap 2."""
    return replace(LEARNERS, gate=Clip(0.2, 0.28) * TruncatedImportance(cap), keep=TokenVeto(floor))


class OffPolicySequenceMask(Mask):
    """Masks trajectories with A < 0 that have become unlikely, mean (log μ − log π) > limit; keeps all others."""

    reads_before_step = frozenset({Signal.LOGP})
    limit: float = 0.5

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        decrease = -moved(view).detach().mean(TRAJECTORY)
        sequence = adv if adv.level >= TRAJECTORY else adv.mean(TRAJECTORY)
        return ~((sequence < 0) & (decrease > self.limit))


def sequence_mask(limit: float = 0.5, low: float = 0.2, high: float = 0.28) -> Recipe:
    """Off-policy sequence mask: drops trajectories with A < 0 that the policy has moved away from.

    no gradient where A < 0 and meanₜ (log μ − log π) > limit; masked tokens still count in the token mean

    Paper: DeepSeek-V3.2, arXiv 2512.02556.
    Settings: limit about 0.5 (third-party), clip 0.2/0.28, token mean."""
    gate = Clip(low, high).where(OffPolicySequenceMask(limit))
    return Recipe(advantage=Standardise(), gate=gate, aggregate=Mean(TOKEN))


def decoupled_ppo(clip: float = 0.2, cap: float = 5.0) -> Recipe:
    """Decoupled PPO: clips around the proximal policy and weights by proximal over behaviour policy.

    L = Σₜ sg[π_prox/μ] · clipped(π/π_prox, A), tokens with π_prox/μ > cap masked

    Paper: AReaL, arXiv 2505.24298.
    Settings: clip 0.2, staleness 4 to 8, cap 5 in its code.
    Deviation: group z-score instead of ±5 rewards normalised over the batch."""
    return replace(
        LEARNERS,
        gate=(Clip(clip, clip) * TruncatedImportance(INF)).where(MismatchWithin(0.0, cap)),
        control=Passes(minibatches=4),
    )


def minirl(low: float = 0.2, high: float = 0.27, cap: float = 5.0) -> Recipe:
    """MiniRL: first-order surrogate of the sequence objective with one capped weight π/μ, a PPO-style mask, token sums.

    ∇J = 1/G Σᵢ Σₜ Mₜ sg[min(π/μ, cap)] Aᵢ ∇ log πₜ,  M = 0 where π/π_old has left 1−low … 1+high in the direction of A

    Paper: Stabilizing Reinforcement Learning with LLMs: Formulation and Practices, arXiv 2512.01374.
    Settings: low 0.2, high 0.27, cap 5 (recalled).
    Deviation: A = R − mean (whether the std is divided out is unconfirmed); routing replay does not apply to dense
    models."""
    mask = OneSided(low, high, ratio=Importance(proximal=True))
    return Recipe(
        advantage=Standardise(scale=False),
        gate=CappedWeight(cap).where(mask),
        aggregate=Sum(TRAJECTORY),
        control=Passes(minibatches=4),
    )


def alp(low: float = 0.5, high: float = 3.0, sigma: float = 1e-2, rate: float = 5e-4) -> Recipe:
    """ALP: noise on hidden layers while learning smooths the policy so that it covers the sampler; one wide clip.

    h_l ← h_l + σ_l e;  ρ = π_σ/μ;  J = token mean of min(ρA, clip(ρ, 1−low, 1+high)A)

    Paper: Adaptive Layerwise Perturbation, arXiv 2603.19470.
    Settings: sigma 1e-2 as in an example of its code (its README's 1e-6 does nothing), its rate 5e-4, low 0.5, high 3."""
    noise = LayerNoise(sigma, rate)
    return Recipe(advantage=Standardise(), gate=Clip(low, high), aggregate=Mean(TOKEN), smoothing=noise)


def alp_sequence(low: float = 0.5, high: float = 3.0, sigma: float = 1e-2, rate: float = 5e-4) -> Recipe:
    """Seq-ALP: layer noise with the geometric-mean ratio of the trajectory.

    s = exp(meanₜ log π_σ/μ);  J = mean of min(sA, clip(s, 1−low, 1+high)A)

    Paper: Adaptive Layerwise Perturbation, arXiv 2603.19470.
    Settings: as ALP."""
    return replace(alp(low, high, sigma, rate), ratio=Importance(TRAJECTORY), aggregate=Mean(TRAJECTORY))


# --------------------------------------------------------------------- precision


def jet_rl(clip: float = 0.2) -> Recipe:
    """Jet-RL: rollouts and learner use the same fp8 precision, so that fast rollouts stay on-policy.

    ŵ = scale · e4m3(w / scale) in both;  y = ĥ ŵ;  ∂/∂w = ∂/∂ŵ;  L as GRPO's

    Paper: Jet-RL: Enabling On-Policy FP8 Reinforcement Learning with Unified Precision Flow, arXiv 2601.14243.
    Settings: e4m3, one precision flow for both sides, wide master weights; the loss is GRPO's.
    Deviation: scales belong to outputs and tokens, not to blocks of 128; backward products and the LM head are not rounded. On a
    CPU only the weights are."""
    return Recipe(advantage=Standardise(), gate=Clip(clip, clip), precision=Precision(learner="fp8"))


def sol_rl(clip: float = 0.2, drafts: int = 0) -> Recipe:
    """Sol-RL (for text, fp8): samples many fp8 drafts, re-samples the best and worst in full precision, trains on those only.

    drafts ~ π̂ (fp8), n of them;  kept: the best and the worst k/2 by reward;  the same random numbers again under π;  L as GRPO's

    Paper: FP4 Explore, BF16 Train: Diffusion Reinforcement Learning via Efficient Rollout Scaling, arXiv 2604.06916.
    Settings: four drafts per kept trajectory are ours (drafts 0), clip 0.2.
    Deviation: for language models; a seed fixes the random numbers, not the text, so a re-sampled draft may diverge.
    fp8 instead of NVFP4. Advantages are z-scores among the kept."""
    drafted = Precision(drafts="fp8")
    return Recipe(advantage=Standardise(), gate=Clip(clip, clip), strategy=DraftSelection(drafts), precision=drafted)
