"""Learning from further data: demonstrations, replayed successes and teachers.

A group may hold trajectories of several origins: sampled for this step (policy), sampled before (replay), not sampled
by the policy (expert). Each method selects which of them take part; each part of its loss has its own average.
"""

from __future__ import annotations

from typing import Literal

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.factor import TruncatedImportance
from turnwise.algebra.gate import Clip, NoGate
from turnwise.algebra.penalty import NegativeLogLikelihood, WeightedPenalty
from turnwise.algebra.ratio import Importance, OnPolicy
from turnwise.algebra.value import Constant, Outcome
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY
from turnwise.core.signals import Signal
from turnwise.credit.by_origin import GateByOrigin, RatioByOrigin, ShapedProbability
from turnwise.credit.distillation import OneTokenRolloutLoss, PerplexityWeighted, TeacherLogRatio
from turnwise.credit.fact import Fact
from turnwise.credit.history import ImprovementWeighted
from turnwise.credit.imitation import OneMinus, WarmupCosine, WeightedNegativeLogLikelihood
from turnwise.credit.pairs import ChosenSide, LabelledPairs
from turnwise.credit.preference import LogisticLoss, PreferenceLoss, SeparateLogisticLoss
from turnwise.credit.selectors import (
    AllOf,
    AnyOf,
    BestOfGroup,
    FailedGroups,
    FromOrigin,
    HasTokens,
    LatestOfGroup,
    MaxAge,
    NonZero,
    Not,
    OnSelected,
    PatchFailedGroups,
    PositiveAdvantage,
    SelectedPeers,
    SolvedGroups,
    Succeeded,
    Unguided,
    UnrewardedGroups,
)
from turnwise.credit.self_imitation import (
    CosineWarmup,
    DropHighCovariance,
    Excess,
    PastMedian,
    ReplayLoss,
    ToolCallBonus,
)
from turnwise.data.replay import ExpertCache, RecentBuffer, SuccessBuffer, WeightedPool
from turnwise.recipes.kind import Kind, declares
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.guidance import HalfInContext
from turnwise.rollout.strategies import Hinted
from turnwise.tasks.samplers import CyclePool

KIND = Kind.DATA

INF = float("inf")

# ------------------------------------------------------------------ expert text


def chord(
    weight: Literal["none", "phi", "is"] = "none",
    rise: int = 0,
    fall: int = 200,
    peak: float = 0.9,
    valley: float = 0.05,
    clip: float = 0.2,
    dual: float = 3.0,
    cutoff: float = 1.0,
) -> Recipe:
    """CHORD: RL on sampled trajectories and SFT on expert trajectories in one loss, with a scheduled weight μ.

    L = (1 − μ) L_GRPO(own), a token mean, − μ · token mean over expert text of sg[w] log π;  w = 1, p(1 − p) or p

    Paper: On-Policy RL Meets Off-Policy Experts, arXiv 2508.11408.
    Settings: weight none: peak 0.9, valley 0.05, fall 200; weight phi: peak = valley = 0.1; together: rise 200, fall 400,
    peak 0.5, valley 0.02. A fifth of the rows expert, 8 rollouts a task, dual clip 3, no KL.
    Deviation: μ moves once a batch; replayed trajectories take no part.
    Sure of: formula, schedule, average and constants (official code).
    """
    mu, own = WarmupCosine(rise, fall, peak, valley), FromOrigin("policy")
    return Recipe(
        advantage=OnSelected(own, Standardise(peers=SelectedPeers(own))),
        gate=Clip(clip, clip, dual) * OneMinus(mu),
        aggregate=Mean(TOKEN),
        keep=own,
        penalties=(
            WeightedPenalty(mu, WeightedNegativeLogLikelihood(weight, cutoff), Mean(TOKEN), rows=FromOrigin("expert")),
        ),
    )


def hpt(gate: float = 0.0, coef: float = 1.0, length: float = 64, low: float = 1.0, high: float = INF) -> Recipe:
    """HPT: per task, RL where the policy succeeds often enough, SFT on a demonstration otherwise.

    solved share > gate: A = R − mean, Σₜ ρₜA / length;  else: coef · mean of log π over the demonstration

    Paper: Towards a Unified View of Large Language Model Post-Training, arXiv 2509.04419.
    Settings: gate 0 (Qwen) or 2/8 (LLaMA), coef 1 (0.3 for the smallest), 8 rollouts; no std, no clip (low 1, high inf).
    Deviation: as released, not as printed (the text has std and clip); its entropy bonus of 0.001 is left out.
    Sure of: the formula (official code).
    """
    practised = AllOf((FromOrigin("policy"), SolvedGroups(gate)))
    shown = BestOfGroup(AllOf((FromOrigin("expert"), Not(SolvedGroups(gate)))))
    return Recipe(
        advantage=OnSelected(practised, Standardise(scale=False, peers=SelectedPeers(practised))),
        gate=Clip(low, high),
        aggregate=Sum(TRAJECTORY, length=length),
        keep=practised,
        penalties=(WeightedPenalty(coef, NegativeLogLikelihood(), Mean(TRAJECTORY), rows=shown),),
    )


def luffy(
    kind: Literal["ratio", "none", "power", "log"] = "ratio",
    shape: float = 0.1,
    power: float = 0.5,
    normalise: bool = False,
    length: float = 64,
) -> Recipe:
    """LUFFY: expert traces join the group; policy shaping f(p) = p/(p + shape) gives their unlikely tokens a gradient.

    A = R − mean over own and expert rows;  own: ρA;  expert: f(p)A, f(p) = p/(p + shape);  token sums / length

    Paper: Learning to Reason under Off-Policy Guidance, arXiv 2504.14945.
    Settings: 7 own rows and 1 expert's, shape 0.1, no clip, no std, no KL.
    Deviation: its entropy bonus of 0.001 is left out. Replayed trajectories are treated as sampled ones: their
    log-probabilities are recorded.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=Standardise(scale=normalise),
        ratio=RatioByOrigin(FromOrigin("expert"), ShapedProbability(kind, shape, power)),
        aggregate=Sum(TRAJECTORY, length=length),
    )


@declares(Kind.CREDIT)
def guide(clip: float = 0.2, more: int = 0) -> Recipe:
    """Guide: adds hinted rollouts to groups that failed, with the importance ratio of the prompt without the hint.

    ρ = π(y | task) / π_old(y | task, hint) on hinted rows;  A = z-score over the rows in use;  clipped

    Paper: Adaptive Guidance Accelerates Reinforcement Learning of Reasoning Models, arXiv 2506.13923.
    Settings: hints only where all plain rollouts are wrong; clip 0.2. As many hinted rollouts as plain ones (more 0) is ours.
    Deviation: the hint is the environment's, not a stronger model's.
    Sure of: the ratio (abstract and recalled), the peers of the comparison (unconfirmed).
    """
    plain = AllOf((FromOrigin("policy"), Unguided()))
    used = AllOf((FromOrigin("policy"), AnyOf((Unguided(), Not(SolvedGroups(0.0, plain))))))
    credit = OnSelected(used, Standardise(peers=SelectedPeers(used)))
    return Recipe(advantage=credit, gate=Clip(clip, clip), keep=used, strategy=Hinted(more))


def trimpi(clip: float = 0.2, share: float = 0.5, tier: int = 1) -> Recipe:
    """TriMPI (policy rollout, without its pre-training): half of each group reads a document that no ratio contains.

    ρ = π(y | task) / π_old(y | task) on all rows, also on those sampled with the document;  A = z-score;  clipped

    Paper: Multimodal Policy Internalization for Conversational Agents, arXiv 2510.09474.
    Settings: as many rollouts with the document as without, the clip of the base method.
    Deviation: the document is the environment's hints; for a text of your own write --guidance trimpi,document=FILE. Continued
    pre-training on the document is left out.
    Sure of: the ratio (notes on the paper), the average (that of GRPO).
    """
    return Recipe(
        advantage=Standardise(),
        ratio=Importance(proximal=True),
        gate=Clip(clip, clip),
        guidance=HalfInContext(share, tier),
    )


# ---------------------------------------------------------------- past successes


def arpo_gui(
    low: float = 0.2, high: float = 0.3, dual: float | None = 3.0, format_weight: float = 0.5, pool: int = 128
) -> Recipe:
    """ARPO (GUI agents): replaces one rollout of a failed group by a stored success (experience replay).

    fails where std R < 0.05 and mean R < 0.2;  A = z-score of R + weight · format;  the stored row has ρ = 1

    Paper: ARPO: End-to-End Policy Optimization for GUI Agents with Experience Replay, arXiv 2505.16282.
    Settings: low 0.2, high 0.3, dual clip, no KL; 8 successes kept for each task (reward above 0.1); 8 rollouts of 16 tasks
    a step, 15 passes over a pool of 128 tasks.
    Deviation: the replaced rollout is chosen at random. The fact `format` (0, or −1 for unparsable output) is optional.
    Sure of: the formula (official code).
    """
    used, paid = (
        PatchFailedGroups(FailedGroups(0.05, 0.2), FromOrigin("replay")),
        Outcome() + format_weight * Fact("format", missing=0.0),
    )
    return Recipe(
        advantage=OnSelected(used, Standardise(paid, peers=SelectedPeers(used))),
        ratio=RatioByOrigin(FromOrigin("replay"), OnPolicy()),
        gate=Clip(low, high, dual),
        keep=used,
        sampler=CyclePool(pool),
        replay=SuccessBuffer(instead=False),
    )


def bepa(
    kind: Literal["ratio", "none", "power", "log", "same"] = "ratio",
    shape: float = 0.1,
    low: float = 0.2,
    high: float = 0.2,
    pool: int = 128,
) -> Recipe:
    """BEPA: replaces one rollout of an all-failed group by the policy's last success, before the first by an expert's.

    A = z-score over the patched group;  own: clipped ρA;  borrowed: f(p)A, f(p) = p/(p + shape)

    Paper: From Off-Policy to On-Policy: Enhancing GUI Agents via Bi-level Expert-to-Policy Assimilation, arXiv 2601.05787.
    Settings: repeated passes over a pool of 128 tasks, one trace each. The weight of a borrowed trace is not confirmed:
    kind same treats it as sampled by the present policy (ρ = 1).
    Deviation: the replaced rollout is chosen at random. Its first level, in which the policy itself plays a plan of the expert's
    trace, is --guidance bepa.
    Sure of: the rule (paper-level text), the ratio of borrowed traces (unconfirmed).
    """
    own, used = FromOrigin("policy"), PatchFailedGroups(UnrewardedGroups(), LatestOfGroup(FromOrigin("expert+replay")))
    return Recipe(
        advantage=OnSelected(used, Standardise(peers=SelectedPeers(used))),
        ratio=RatioByOrigin(own, Importance(), ShapedProbability(kind, shape)),
        gate=GateByOrigin(own, Clip(low, high), NoGate()),
        keep=used,
        sampler=CyclePool(pool),
        replay=ExpertCache(instead=False),
    )


def spear_replay(
    bonus: float = 1.0,
    tool_horizon: int = 100,
    imitation: float = 1.0,
    replay_horizon: int = 200,
    low: float = 0.2,
    high: float = 0.28,
    length: float = 64,
    oldest: int = 10,
    covariance: float = 0.0,
) -> Recipe:
    """SPEAR (clamped): replays trajectories above the past median, advantage clamped at 0; bonus per tool call.

    own: A = R + κ min(0.1 calls, 1) − mean;  replayed: A = [R − median of past group means]₊;  L = L_own + η L_replay

    Paper: Learn the Ropes, Then Trust the Wins, arXiv 2509.22601.
    Settings: κ falls over 100 (to 200) steps, η rises over 200, clip 0.2/0.28, oldest 10, history 10240 groups, covariance 0.02
    (a share of all tokens).
    Deviation: both losses in one optimiser step; covariance clipping is off by default. `spear` follows the agent runs.
    Sure of: the formula (official code).
    """
    own, past = FromOrigin("policy"), AllOf((FromOrigin("replay"), MaxAge(oldest)))
    good, over = AllOf((past, PositiveAdvantage())), Sum(TRAJECTORY, length=length)
    drop = {rows: DropHighCovariance(rows, covariance, 1.0, 40.0, clip=(low, high)) for rows in (own, good)}
    value = Outcome() + bonus * ToolCallBonus(0.1, tool_horizon, per_turn=False)
    loss, fresh = ReplayLoss(Clip(low, high).where(drop[good])), Standardise(value, SelectedPeers(own), scale=False)
    return Recipe(
        advantage=OnSelected(own, fresh) + OnSelected(past, Excess(Outcome(), PastMedian(value))),
        gate=Clip(low, high).where(drop[own]), aggregate=over, keep=own,
        penalties=(WeightedPenalty(CosineWarmup(imitation, replay_horizon), loss, over, rows=good),),
        replay=RecentBuffer(oldest=oldest, tools=1),
    )  # fmt: skip


def pipo(window: int = 3, damp: float = 0.5, eps: float = 1e-6, clip: float = 0.2) -> Recipe:
    """PIPO: replays the previous batch with its advantages weighted by whether the return improved since.

    A = φ(ξ) a for a replayed trajectory, a its credit then; ξ = (μ − mean)/(std + ε) of the last K batches; φ(ξ) = ξ, λξ below 0

    Paper: PIPO: Policy Improvement Reinforcement Learning, arXiv 2604.00860.
    Settings: K 3, λ 0.5.
    Deviation: old and new are one optimiser step, not two; trajectories with advantage 0 are not replayed (they have no
    gradient).
    Sure of: the formula (third-party notes), K and λ (unverified).
    """
    own, past = FromOrigin("policy"), FromOrigin("replay")
    verdict = ImprovementWeighted(Fact("advantage", missing=0.0), window, damp, eps)
    return Recipe(
        advantage=OnSelected(own, Standardise(Outcome(), SelectedPeers(own), eps=eps)) + OnSelected(past, verdict),
        gate=Clip(clip, clip),
        replay=WeightedPool(share=1.0, power=0.0, oldest=1),
    )


@declares(Kind.PREFERENCE)
def r1v2(
    beta: float = 0.1,
    preference: float = 0.8,
    quality: float = 0.2,
    generation: float = 1.0,
    delta: float = 0.0,
    clip: float = 0.2,
) -> Recipe:
    """Skywork R1V2: GRPO with replay of trajectories with non-zero advantage, plus DPO, BCO and NLL on labelled pairs.

    L = L_GRPO(own, and replayed with their stored A) + w_p DPO + w_q BCO + w_g (−mean log π of the chosen)

    Paper: Skywork R1V2: Multimodal Hybrid Reinforcement Learning for Reasoning, arXiv 2504.16656.
    Settings: weights 0.8, 0.2, 1; beta 0.1; delta a running mean of rewards (0 here); trajectories are replayed with
    probability ∝ |A|.
    Deviation: no KL; pairs take no part in GRPO.
    Sure of: the losses (paper text), how trajectories are sampled for replay (unconfirmed).
    """
    pairs, stored = LabelledPairs(), Fact("advantage", missing=0.0)
    own = AllOf((FromOrigin("policy"), Not(pairs)))
    past = AllOf((FromOrigin("replay"), Not(pairs), NonZero(stored)))
    ranking = WeightedPenalty(preference, PreferenceLoss(LogisticLoss(beta)), Mean(GROUP), rows=pairs)
    binary = WeightedPenalty(quality, PreferenceLoss(SeparateLogisticLoss(beta, delta)), Mean(GROUP), rows=pairs)
    likelihood = WeightedPenalty(generation, NegativeLogLikelihood(), Mean(TRAJECTORY), rows=ChosenSide(pairs))
    credit = OnSelected(own, Standardise(peers=SelectedPeers(own))) + OnSelected(past, stored)
    return Recipe(
        advantage=credit, gate=Clip(clip, clip), keep=AnyOf((own, past)),
        penalties=(ranking, binary, likelihood), replay=WeightedPool(),
    )  # fmt: skip


# ---------------------------------------------------------------------- teachers


def opd(lam: float = 1.25, clip: float = 0.2) -> Recipe:
    """G-OPD: on-policy distillation, token advantage is the teacher's log-ratio; λ > 1 extrapolates beyond the teacher.

    Aₜ = λ (log T − log π_ref) − (log π_old − log π_ref);  clipped, token mean;  λ = 1 is on-policy distillation

    Paper: Learning beyond Teacher: Generalized On-Policy Distillation with Reward Extrapolation, arXiv 2602.12125.
    Settings: lambda 1.25 (1.5 can destabilise), one sample a task, batch 1024, temperature 1.
    Sure of: the formula (paper text and official code).
    """
    own = FromOrigin("policy")
    return Recipe(
        advantage=OnSelected(own, TeacherLogRatio(lam)), gate=Clip(clip, clip), aggregate=Mean(TOKEN), keep=own
    )


def opd_corrected(lam: float = 1.25, clip: float = 0.2, cap: float = 5.0) -> Recipe:
    """G-OPD with rollout correction: clips around the proximal policy, with truncated weights proximal over sampler.

    Aₜ as `opd` with the learner's π_old;  Σₜ min(π_old/μ, cap) · clipped(π/π_old, Aₜ)

    Paper: Learning beyond Teacher: Generalized On-Policy Distillation with Reward Extrapolation, arXiv 2602.12125.
    Settings: as `opd`, cap 5.
    Sure of: the formula (paper text and official code).
    """
    own = FromOrigin("policy")
    return Recipe(
        advantage=OnSelected(own, TeacherLogRatio(lam, proximal=True)),
        ratio=Importance(proximal=True),
        gate=Clip(clip, clip) * TruncatedImportance(cap),
        aggregate=Mean(TOKEN),
        keep=own,
    )


def scope(tau: float = 1.0) -> Recipe:
    """SCOPE: reinforces right answers by the policy's perplexity, distils wrong ones by the teacher's.

    right: A = w, w ∝ PPL_π^{1/τ};  wrong: Aₜ = w (log T − log π), w ∝ PPL_T^{−1/τ};  Σₜ ρₜAₜ, mean over tasks

    Paper: SCOPE: Signal-Calibrated On-Policy Distillation, arXiv 2604.10688.
    Settings: tau 1, rollout temperature 0.6, batch 256.
    Deviation: weights and credit are of the policy at the start of the batch, not of each update.
    Sure of: the formula (paper text).
    """
    own = AllOf((FromOrigin("policy"), HasTokens()))
    right, wrong = AllOf((own, Succeeded())), AllOf((own, Not(Succeeded())))
    return Recipe(
        advantage=PerplexityWeighted(Constant(1.0), right, Signal.PROXIMAL, favour_high=True, tau=tau)
        + PerplexityWeighted(TeacherLogRatio(1.0, proximal=True), wrong, Signal.TEACHER, favour_high=False, tau=tau),
        aggregate=Sum(GROUP),
        keep=own,
    )


def otr(negative: float = -0.1, candidates: int = 8) -> Recipe:
    """OTR: one-token rollouts at each demonstration token; matching candidates earn 1, the others a negative reward.

    L = −mean over rows of 1/|y| Σₜ [ hits · log π(yₜ) + negative · Σ_{a ≠ yₜ} log π(a) ] / candidates

    Paper: One-Token Rollout: Guiding Supervised Fine-Tuning of LLMs with Policy Gradient, arXiv 2509.26313.
    Settings: 256 candidates at temperature 1.3, negative −0.1 (recalled).
    Deviation: 8 candidates by default, at the temperature of the turn.
    Sure of: the formula (paper-level text), the constants (recalled).
    """
    cost = OneTokenRolloutLoss(candidates, negative)
    penalty = WeightedPenalty(1.0, cost, Mean(TRAJECTORY), rows=FromOrigin("expert"))
    return Recipe(advantage=Constant(0.0), ratio=OnPolicy(), penalties=(penalty,))
