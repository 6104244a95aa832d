"""Preference learning: pairs labelled by data, or the best and worst of a group of rollouts.

A labelled pair is a group of two with the facts chosen 1 and 0. Every method logs the margin and the accuracy of its
score, and the ranking accuracy of the policy itself.
"""

from __future__ import annotations

from typing import Literal

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.gate import Clip
from turnwise.algebra.penalty import NegativeLogLikelihood, WeightedPenalty
from turnwise.algebra.ratio import OnPolicy
from turnwise.algebra.value import Constant
from turnwise.core.levels import GROUP, TOKEN
from turnwise.credit.comparison import GapOrderLoss, RevisionGroups, RevisionLoss
from turnwise.credit.pairs import DirectionalReward, LabelledPairs, WinRate, answers_from, pairs_from
from turnwise.credit.preference import (
    FlipCorrected,
    LogisticLoss,
    LogRatioScore,
    MixedReferenceScore,
    PreferenceLoss,
    SquaredMarginLoss,
    preference_loss,
)
from turnwise.credit.selectors import BestOfGroup
from turnwise.recipes.kind import Kind, declares
from turnwise.recipes.recipe import Recipe

KIND = Kind.PREFERENCE

INF = float("inf")
Source = Literal["told", "formed"]


def dpo(
    kind: Literal["sigmoid", "hinge", "ipo", "bco", "sppo"] = "sigmoid",
    beta: float = 0.1,
    smoothing: float = 0.0,
    pairs: Source = "told",
) -> Recipe:
    """DPO: the log-ratio to the reference is an implicit reward; a logistic loss ranks chosen above rejected.

    s = Σₜ log π/π_ref, d = s(w) − s(l);  sigmoid: −log σ(βd);  hinge: [1 − βd]₊;  ipo: (d̄ − 1/2β)², means over tokens;
    bco: −log σ(βs_w) − log σ(−βs_l);  sppo: (s_w − 1/2β)² + (s_l + 1/2β)²;  smoothing ε: (1 − ε)ℓ(w, l) + εℓ(l, w)

    Paper: Direct Preference Optimization, arXiv 2305.18290; the variants under the names of their kinds.
    Settings: beta 0.1, lr 5e-7 to 1e-6, batch 64.
    Sure of: the formulas (paper text and public code).
    """
    selected = pairs_from(pairs)
    penalty = WeightedPenalty(1.0, preference_loss(kind, beta, smoothing, selected), Mean(GROUP), rows=selected)
    return Recipe(advantage=Constant(0.0), ratio=OnPolicy(), penalties=(penalty,))


def rdpo(flip: float = 0.1, beta: float = 0.1, bound: float = INF, pairs: Source = "told") -> Recipe:
    """rDPO: DPO with an unbiased correction for labels flipped at a known rate.

    ℓ = [(1 − ε)(−log σ(βd)) − ε(−log σ(−βd))] / (1 − 2ε), d held within ±bound

    Paper: Provably Robust DPO: Aligning Language Models with Noisy Feedback, arXiv 2403.00409.
    Settings: flip 0.1, beta 0.1. The loss is unbounded below as d grows: bound d, keep beta small, or stop early.
    Sure of: the formula (paper text).
    """
    selected = pairs_from(pairs)
    cost = PreferenceLoss(FlipCorrected(LogisticLoss(beta), flip, bound), pairs=selected)
    return Recipe(
        advantage=Constant(0.0), ratio=OnPolicy(), penalties=(WeightedPenalty(1.0, cost, Mean(GROUP), rows=selected),)
    )


def simpo(beta: float = 2.0, gamma: float = 1.0, pairs: Source = "told") -> Recipe:
    """SimPO: logistic loss on length-normalised log-probabilities with a margin, without a reference.

    ℓ = −log σ( β mean log π(w) − β mean log π(l) − γ )

    Paper: SimPO: Simple Preference Optimization with a Reference-Free Reward, arXiv 2405.14734.
    Settings: beta 2 to 2.5 (10 for newer models), gamma about half of it, lr 3e-7 to 1e-6.
    Sure of: the formula (paper text and official code).
    """
    selected = pairs_from(pairs)
    cost = PreferenceLoss(LogisticLoss(beta, gamma), LogRatioScore(mean=True, reference=False), selected)
    return Recipe(
        advantage=Constant(0.0), ratio=OnPolicy(), penalties=(WeightedPenalty(1.0, cost, Mean(GROUP), rows=selected),)
    )


def inpo(eta: float = 0.0075, tau: float = 0.0025, pairs: Source = "formed") -> Recipe:
    """INPO: self-play toward a Nash policy; squared loss with a reference between the frozen policy and the sampler.

    h = Δ log π − (τ/η) Δ log π_ref − (1 − τ/η) Δ log μ, Δ = chosen − rejected;  ℓ = (h − 1/2η)²

    Paper: Iterative Nash Policy Optimization, arXiv 2407.00617.
    Settings: tau a third of eta, eta 0.0075 (recalled), 8 samples a task, best against worst, 3 rounds.
    Deviation: a round is a batch; labelled pairs need the log-probabilities of their sampler.
    Sure of: the formula (recalled, its fixed point and both limits checked), the constants (recalled).
    """
    selected = pairs_from(pairs)
    cost = PreferenceLoss(SquaredMarginLoss(eta), MixedReferenceScore(eta, tau), selected)
    return Recipe(
        advantage=Constant(0.0), ratio=OnPolicy(), penalties=(WeightedPenalty(1.0, cost, Mean(GROUP), rows=selected),)
    )


@declares(Kind.CREDIT)
def spo_minimax(clip: float = 0.2) -> Recipe:
    """SPO (minimax): the reward is the win rate against the rest of the group; then GRPO without KL.

    R = mean over the other members of P(this ≻ that);  A = z-score of R;  clipped

    Paper: A Minimaximalist Approach to Reinforcement Learning from Human Feedback, arXiv 2401.04056.
    Settings: any RL update of this reward; here clip 0.2.
    Deviation: the others are those of the group, not of a queue. Where no facts `beats_0`, `beats_1` ... record the
    probabilities, the larger return wins.
    Sure of: the reward (recalled).
    """
    return Recipe(advantage=Standardise(WinRate()), gate=Clip(clip, clip))


def srpo(beta: float = 0.1, alpha: float = 0.5) -> Recipe:
    """SRPO (self-improving): trains answers and revisions jointly, so that little is left to revise.

    (1 − α)(½ − (β/2)[r(w|l) − r(l|w) + r(w) − r(l)])² + α[(½ − β[r(w|l) − r(l|l)])² + (½ − β[r(w|w) − r(l|w)])²]

    Paper: Self-Improving Robust Preference Optimization, arXiv 2406.01660.
    Settings: up to five revisions when used; beta 0.1 and alpha 0.5 are ours.
    Deviation: data holds groups of six: chosen and rejected (fact chosen 1, 0), each as an answer, as a revision of the
    rejected and as a revision of the chosen (fact revises 0, 1, 2); the prompt of a revision shows what is revised.
    Sure of: the optimum's identities (checked), where the constants stand in the loss (reconstructed).
    """
    cost = WeightedPenalty(1.0, RevisionLoss(beta, alpha), Mean(GROUP), rows=RevisionGroups())
    return Recipe(advantage=Constant(0.0), ratio=OnPolicy(), penalties=(cost,))


def mapl(beta: float = 0.1, intra: float = 1.0, inter: float = 1.0) -> Recipe:
    """MAPL: DPO, plus preferences of one answer under two prompts, plus an order of margins by quality gap.

    L = DPO + λ₁ mean −log σ(β[s(y|x⁺) − s(y|x⁻)]) + λ₂ mean −log σ(m(wide) − m(narrow)),  m = β(s_w − s_l)

    Paper: MAPL: Multi-Level Aware Preference Learning, 2025.
    Settings: beta 0.1; both weights 1 (ours).
    Deviation: an answer y under x⁺ and x⁻ is a pair of its own (chosen 1: its own prompt, 0: the changed one) with the
    fact within 1; fact family groups the pairs of one origin, fact gap is the quality gap of a pair.
    Sure of: the idea (abstract), its form (reconstructed).
    """
    across, within = LabelledPairs(without="within"), LabelledPairs(having="within")
    base = WeightedPenalty(1.0, PreferenceLoss(LogisticLoss(beta), pairs=across), Mean(GROUP), rows=across)
    prompts = WeightedPenalty(intra, PreferenceLoss(LogisticLoss(beta), pairs=within), Mean(GROUP), rows=within)
    wider = WeightedPenalty(inter, GapOrderLoss(beta, across), Mean(GROUP), rows=across)
    return Recipe(advantage=Constant(0.0), ratio=OnPolicy(), penalties=(base, prompts, wider))


def dpa(heads: tuple[str, ...] = ("helpfulness", "verbosity"), answers: Source = "told") -> Recipe:
    """DPA: the prompt states a direction among several rewards; imitates the best answer along it.

    kept: argmax vᵀr among the answers to one prompt;  L = −token mean of log π over the kept

    Paper: Arithmetic Control of LLMs for Diverse User Preferences: Directional Preference Alignment, arXiv 2402.18571.
    Settings: v = (cos φ, sin φ), |φ| at most 45°, stated in the prompt as whole hundredths.
    Deviation: one round over the answers of a file, each prompt in four directions; r are their ratings instead of a
    reward model's. answers=formed: the policy's own, for an environment that samples v, states it and records it as
    facts `toward_NAME`.
    Sure of: the rule (paper text), how many samples and rounds (recalled).
    """
    best = BestOfGroup(answers_from(answers), DirectionalReward(heads))
    penalty = WeightedPenalty(1.0, NegativeLogLikelihood(), Mean(TOKEN), rows=best)
    return Recipe(advantage=Constant(0.0), ratio=OnPolicy(), penalties=(penalty,))
