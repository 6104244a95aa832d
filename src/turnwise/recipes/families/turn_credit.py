"""Credit by turns, states and what a turn tells."""

from __future__ import annotations

from typing import Literal

from turnwise.algebra.advantage import LeaveOneOut, Standardise, Whiten
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.gate import Clip
from turnwise.algebra.peers import Same
from turnwise.algebra.penalty import KL, CriticError, Weighted
from turnwise.algebra.reward import Environment
from turnwise.algebra.value import Constant, Outcome, ReturnToGo
from turnwise.core.levels import TOKEN, TURN
from turnwise.credit.fact import Fact
from turnwise.credit.information import AmongPresent, AnswerRise, Fading, FeedbackGain, NoLouder, WhereAlike
from turnwise.credit.same_state import Nested, Recent, SameStep, Shared
from turnwise.credit.turns import (
    AtSameTurn,
    Marked,
    MeanOfTurns,
    Only,
    OwnReturn,
    ToGo,
    TwoLevelGAE,
    UnbrokenReturn,
    UnlessAlone,
    ValueHead,
    Varied,
)
from turnwise.credit.voters import Drawn, Roles, SamePlace, Voters
from turnwise.recipes.kind import Kind
from turnwise.recipes.recipe import Recipe
from turnwise.tasks.admission import Spread

KIND = Kind.CREDIT

Rows = Literal["turn", "trajectory"]


def bilevel_gae(
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    turn_gamma: float = 0.95,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
) -> Recipe:
    """Bi-level GAE: advantages run from turn to turn first, then inside each turn, each with a discount of its own.

    turns: Aᵏ = GAE of rᵏ and v(last token), γ_turn;  inside turn k: GAE with γ, its last token is paid Aᵏ + v;  whitened

    Paper: RAGEN: Understanding Self-Evolution in LLM Agents via Multi-Turn Reinforcement Learning, arXiv 2504.20073; GAE
    itself is arXiv 1506.02438.
    Settings: gamma 1, lambda 0.95 or 1, turn gamma 0.95; clip, value clip and dual as PPO.
    Sure of: the two levels (code of several agent trainers), one lambda for both (reconstructed).
    """
    target = TwoLevelGAE(gamma, lam, turn_gamma) + ValueHead()
    return Recipe(
        advantage=Whiten(TwoLevelGAE(gamma, lam, turn_gamma)),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        penalties=(Weighted(value_weight, CriticError(target, value_clip)),),
    )


def gigpo(
    omega: float = 1.0,
    gamma: float = 0.95,
    scale: bool = False,
    rows: Rows = "turn",
    clip: float = 0.2,
    beta: float = 0.01,
) -> Recipe:
    """GiGPO: besides its episode's credit a turn gets that of its return among turns that began in the same state.

    Aₖ = F(R among the task) + ω F(Gₖ among turns of the task in state sₖ),  Gₖ = Σ_{j≥k} γ^{j−k} rⱼ,  F(x) = x − mean

    Paper: Group-in-Group Policy Optimization for LLM Agent Training, arXiv 2505.10978.
    Settings: omega 1, gamma 0.95, G 8, 16 tasks, k3 KL 0.01. scale=True divides by the std; rows=turn lets every turn vote
    for its episode's return (the released code), rows=trajectory every episode once.
    Deviation: states are equal or not (no clusters of similar texts); a penalty on invalid actions is the environment's; a
    lone episode gets 0.
    Sure of: the formula (official code), the average over trajectories (ours).
    """
    return Recipe(
        advantage=Standardise(Outcome(), Voters(rows), scale) + omega * Standardise(ReturnToGo(gamma), Recent(), scale),
        gate=Clip(clip, clip),
        penalties=(Weighted(beta, KL("k3")),),
    )


def hgpo(
    past: int = 2,
    alpha: float = 1.0,
    gamma: float = 0.95,
    scale: bool = True,
    base: bool = False,
    rows: Rows = "turn",
    clip: float = 0.2,
    beta: float = 0.01,
) -> Recipe:
    """HGPO: a turn is compared with those that share its last n states, and the longer the shared past the more it weighs.

    Aₖ = Σₙ wₙ Aⁿ / Σₙ wₙ,  wₙ ∝ (n + 1)^α,  Aⁿ = (Gₖ − mean)/std among turns with the same sₖ₋ₙ₊₁ … sₖ,  n = 1 … K + 1

    Paper: Hierarchy-of-Groups Policy Optimization for Long-Horizon Agentic Tasks, arXiv 2602.22817.
    Settings: past K 2 or 4, alpha 1, gamma 0.95, population std, G 8. Levels at which a turn is alone or at the mean are
    left out. base=True adds GiGPO's episode term as level 0.
    Sure of: the formula (official code), clip and KL (GiGPO's, on whose code it is built).
    """
    episode = Standardise(Outcome(), Voters(rows), scale)
    return Recipe(
        advantage=Nested(ReturnToGo(gamma), past, alpha, scale, base, episode),
        gate=Clip(clip, clip),
        penalties=(Weighted(beta, KL("k3")),),
    )


def salt(window: int = 3, base: Literal["grpo", "rloo"] = "grpo", clip: float = 0.2, beta: float = 0.0) -> Recipe:
    """SALT: a step that several trajectories of a task take alike gets the mean of their credit; where they part, their own.

    Aₖ = mean of A over the trajectories that take (sₖ, aₖ, sₖ₊₁) after the same h states

    Paper: Step-level Advantage Assignment for Long-horizon Agents via Trajectory Graph, arXiv 2510.20022.
    Settings: base GRPO or RLOO; window h 3.
    Deviation: a trajectory that takes a step twice counts once; a lone trajectory gets 0. Actions are equal token by token.
    Sure of: the averaging (abstract and summaries), the window (reconstructed), no KL (ours).
    """
    bases = {"grpo": Standardise(), "rloo": UnlessAlone(LeaveOneOut(), Constant(0.0))}
    return Recipe(
        advantage=Shared(bases[base], SameStep(window)),
        gate=Clip(clip, clip),
        penalties=(Weighted(beta, KL("k3")),),
    )


def igpo(
    gamma: float = 1.0,
    form: Literal["paper", "code"] = "paper",
    answer_weight: float = 1.0,
    clip: float = 0.2,
    beta: float = 1e-3,
) -> Recipe:
    """IGPO: a turn earns by how much it raises the probability of the gold answer, the last one the outcome.

    rₖ = pₖ₊₁ − pₖ, r_last = R;  Aₖ = Σ_{j≥k} γ^{j−k} zⱼ,  z = (r − mean)/std over all turns of the task

    Paper: Information Gain-based Policy Optimization, arXiv 2510.14967.
    Settings: gamma 1, G 16, 32 tasks, at most 10 turns. form=code: returns token by token, minus their mean over the
    trajectories of the task at the same place, no std.
    Deviation: no penalty on the format and no F1; the outcome is what the environment pays.
    Sure of: both forms (official code and notes on the paper), the weight of the KL (ours).
    """
    forms = {
        "paper": ToGo(Standardise(Environment()), gamma),
        "code": Standardise(ReturnToGo(gamma, TOKEN), SamePlace(), scale=False),
    }
    return Recipe(
        advantage=forms[form],
        gate=Clip(clip, clip),
        penalties=(Weighted(beta, KL("k3")),),
        reward=AnswerRise(answer_weight),
    )


def infopo(
    beta: float = 0.5,
    gate_temperature: float = 0.05,
    per_token: bool = True,
    rate: float = 0.0,
    clip: float = 0.2,
    kl: float = 0.0,
) -> Recipe:
    """InfoPO: a turn earns by how much the answer it got changed what was said next, most where outcomes do not differ.

    Iₖ = mean over turn k+1 of log π(y) − log π(y | answer masked);  A = z(R) + β σ(−std R / T) c z(I),
    c = min(1, max(std A_ext, 1)/std A_info)

    Paper: Information-Driven Policy Optimization for User-Centric Agents, arXiv 2603.00656.
    Settings: beta 0.5, gate temperature T 0.05, rate 0. per_token divides I among the tokens of its turn (the released code).
    Deviation: the decay exp(−rate · t) counts batches, not epochs; every turn of an episode weighs alike.
    Sure of: the formula (official code), no KL (ours).
    """
    told = NoLouder(AmongPresent(FeedbackGain(per_token)), Standardise())
    return Recipe(
        advantage=Standardise() + beta * Fading(WhereAlike(told, gate_temperature), rate),
        gate=Clip(clip, clip),
        penalties=(Weighted(kl, KL("k3")),),
    )


def mars(
    game: Literal["group", "domain"] = "group", clip: float = 0.2, dual: float | None = 3.0, beta: float = 0.2
) -> Recipe:
    """MARS: each player is credited with what it earns from here on, against the mean of its own role in this game.

    Gₖ = Σ r of this and the later turns of the same agent;  Aₖ = Gₖ − mean of G over (game, role)

    Paper: MARS: Reinforcing Multi-Agent Reasoning of LLMs through Self-Play in Strategic Games, arXiv 2510.15414.
    Settings: clip 0.2, KL 0.2, dual clip on, 384 trajectories. game=domain takes all tasks of a kind for one game.
    Deviation: sums first and centres then, as the paper; the released code centres twice and whitens between.
    Sure of: the formula (paper text and official code), the dual clip's 3 (common default).
    """
    return Recipe(
        advantage=Standardise(OwnReturn(), Roles(game), scale=False),
        gate=Clip(clip, clip, dual),
        penalties=(Weighted(beta, KL("k3")),),
    )


def trloo(
    gamma: float = 1.0,
    absent: Literal["out", "outcome", "nothing"] = "out",
    low: float = 0.2,
    high: float = 0.28,
) -> Recipe:
    """TRLOO: the return of a turn against the mean of the *other* trajectories at the same turn.

    Aₖ = Gₖ − 1/(N−1) Σ_{j≠i} Gₖʲ over the N trajectories that have a turn k;  alone: Aₖ = Gₖ

    Paper: Dr. Kernel: Reinforcement Learning Done Right for Triton Kernel Generations, arXiv 2602.05885.
    Settings: gamma 1, clip 0.2/0.28, N 16, 3 turns, no KL. Turns told not to be valid are left out. absent=outcome lets
    episodes that are over stand in with all they earned, absent=nothing with 0 (ours).
    Deviation: its rewards for kernels and its rejection of mismatched sequences are left out.
    Sure of: the formula (official code), the average over trajectories (ours).
    """
    valid = Fact("valid", TURN, missing=1.0)
    return Recipe(
        advantage=AtSameTurn(ReturnToGo(gamma), absent, valid),
        gate=Clip(low, high),
        keep=Marked(valid),
    )


def flow_grpo(rows: Rows = "trajectory", low: float = 0.2, high: float = 0.3, beta: float = 1e-3) -> Recipe:
    """Flow-GRPO (AgentFlow): every turn of the planner gets the verdict on its whole episode; other turns are not trained.

    A = (R − mean)/std among the task;  J = mean over trajectories, over planner turns, over tokens of the clipped gain − β k3

    Paper: In-the-Flow Agentic System Optimization for Effective Planning and Tool Use, arXiv 2510.05592.
    Settings: clip 0.2/0.3, KL 0.001, G 8, batch 32, temperature 0.7. rows=turn lets every planner turn vote (released code).
    Deviation: without the turn fact "planner" every turn is the planner's; a lone vote gets 0.
    Sure of: the formula (official code).
    """
    planner = Fact("planner", TURN, missing=1.0)
    return Recipe(
        advantage=Only(planner, Standardise(Outcome(), Voters(rows, planner))),
        gate=Clip(low, high),
        penalties=(Weighted(beta, KL("k3")),),
        aggregate=MeanOfTurns(),
        keep=Marked(planner),
    )


def srgpo(
    size: int = 16,
    omega: float = 0.5,
    scale: bool = True,
    rows: Rows = "turn",
    within: Literal["batch", "task", "trajectory"] = "batch",
    clip: float = 0.2,
    beta: float = 0.01,
) -> Recipe:
    """SRGPO: where a step's reward means the same everywhere, any steps are peers: groups of them are drawn by lot.

    Aₖ = F(R among the task) + ω (rₖ − mean)/std among ``size`` turns drawn from the batch

    Paper: SeeNav-Agent: Enhancing Vision-Language Navigation with Visual Prompt and Step-Level Policy Optimization,
    arXiv 2512.02631.
    Settings: size 16 (-1: one group of all), omega 0.5, KL 0.01, at most 20 steps; rows as in GiGPO.
    Sure of: the formula (official code), the average over trajectories (ours).
    """
    return Recipe(
        advantage=Standardise(Outcome(), Voters(rows), scale) + omega * Standardise(Environment(), Drawn(size, within)),
        gate=Clip(clip, clip),
        penalties=(Weighted(beta, KL("k3")),),
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
    """UI-S1: episodes along an expert's, where later rewards count for a step only as long as it matches the expert.

    Gₖ = rₖ + γ eₖ eₖ₊₁ Gₖ₊₁;  Aₖ = w_E F(R among the task's turns) + w_S F(Gₖ among the task's k-th turns)

    Paper: UI-S1: Advancing GUI Automation via Semi-online Reinforcement Learning, arXiv 2509.11543.
    Settings: weights 1, gamma 0.5, G 8, KL 1e-4, groups with a reward std above 0.3. A lone episode of one turn gets R.
    Deviation: the turn fact "match" is the environment's, and so is patching a history with the expert's action. Groups
    without any spread are drawn anew, those below 0.3 only left out.
    Sure of: the formula (official code).
    """
    turns, matched = Voters("turn"), UnbrokenReturn(Fact("match", TURN), gamma)
    return Recipe(
        advantage=episode_weight * UnlessAlone(Standardise(Outcome(), turns, scale), Outcome(), turns)
        + step_weight * Standardise(matched, Same("index"), scale),
        gate=Clip(clip, clip),
        penalties=(Weighted(beta, KL("k3")),),
        admission=Spread(),
        keep=Varied(least),
    )
