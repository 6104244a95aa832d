"""Trust regions: other importance ratios, clipping rules and limits on how far the policy moves."""

from __future__ import annotations

from turnwise.algebra.adaptive_clip import BalancedClip, ProximalClip, WideningClip
from turnwise.algebra.advantage import DivideByBatchStd, Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.control import LastTurnFirst, Passes
from turnwise.algebra.fibration import Fibration
from turnwise.algebra.gate import CappedWeight, Clip, ClipByOutcome, NoGate, RatioRegression, SigmoidGate
from turnwise.algebra.gradient import DivideByClippingBias, ScaleByEffectiveSamples, ScaleBySignalToNoise
from turnwise.algebra.mask import BinaryKL, SmallPredictedChange, TotalVariation
from turnwise.algebra.penalty import KL, RatioVariance, WeightedPenalty
from turnwise.algebra.ratio import Importance, PerToken, PrefixMinimum, PrefixProduct, Product
from turnwise.algebra.value import Constant, MedianCentred, Outcome
from turnwise.algebra.weight import DualVariable, StepSchedule
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN
from turnwise.core.signals import Signal
from turnwise.credit.accuracy_weight import AccuracyWeight
from turnwise.credit.reference_reset import ResetReference
from turnwise.credit.trajectories import MinimumVarianceBaseline
from turnwise.data.replay import PastBatches
from turnwise.recipes.kind import Kind
from turnwise.recipes.recipe import Recipe
from turnwise.tasks.frontier import GaussianFrontier

KIND = Kind.OBJECTIVE


def so_grpo(clip: float = 0.2, floor: float = 1.0) -> Recipe:
    """SO-GRPO: GRPO with turn-level ratios, and gradients divided by the norm of the clipped part (clipping bias).

    wᵏ = exp( mean over turn k of log ρ );  g = ∇J_clip / max(‖C‖, floor), C = ∇ of the clipped part

    Paper: Stabilizing Off-Policy Training for Long-Horizon LLM Agent (v2 of ST-PPO), arXiv 2511.20718.
    Settings: clip 0.2.
    Deviation: the floor is ours.
    Sure of: the turn ratio (paper text), the floor (reconstructed).
    """
    return Recipe(
        advantage=Standardise(),
        ratio=PerToken(Importance(TURN)),
        gate=Clip(clip, clip),
        gradient=DivideByClippingBias(floor),
    )


def minpro(low: float = 0.8, high: float = 1.28) -> Recipe:
    """MinPRO: multiplies the token ratio by the minimum ratio of its prefix, a bounded proxy for the prefix product.

    wₜ = min_{i<t} ρᵢ · ρₜ;  ∇J = token mean of sg[clip(wₜ, low, high)] A ∇ log πₜ

    Paper: A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization, arXiv 2601.22718.
    Settings: rollouts delayed by two or more steps; bounds as CISPO or DAPO (the paper's were not found).
    Sure of: the formula (two third-party notes agree), the bounds (unknown).
    """
    gate = CappedWeight(high, low)
    return Recipe(advantage=Standardise(), ratio=PrefixMinimum(), gate=gate, aggregate=Mean(TOKEN))


def ctpo(low: float = 0.025, high: float = 0.05, dual: float = 0.05, power: float = 0.5) -> Recipe:
    """CTPO: cumulative prefix product as ratio, clipped in log space to a window that grows with the token index.

    ρ̂ₜ = Π_{i≤t} ρᵢ;  clip in log space to [−low·tᵖ, high·tᵖ], for A < 0 also at dual·tᵖ

    Paper: Rethinking Importance Sampling in LLM Policy Optimization: A Cumulative Token Perspective, arXiv 2605.07331.
    Settings: low 0.025, high 0.05, dual 0.05, power 0.5.
    Sure of: the formula (official code).
    """
    gate = WideningClip(low, high, dual, power)
    return Recipe(advantage=Standardise(), ratio=PrefixProduct(), gate=gate, aggregate=Mean(TOKEN))


def dppo_tv(low: float = 0.15, high: float = 0.15, cap: float = 20.0) -> Recipe:
    """DPPO (total variation): masks tokens by the change of their *probability*, which does not penalise rare tokens.

    kept where A > 0 and p − p_μ ≤ high, or A ≤ 0 and p − p_μ ≥ −low;  ∇J = token mean of sg[min(ρ, cap)] A ∇ log π

    Paper: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879.
    Settings: cap 20; the thresholds are left to the user (0.15 is ours).
    Sure of: the formula (code in a public trainer), the thresholds (unconfirmed).
    """
    return Recipe(
        advantage=Standardise(), gate=CappedWeight(cap).where(TotalVariation(low, high)), aggregate=Mean(TOKEN)
    )


def dppo_kl(limit: float = 0.05, cap: float = 20.0) -> Recipe:
    """DPPO (binary KL): masks tokens by the KL of (p, 1 − p), unless the update moves them back to the sampler.

    kept where KL((p_μ, 1−p_μ) ‖ (p, 1−p)) ≤ limit, or the move is toward p_μ

    Paper: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879.
    Settings: cap 20; the threshold is left to the user (0.05 is ours).
    Sure of: the formula (code in a public trainer), the threshold (unconfirmed).
    """
    return Recipe(advantage=Standardise(), gate=CappedWeight(cap).where(BinaryKL(limit)), aggregate=Mean(TOKEN))


def bapo(
    share: float = 0.4,
    low: float = 0.6,
    high: float = 1.2,
    low_end: float = 0.9,
    high_end: float = 3.0,
    low_step: float = 0.02,
    high_step: float = 0.05,
    dual: float = 3.0,
    statistic: str = "gradient",
) -> Recipe:
    """BAPO: widens the clip window before each step until positive tokens carry a set share of the objective.

    while Σ_{A>0} e / Σ e < share: raise the upper bound, then the lower;  e = what a token contributes

    Paper: BAPO: Stabilizing Off-Policy RL for LLMs via Balanced Policy Optimization with Adaptive Clipping, arXiv 2510.18927.
    Settings: share 0.4, bounds from 0.6/1.2 to 0.9/3.0, steps 0.02/0.05, dual 3.
    Deviation: statistic "gradient" by default; with the paper's "value" the lower bound cannot help and runs to its end.
    Sure of: the search (official code and paper text, which differ in order and statistic).
    """
    gate = BalancedClip(share, low, high, low_end, high_end, low_step, high_step, dual, statistic)
    return Recipe(advantage=Standardise(), gate=gate, aggregate=Mean(TOKEN))


def topr(baseline: float = 0.0) -> Recipe:
    """TOPR (needs negative rewards): no importance weight on good trajectories, a truncated (tapered) sequence ratio on bad ones.

    ∇J = mean of α (R − c) Σₜ ∇ log πₜ,  α = 1 where R ≥ 0, min(π(y)/μ(y), 1) where R < 0

    Paper: Tapered Off-Policy REINFORCE, arXiv 2503.14286.
    Settings: rewards ±1, n 16, no KL; an effective share of 10 to 20 % good ones works best.
    Deviation: environments here reward 0 and 1, so nothing is tapered unless a reward is negative.
    Sure of: the formula (paper text).
    """
    return Recipe(
        advantage=Outcome() - Constant(baseline),
        ratio=Product(TRAJECTORY),
        gate=ClipByOutcome(),
        aggregate=Sum(TRAJECTORY),
    )


def sapo(pos: float = 1.0, neg: float = 1.05) -> Recipe:
    """SAPO: a sigmoid gate instead of clipping; the gradient decays with |ρ − 1|, faster for negative advantages.

    J = 1/G Σᵢ 1/|yᵢ| Σₜ (4/τ) σ(τ(ρₜ − 1)) Aᵢ,  τ by the sign of A

    Paper: Soft Adaptive Policy Optimization, arXiv 2511.20347.
    Settings: pos 1.0, neg 1.05.
    Sure of: the formula (official, three public trainers agree).
    """
    return Recipe(advantage=Standardise(), gate=SigmoidGate(pos, neg))


def fiberpo(plus: float = 0.12, minus: float = 0.05, eps: float = 0.04) -> Recipe:
    """FiberPO: separate trust regions for the drift of a trajectory and for the residual of each token.

    G = W·F, W = exp(g(S⁺) − g(S⁻)), F the clipped residual;  J = mean of 1/T Σₜ Gₜ Aₜ; beyond its budget a drift pulls back

    Paper: Fibration Policy Optimization, arXiv 2603.08239.
    Settings: budgets 0.12/0.05, eps 0.04 in an illustration; none tuned.
    Sure of: the formula (paper text; its Jacobian was checked by finite differences).
    """
    return Recipe(advantage=Standardise(), ratio=Fibration(plus, minus, eps), gate=NoGate())


def fiberpo_domain(plus: float = 0.12, minus: float = 0.05, eps: float = 0.04) -> Recipe:
    """FiberPO-Domain: splits the drift into domain, group and trajectory parts, each with its own gate.

    W = exp Σ± ±[ g(S_D) + g(S_g − S_D) + g(S_τ − S_g) ];  F as in FiberPO

    Paper: Fibration Policy Optimization, arXiv 2603.08239.
    Settings: none published. A domain here is an environment at one difficulty.
    Sure of: the formula (paper text).
    """
    return Recipe(advantage=Standardise(), ratio=Fibration(plus, minus, eps, domains=True), gate=NoGate())


def r2vpo(weight: float = 0.04, target: float = 0.02, rate: float = 0.01) -> Recipe:
    """R2VPO: no clipping; penalises the variance of the ratio with a Lagrange multiplier.

    J = token mean of ρA − λ(ρ − 1)²;  λ ← max(0, λ + rate (mean (ρ − 1)² − target))

    Paper: Ratio-Variance Regularized Policy Optimization, arXiv 2601.03320.
    Settings: λ about 0.04 (third-party); target and rate ours.
    Sure of: the Lagrangian (abstract-level text and notes), the dual step and constants (reconstructed).
    """
    return Recipe(
        advantage=Standardise(),
        gate=NoGate(),
        aggregate=Mean(TOKEN),
        penalties=(WeightedPenalty(DualVariable(weight, target, rate), RatioVariance()),),
    )


def gbpo(low: float = 0.3, high: float = 0.3, softness: float = 1e-4) -> Recipe:
    """GBPO: regresses the ratio onto a bounded target by whether the return exceeds the group median.

    ρ* = 1 − low + (low + high) σ(((R − median)/(std + ε))/softness);  L = token mean of |ρ − ρ*| |A|

    Paper: Bounded Ratio Reinforcement Learning, arXiv 2604.18578.
    Settings: bounds 0.3, softness 1e-4 recommended (1.0 in its config), 5 to 10 epochs per batch.
    Sure of: the formula (official code).
    """
    gate = RatioRegression(MedianCentred(), softness, low, high)
    return Recipe(advantage=Standardise(), gate=gate, aggregate=Mean(TOKEN))


def vcpo(cap: float = 8.0, base: float = 1.0) -> Recipe:
    """VCPO: minimum-variance off-policy baseline, and a learning rate scaled by the effective sample size.

    b* = Σ w²n²R / Σ w²n²;  g = mean of min(w, cap) (R − b*)/std · 1/|y| Σ ∇ log π;  lr ← lr √min(1, (ESS/B)/base)

    Paper: Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs, arXiv 2602.17616.
    Settings: cap 8, base 1, lag 10, no KL.
    Deviation: weights and norms of the baseline are those before the first update on a batch.
    Sure of: the formula (official code; the paper's w² is used once, the code's twice).
    """
    return Recipe(
        advantage=MinimumVarianceBaseline(offpolicy=True, scale=True),
        ratio=Product(TRAJECTORY),
        gate=CappedWeight(cap),
        gradient=ScaleByEffectiveSamples(base),
    )


def oblr_po(clip: float = 0.2, shares: int = 4) -> Recipe:
    """OBLR-PO: minimum-variance baseline, and a learning rate scaled by the signal-to-noise ratio of the gradient.

    b* = Σ n²R / Σ n², n = ‖∇ log π(y)‖;  lr ← lr |g|²/(|g|² + Var)

    Paper: Optimal Baseline and Learning-Rate Policy Optimization, arXiv 2511.23310.
    Settings: constants not found.
    Deviation: the noise is estimated from the gradients of equal shares of the groups.
    Sure of: the baseline (paper text), the learning-rate estimator (reconstructed).
    """
    return Recipe(
        advantage=MinimumVarianceBaseline(),
        gate=Clip(clip, clip),
        aggregate=Sum(TRAJECTORY),
        gradient=ScaleBySignalToNoise(shares),
    )


def remix(
    clip: float = 0.2, weight: float = 1e-3, begin: int = 50, share: float = 0.4, window: int = 2, reset: int = 50
) -> Recipe:
    """ReMix: replays the last batches, clipped around the policy at batch start; then resets the reference and ends the replay.

    clip(ρ, c ± eps), c = sg[π_k/μ];  λₜ KL(π‖base) + (1 − λₜ) KL(π‖π_{k−1}),  λₜ = max(1 − 0.1⌈(t − 50)₊/10⌉, 0.5)

    Paper: Squeeze the Soaked Sponge: Efficient Off-policy RFT for LLMs, arXiv 2507.06892.
    Settings: two passes, window of 2 policies, replay share 0.4, reset at batch 50 or 100 (0: never), eps 0.2.
    Deviation: a step has all of its fresh groups and so many past ones that they are the replay share of it; no entropy bonus.
    Sure of: the formulas (third-party notes), the KL's weight (ours).
    """
    old = KL("k2", to=Signal.PREVIOUS)
    return Recipe(
        advantage=Standardise(),
        gate=ProximalClip(clip),
        aggregate=Mean(TOKEN),
        penalties=(
            WeightedPenalty(StepSchedule(weight, begin), ResetReference(KL("k2"), reset)),
            WeightedPenalty(StepSchedule(weight, begin, complement=True), old),
        ),
        control=Passes(epochs=2),
        replay=PastBatches(share, window, reset),
    )


def fg_expo(beta: float = 0.02, clip: float = 0.2, pool: int = 1024, keep: float = 0.9, width: float = 0.35) -> Recipe:
    """FG-ExPO: a KL weight that grows with the accuracy of the step, and tasks drawn around a success rate of one half.

    J = J_clip − β ½(1 + tanh R̄) k3(π‖π_ref), R̄ the mean reward;  Pr[task] ∝ exp(−(p − ½)²/(2·width²))

    Paper: Frontier-Guided Exploration-Prioritized Policy Optimization, arXiv 2605.11403.
    Settings: beta 0.02, keep 0.9 (of the success rate p at each visit), width 0.35, group of 8.
    Deviation: a step of several mini-batches takes the mean reward of each of them.
    Sure of: formulas and constants (paper text).
    """
    penalty = WeightedPenalty(AccuracyWeight(beta), KL("k3"))
    sampler = GaussianFrontier(pool, keep, width)
    return Recipe(advantage=Standardise(), gate=Clip(clip, clip), penalties=(penalty,), sampler=sampler)


def capo(objective: float = 5.0, policy: float = 5.0, clip: float = 0.2) -> Recipe:
    """CAPO (curvature): masks tokens whose predicted second-order change of objective or policy is too large.

    kept where |m_H| < objective and m_F < policy: second-order predictions from the last layer and the optimiser's state

    Paper: Stabilizing Policy Gradients for Sample-Efficient RL in LLM Reasoning, arXiv 2510.00819.
    Settings: on GRPO 1e-2 and 1e-4 at a learning rate of 1.5e-5; fewer than 8 % of tokens are dropped.
    Deviation: thresholds for tiny models at 3e-4 (about one token in twenty is dropped; the authors' would drop half); the
    whole vocabulary instead of its top 50; the learner's own second moments, held above their mean, instead of shadow ones.
    Sure of: the formula (official code).
    """
    return Recipe(advantage=Standardise(), gate=Clip(clip, clip), keep=SmallPredictedChange(objective, policy))


def see_upo(clip: float = 0.2, beta: float = 0.002, turns: int = 10) -> Recipe:
    """SeeUPO: updates the turns one after another, last turn first, with turn-level ratios; no critic, no group std.

    for k = K … 1: J_k = mean of min(s_k M_k, clip(s_k)M_k) over turn k only;  M_{k−1} = M_k · π_new(k)/π_old(k)

    Paper: SeeUPO: Sequence-Level Agentic-RL with Convergence Guarantees, arXiv 2602.06554.
    Settings: up to 10 turns, clip 0.2, KL 0.002, G 8.
    Deviation: the ratio of a turn is its geometric mean (the theory's product is numerically unsafe).
    Sure of: order and normalisation (third-party notes agree), length normalisation (unverified).
    """
    return Recipe(
        advantage=DivideByBatchStd(Standardise(scale=False)),
        ratio=Importance(TURN),
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(beta, KL("k3")),),
        control=LastTurnFirst(turns),
    )
