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
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY
from turnwise.credit.comparison import GapOrderLoss, RevisionGroups, RevisionLoss
from turnwise.credit.pair_losses import (
    BlendedLoss,
    LogOddsScore,
    NoiseContrastiveLoss,
    ProspectLoss,
    ReverseKLLoss,
    SortedPreferenceLoss,
    anchored_loss,
)
from turnwise.credit.pairs import DirectionalReward, LabelledPairs, WinRate, answers_from, labelled_from, pairs_from
from turnwise.credit.preference import (
    FlipCorrected,
    LabelSmoothed,
    LogisticLoss,
    LogRatioScore,
    MixedReferenceScore,
    PreferenceLoss,
    SquaredMarginLoss,
    preference_loss,
)
from turnwise.credit.selectors import BestOfGroup
from turnwise.recipes.kind import Kind, declares
from turnwise.recipes.pairwise import imitating_chosen, of_pairs, penalised
from turnwise.recipes.recipe import Recipe

KIND = Kind.PREFERENCE

INF = float("inf")


def dpo(
    kind: Literal["sigmoid", "hinge", "ipo", "bco", "sppo"] = "sigmoid",
    beta: float = 0.1,
    smoothing: float = 0.0,
    pairs: Literal["told", "formed"] = "told",
) -> Recipe:
    """DPO: the log-ratio to the reference is an implicit reward; a logistic loss ranks chosen above rejected.

    s = Σₜ log π/π_ref, d = s(w) − s(l);  sigmoid: −log σ(βd);  hinge: [1 − βd]₊;  ipo: (d̄ − 1/2β)², means over tokens;
    bco: −log σ(βs_w) − log σ(−βs_l);  sppo: (s_w − 1/2β)² + (s_l + 1/2β)²;  smoothing ε: (1 − ε)ℓ(w, l) + εℓ(l, w)

    Paper: Direct Preference Optimization, arXiv 2305.18290; the variants under the names of their kinds.
    Settings: beta 0.1, lr 5e-7 to 1e-6, batch 64.
    Sure of: the formulas (paper text and public code).
    """
    selected = pairs_from(pairs)
    return penalised(preference_loss(kind, beta, smoothing, selected), selected)


def rdpo(flip: float = 0.1, beta: float = 0.1, bound: float = INF, pairs: Literal["told", "formed"] = "told") -> Recipe:
    """rDPO: DPO with an unbiased correction for labels flipped at a known rate.

    ℓ = [(1 − ε)(−log σ(βd)) − ε(−log σ(−βd))] / (1 − 2ε), d held within ±bound

    Paper: Provably Robust DPO: Aligning Language Models with Noisy Feedback, arXiv 2403.00409.
    Settings: flip 0.1, beta 0.1. The loss is unbounded below as d grows: bound d, keep beta small, or stop early.
    Sure of: the formula (paper text).
    """
    return of_pairs(FlipCorrected(LogisticLoss(beta), flip, bound), pairs)


def simpo(beta: float = 2.0, gamma: float = 1.0, pairs: Literal["told", "formed"] = "told") -> Recipe:
    """SimPO: logistic loss on length-normalised log-probabilities with a margin, without a reference.

    ℓ = −log σ( β mean log π(w) − β mean log π(l) − γ )

    Paper: SimPO: Simple Preference Optimization with a Reference-Free Reward, arXiv 2405.14734.
    Settings: beta 2 to 2.5 (10 for newer models), gamma about half of it, lr 3e-7 to 1e-6.
    Sure of: the formula (paper text and official code).
    """
    return of_pairs(LogisticLoss(beta, gamma), pairs, LogRatioScore(mean=True, reference=False))


def inpo(eta: float = 0.0075, tau: float = 0.0025, pairs: Literal["told", "formed"] = "formed") -> Recipe:
    """INPO: self-play toward a Nash policy; squared loss with a reference between the frozen policy and the sampler.

    h = Δ log π − (τ/η) Δ log π_ref − (1 − τ/η) Δ log μ, Δ = chosen − rejected;  ℓ = (h − 1/2η)²

    Paper: Iterative Nash Policy Optimization, arXiv 2407.00617.
    Settings: tau a third of eta, eta 0.0075 (recalled), 8 samples a task, best against worst, 3 rounds.
    Deviation: a round is a batch; labelled pairs need the log-probabilities of their sampler.
    Sure of: the formula (recalled, its fixed point and both limits checked), the constants (recalled).
    """
    return of_pairs(SquaredMarginLoss(eta), pairs, MixedReferenceScore(eta, tau))


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


def dpa(heads: tuple[str, ...] = ("helpfulness", "verbosity"), answers: Literal["told", "formed"] = "told") -> Recipe:
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


# ------------------------------------------------------------- losses of one pair


def exo(beta: float = 0.1, eps: float = 1e-3, pairs: Literal["told", "formed"] = "told") -> Recipe:
    """EXO: reverse KL from the policy's probability of the order to the label's, instead of DPO's forward KL.

    q = σ(βd);  ℓ = q log(q / (1 − ε)) + (1 − q) log((1 − q) / ε)

    Paper: Towards Efficient Exact Optimization of Language Model Alignment, arXiv 2402.00856.
    Settings: eps 1e-3, beta 0.1.
    Deviation: two answers a prompt (its pairwise form).
    Sure of: the formula (released code of a public trainer).
    """
    return of_pairs(ReverseKLLoss(beta, eps), pairs)


def nca(beta: float = 0.1, pairs: Literal["told", "formed"] = "told") -> Recipe:
    """NCA: noise contrastive alignment; classifies each answer against the reference, so the chosen does not get rarer.

    ℓ = −log σ(βs_w) − ½ log σ(−βs_w) − ½ log σ(−βs_l)

    Paper: Noise Contrastive Alignment of Language Models with Explicit Rewards, arXiv 2402.05369.
    Settings: beta 0.01 in the paper, 0.1 here as for the others.
    Deviation: two answers a prompt (its pairwise form).
    Sure of: the formula (released code of a public trainer).
    """
    return of_pairs(NoiseContrastiveLoss(beta), pairs)


def apo(
    anchor: Literal["zero", "down"] = "zero", beta: float = 0.1, pairs: Literal["told", "formed"] = "told"
) -> Recipe:
    """APO: anchored preference optimisation; says for each side whether it should rise or fall against the reference.

    zero: ℓ = 1 − σ(βs_w) + σ(βs_l), for data better than the model;  down: ℓ = σ(βs_w) + 1 − σ(βd), for worse data

    Paper: Anchored Preference Optimization and Contrastive Revisions, arXiv 2408.06266.
    Settings: beta 0.1.
    Sure of: the formulas (paper text, released code of a public trainer).
    """
    return of_pairs(anchored_loss(anchor, beta), pairs)


def discopop(beta: float = 0.05, tau: float = 0.05, pairs: Literal["told", "formed"] = "told") -> Recipe:
    """DiscoPOP: a discovered blend of the logistic and the exponential loss.

    x = βd, m = σ(x/τ);  ℓ = (1 − m)(−log σ(x)) + m exp(−x)

    Paper: Discovering Preference Optimization Algorithms with and for Large Language Models, arXiv 2406.08414.
    Settings: tau 0.05, beta 0.05. Just above d = 0 the loss rises with d: there it lowers the margin.
    Sure of: the formula (paper text, released code of a public trainer).
    """
    return of_pairs(BlendedLoss(beta, tau), pairs)


def aot(
    beta: float = 0.1, smoothing: float = 0.0, paired: bool = True, pairs: Literal["told", "formed"] = "told"
) -> Recipe:
    """AOT: alignment by optimal transport; the distribution of scores dominates another instead of each pair's order.

    d₍ₖ₎ = k-th smallest margin of the policy − k-th smallest of the reference (unpaired: of chosen − of rejected);
    ℓ = −log σ(βd₍ₖ₎)

    Paper: Distributional Preference Alignment of LLMs via Optimal Transport, arXiv 2406.05882.
    Settings: beta 0.1.
    Deviation: sorts over the whole optimiser step, not over a device's micro-batch.
    Sure of: the formula (released code of a public trainer).
    """
    selected = pairs_from(pairs)
    cost = SortedPreferenceLoss(LabelSmoothed(LogisticLoss(beta), smoothing), paired, selected)
    return penalised(cost, selected)


def kto(
    beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0, pairs: Literal["told", "formed"] = "told"
) -> Recipe:
    """KTO: values each answer alone by a prospect-theoretic utility around a reference point.

    ℓ = λ_D (1 − σ(β(s − z))) if chosen, λ_U (1 − σ(β(z − s))) if rejected;  z = [mean s]₊, detached

    Paper: KTO: Model Alignment as Prospect Theoretic Optimization, arXiv 2402.01306.
    Settings: beta 0.1, weights 1 (keep λ_D n_D / λ_U n_U within 1 to 4/3).
    Deviation: z is estimated from the labelled answers themselves, not from answers paired with other prompts. Answers come as
    pairs, or one by one with a label (rows of prompt, completion and label).
    Sure of: the utility (paper text), the estimate of z (ours).
    """
    selected = labelled_from(pairs)
    cost = ProspectLoss(beta, desirable, undesirable, selected)
    return penalised(cost, selected, Mean(TRAJECTORY))


def orpo(weight: float = 0.1, pairs: Literal["told", "formed"] = "told") -> Recipe:
    """ORPO: supervised learning of the chosen answer plus a log-odds ratio against the rejected one; no reference.

    L = token mean of −log π(w) + λ mean −log σ(log odds(w) − log odds(l)),  odds p/(1 − p), log p = mean log π

    Paper: ORPO: Monolithic Preference Optimization without Reference Model, arXiv 2403.07691.
    Settings: weight 0.1, lr 8e-6.
    Deviation: the supervised term covers the answer, not the prompt.
    Sure of: the formula (paper text).
    """
    return imitating_chosen(LogisticLoss(1.0), pairs, LogOddsScore(), weight)


def cpo(beta: float = 0.1, imitation: float = 1.0, pairs: Literal["told", "formed"] = "told") -> Recipe:
    """CPO: contrastive preference optimisation; DPO with a uniform reference, plus supervised learning of the chosen answer.

    L = mean −log σ(β(log π(w) − log π(l))) + α · token mean of −log π(w)

    Paper: Contrastive Preference Optimization, arXiv 2401.08417.
    Settings: beta 0.1, imitation 1.
    Sure of: the formula (paper text).
    """
    return imitating_chosen(LogisticLoss(beta), pairs, LogRatioScore(reference=False), imitation=imitation)
