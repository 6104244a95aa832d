"""Reward shaping: tracked baselines, replayed successes, bonuses from tools, questions, judges and hidden states."""

from __future__ import annotations

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.gate import Clip
from turnwise.algebra.penalty import KL, WeightedPenalty
from turnwise.algebra.value import Outcome, SpreadTo
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY
from turnwise.credit.effective_rank import CappedBonus, EffectiveRankPotential
from turnwise.credit.fact import Fact
from turnwise.credit.modes import CheapestModePays
from turnwise.credit.peers import SameTokenIndex
from turnwise.credit.selectors import FromOrigin, Not, OnSelected, SelectedPeers
from turnwise.credit.self_imitation import (
    CosineWarmup,
    DropHighCovariance,
    NonNegativeReplay,
    PastMedian,
    RecalibratedReturn,
    ReplayLoss,
    ToolCallBonus,
)
from turnwise.credit.shaping import (
    FlawPenalisedOutcome,
    FlowOutlierScore,
    GroupContrast,
    NormalisedLength,
    QuestionReward,
    ShapleyInformationGain,
    TokenEntropyReward,
    ToolEfficiencyReward,
    UsedAction,
)
from turnwise.credit.tracker import DriftSinceVisit, RetentionByDrift, Solved, SuccessTracker
from turnwise.credit.turns import SumToGo
from turnwise.data.replay import RecentBuffer
from turnwise.recipes.kind import Kind, declares
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.strategies.modes import ForcedModes
from turnwise.tasks.budgets import Fixed
from turnwise.tasks.samplers import CyclePool, UncertaintySampler

KIND = Kind.CREDIT

# --------------------------------------------------------------- between the steps


def spo_single(
    half: float = 0.06,
    low: float = 0.875,
    high: float = 0.96,
    strength: float = 8.0,
    clip: float = 0.2,
    wide: float = 0.28,
) -> Recipe:
    """SPO (single-stream): one rollout per task against a tracked success rate, normalised over the batch.

    A = (r − v − mean)/(std + ε) over the batch, v = a/(a + b); then a ← ρa + r, b ← ρb + 1 − r, ρ = clip(2^{−D/half},
    low, high); tasks are sampled by √(v(1 − v)) + 0.05, without replacement

    Paper: Single-stream Policy Optimization, arXiv 2509.13232.
    Settings: half 0.06, low 0.875, high 0.96, 8 tries of a task before its first visit, clip 0.2/0.28, 768 tasks a step.
    Deviation: D is not the drift on the task's last response but the sum of the drifts, each measured on its step's
    batch, of the steps since (no less, by the triangle inequality); without the facts ``tries`` and ``solved`` a task
    starts at ½; the sampler keeps its own counts and decays them at a fixed rate; 64 tasks a step from a pool of 1024.
    Sure of: the formula (official recipe).
    """
    return Recipe(
        advantage=Standardise(
            Solved() - SuccessTracker(keep=RetentionByDrift(DriftSinceVisit(), half, low, high), strength=strength),
            BATCH,
            eps=1e-8,
        ),
        gate=Clip(clip, wide),
        aggregate=Mean(TOKEN),
        budget=Fixed(64, 1),
        sampler=UncertaintySampler(),
    )


@declares(Kind.DATA)
def spear(
    gamma: float = 1.0, warm: float = 100.0, horizon: float = 200.0, oldest: int = 5, size: int = 2048,
    scale: bool = False, fraction: float = 0.02, low: float = 2.0, high: float = 60.0, length: float = 64.0,
) -> Recipe:  # fmt: skip
    """SPEAR (agent runs): replays trajectories at or above the past median return; bonus per turn with a tool call.

    fresh: A = R + b − mean, b = min(1, 0.1 tool turns)(cos(πt/T) + 1)/2;  replayed: A = R − median of recent group means,
    kept where A ≥ 0, in a loss of their own, weight γ (1 − cos(πt/T'))/2, less some tokens of high covariance

    Paper: Self-imitation with Progressive Exploration for Agentic RL, arXiv 2509.22601.
    Settings: gamma 1, T' 100 (300 with code tools), T 200, 5 steps, 2048 trajectories, 2 % of tokens with covariance in
    (2, 60), clip 0.2/0.28, no std, no KL.
    Deviation: replayed trajectories are sampled each step, not all at once when the buffer is full; unparsable or
    repetitive outputs and tasks with little spread are not filtered out. `spear_replay` clamps the replayed advantage
    at 0 instead.
    Sure of: the formula (official code).
    """
    past, fresh = NonNegativeReplay(oldest, size), Not(FromOrigin("replay"))
    value, median = Outcome() + ToolCallBonus(horizon=horizon), PastMedian(Outcome(), fresh)
    recalibrated = RecalibratedReturn(Outcome(), median, PastMedian(Outcome(), fresh, statistic="std"), scale)
    loss = ReplayLoss(Clip(0.2, 0.28).where(DropHighCovariance(past, fraction, low, high)))
    return Recipe(
        advantage=OnSelected(fresh, Standardise(value, SelectedPeers(fresh), scale=False))
        + OnSelected(FromOrigin("replay"), recalibrated),
        gate=Clip(0.2, 0.28), aggregate=Sum(TRAJECTORY, length=length), keep=FromOrigin("policy"),
        penalties=(WeightedPenalty(CosineWarmup(gamma, warm), loss, rows=past),), replay=RecentBuffer(oldest, size),
    )  # fmt: skip


# ------------------------------------------------------------------ hidden states


def verl_rank(
    follow: float = 0.3,
    sharpness: float = 2.0,
    explore: tuple[float, ...] = (0.0, 0.0, 1.0),
    exploit: tuple[float, ...] = (0.0, 1.0, 0.0),
    kappa: float = 2.0,
    everywhere: bool = False,
    clip: float = 0.2,
) -> Recipe:
    """VERL (effective rank): a capped advantage bonus from the effective rank of hidden states and its dynamics.

    A + min(max(Φ, 0), |A|/κ),  Φ = Σ w tanh(rel),  w = β explore + (1 − β) exploit,  β = σ(sharpness · rel of the acceleration)

    Paper: Beyond the Exploration-Exploitation Trade-off: A Hidden State Approach for LLM Reasoning in RLVR, arXiv 2509.23808.
    Settings: follow 0.3, sharpness 2, kappa 2, weights of (acceleration, speed, rank) as given, prefixes every 40 tokens.
    Deviation: as in its code only the last token gets the bonus; everywhere is the paper's.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=CappedBonus(
            Standardise(), EffectiveRankPotential(follow, sharpness, explore, exploit), kappa, everywhere
        ),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
    )


def rlfr(threshold: float = 0.6, top: int = 15, coef: float = 0.01, clip: float = 0.2, dual: float = 3.0) -> Recipe:
    """RLFR (last layer, flow fitted during the run): penalises tokens whose hidden states leave the flow of good reasoning.

    Aₜ = z − coef Σ_{s≥t} score_s, z = (R − mean)/(std + ε), score in [0, 1] of the trajectory, above threshold, top k only

    Paper: Extending RL for LLMs with Flow Environment, arXiv 2510.10201.
    Settings: threshold 0.6, top 15, coef 0.01, layers at 25, 50 and 75 % of the depth, noise level 0.8, dual clip 3
    (ratio at most 3 where A < 0), mean over the tokens of each trajectory, no KL.
    Deviation: the last hidden state instead of three layers; the flow learns from successes of the run, without
    pre-training on expert traces.
    Sure of: formula, average and constants (official code).
    """
    return Recipe(
        advantage=Standardise() - coef * SumToGo(FlowOutlierScore(threshold, top)),
        gate=Clip(clip, clip, dual),
    )


# ---------------------------------------------------------------- shaped outcomes


def gcpo(
    threshold: float = 0.0, length: float = 1.0, longest: int = 1024, form: float = 1.0, clip: float = 0.2
) -> Recipe:
    """GCPO: rewards an auxiliary action where its users did better than the rest of the group, penalises it otherwise.

    R ← R + form · format ± 1[acted] + length · min(1, n/longest), the sign by the group; then as GRPO

    Paper: GeometryZero: Improving Geometry Solving with Group Contrastive Policy Optimization, arXiv 2506.07160.
    Settings: threshold, length and longest are guesses.
    Deviation: one group is split by whether the action was taken (fact ``action``, else any tool call); ``format`` is a fact.
    Sure of: the structure (summaries), not the constants.
    """
    shaped = (
        Outcome()
        + GroupContrast(UsedAction(), threshold)
        + length * NormalisedLength(longest)
        + form * Fact("format", missing=0.0)
    )
    return Recipe(advantage=Standardise(shaped), gate=Clip(clip, clip))


def promed(
    alpha: float = 2.0,
    beta: float = 1.0,
    gamma: float = 3.0,
    form: float = 1.0,
    softness: float = 2.0,
    places: bool = True,
    fresh: bool = False,
    clip: float = 0.1,
    kl: float = 0.04,
) -> Recipe:
    """ProMed (its reward; Shapley values come from the environment): rewards a question by the worth of what its answer tells.

    r = α G + β G 1[solved] + format for questions, γ 1[solved] + format for the answer;  A = r − mean at the same place

    Paper: Shapley Information Gain Guided RL for Proactive Medical LLMs, arXiv 2508.13514.
    Settings: alpha 2, beta 1, gamma 3, format 1, softmax temperature (softness) 2, groups of 4, clip 0.1, KL 0.04.
    Deviation: environment or data record the Shapley values (facts ``worth k``; examples/shapley_of_facts.py estimates them
    with a model) and the pieces in an answer (turn fact ``uncovered``, one bit each); as in its code a piece counts every time,
    with fresh only the first time.
    Sure of: the formula (official code).
    """
    reward = QuestionReward(ShapleyInformationGain(softness, fresh), alpha, beta, gamma, form)
    return Recipe(
        advantage=Standardise(SpreadTo(TOKEN, reward), SameTokenIndex(places), scale=False),
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(kl, KL("k3")),),
    )


def fapo(penalty: float = 1.0, low: float = 0.2, high: float = 0.28, dual: float | None = 10.0) -> Recipe:
    """FAPO: penalises right answers with flawed reasoning, by the verdict of a reward model or of the environment.

    R = ±1 by the verdict, less ``penalty`` for a right answer in which an error was found;  A = (R − mean)/(std + ε)

    Paper: Flawed-Aware Policy Optimization, arXiv 2510.22543.
    Settings: penalty 1, clip 0.2/0.28, dual 10, G 16; the reward model has 4 B parameters and learns to name the first wrong step
    (turnwise.environments.first_error, then --judge first_error:FOLDER; examples/flaw_finder.py does both).
    Deviation: without a judge the fact ``error`` is the environment's own.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=Standardise(FlawPenalisedOutcome(penalty)), gate=Clip(low, high, dual), aggregate=Mean(TOKEN)
    )


def otc(alpha: float = 1.0, slack: float = 4.0, alone: bool = False, clip: float = 0.2, pool: int = 128) -> Recipe:
    """OTC: scales the reward of a solved task by how close its tool calls are to the fewest that ever solved it.

    R = α sin(πm/(m + n)) 1[solved], n the fewest calls over all visits; n = 0 (or alone): α cos(πm/(2m + slack)) 1[solved]

    Paper: Acting Less is Reasoning More! Teaching Model to Act Efficiently, arXiv 2504.14870.
    Settings: alpha 1; slack about the largest number of calls (a guess); repeated passes over a pool of 128 tasks (ours):
    the fewest calls are remembered across visits.
    Deviation: alone is the factor of its PPO form, here on the group's advantage.
    Sure of: the formula (third-party notes).
    """
    return Recipe(
        advantage=Standardise(ToolEfficiencyReward(alpha, slack, alone)), gate=Clip(clip, clip), sampler=CyclePool(pool)
    )


def a2fm(
    alpha: float = 2.0, easy: float = 0.5, clip: float = 0.2, openings: str = "answer:|<tool_call>", forced: int = 2
) -> Recipe:
    """A2FM (adaptive policy optimisation, without its SFT): expensive modes earn less on tasks that the cheapest one solves.

    R(1 − pᵅ) for another mode than the cheapest where forced rollouts of that one succeed at a rate ≥ easy, else R;  A = z-score

    Paper: A2FM: An Adaptive Agent Foundation Model for Tool-Aware Hybrid Reasoning, arXiv 2510.12838.
    Settings: alpha 2; 3 forced rollouts of each of 3 modes and 3 free ones. easy 0.5 is ours, and so are 2 forced rollouts of
    2 modes in groups of 8.
    Deviation: a mode is how a first turn begins, not a tag; correct means a positive reward; no judge and no format reward.
    Sure of: the reward (notes on the paper), the threshold (unknown).
    """
    return Recipe(
        advantage=Standardise(CheapestModePays(alpha, easy)),
        gate=Clip(clip, clip),
        strategy=ForcedModes(openings, forced),
    )


def information_consistency(helpful: float = 1.0, stable: float = 1.0, clip: float = 0.2) -> Recipe:
    """Information-consistency GRPO (reconstructed): rewards high and equal token entropy of answers to paraphrases.

    R = helpful · H/max H − stable · |H − mean H|, H the entropy of the tokens an answer uses;  A = (R − mean)/(std + ε)

    Paper: Information-Consistent Language Model Recommendations through GRPO, arXiv 2512.12858.
    Settings: the weights are guesses.
    Deviation: the episodes of a group must be paraphrases of one request: the environment writes them; its reward is
    not read.
    Sure of: the idea (abstract); the formula is a reconstruction.
    """
    return Recipe(advantage=Standardise(TokenEntropyReward(helpful, stable)), gate=Clip(clip, clip))
