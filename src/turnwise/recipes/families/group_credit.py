"""Group-level credit: peers, baselines and scales of a trajectory's return, and several rewards in one advantage."""

from __future__ import annotations

from typing import Literal

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.gate import Clip
from turnwise.algebra.penalty import KL, SquaredLogRatio, WeightedPenalty
from turnwise.algebra.value import Outcome
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY
from turnwise.credit.baselines import (
    AtMedian,
    DifficultyWeighted,
    LeaveOneOutProbeBaseline,
    ProbeBaseline,
    StandardiseByMeanDeviation,
    StandardiseByMedian,
)
from turnwise.credit.history import CappedEntropyBonus, RetentionByKL
from turnwise.credit.likelihood import NoveltyBonus, PairwiseCalibration, UnlikelinessReward
from turnwise.credit.multi_reward import (
    BetaNormalised,
    CentredOverTotalStd,
    StandardiseOverBatch,
    SumOfStandardised,
    UnitOutcome,
    WeightedRewards,
)
from turnwise.credit.selectors import BestOfGroup, Not
from turnwise.credit.sets import ClipEachPart, ConsistencyAdvantage, DisagreementWeighted, SetAdvantage
from turnwise.credit.stratified import (
    Blend,
    ConditionalAdvantage,
    LengthDampedGroups,
    PublicBaseline,
    SameCount,
    SameFact,
)
from turnwise.credit.tail_risk import TailRisk
from turnwise.credit.tracker import SuccessTracker
from turnwise.recipes.kind import Kind
from turnwise.recipes.recipe import Recipe
from turnwise.tasks.budgets import Fixed
from turnwise.tasks.samplers import CyclePool

KIND = Kind.CREDIT


def mc_grpo(eps: float = 1e-3, rescale: bool = False, fallback: bool = False, clip: float = 0.2) -> Recipe:
    """MC-GRPO: median-centred advantages for small groups; one extra rollout serves as the median and is not trained on.

    m = median R, d = median |R − m|;  A = (R − m)/(d + ε);  one rollout at the median is not trained on

    Paper: MC-GRPO: Median-Centered GRPO for Small-Rollout RL, arXiv 2601.22582.
    Settings: groups of G + 1 (9 here), eps 1e-3. rescale is the GSM8K script's n/(members with A ≠ 0); fallback takes d
    = 1 where d is 0: with rewards of 0 and 1 it always is, and the minority gets ±1/eps, left to gradient clipping. Of
    an even group the median is the lower of the middle two, so that it is a member there, too.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=StandardiseByMedian(eps, rescale, fallback),
        gate=Clip(clip, clip),
        keep=Not(BestOfGroup(AtMedian())),
        budget=Fixed(8, 9),
    )


def bnpo(
    rewards: tuple[str, ...] | None = None,
    bottom: float = 0.0,
    top: float = 1.0,
    low: float = 0.2,
    high: float = 0.28,
    dual: float | None = 10.0,
) -> Recipe:
    """BNPO: normalises binary rewards by a Beta density fitted to the success rates of the batch.

    A = (R − p)/Beta(p; α, β), α = max(1, 1 + a/3), β = max(1, 1 + b/3);  (a, b) by moments of p over the tasks

    Paper: BNPO: Beta Normalization Policy Optimization, arXiv 2506.02864.
    Settings: G 16, 32 tasks, clip 0.2/0.28, dual clip 10, token sums, no KL. rewards: each named one by itself, then the
    mean; () takes all that are named, None the outcome. bottom and top: what counts as 0 and as 1.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=BetaNormalised(WeightedRewards(rewards), bottom, top),
        gate=Clip(low, high, dual),
        aggregate=Sum(TRAJECTORY),
    )


def gdpo(
    rewards: tuple[str, ...] = (),
    weights: tuple[float, ...] = (),
    eps: float = 1e-4,
    whiten: Literal["rows", "tokens", "none"] = "rows",
    clip: float = 0.2,
) -> Recipe:
    """GDPO: standardises each reward by itself before summing (decoupled normalisation), then whitens over the batch.

    A = Σₖ wₖ (Rᵏ − meanᵏ)/(stdᵏ + ε), then (A − mean)/(std + ε) over the batch

    Paper: GDPO: Group reward-Decoupled Normalization Policy Optimization, arXiv 2601.05242.
    Settings: all named rewards with weight 1, eps 1e-4; whiten by rows or, as the other released version, by tokens. A
    reward a trajectory was not given counts as 0.
    Deviation: to condition one reward on another, let the environment name the conditioned one.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=StandardiseOverBatch(SumOfStandardised(WeightedRewards(rewards, weights), eps), whiten, eps),
        gate=Clip(clip, clip),
    )


def dvao(
    rewards: tuple[str, ...] = (), weights: tuple[float, ...] = (), eps: float = 1e-6, clip: float = 0.2
) -> Recipe:
    """DVAO: weights each reward by its std within the group.

    A = Σₖ wₖ (Rᵏ − meanᵏ) / (Σₖ wₖ stdᵏ + ε)

    Paper: Dynamic Variance-adaptive Advantage Optimization for Multi-reward RL, arXiv 2605.25604.
    Settings: all named rewards with weight 1, G 16.
    Sure of: the formula (third-party notes quoting the method section); eps is ours.
    """
    return Recipe(advantage=CentredOverTotalStd(WeightedRewards(rewards, weights), eps), gate=Clip(clip, clip))


def risk_po(
    bundle: int = 5,
    a: float = 0.2,
    b: float = 0.8,
    omega: float = 1.5,
    eta: float = 0.1,
    mode: Literal["batch", "track", "mix"] = "track",
    share: Literal["uniform", "std", "sum-mean", "score"] = "sum-mean",
    baseline: bool = False,
    eps: float = 1e-6,
    clip: float = 0.2,
) -> Recipe:
    """RiskPO: risk-sensitive advantage from the quantiles of bundle scores, with emphasis on the lower tail.

    g = (ω g_low + g_mid)/(ω + 1) over the std of the bundle's scores, by the quantiles q_a, q_b; shared out by R − mean

    Paper: RiskPO: Risk-based Policy Optimization via Verifiable Reward, arXiv 2510.00911.
    Settings: bundles of 5, a 0.2, b 0.8 (0.9 on easy tasks), omega 1.5, eta 0.1, tracked quantiles.
    Deviation: tasks are bundled at random, not in batch order, so that packing does not change the credit.
    Sure of: the formula (official code), clip (ours).
    """
    return Recipe(advantage=TailRisk(bundle, a, b, omega, eta, mode, share, baseline, eps), gate=Clip(clip, clip))


def canon(
    mu: float | None = 1.0,
    alpha: float = 1.0,
    metric: Literal["entropy", "length"] = "entropy",
    low: float = 0.2,
    high: float = 0.28,
    length: float = 64,
) -> Recipe:
    """CANON: conditional advantage, each half of a group (by entropy or length) against the other half's mean.

    A = μ (R − mean of the other half) + (1 − μ)(R − mean of the own half)

    Paper: CANON: Conditional Advantage Estimation, arXiv 2509.23962.
    Settings: mu 1 or 0.5, or None for the batch's mean reward; alpha 1 (below 1, with length, long answers lose); G 16,
    clip 0.2/0.28, no KL, a constant length (8192 in the paper, 64 here).
    Deviation: no cosine schedule of mu.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=ConditionalAdvantage(mu, alpha, metric),
        gate=Clip(low, high),
        aggregate=Sum(TRAJECTORY, length=length),
    )


def stratified_grpo(
    alpha: float = 0.8, by: Literal["tool_calls", "turns"] = "tool_calls", eps: float = 1e-6, clip: float = 0.2
) -> Recipe:
    """Stratified GRPO: z-score within strata of equal structure, blended with the z-score of the group.

    A = α z-score among those with as many calls + (1 − α) z-score among the group

    Paper: Stratified GRPO: Handling Structural Heterogeneity in RL of LLM Search Agents, arXiv 2510.06214.
    Settings: alpha 0.8.
    Sure of: the formula (third-party notes), alpha (unverified).
    """
    return Recipe(
        advantage=Blend(Standardise(Outcome(), SameCount(by), eps=eps), Standardise(eps=eps), share=alpha),
        gate=Clip(clip, clip),
    )


def dgpo_difficulty(
    softness: float = 2.0,
    eps: float = 1e-4,
    summed: bool = False,
    accuracy: str | None = None,
    valid_tokens: bool = True,
    clip: float = 0.2,
) -> Recipe:
    """DGPO (difficulty): scales by the mean absolute deviation, then weights hard tasks more.

    A = λ (R − mean)/(mean |R − mean| + ε), λ = B softmax(−p/softness) over the B tasks whose rewards differ

    Paper: Harder Is Better (MathForge), arXiv 2601.20614.
    Settings: softness 2, eps 1e-4, G 8; summed: eps beside the sum of deviations (released code). accuracy: the reward whose mean
    is p, None for the outcome. The mean runs over tokens of these tasks (valid_tokens). Rewrites: --env calculator,rewrites=3.
    Sure of: the formula (official code).
    """
    term = StandardiseByMeanDeviation(Outcome(), eps, summed)
    return Recipe(
        advantage=DifficultyWeighted(term, softness, accuracy, valid_tokens),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
    )


def capo_calibration(
    tau: float = 0.6, high: float = 2.5, low: float = 1.05, scaled: bool = False, clip: float = 0.2
) -> Recipe:
    """CAPO (calibration): pairwise credit that makes right answers likelier than wrong ones of the group.

    Aᵢ = Σ over wrong j of σ((lⱼ − lᵢ)/τ) for a right i, −Σ over right j of σ((lᵢ − lⱼ)/τ) for a wrong one; l = mean log π

    Paper: Calibration-Aware Policy Optimization for Reasoning LLMs, arXiv 2604.12632.
    Settings: tau 0.6 (1.5B) or 0.5 (7B); right answers of reference perplexity above 2.5 and wrong ones below 1.05 get 0;
    G 8, clip 0.2, no KL. scaled keeps the derivative's 1/τ.
    Deviation: l is taken from the log-probabilities of sampling.
    Sure of: the formula up to its scale (third-party notes).
    """
    return Recipe(advantage=PairwiseCalibration(tau, high, low, scaled), gate=Clip(clip, clip))


def copo(b: float = 0.5, k: float = 1.0, forced: bool = False, clip: float = 0.2, eps: float = 1e-6) -> Recipe:
    """COPO: blends the group advantage with an across-task consistency advantage by the entropy of the group's answers.

    J = w J_local + (1 − w) J_across, w = σ(k (H − b)), H the entropy of the answers in bits; A_across = z-score over the
    tasks of mean R (1 − κH), κ = (1 − 1/G)/log₂ G; two clipped objectives

    Paper: COPO: Consistency-Aware Policy Optimization, arXiv 2508.04138.
    Settings: b 0.5, k 1, G 8, eps 1e-6; forced sets w = 0 where the local advantage is 0.
    Deviation: answers are equal by the fact `answer`; where it is not recorded, by their return.
    Sure of: the formula (official code); the paper's tuned b and k were not found.
    """
    near, same = Standardise(eps=eps), SameFact("answer")
    across = ConsistencyAdvantage(same, eps)
    return Recipe(
        advantage=DisagreementWeighted(near, same, b, k, forced)
        + DisagreementWeighted(near, same, b, k, forced, across),
        gate=ClipEachPart(DisagreementWeighted(near, same, b, k, forced), clip, clip),
    )


def adora(
    damp: float = 0.1,
    threshold: float = 0.5,
    lenient: bool = False,
    eps: float = 1e-6,
    clip: float = 0.2,
    kl: float = 1e-3,
) -> Recipe:
    """ADORA: damps groups whose longest right answer is not longer than their mean wrong answer.

    A = z-score, times damp unless max length of right ones > mean length of wrong ones that were not cut off

    Paper: ADORA: Training Reasoning Model with Dynamic Advantage Estimation on RL, blog and code, 2025-03.
    Settings: damp 0.1, token mean, KL 1e-3. Right is a reward above 1.01 for its language models (here above 0.5: a task
    pays 1) and above 0.5 for its vision models, where lenient reverses the rule for groups of only right or only wrong answers.
    Sure of: formula, average and constants (official code).
    """
    advantage, penalties = (
        LengthDampedGroups(Standardise(eps=eps), damp, threshold, lenient),
        (WeightedPenalty(kl, KL("k3")),),
    )
    return Recipe(advantage=advantage, gate=Clip(clip, clip), aggregate=Mean(TOKEN), penalties=penalties)


def unlikeliness(beta: float = 0.25, kl: float = 0.1, clip: float = 0.2, eps: float = 1e-6) -> Recipe:
    """Unlikeliness reward: right answers that were less likely earn more, against distribution sharpening.

    R ← R (1 − β k/G), k = 0 for the least likely of the group;  A = z-score

    Paper: Rewarding the Unlikely: Lifting GRPO Beyond Distribution Sharpening, arXiv 2506.02355.
    Settings: beta 0.25, G 32, two passes, KL 0.1.
    Deviation: trajectories with a tiny advantage are kept; one pass by default.
    Sure of: the formula (official code).
    """
    advantage, penalties = Standardise(UnlikelinessReward(beta), eps=eps), (WeightedPenalty(kl, KL("k3")),)
    return Recipe(advantage=advantage, gate=Clip(clip, clip), penalties=penalties)


def xrpo(novelty: float = 2.5, kappa: float = 0.5, eps: float = 1e-6, clip: float = 0.2) -> Recipe:
    """XRPO (its advantage; see `--budget xrpo`, `--guidance xrpo`): a bounded novelty bonus for good answers that were unlikely.

    A + min(λ (1 − η)₊, κA) where A > 0, η = exp(l − mean l), l = mean log π

    Paper: XRPO: Pushing the Limits of GRPO with Targeted Exploration and Exploitation, arXiv 2510.06672.
    Settings: novelty 2.5, kappa 0.5.
    Deviation: the sharpening alone; `--budget xrpo` allocates rollouts, `--guidance xrpo` shows solved examples.
    Sure of: the formula (third-party implementation).
    """
    return Recipe(advantage=NoveltyBonus(Standardise(eps=eps), novelty, kappa), gate=Clip(clip, clip))


def polychromic(size: int = 4, bottom: float = 0.0, top: float = 1.0, beta: float = 0.01, clip: float = 0.2) -> Recipe:
    """Polychromic objective: scores sets of trajectories by mean reward times diversity; members share the advantage.

    f(set) = mean R · share of distinct members;  A = mean of f over its sets − mean over all sets of n in the group

    Paper: Polychromic Objectives for Reinforcement Learning, arXiv 2509.25424.
    Settings: N 8, n 4; a penalty (log π − log μ)² keeps the policy near the sampler. bottom and top: what counts as 0
    and as 1.
    Deviation: the state is the task and all sets of its group count, in closed form; no vines inside an episode, no
    critic. Trajectories are equal by the fact `key`; where it is not recorded, by all their actions.
    Sure of: the formula (third-party notes), beta (ours).
    """
    return Recipe(
        advantage=SetAdvantage(size, SameFact("key", "words"), UnitOutcome(bottom, top)),
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(beta, SquaredLogRatio()),),
    )


def public_baseline(scale: bool = False, eps: float = 1e-6, clip: float = 0.2) -> Recipe:
    """AdvEvo-MARL's public baseline (needs several agents): one baseline for all agents of a function.

    A = Rᵢⱼ − mean of R over all agents j of the function and all rollouts i

    Paper: AdvEvo-MARL: Shaping Internalized Safety through Adversarial Co-Evolution, arXiv 2510.01586.
    Settings: clipped ratio, token mean; scale divides by the std.
    Deviation: any number of agents and functions; the turn fact `function` names it, without it each agent is its own.
    Sure of: the idea (abstract); the formula is reconstructed.
    """
    return Recipe(advantage=PublicBaseline(scale, eps), gate=Clip(clip, clip), aggregate=Mean(TOKEN))


def mssr(
    gamma: float = 0.4,
    weight: float = 2.0,
    least: float = 0.875,
    most: float = 0.96,
    window: int = 20,
    target: float = 0.01,
    strength: float = 8.0,
    bottom: float = 0.0,
    top: float = 1.0,
    kl: float = 0.01,
    clip: float = 0.2,
    pool: int = 512,
) -> Recipe:
    """MSSR: single rollouts against a tracked success rate per task, plus a capped entropy bonus.

    A = batch z-score of r − a/(a + b);  Aₜ = A + min(|A|/γ, λ Hₜ);  a ← ηa + r, b ← ηb + 1 − r

    Paper: Stable and Efficient Single-Rollout RL for Multimodal Reasoning, arXiv 2512.18215.
    Settings: gamma 0.4, weight 2, eta between 0.875 and 0.96 by the mean KL of the last 20 updates (target 0.01), KL
    0.01; 2048 tasks of one rollout (64 here, in repeated passes over a pool of 512: a task must return to have a
    history). strength: a new task begins with a = b = strength/2, 1/(1 − least)/2.
    Deviation: the KL of an update is measured on the batch after it; rollouts of one task in one batch are one visit.
    Sure of: the formula and constants (third-party notes).
    """
    keep = RetentionByKL(least, most, window, target)
    surprise = UnitOutcome(bottom, top) - SuccessTracker(UnitOutcome(bottom, top), keep, strength, average=True)
    return Recipe(
        advantage=CappedEntropyBonus(Standardise(surprise, BATCH), gamma, weight),
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(kl, KL("k3")),),
        budget=Fixed(64, 1),
        sampler=CyclePool(pool),
    )


def poise(normalise: bool = True, eps: float = 1e-6, low: float = 0.2, high: float = 0.28) -> Recipe:
    """POISE: the baseline is a probe of the policy's hidden states, read from the other rollouts of the group.

    A = R − mean over the other rollouts j of V(zⱼ), then the z-score over the batch

    Paper: Your Language Model is Its Own Critic, arXiv 2605.07579.
    Settings: two rollouts per task in the paper (any number here), DAPO's clip and token mean.
    Sure of: the formula (abstract and third-party notes); the probe's features are reconstructed.
    """
    return Recipe(advantage=LeaveOneOutProbeBaseline(normalise, eps), gate=Clip(low, high), aggregate=Mean(TOKEN))


def v0(clip: float = 0.2) -> Recipe:
    """V₀ (its baseline, from a probe): the predicted success rate of the task; its allocation of rollouts is `--budget v0`.

    A = R − V₀(x | recent outcomes)

    Paper: V₀: A Generalist Value Model for Any Policy at State Zero, arXiv 2602.03584.
    Settings: none.
    Deviation: a probe of hidden states, refitted on recent batches, stands in for the embedding model and its in-context
    classifier; V₀ is its mean over the other rollouts of the task. No routing between models.
    Sure of: the model (official code), its use as a baseline (abstract).
    """
    return Recipe(advantage=ProbeBaseline(), gate=Clip(clip, clip))
