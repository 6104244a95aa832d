"""Selection: which trajectories, turns, tokens and past batches are trained on, before any clipping."""

from __future__ import annotations

from turnwise.algebra.advantage import LeaveOneOut, SoftBaseline, Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.control import CriticsFirst
from turnwise.algebra.factor import TruncatedImportance
from turnwise.algebra.gate import Clip
from turnwise.algebra.mask import AllTokens, Both
from turnwise.algebra.penalty import KL, NegativeLogLikelihood, WeightedPenalty
from turnwise.algebra.ratio import Importance, OnPolicy
from turnwise.algebra.value import Constant
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN
from turnwise.credit.by_origin import RatioByOrigin
from turnwise.credit.critics import UtteranceCriticError, ZeroGate
from turnwise.credit.downsampling import HighestEntropyTurns, LargestAdvantageEntropy, LargestVariance, ShareSchedule
from turnwise.credit.forking_pairs import ForkingTurnPairs, ForkingTurnScore
from turnwise.credit.preference import LogisticLoss, PreferenceLoss
from turnwise.credit.regression import SamplerRegressionError
from turnwise.credit.selectors import AllOf, FromOrigin, Succeeded
from turnwise.credit.step_values import BestActionOfState, GoodSteps, OutcomeAboveValue, StepCrossEntropy, TopOfBatch
from turnwise.data.replay import ExpertItems, PastBatches, RecentBuffer, SharedExperience, SuccessBuffer
from turnwise.recipes.kind import Kind, declares
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.strategies import Branch, OneTurn
from turnwise.tasks.admission import AfterDraws, Spread
from turnwise.tasks.budgets import Fixed
from turnwise.tasks.frontier import PivotFilter
from turnwise.tasks.samplers import CyclePool
from turnwise.tasks.turn_limits import FallingWithSuccess

KIND = Kind.DATA


def d3s(
    rows: float = 0.25,
    rows_end: float = 0.75,
    tokens: float = 0.2,
    tokens_end: float = 0.8,
    ramp: int = 100,
    by_group: bool = False,
    clip: float = 0.2,
) -> Recipe:
    """D3S: trains on the trajectories whose advantages have the largest variance, and in them on the largest |A|·entropy.

    A = z-score over all rows;  S = argmax Var(A over S), |S| = N;  tokens of S: the top K by |A| H;  N and K rise with the step

    Paper: Learning More with Less: A Dynamic Dual-Level Down-Sampling Framework, arXiv 2509.22115.
    Settings: not recovered; a quarter to three quarters of the rows and a fifth to four fifths of their tokens over 100
    batches (ramp) are ours. by_group chooses inside each group (D3S-I).
    Deviation: progress is counted in batches; a step of several mini-batches chooses in each of them.
    Sure of: the formula (notes and reviews agree), not the constants.
    """
    subset = LargestVariance(ShareSchedule(rows, rows_end, ramp), by_group)
    return Recipe(
        advantage=Standardise(),
        gate=Clip(clip, clip),
        keep=Both(subset, LargestAdvantageEntropy(ShareSchedule(tokens, tokens_end, ramp), subset)),
    )


def swarm(folder: str = "swarm", foreign: int = 4, sender: str = "", clip: float = 0.2) -> Recipe:
    """Swarm SAPO: trains on groups of other runs as well, shared through a folder, as if the own policy had sampled them.

    A = z-score inside each group;  own: ρ = π/μ;  of other runs: ρ = π/π_old, so that the first ratio is 1;  clipped, no KL

    Paper: Sharing is Caring: Efficient LM Post-Training with Collective RL Experience Sharing, arXiv 2509.08721.
    Settings: 4 own and 4 foreign groups of 8, foreign groups without any reward left out; alone it is GRPO without a KL.
    Deviation: token ids are shared instead of text, so runs need one tokenizer; the sender's rewards are kept. Foreign groups are
    drawn at random among the last 256; the released agent also has a variant that takes the best.
    Sure of: the rule (official code).
    """
    return Recipe(
        advantage=Standardise(),
        ratio=RatioByOrigin(FromOrigin("replay"), Importance(proximal=True)),
        gate=Clip(clip, clip),
        replay=SharedExperience(folder, foreign, sender),
    )


def dart(
    share: float = 0.8,
    cap: float = 1.0,
    low: float = 0.2,
    high: float = 0.28,
    beta: float = 0.1,
    easy: float = 0.6,
    pool: int = 128,
) -> Recipe:
    """DART (GUI agents): trains on turns of high entropy, with truncated ratios and stored successes.

    kept: the share of a group's turns with the highest mean entropy;  ρ = π/π_old clipped, times min(π_old/μ, cap);  β k3

    Paper: Efficient Multi-turn RL for GUI Agents via Decoupled Training and Adaptive Data Curation, arXiv 2509.23866.
    Settings: share 0.8, cap 1, clip 0.2/0.28, KL 0.1, groups of 8, all rollouts up to a success rate of 0.6, turns limited by
    the longest success; repeated passes over a pool of 128 tasks.
    Deviation: a stored success replaces the first rollout of a group that failed, not its oldest; a failing group without one
    stays. Old data comes from --staleness; the four services are one process.
    Sure of: grouping, weights and constants (official code), the choice of turns (summary of the paper).
    """
    return Recipe(
        advantage=Standardise(),
        ratio=Importance(proximal=True),
        gate=Clip(low, high) * TruncatedImportance(cap),
        penalties=(WeightedPenalty(beta, KL("k3")),),
        keep=HighestEntropyTurns(share),
        budget=FallingWithSuccess(8, 8, easy),
        sampler=CyclePool(pool),
        replay=SuccessBuffer(),
    )


def oapl(value: float = 1.0, beta: float = 1e-3, share: float = 0.5, window: int = 4) -> Recipe:
    """OAPL (KARL): regresses the log-ratio to the sampler of each trajectory onto its soft advantage; no ratio and no clip.

    V = β₁ log mean exp(R/β₁) over the group;  min mean (β₂ Σₜ (log π − log μ) − (R − V))²

    Paper: KARL: Knowledge Agents via Reinforcement Learning, arXiv 2603.05218, objective of arXiv 2602.19362.
    Settings: value (β₁) 1, beta (β₂) 1e-3, 8 rollouts, groups without spread dropped; the sampler is refreshed every 50 updates.
    Deviation: old data comes from a buffer of whole batches, half of each step of the last 4 policies; the synthesis of tasks is
    not part of it.
    Sure of: the loss (vendor implementation), the schedule (from memory).
    """
    return Recipe(
        advantage=SoftBaseline(value),
        gate=ZeroGate(),
        penalties=(WeightedPenalty(1.0, SamplerRegressionError(beta)),),
        admission=Spread(),
        replay=PastBatches(share, window),
    )


def digirl(
    gamma: float = 0.5, cost: float = 0.05, share: float = 0.1, value_weight: float = 1.0, oldest: int = 10
) -> Recipe:
    """DigiRL: imitates the good steps of the trajectories that did better than their task promised; values are classifiers.

    kept: the top share by R − V(o₀);  ∇J = mean over steps of 1[V(o′) − V(o) − cost + r + G > 0] Σₜ ∇ log π

    Paper: DigiRL: Training In-The-Wild Device-Control Agents with Autonomous RL, arXiv 2406.11896.
    Settings: gamma 0.5, cost 0.05, top 10 %, a buffer of 2000 steps (10 training steps here).
    Deviation: one value head; the value of the task is the step value of its first state; the offline phase is the cold start.
    Sure of: the released form of the step advantage (official code).
    """
    return Recipe(
        advantage=GoodSteps(gamma, cost),
        ratio=OnPolicy(),
        aggregate=Sum(TURN),
        keep=TopOfBatch(share, OutcomeAboveValue()),
        penalties=(WeightedPenalty(value_weight, StepCrossEntropy(), Sum(TURN), rows=AllTokens()),),
        replay=RecentBuffer(oldest, share=1.0, above=-1.0),
    )


def digi_q(
    gamma: float = 0.9,
    least: float = 0.1,
    value_weight: float = 1.0,
    passes: int = 10,
    warm: int = 10,
    trunks: int = 2,
    oldest: int = 10,
) -> Recipe:
    """Digi-Q: twin TD critics of turns; imitates the best of the actions tried in a state, if its advantage is large enough.

    Q → r + γ V̄(s'), V → Q̄(s, a);  A = max Q − max V over the heads;  ∇J = mean of ∇ log π(best action) where A > least

    Paper: Digi-Q: Learning Q-Value Functions for Training Device-Control Agents, arXiv 2502.15760.
    Settings: gamma 0.9, least 0.1 or 0.05, 4 to 16 actions of each state.
    Deviation: the actions of a state are the forks of a tree and what the group took there; heads read the policy's detached
    states, not those of a frozen model fine-tuned to foresee changes. Replayed turns have their one logged action.
    Sure of: losses and extraction (official code).
    """
    return Recipe(
        advantage=Constant(1.0), ratio=OnPolicy(), aggregate=Sum(TURN), keep=BestActionOfState(least),
        penalties=(WeightedPenalty(value_weight, UtteranceCriticError(gamma), Mean(TURN), rows=AllTokens()),),
        control=CriticsFirst(passes, warm), strategy=Branch(trunks, "every"), budget=Fixed(8, 16),
        replay=RecentBuffer(oldest, share=1.0),
    )  # fmt: skip


def pivotrl(clip: float = 0.2, pool: int = 256, below: float = 0.9, renew: bool = False) -> Recipe:
    """PivotRL: one-turn rollouts at those turns of an expert where the first policy sometimes does as well, and sometimes not.

    pivots: 0 < μ < below, μ of the first policy's turns there;  R = 1 if a turn does what the expert's does;
    A = R − mean of the others;  clipped token mean, no KL

    Paper: PivotRL: High Accuracy Agentic Post-Training at Low Compute Cost, arXiv 2603.21383.
    Settings: clip 0.2, 64 pivots of 16 turns, 8 turns to profile (here a group of 16); the threshold is ours. With renew the
    policy of a turn's latest visit profiles it again.
    Deviation: the profiling pass takes the first ``pool`` groups, which are not trained on. What counts as doing the same is the
    environment's (turnwise.environments.expert_turns, or demonstrated:FILE for dialogues of a file).
    Sure of: filter, reward and baseline (study of the paper and a vendor's recipe), not the threshold and not the average.
    """
    return Recipe(
        advantage=LeaveOneOut(), gate=Clip(clip, clip), aggregate=Mean(TOKEN), strategy=OneTurn(),
        sampler=PivotFilter(pool, below, renew), admission=AfterDraws(pool), budget=Fixed(8, 16),
    )  # fmt: skip


@declares(Kind.PREFERENCE)
def evocua(beta: float = 0.1, imitation: float = 1.0) -> Recipe:
    """EvoCUA (step-level pairs): DPO on the first turn where a success and a failure of a task differ; imitates successes.

    d = Σ over the forking turn of log π/π_ref, success minus failure;  L = mean −log σ(βd) + α · token mean of −log π(success)

    Paper: EvoCUA: Evolving Computer Use Agents via Learning from Scalable Synthetic Experience, arXiv 2601.15876.
    Settings: beta 0.1 and imitation 1 are ours; both stages in one loss instead of one after the other.
    Deviation: one pair by group, its best and its worst trajectory; no rewritten reasoning, no reflection pairs at the turn after
    the fork, no synthesis of tasks, no levels of rollouts (`--budget dart` spends by success).
    Sure of: the forking point and the loss (reading notes), not the constants.
    """
    pairs = ForkingTurnPairs()
    ranked = WeightedPenalty(
        1.0, PreferenceLoss(LogisticLoss(beta), ForkingTurnScore(pairs), pairs), Mean(GROUP), rows=pairs
    )
    good = AllOf((FromOrigin("policy"), Succeeded()))
    copied = WeightedPenalty(imitation, NegativeLogLikelihood(), Mean(TOKEN), rows=good)
    return Recipe(advantage=Constant(0.0), ratio=OnPolicy(), penalties=(ranked, copied))


def dynaweb(share: float = 0.5, low: float = 3e-4, high: float = 4e-4) -> Recipe:
    """DynaWeb: dreamed rollouts mixed with real expert trajectories, trained on together by a sequence-level clipped ratio.

    sᵢ = exp( 1/|yᵢ| Σₜ log ρₜ ), ρ = 1 for an expert;  A = z-score over the mixed group;  J = 1/G Σᵢ min(sᵢAᵢ, clip(sᵢ)Aᵢ)

    Paper: DynaWeb: Model-Based Reinforcement Learning of Web Agents, arXiv 2601.22149.
    Settings: 8 rollouts of at most 5 dreamed steps, share 0.5 (some summaries: 0.4), temperature 0.7, top-p 0.9. Write --demos
    oracle and an environment that dreams (turnwise.environments.dreamed; examples/dreamed_keydoor.py trains its world model).
    Deviation: the bounds are GSPO's; an expert's trajectory counts as sampled by the present policy.
    Sure of: the mixture (abstract, third-party implementation), the expert's ratio (ours).
    """
    return Recipe(
        advantage=Standardise(),
        ratio=RatioByOrigin(FromOrigin("expert"), OnPolicy(), Importance(TRAJECTORY, cap=10.0)),
        gate=Clip(low, high),
        replay=ExpertItems(share),
    )
