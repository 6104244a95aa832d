"""Methods that learn from others: expert text, past successes, teachers.

A group may hold rows of several origins: what the policy sampled for this step, what it sampled before (replay) and what
it did not sample (expert). Each method says which of them take part, and each part of its loss has a count of its own.
"""

from __future__ import annotations

from typing import Literal

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.factor import Truncated
from turnwise.algebra.gate import Clip, Open
from turnwise.algebra.penalty import NegativeLogLikelihood, Weighted
from turnwise.algebra.ratio import Importance, OnPolicy
from turnwise.algebra.value import Constant, Outcome
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY
from turnwise.core.signals import Signal
from turnwise.credit.by_origin import GateBy, RatioBy, Shaped
from turnwise.credit.distillation import ByPerplexity, OneTokenRollouts, TeacherGap
from turnwise.credit.fact import Fact
from turnwise.credit.imitation import Imitation, Rest, WarmCosine
from turnwise.credit.pairs import Chosen, ToldPairs
from turnwise.credit.preference import Apart, Logistic, Preferred
from turnwise.credit.replayed import Repeated, Warming
from turnwise.credit.selectors import (
    AllOf,
    Among,
    AnyOf,
    Best,
    Failing,
    From,
    Gained,
    Latest,
    Mastered,
    NonZero,
    Not,
    NotOlder,
    Only,
    Patched,
    Spoken,
    Succeeded,
    Unaided,
    Unrewarded,
)
from turnwise.credit.self_imitation import CallBonus, Excess, PastMedian, SparingCovariance
from turnwise.data.replay import ExpertCache, RecentBuffer, SuccessBuffer, WeightedPool
from turnwise.recipes.kind import Kind, declares
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.strategies import Hinted
from turnwise.tasks.listed import Rounds

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
    cutoff: float = 1.0,
) -> Recipe:
    """CHORD: one loss of reinforcement on own rows and imitation of expert rows; its share μ falls as training goes on.

    L = (1 − μ) L_GRPO(own) − μ · token mean over expert text of sg[w] log π;  w = 1, p(1 − p) or p

    Paper: On-Policy RL Meets Off-Policy Experts, arXiv 2508.11408.
    Settings: weight none: peak 0.9, valley 0.05, fall 200; weight phi: peak = valley = 0.1; together: rise 200, fall 400,
    peak 0.5, valley 0.02. A fifth of the rows expert, 8 rollouts a task, no KL.
    Deviation: μ moves once a batch; replayed rows take no part.
    Sure of: the formula and the schedule (official code).
    """
    mu, own = WarmCosine(rise, fall, peak, valley), From("policy")
    return Recipe(
        advantage=Only(own, Standardise(peers=Among(own))),
        gate=Clip(clip, clip) * Rest(mu),
        keep=own,
        penalties=(Weighted(mu, Imitation(weight, cutoff), Mean(TOKEN), rows=From("expert")),),
    )


def hpt(gate: float = 0.0, coef: float = 1.0, length: float = 64, low: float = 1.0, high: float = INF) -> Recipe:
    """HPT: a task that the policy solves often enough is practised, any other is shown: its demonstration is imitated instead.

    solved share > gate: A = R − mean, Σₜ ρₜA / length;  else: coef · mean of log π over the demonstration

    Paper: Towards a Unified View of Large Language Model Post-Training, arXiv 2509.04419.
    Settings: gate 0 (Qwen) or 2/8 (LLaMA), coef 1 (0.3 for the smallest), 8 rollouts; no std, no clip (low 1, high inf).
    Deviation: as released, not as printed (the text has std and clip); its entropy bonus of 0.001 is left out.
    Sure of: the formula (official code).
    """
    practised = AllOf((From("policy"), Mastered(gate)))
    shown = Best(AllOf((From("expert"), Not(Mastered(gate)))))
    return Recipe(
        advantage=Only(practised, Standardise(scale=False, peers=Among(practised))),
        gate=Clip(low, high),
        aggregate=Sum(TRAJECTORY, length=length),
        keep=practised,
        penalties=(Weighted(coef, NegativeLogLikelihood(), Mean(TRAJECTORY), rows=shown),),
    )


def luffy(
    kind: Literal["ratio", "none", "power", "log"] = "ratio",
    shape: float = 0.1,
    power: float = 0.5,
    normalise: bool = False,
    length: float = 64,
) -> Recipe:
    """LUFFY: expert traces are members of the group; a shaped ratio lets their unlikely tokens learn.

    A = R − mean over own and expert rows;  own: ρA;  expert: f(p)A, f(p) = p/(p + shape);  token sums / length

    Paper: Learning to Reason under Off-Policy Guidance, arXiv 2504.14945.
    Settings: 7 own rows and 1 expert's, shape 0.1, no clip, no std, no KL.
    Deviation: its entropy bonus of 0.001 is left out. Replayed rows count as own: their log-probabilities are recorded.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=Standardise(scale=normalise),
        ratio=RatioBy(From("expert"), Shaped(kind, shape, power)),
        aggregate=Sum(TRAJECTORY, length=length),
    )


@declares(Kind.CREDIT)
def guide(clip: float = 0.2, more: int = 0) -> Recipe:
    """Guide: where every rollout failed, hinted ones join the group; the policy learns them as if there had been no hint.

    ρ = π(y | task) / π_old(y | task, hint) on hinted rows;  A = z-score over the rows in use;  clipped

    Paper: Adaptive Guidance Accelerates Reinforcement Learning of Reasoning Models, arXiv 2506.13923.
    Settings: hints only where all plain rollouts are wrong; clip 0.2. As many hinted rollouts as plain ones (more 0) is ours.
    Deviation: the hint is the environment's, not a stronger model's.
    Sure of: the ratio (abstract and recalled), who is compared with whom (unconfirmed).
    """
    plain = AllOf((From("policy"), Unaided()))
    used = AllOf((From("policy"), AnyOf((Unaided(), Not(Mastered(0.0, plain))))))
    credit = Only(used, Standardise(peers=Among(used)))
    return Recipe(advantage=credit, gate=Clip(clip, clip), keep=used, strategy=Hinted(more))


# ---------------------------------------------------------------- past successes


def arpo_gui(
    low: float = 0.2, high: float = 0.3, dual: float | None = 3.0, format_weight: float = 0.5, pool: int = 128
) -> Recipe:
    """ARPO (GUI agents): in a group that failed one rollout gives way to a stored success, so that it has something to learn.

    fails where std R < 0.05 and mean R < 0.2;  A = z-score of R + weight · format;  the stored row has ρ = 1

    Paper: ARPO: End-to-End Policy Optimization for GUI Agents with Experience Replay, arXiv 2505.16282.
    Settings: low 0.2, high 0.3, dual clip, no KL; 8 successes kept for each task (reward above 0.1); 8 rollouts of 16 tasks
    a step, 15 passes over a pool of 128 tasks.
    Deviation: which rollout gives way is decided by lot. The fact `format` (0, or −1 for what cannot be read) is optional.
    Sure of: the formula (official code).
    """
    used, paid = Patched(Failing(0.05, 0.2), From("replay")), Outcome() + format_weight * Fact("format", missing=0.0)
    return Recipe(
        advantage=Only(used, Standardise(paid, peers=Among(used))),
        ratio=RatioBy(From("replay"), OnPolicy()),
        gate=Clip(low, high, dual),
        keep=used,
        sampler=Rounds(pool),
        replay=SuccessBuffer(instead=False),
    )


def bepa(
    kind: Literal["ratio", "none", "power", "log", "same"] = "ratio",
    shape: float = 0.1,
    low: float = 0.2,
    high: float = 0.2,
    pool: int = 128,
) -> Recipe:
    """BEPA: a task whose rollouts all fail borrows one trace: the policy's own last success, before that an expert's.

    A = z-score over the patched group;  own: clipped ρA;  borrowed: f(p)A, f(p) = p/(p + shape)

    Paper: From Off-Policy to On-Policy: Enhancing GUI Agents via Bi-level Expert-to-Policy Assimilation, arXiv 2601.05787.
    Settings: a pool of 128 tasks, passed again and again, one trace each. How a borrowed trace is weighted is not confirmed:
    kind same counts it as said by the present policy (ρ = 1).
    Deviation: which rollout gives way is decided by lot. Turning an expert's trace into one that the policy can say (its
    first level) is a matter of the data.
    Sure of: the rule (paper-level text), the ratio of borrowed traces (unconfirmed).
    """
    own, used = From("policy"), Patched(Unrewarded(), Latest(From("expert+replay")))
    return Recipe(
        advantage=Only(used, Standardise(peers=Among(used))),
        ratio=RatioBy(own, Importance(), Shaped(kind, shape)),
        gate=GateBy(own, Clip(low, high), Open()),
        keep=used,
        sampler=Rounds(pool),
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
    """SPEAR, every tool call counted: first a bonus for calls, later ever more imitation of one's own successes.

    own: A = R + κ min(0.1 calls, 1) − mean;  replayed: A = [R − median of past group means]₊;  L = L_own + η L_replay

    Paper: Learn the Ropes, Then Trust the Wins, arXiv 2509.22601.
    Settings: κ falls over 100 (to 200) steps, η rises over 200, clip 0.2/0.28, oldest 10, history 10240 groups, covariance 0.02.
    Deviation: both losses in one optimiser step; covariance clipping is off unless asked for. `spear` follows the agent runs.
    Sure of: the formula (official code).
    """
    own, past = From("policy"), AllOf((From("replay"), NotOlder(oldest)))
    again, value = AllOf((past, Gained())), Outcome() + bonus * CallBonus(tool_horizon)
    spare = {rows: SparingCovariance(rows, covariance, clip_low=low, clip_high=high) for rows in (own, again)}
    over, cost = Sum(TRAJECTORY, length=length), Repeated(Clip(low, high).where(spare[again]))
    fresh = Standardise(value, Among(own), scale=False)
    return Recipe(
        advantage=Only(own, fresh) + Only(past, Excess(Outcome(), PastMedian(value))),
        gate=Clip(low, high).where(spare[own]), aggregate=over, keep=own,
        penalties=(Weighted(Warming(imitation, replay_horizon), cost, over, rows=again),),
        replay=RecentBuffer(oldest=oldest, tools=1),
    )  # fmt: skip


@declares(Kind.PREFERENCE)
def r1v2(
    beta: float = 0.1,
    preference: float = 0.8,
    quality: float = 0.2,
    generation: float = 1.0,
    delta: float = 0.0,
    clip: float = 0.2,
) -> Recipe:
    """Skywork R1V2: GRPO in which past rows with credit come back, beside three preference losses on told pairs.

    L = L_GRPO(own, and replayed with their stored A) + w_p DPO + w_q BCO + w_g (−mean log π of the chosen)

    Paper: Skywork R1V2: Multimodal Hybrid Reinforcement Learning for Reasoning, arXiv 2504.16656.
    Settings: weights 0.8, 0.2, 1; beta 0.1; delta a running mean of rewards (0 here); rows return with probability ∝ |A|.
    Deviation: no KL; pairs take no part in GRPO.
    Sure of: the losses (paper text), how rows are drawn again (unconfirmed).
    """
    pairs, stored = ToldPairs(), Fact("advantage", missing=0.0)
    own = AllOf((From("policy"), Not(pairs)))
    past = AllOf((From("replay"), Not(pairs), NonZero(stored)))
    better = Weighted(preference, Preferred(Logistic(beta)), Mean(GROUP), rows=pairs)
    apart = Weighted(quality, Preferred(Apart(beta, delta)), Mean(GROUP), rows=pairs)
    said = Weighted(generation, NegativeLogLikelihood(), Mean(TRAJECTORY), rows=Chosen(pairs))
    credit = Only(own, Standardise(peers=Among(own))) + Only(past, stored)
    return Recipe(
        advantage=credit, gate=Clip(clip, clip), keep=AnyOf((own, past)),
        penalties=(better, apart, said), replay=WeightedPool(),
    )  # fmt: skip


# ---------------------------------------------------------------------- teachers


def opd(lam: float = 1.25, clip: float = 0.2) -> Recipe:
    """G-OPD: each token of the policy's own is credited with what a teacher makes of it; λ > 1 goes beyond the teacher.

    Aₜ = λ (log T − log π_ref) − (log π_old − log π_ref);  clipped, token mean;  λ = 1 is on-policy distillation

    Paper: Learning beyond Teacher: Generalized On-Policy Distillation with Reward Extrapolation, arXiv 2602.12125.
    Settings: lambda 1.25 (1.5 can destabilise), one sample a task, batch 1024, temperature 1.
    Sure of: the formula (paper text and official code).
    """
    own = From("policy")
    return Recipe(advantage=Only(own, TeacherGap(lam)), gate=Clip(clip, clip), aggregate=Mean(TOKEN), keep=own)


def opd_corrected(lam: float = 1.25, clip: float = 0.2, cap: float = 5.0) -> Recipe:
    """G-OPD with rollout correction: clipped around the learner's policy, each token weighted by learner over sampler.

    Aₜ as `opd` with the learner's π_old;  Σₜ min(π_old/μ, cap) · clipped(π/π_old, Aₜ)

    Paper: Learning beyond Teacher: Generalized On-Policy Distillation with Reward Extrapolation, arXiv 2602.12125.
    Settings: as `opd`, cap 5.
    Sure of: the formula (paper text and official code).
    """
    own = From("policy")
    return Recipe(
        advantage=Only(own, TeacherGap(lam, proximal=True)),
        ratio=Importance(proximal=True),
        gate=Clip(clip, clip) * Truncated(cap),
        aggregate=Mean(TOKEN),
        keep=own,
    )


def scope(tau: float = 1.0) -> Recipe:
    """SCOPE: right answers are reinforced the more the policy is surprised by them, wrong ones distilled where the teacher finds
    them plausible.

    right: A = w, w ∝ PPL_π^{1/τ};  wrong: Aₜ = w (log T − log π), w ∝ PPL_T^{−1/τ};  Σₜ ρₜAₜ, mean over tasks

    Paper: SCOPE: Signal-Calibrated On-Policy Distillation, arXiv 2604.10688.
    Settings: tau 1, rollout temperature 0.6, batch 256.
    Deviation: weights and credit are of the policy at the start of the batch, not of each update.
    Sure of: the formula (paper text).
    """
    own = AllOf((From("policy"), Spoken()))
    right, wrong = AllOf((own, Succeeded())), AllOf((own, Not(Succeeded())))
    return Recipe(
        advantage=ByPerplexity(Constant(1.0), right, Signal.PROXIMAL, rare=True, tau=tau)
        + ByPerplexity(TeacherGap(1.0, proximal=True), wrong, Signal.TEACHER, rare=False, tau=tau),
        aggregate=Sum(GROUP),
        keep=own,
    )


def otr(negative: float = -0.1, candidates: int = 8) -> Recipe:
    """OTR: at every token of a demonstration the policy draws a few of its own; those equal to the label earn 1, others lose.

    L = −mean over rows of 1/|y| Σₜ [ hits · log π(yₜ) + negative · Σ_{a ≠ yₜ} log π(a) ] / candidates

    Paper: One-Token Rollout: Guiding Supervised Fine-Tuning of LLMs with Policy Gradient, arXiv 2509.26313.
    Settings: 256 candidates at temperature 1.3, negative −0.1 (recalled).
    Deviation: as many candidates as the learner draws (8), at the temperature of the turn.
    Sure of: the formula (paper-level text), the constants (recalled).
    """
    cost = OneTokenRollouts(candidates, negative)
    penalty = Weighted(1.0, cost, Mean(TRAJECTORY), rows=From("expert"))
    return Recipe(advantage=Constant(0.0), ratio=OnPolicy(), penalties=(penalty,))
