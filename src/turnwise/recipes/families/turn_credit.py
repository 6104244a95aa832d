"""Turn-level credit: by turn, by state and by information gain."""

from __future__ import annotations

from typing import Literal

from turnwise.algebra.advantage import LeaveOneOut, Standardise, Whiten
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.gate import Clip
from turnwise.algebra.peers import Same
from turnwise.algebra.penalty import KL, ClippedValueLoss, WeightedPenalty
from turnwise.algebra.reward import EnvironmentReward
from turnwise.algebra.value import Constant, Outcome, ReturnToGo
from turnwise.core.levels import TOKEN, TURN
from turnwise.credit.fact import Fact
from turnwise.credit.information import (
    AnswerProbabilityGain,
    ExponentialDecay,
    FeedbackInformationGain,
    LimitStd,
    LowSpreadGate,
    StandardiseNonZero,
)
from turnwise.credit.peers import RandomGroups, SameAgent, SameTask, SameTokenIndex
from turnwise.credit.same_state import HierarchyOfGroups, PeerTrajectoryMean, SameRecentStates, SameTransition
from turnwise.credit.turns import (
    AgentReturnToGo,
    BiLevelGAE,
    FallbackWithoutPeers,
    GroupStdAbove,
    LeaveOneOutAtTurn,
    MarkedTurns,
    MeanOfTurnMeans,
    OldValue,
    OnMarkedTurns,
    ReturnUntilMismatch,
    SumToGo,
)
from turnwise.recipes.kind import Kind
from turnwise.recipes.recipe import Recipe
from turnwise.tasks.admission import Spread

KIND = Kind.CREDIT

RowUnit = Literal["turn", "trajectory"]


def bilevel_gae(
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    turn_gamma: float = 0.95,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
) -> Recipe:
    """Bi-level GAE: GAE over turns first, then over the tokens of each turn, each with its own discount.

    turns: Aᵏ = GAE of rᵏ and v(last token), γ_turn;  inside turn k: GAE with γ, its last token is paid Aᵏ + v;  whitened

    Paper: RAGEN: Understanding Self-Evolution in LLM Agents via Multi-Turn Reinforcement Learning, arXiv 2504.20073; GAE
    itself is arXiv 1506.02438.
    Settings: gamma 1, lambda 0.95 or 1, turn gamma 0.95; clip, value clip and dual as PPO.
    Sure of: the two levels (code of several agent trainers), one lambda for both (reconstructed).
    """
    target = BiLevelGAE(gamma, lam, turn_gamma) + OldValue()
    return Recipe(
        advantage=Whiten(BiLevelGAE(gamma, lam, turn_gamma)),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        penalties=(WeightedPenalty(value_weight, ClippedValueLoss(target, value_clip)),),
    )


def gigpo(
    omega: float = 1.0,
    gamma: float = 0.95,
    scale: bool = False,
    rows: RowUnit = "turn",
    clip: float = 0.2,
    beta: float = 0.01,
) -> Recipe:
    """GiGPO: episode advantage plus a step advantage among turns of the task that start in the same state.

    Aₖ = F(R among the task) + ω F(Gₖ among turns of the task in state sₖ),  Gₖ = Σ_{j≥k} γ^{j−k} rⱼ,  F(x) = x − mean

    Paper: Group-in-Group Policy Optimization for LLM Agent Training, arXiv 2505.10978.
    Settings: omega 1, gamma 0.95, G 8, 16 tasks, k3 KL 0.01. scale=True divides by the std; rows=turn counts an
    episode's return once per turn (the released code), rows=trajectory once.
    Deviation: states are equal or not (no clusters of similar texts); a penalty on invalid actions is the
    environment's; a single episode gets 0.
    Sure of: the formula (official code), the average over trajectories (ours).
    """
    return Recipe(
        advantage=Standardise(Outcome(), SameTask(rows), scale)
        + omega * Standardise(ReturnToGo(gamma), SameRecentStates(), scale),
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(beta, KL("k3")),),
    )


def hgpo(
    past: int = 2,
    alpha: float = 1.0,
    gamma: float = 0.95,
    scale: bool = True,
    base: bool = False,
    rows: RowUnit = "turn",
    clip: float = 0.2,
    beta: float = 0.01,
) -> Recipe:
    """HGPO: step advantages over a hierarchy of groups, turns that share the last n states; longer histories weigh more.

    Aₖ = Σₙ wₙ Aⁿ / Σₙ wₙ,  wₙ ∝ (n + 1)^α,  Aⁿ = (Gₖ − mean)/std among turns with the same sₖ₋ₙ₊₁ … sₖ,  n = 1 … K + 1

    Paper: Hierarchy-of-Groups Policy Optimization for Long-Horizon Agentic Tasks, arXiv 2602.22817.
    Settings: past K 2 or 4, alpha 1, gamma 0.95, population std, G 8. Levels at which a turn has no peers or is at the
    mean are left out. base=True adds GiGPO's episode term as level 0.
    Sure of: the formula (official code), clip and KL (GiGPO's, on whose code it is built).
    """
    episode = Standardise(Outcome(), SameTask(rows), scale)
    return Recipe(
        advantage=HierarchyOfGroups(ReturnToGo(gamma), past, alpha, scale, base, episode),
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(beta, KL("k3")),),
    )


def salt(window: int = 3, base: Literal["grpo", "rloo"] = "grpo", clip: float = 0.2, beta: float = 0.0) -> Recipe:
    """SALT: averages the advantage over all trajectories of a task that take the same transition.

    Aₖ = mean of A over the trajectories that take (sₖ, aₖ, sₖ₊₁) after the same h states

    Paper: Step-level Advantage Assignment for Long-horizon Agents via Trajectory Graph, arXiv 2510.20022.
    Settings: base GRPO or RLOO; window h 3.
    Deviation: a trajectory that takes a step twice counts once; a single trajectory gets 0. Actions are compared token
    by token.
    Sure of: the averaging (abstract and summaries), the window (reconstructed), no KL (ours).
    """
    bases = {"grpo": Standardise(), "rloo": FallbackWithoutPeers(LeaveOneOut(), Constant(0.0))}
    return Recipe(
        advantage=PeerTrajectoryMean(bases[base], SameTransition(window)),
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(beta, KL("k3")),),
    )


def igpo(
    gamma: float = 1.0,
    form: Literal["paper", "code"] = "paper",
    answer_weight: float = 1.0,
    clip: float = 0.2,
    beta: float = 1e-3,
) -> Recipe:
    """IGPO: turn reward is the increase of the gold answer's probability; the last turn gets the outcome.

    rₖ = pₖ₊₁ − pₖ, r_last = R;  Aₖ = Σ_{j≥k} γ^{j−k} zⱼ,  z = (r − mean)/std over all turns of the task

    Paper: Information Gain-based Policy Optimization, arXiv 2510.14967.
    Settings: gamma 1, G 16, 32 tasks, at most 10 turns. form=code: returns token by token, minus their mean over the
    trajectories of the task at the same place, no std.
    Deviation: no penalty on the format and no F1; the outcome is what the environment pays.
    Sure of: both forms (official code and notes on the paper), the weight of the KL (ours).
    """
    forms = {
        "paper": SumToGo(Standardise(EnvironmentReward()), gamma),
        "code": Standardise(ReturnToGo(gamma, TOKEN), SameTokenIndex(), scale=False),
    }
    return Recipe(
        advantage=forms[form],
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(beta, KL("k3")),),
        reward=AnswerProbabilityGain(answer_weight),
    )


def infopo(
    beta: float = 0.5,
    gate_temperature: float = 0.05,
    per_token: bool = True,
    rate: float = 0.0,
    clip: float = 0.2,
    kl: float = 0.0,
) -> Recipe:
    """InfoPO: turn-level information gain of the environment's feedback, gated to groups with equal outcomes.

    Iₖ = mean over turn k+1 of log π(y) − log π(y | answer masked);  A = z(R) + β σ(−std R / T) c z(I),
    c = min(1, max(std A_ext, 1)/std A_info)

    Paper: Information-Driven Policy Optimization for User-Centric Agents, arXiv 2603.00656.
    Settings: beta 0.5, gate temperature T 0.05, rate 0. per_token divides I among the tokens of its turn (the released code).
    Deviation: the decay exp(−rate · t) counts batches, not epochs; every turn of an episode has the same weight.
    Sure of: the formula (official code), no KL (ours).
    """
    information = LimitStd(StandardiseNonZero(FeedbackInformationGain(per_token)), Standardise())
    return Recipe(
        advantage=Standardise() + beta * ExponentialDecay(LowSpreadGate(information, gate_temperature), rate),
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(kl, KL("k3")),),
    )


def mars(
    game: Literal["group", "domain"] = "group", clip: float = 0.2, dual: float | None = 3.0, beta: float = 0.2
) -> Recipe:
    """MARS: per-agent return-to-go minus the mean of that agent's role in the game.

    Gₖ = Σ r of this and the later turns of the same agent;  Aₖ = Gₖ − mean of G over (game, role)

    Paper: MARS: Reinforcing Multi-Agent Reasoning of LLMs through Self-Play in Strategic Games, arXiv 2510.15414.
    Settings: clip 0.2, KL 0.2, dual clip on, 384 trajectories. game=domain takes all tasks of a kind for one game.
    Deviation: sums first and centres then, as the paper; the released code centres twice and whitens between.
    Sure of: the formula (paper text and official code), the dual clip's 3 (common default).
    """
    return Recipe(
        advantage=Standardise(AgentReturnToGo(), SameAgent(game), scale=False),
        gate=Clip(clip, clip, dual),
        penalties=(WeightedPenalty(beta, KL("k3")),),
    )


def trloo(
    gamma: float = 1.0,
    absent: Literal["out", "outcome", "nothing"] = "out",
    low: float = 0.2,
    high: float = 0.28,
) -> Recipe:
    """TRLOO: turn-level leave-one-out baseline, the mean return of the *other* trajectories at the same turn.

    Aₖ = Gₖ − 1/(N−1) Σ_{j≠i} Gₖʲ over the N trajectories that have a turn k;  alone: Aₖ = Gₖ

    Paper: Dr. Kernel: Reinforcement Learning Done Right for Triton Kernel Generations, arXiv 2602.05885.
    Settings: gamma 1, clip 0.2/0.28, N 16, 3 turns, no KL. Turns recorded as invalid are left out. absent=outcome
    counts episodes that have ended with their total return, absent=nothing with 0 (ours).
    Deviation: its rewards for kernels and its rejection of mismatched sequences are left out.
    Sure of: the formula (official code), the average over trajectories (ours).
    """
    valid = Fact("valid", TURN, missing=1.0)
    return Recipe(
        advantage=LeaveOneOutAtTurn(ReturnToGo(gamma), absent, valid),
        gate=Clip(low, high),
        keep=MarkedTurns(valid),
    )


def flow_grpo(rows: RowUnit = "trajectory", low: float = 0.2, high: float = 0.3, beta: float = 1e-3) -> Recipe:
    """Flow-GRPO (AgentFlow's credit, not its modules): broadcasts the outcome to planner turns; others are not trained.

    A = (R − mean)/std among the task;  J = mean over trajectories, over planner turns, over tokens of the clipped gain − β k3

    Paper: In-the-Flow Agentic System Optimization for Effective Planning and Tool Use, arXiv 2510.05592.
    Settings: clip 0.2/0.3, KL 0.001, G 8, batch 32, temperature 0.7. rows=turn counts every planner turn (released code).
    Deviation: without the turn fact "planner" every turn is the planner's; a single value gets 0. A loop of planner, executor,
    verifier and generator with a shared memory is in examples/planner_and_verifier.py.
    Sure of: the formula (official code).
    """
    planner = Fact("planner", TURN, missing=1.0)
    return Recipe(
        advantage=OnMarkedTurns(planner, Standardise(Outcome(), SameTask(rows, planner))),
        gate=Clip(low, high),
        penalties=(WeightedPenalty(beta, KL("k3")),),
        aggregate=MeanOfTurnMeans(),
        keep=MarkedTurns(planner),
    )


def srgpo(
    size: int = 16,
    omega: float = 0.5,
    scale: bool = True,
    rows: RowUnit = "turn",
    within: Literal["batch", "task", "trajectory"] = "batch",
    clip: float = 0.2,
    beta: float = 0.01,
) -> Recipe:
    """SRGPO: episode advantage plus step advantages within random groups of turns, for state-independent step rewards.

    Aₖ = F(R among the task) + ω (rₖ − mean)/std among ``size`` turns drawn from the batch

    Paper: SeeNav-Agent: Enhancing Vision-Language Navigation with Visual Prompt and Step-Level Policy Optimization,
    arXiv 2512.02631.
    Settings: size 16 (-1: one group of all), omega 0.5, KL 0.01, at most 20 steps; rows as in GiGPO.
    Sure of: the formula (official code), the average over trajectories (ours).
    """
    return Recipe(
        advantage=Standardise(Outcome(), SameTask(rows), scale)
        + omega * Standardise(EnvironmentReward(), RandomGroups(size, within)),
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(beta, KL("k3")),),
    )


def ui_s1(
    episode_weight: float = 1.0,
    step_weight: float = 1.0,
    gamma: float = 0.5,
    scale: bool = True,
    least: float = 0.3,
    clip: float = 0.2,
    beta: float = 1e-4,
) -> Recipe:
    """UI-S1: semi-online RL along expert traces; returns stop at the first mismatch.

    Gₖ = rₖ + γ eₖ eₖ₊₁ Gₖ₊₁;  Aₖ = w_E F(R among the task's turns) + w_S F(Gₖ among the task's k-th turns)

    Paper: UI-S1: Advancing GUI Automation via Semi-online Reinforcement Learning, arXiv 2509.11543.
    Settings: weights 1, gamma 0.5, G 8, KL 1e-4, groups with a reward std above 0.3. A single episode of one turn gets R.
    Deviation: the turn fact "match" is the environment's, and so is patching a history with the expert's action: write --env
    turnwise.environments.expert_path:KeyDoorPath,patches=2 (or LookupPath, or ExpertPath before a class of your own). Groups
    without any spread are re-sampled, those below 0.3 only left out.
    Sure of: the formula (official code), the average over trajectories (ours).
    """
    turns, matched = SameTask("turn"), ReturnUntilMismatch(Fact("match", TURN), gamma)
    return Recipe(
        advantage=episode_weight * FallbackWithoutPeers(Standardise(Outcome(), turns, scale), Outcome(), turns)
        + step_weight * Standardise(matched, Same("index"), scale),
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(beta, KL("k3")),),
        admission=Spread(),
        keep=GroupStdAbove(least),
    )
