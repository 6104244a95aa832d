"""Learning from further data: demonstrations, replayed successes and teachers.

A group may hold trajectories of several origins: sampled for this step (policy), sampled before (replay), not sampled
by the policy (expert). Each method selects which of them take part; each part of its loss has its own average.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable
from dataclasses import field, replace
from functools import reduce
from typing import TYPE_CHECKING, Literal

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.control import Passes
from turnwise.algebra.gate import Clip, Factor, NoGate, TruncatedImportance
from turnwise.algebra.penalty import NegativeLogLikelihood, Penalty, Schedule, Weight, WeightedPenalty
from turnwise.algebra.piece import MicroBatchView, State, StepView
from turnwise.algebra.ratio import Importance, OnPolicy, Ratio, behaviour
from turnwise.algebra.term import Term
from turnwise.algebra.value import Constant, Outcome
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, Field, Partition, where
from turnwise.core.limits import choice, number
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact
from turnwise.credit.preference import ChosenSide, LabelledPairs, LogisticLoss, PreferenceLoss, SeparateLogisticLoss
from turnwise.credit.selectors import (
    AllOf,
    BestOfGroup,
    FromOrigin,
    GateBySelector,
    HasTokens,
    Not,
    OnSelected,
    RatioByOrigin,
    SelectedPeers,
    Selector,
    Succeeded,
    Unguided,
)
from turnwise.credit.self_imitation import (
    CosineWarmup,
    DropHighCovariance,
    PastMedian,
    ReplayLoss,
    ToolCallBonus,
    cosine_decay,
)
from turnwise.credit.tracker import Solved
from turnwise.data.replay import ExpertCache, RecentBuffer, SuccessBuffer, WeightedPool
from turnwise.maths.lazy_torch import torch
from turnwise.recipes.recipe import Kind, Recipe, declares
from turnwise.recipes.signatures import suggests
from turnwise.rollout.guidance import HalfInContext, HintByDifficulty, SelfRolledPlans
from turnwise.rollout.strategies import Hinted
from turnwise.tasks.samplers import CyclePool

if TYPE_CHECKING:
    from torch import Tensor

KIND = Kind.DATA

INF = float("inf")

# ------------------------------------------------------------------ expert text


TOKEN_WEIGHTS: dict[str, Callable[[Field], Field]] = {
    "none": lambda p: p.map(torch.ones_like),
    "phi": lambda p: p * (1 - p),
    "is": lambda p: p,
}


class WeightedNegativeLogLikelihood(Penalty):
    """−sg[w] min(log π, log cutoff). w = 1 (``none``), p(1 − p) (``phi``: tokens the policy is uncertain about) or p
    (``is``: as if the policy had sampled the token). Tokens more likely than ``cutoff`` have no gradient."""

    weight: str = choice(*TOKEN_WEIGHTS, default="none")
    cutoff: float = number(1.0, above=0, most=1, why="a probability, 1 for off")

    def __call__(self, view: MicroBatchView) -> Field:
        logp = view.logp if self.cutoff == 1 else view.logp.clamp(high=math.log(self.cutoff))
        return -(TOKEN_WEIGHTS[self.weight](view.logp.detach().exp()) * logp)


class WarmupCosine(Schedule):
    """peak·t/warmup during ``warmup``, then half a cosine of ``decay`` steps down to ``valley``, constant afterwards."""

    warmup: int = number(0, least=0)
    decay: int = number(200, least=0)
    peak: float = number(0.9, least=0, most=1)
    valley: float = number(0.05, least=0, most=1)

    def at(self, t: float) -> float:
        if t < self.warmup:
            return self.peak * t / self.warmup
        if t < self.warmup + self.decay:
            return self.valley + (self.peak - self.valley) * cosine_decay(t - self.warmup, self.decay)
        return self.valley


class OneMinus(Factor):
    """1 − weight: the share that another loss leaves to the policy gradient."""

    weight: Weight

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return 1 - view[self.weight].to(rho.x.dtype)


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
    Deviation: μ moves once a batch; replayed trajectories take no part."""
    mu, rollouts = WarmupCosine(rise, fall, peak, valley), FromOrigin("policy")
    imitation = WeightedNegativeLogLikelihood(weight, cutoff)
    return Recipe(
        advantage=OnSelected(rollouts, Standardise(peers=SelectedPeers(rollouts))),
        gate=Clip(clip, clip, dual) * OneMinus(mu),
        aggregate=Mean(TOKEN),
        keep=rollouts,
        penalties=(WeightedPenalty(mu, imitation, Mean(TOKEN), rows=FromOrigin("expert")),),
    )


class SolvedGroups(Selector):
    """Groups in which more than a share ``threshold`` of the trajectories selected by ``counted`` succeeded."""

    threshold: float = 0.0
    counted: Selector = field(default_factory=lambda: FromOrigin("policy"))

    def select(self, batch: Batch) -> Field:
        weight = where(self.counted.select(batch), 1.0, 0.0)
        solved_share = (weight * Solved()(batch)).sum(GROUP) / weight.sum(GROUP).clamp(low=1.0)
        return (solved_share > self.threshold).at(TRAJECTORY)


def hpt(gate: float = 0.0, coef: float = 1.0, length: float = 64, low: float = 1.0, high: float = INF) -> Recipe:
    """HPT: per task, RL where the policy succeeds often enough, SFT on a demonstration otherwise.

    solved share > gate: A = R − mean, Σₜ ρₜA / length;  else: coef · mean of log π over the demonstration

    Paper: Towards a Unified View of Large Language Model Post-Training, arXiv 2509.04419.
    Settings: gate 0 (Qwen) or 2/8 (LLaMA), coef 1 (0.3 for the smallest), 8 rollouts; no std, no clip (low 1, high inf).
    Deviation: as released, not as printed (the text has std and clip); its entropy bonus of 0.001 is left out."""
    practised = AllOf((FromOrigin("policy"), SolvedGroups(gate)))
    shown = BestOfGroup(AllOf((FromOrigin("expert"), Not(SolvedGroups(gate)))))
    return Recipe(
        advantage=OnSelected(practised, Standardise(scale=False, peers=SelectedPeers(practised))),
        gate=Clip(low, high),
        aggregate=Sum(TRAJECTORY, length=length),
        keep=practised,
        penalties=(WeightedPenalty(coef, NegativeLogLikelihood(), Mean(TRAJECTORY), rows=shown),),
        control=Passes(minibatches=2),
    )


SHAPES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "ratio": lambda logp, shape, power: logp.exp() / (logp.exp() + shape),
    "none": lambda logp, shape, power: logp.exp(),
    "power": lambda logp, shape, power: (power * logp).exp(),
    "log": lambda logp, shape, power: logp,
    "same": lambda logp, shape, power: (logp - logp.detach()).exp(),
}


class ShapedProbability(Ratio):
    """ρ = f(p), p = π(y): the ratio for expert text, whose sampler is taken to be certain (μ = 1). The gradient flows
    through f.

    ``ratio``: p/(p + shape), which keeps a gradient on rare tokens (f′(0) = 1/shape); ``none``: p; ``power``: p^power;
    ``log``: log p; ``same``: 1 with the gradient of log p, as if the policy had sampled the token."""

    kind: str = choice(*SHAPES, default="ratio")
    shape: float = number(0.1, above=0)
    power: float = 0.5

    def __call__(self, view: MicroBatchView) -> Field:
        return view.logp.map(lambda x: SHAPES[self.kind](x, self.shape, self.power))


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
    log-probabilities are recorded."""
    return Recipe(
        advantage=Standardise(scale=normalise),
        ratio=RatioByOrigin(FromOrigin("expert"), ShapedProbability(kind, shape, power)),
        aggregate=Sum(TRAJECTORY, length=length),
        control=Passes(minibatches=2),
    )


class AnyOf(Selector):
    """Trajectories that at least one selector selects."""

    selectors: tuple[Selector, ...]

    def select(self, batch: Batch) -> Field:
        return reduce(operator.or_, (selector.select(batch) for selector in self.selectors))


@declares(Kind.CREDIT)
def guide(clip: float = 0.2, more: int = 0) -> Recipe:
    """Guide: adds hinted rollouts to groups that failed, with the importance ratio of the prompt without the hint.

    ρ = π(y | task) / π_old(y | task, hint) on hinted rows;  A = z-score over the rows in use;  clipped

    Paper: Adaptive Guidance Accelerates Reinforcement Learning of Reasoning Models, arXiv 2506.13923.
    Settings: hints only where all plain rollouts are wrong; clip 0.2. As many hinted rollouts as plain ones (more 0) is ours.
    Deviation: the hint is the environment's, not a stronger model's."""
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
    pre-training on the document is left out."""
    ratio, document = Importance(proximal=True), HalfInContext(share, tier)
    return Recipe(advantage=Standardise(), ratio=ratio, gate=Clip(clip, clip), guidance=document)


class RelativeDifficulty(Term):
    """z-scores of the trajectories with help and of those without, each among their own kind in the group. Of successes, those
    without help times 1 + g, those with help times 1 − g; g = clip(mean return with help − mean without, 0, 1), what the
    help was worth; 0 in a group of one kind."""

    compares_peers = True
    solved: Term = field(default_factory=Solved)
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        outcome, helped = batch.reward.sum(TRAJECTORY), where(batch.guided, 1.0, 0.0)
        kind = Partition.by(batch.tree, TRAJECTORY, batch.group, batch.guided)
        score = (outcome - outcome.mean(kind)) / (outcome.std(kind) + self.eps)

        def mean_of(weight: Field) -> Field:
            return (weight * outcome).sum(GROUP) / weight.sum(GROUP).clamp(low=1.0)

        both = helped.mean(GROUP) * (1 - helped.mean(GROUP)) > 0
        gap = where(both, (mean_of(helped) - mean_of(1 - helped)).clamp(0.0, 1.0), 0.0)
        return score * (1 + self.solved(batch) * gap * (1 - 2 * helped)).to(score.x.dtype)


def adhint(most: float = 0.8, clip: float = 0.2) -> Recipe:
    """ADHint: half of a group begins with a part of the solution, longer for harder tasks; successes without it count more.

    A = z-score among those with help, and among those without; successes: times 1 + g without help, 1 − g with it, g = what
    the help was worth in mean reward, within 0 to 1

    Paper: Adaptive Hints with Difficulty Priors for RL (ADHint), arXiv 2512.13095.
    Settings: not found; the longest hint of 0.8 is ours.
    Deviation: the hint is context, so its tokens have no gradient to modulate; its length most·(1 − success), g and its place
    are ours."""
    return Recipe(advantage=RelativeDifficulty(), gate=Clip(clip, clip), guidance=HintByDifficulty(most))


# ---------------------------------------------------------------- past successes


class FailedGroups(Selector):
    """Groups whose sampled trajectories have similar and low returns: std < ``max_std`` and mean < ``max_mean``."""

    max_std: float = number(0.05, above=0)
    max_mean: float = 0.2

    def select(self, batch: Batch) -> Field:
        weight, r = where(FromOrigin("policy").select(batch), 1.0, 0.0), batch.reward.sum(TRAJECTORY)
        n = weight.sum(GROUP)
        mean = (weight * r).sum(GROUP) / n.clamp(low=1.0)
        std = ((weight * (r - mean) ** 2).sum(GROUP) / n.clamp(low=1.0)) ** 0.5
        return ((n > 0) & (std < self.max_std) & (mean < self.max_mean)).at(TRAJECTORY)


class PatchFailedGroups(Selector):
    """The sampled trajectories; in a ``failed`` group with a trajectory in ``pool``, one of ``pool`` replaces a sampled
    one.

    Seeds decide which one is taken and which one it replaces."""

    failed: Selector
    pool: Selector

    def select(self, batch: Batch) -> Field:
        sampled, substitute = FromOrigin("policy").select(batch), BestOfGroup(self.pool).select(batch)
        patched = self.failed.select(batch) & (where(substitute, 1.0, 0.0).sum(GROUP) > 0)
        return (sampled & ~(patched & BestOfGroup(FromOrigin("policy")).select(batch))) | (substitute & patched)


def arpo_gui(
    low: float = 0.2, high: float = 0.3, dual: float | None = 3.0, format_weight: float = 0.5, pool: int = 128
) -> Recipe:
    """ARPO (GUI agents): replaces one rollout of a failed group by a stored success (experience replay).

    fails where std R < 0.05 and mean R < 0.2;  A = z-score of R + weight · format;  the stored row has ρ = 1

    Paper: ARPO: End-to-End Policy Optimization for GUI Agents with Experience Replay, arXiv 2505.16282.
    Settings: low 0.2, high 0.3, dual clip, no KL; 8 successes kept for each task (reward above 0.1); 8 rollouts of 16 tasks
    a step, 15 passes over a pool of 128 tasks.
    Deviation: the replaced rollout is chosen at random. The fact `format` (0, or −1 for unparsable output) is optional."""
    used = PatchFailedGroups(FailedGroups(0.05, 0.2), FromOrigin("replay"))
    paid = Outcome() + format_weight * Fact("format", missing=0.0)
    return Recipe(
        advantage=OnSelected(used, Standardise(paid, peers=SelectedPeers(used))),
        ratio=RatioByOrigin(FromOrigin("replay"), OnPolicy()),
        gate=Clip(low, high, dual),
        keep=used,
        sampler=CyclePool(pool),
        replay=SuccessBuffer(instead=False),
        control=Passes(minibatches=2),
    )


class UnrewardedGroups(Selector):
    """Groups whose sampled trajectories all have return 0."""

    def select(self, batch: Batch) -> Field:
        weight = where(FromOrigin("policy").select(batch), 1.0, 0.0)
        total_reward = (weight * batch.reward.sum(TRAJECTORY).abs()).sum(GROUP)
        return ((weight.sum(GROUP) > 0) & (total_reward <= 0)).at(TRAJECTORY)


class LatestOfGroup(Selector):
    """One trajectory per group: the one stored last (fact ``age``); trajectories without an age come last."""

    selector: Selector

    def select(self, batch: Batch) -> Field:
        return BestOfGroup(self.selector, -1.0 * Fact("age", missing=torch.inf)).select(batch)


@suggests(demos="oracle")
def bepa(
    kind: Literal["ratio", "none", "power", "log", "same"] = "ratio",
    shape: float = 0.1,
    low: float = 0.2,
    high: float = 0.2,
    pool: int = 128,
) -> Recipe:
    """BEPA: plays hard tasks with a plan of an expert's trace; a failed group gets the policy's last success, or the expert's.

    A = z-score over the patched group;  own: clipped ρA;  borrowed: f(p)A, f(p) = p/(p + shape)

    Paper: From Off-Policy to On-Policy: Enhancing GUI Agents via Bi-level Expert-to-Policy Assimilation, arXiv 2601.05787.
    Settings: repeated passes over a pool of 128 tasks, one trace each. The weight of a borrowed trace is not confirmed:
    kind same treats it as sampled by the present policy (ρ = 1).
    Deviation: the replaced rollout is chosen at random. The plan is made by rule, and played by the present policy where its
    group fails, not by the base policy before the run; --guidance none leaves that level out."""
    rollouts = FromOrigin("policy")
    used = PatchFailedGroups(UnrewardedGroups(), LatestOfGroup(FromOrigin("expert+replay")))
    return Recipe(
        advantage=OnSelected(used, Standardise(peers=SelectedPeers(used))),
        ratio=RatioByOrigin(rollouts, Importance(), ShapedProbability(kind, shape)),
        gate=GateBySelector(rollouts, Clip(low, high), NoGate()),
        keep=used,
        sampler=CyclePool(pool),
        replay=ExpertCache(instead=False),
        guidance=SelfRolledPlans(),
    )


class MaxAge(Selector):
    """Stored at most ``steps`` training steps ago (fact ``age``; a trajectory without an age counts as fresh)."""

    steps: int = 10

    def select(self, batch: Batch) -> Field:
        return Fact("age", missing=0.0)(batch) <= self.steps


class PositiveAdvantage(Selector):
    """Trajectories with a positive advantage on at least one token."""

    def select(self, batch: Batch) -> Field:
        a = batch[Column.ADVANTAGE]
        return (a.max(TRAJECTORY) if a.level < TRAJECTORY else a.at(TRAJECTORY)) > 0


class Excess(Term):
    """max(value − threshold, 0), in the dtype of the value."""

    value: Term
    threshold: Term

    def __call__(self, batch: Batch) -> Field:
        value = self.value(batch)
        return (value - self.threshold(batch).to(value.x.dtype)).clamp(low=0.0)


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
    Deviation: both losses in one optimiser step; covariance clipping is off by default. `spear` follows the agent runs."""
    rollouts, past = FromOrigin("policy"), AllOf((FromOrigin("replay"), MaxAge(oldest)))
    good, over = AllOf((past, PositiveAdvantage())), Sum(TRAJECTORY, length=length)
    drop = {rows: DropHighCovariance(rows, covariance, 1.0, 40.0, clip=(low, high)) for rows in (rollouts, good)}
    value = Outcome() + bonus * ToolCallBonus(0.1, tool_horizon, per_turn=False)
    loss = ReplayLoss(Clip(low, high).where(drop[good]))
    fresh = Standardise(value, SelectedPeers(rollouts), scale=False)
    return Recipe(
        advantage=OnSelected(rollouts, fresh) + OnSelected(past, Excess(Outcome(), PastMedian(value))),
        gate=Clip(low, high).where(drop[rollouts]), aggregate=over, keep=rollouts,
        penalties=(WeightedPenalty(CosineWarmup(imitation, replay_horizon), loss, over, rows=good),),
        replay=RecentBuffer(oldest=oldest, tools=1), control=Passes(minibatches=2),)  # fmt: skip


class ImprovementWeighted(Term):
    """φ(ξ) · term: weights the credit of earlier batches by how this batch fared after their update.

    ξ = (μ − mean)/(std + ε): this step's mean return against those of the last ``window`` batches. φ(ξ) = ξ, or damp ·
    ξ below 0; 0 until ``window`` batches are known. An improvement reinforces the last update, a decline reverses
    it."""

    updates_after_credit = True
    term: Term
    window: int = number(3, least=1)
    damp: float = number(0.5, least=0, most=1)
    eps: float = 1e-6

    def initial_state(self) -> State:
        return {"means": []}

    def next_state(self, state: State, view: StepView) -> State:
        if not bool(FromOrigin("policy").select(view.batch).x.any()):
            return state
        return {"means": [*state["means"], float(self._mean(view.batch).item)][-self.window :]}

    def memory_columns(self, state: State, batch: Batch) -> dict[object, Field]:
        means = state["means"]
        ready = len(means) >= self.window
        mean = statistics.fmean(means) if ready else float("nan")
        std = statistics.stdev(means) if ready and len(means) > 1 else 0.0
        return {(self, name): batch.tree.full(BATCH, x, torch.float64) for name, x in (("mean", mean), ("std", std))}

    def _mean(self, batch: Batch) -> Field:
        weight = where(FromOrigin("policy").select(batch), 1.0, 0.0)
        return (weight * batch.reward.sum(TRAJECTORY)).sum(BATCH) / weight.sum(BATCH).clamp(low=1.0)

    def improvement(self, batch: Batch) -> Field:
        """φ. At BATCH."""
        mean = batch[self, "mean"]  # NaN until the window is full
        xi = (self._mean(batch) - mean) / (batch[self, "std"] + self.eps)
        return where(mean.map(torch.isnan), 0.0, where(xi < 0, self.damp * xi, xi))

    def __call__(self, batch: Batch) -> Field:
        return self.improvement(batch) * self.term(batch)


def pipo(window: int = 3, damp: float = 0.5, eps: float = 1e-6, clip: float = 0.2) -> Recipe:
    """PIPO: replays the previous batch with its advantages weighted by whether the return improved since.

    A = φ(ξ) a for a replayed trajectory, a its credit then; ξ = (μ − mean)/(std + ε) of the last K batches; φ(ξ) = ξ, λξ below 0

    Paper: PIPO: Policy Improvement Reinforcement Learning, arXiv 2604.00860.
    Settings: K 3, λ 0.5.
    Deviation: old and new are one optimiser step, not two; trajectories with advantage 0 are not replayed (they have no
    gradient)."""
    rollouts, past = FromOrigin("policy"), FromOrigin("replay")
    verdict = ImprovementWeighted(Fact("advantage", missing=0.0), window, damp, eps)
    return Recipe(
        advantage=OnSelected(rollouts, Standardise(Outcome(), SelectedPeers(rollouts), eps=eps))
        + OnSelected(past, verdict),
        gate=Clip(clip, clip),
        replay=WeightedPool(share=1.0, power=0.0, oldest=1),
    )


class NonZero(Selector):
    """Trajectories on which ``term`` is not 0."""

    term: Term

    def select(self, batch: Batch) -> Field:
        return self.term(batch).map(lambda x: x != 0)


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
    Deviation: no KL; pairs take no part in GRPO."""
    pairs, stored = LabelledPairs(), Fact("advantage", missing=0.0)
    rollouts = AllOf((FromOrigin("policy"), Not(pairs)))
    past = AllOf((FromOrigin("replay"), Not(pairs), NonZero(stored)))
    ranking = WeightedPenalty(preference, PreferenceLoss(LogisticLoss(beta)), Mean(GROUP), rows=pairs)
    binary = WeightedPenalty(quality, PreferenceLoss(SeparateLogisticLoss(beta, delta)), Mean(GROUP), rows=pairs)
    likelihood = WeightedPenalty(generation, NegativeLogLikelihood(), Mean(TRAJECTORY), rows=ChosenSide(pairs))
    credit = OnSelected(rollouts, Standardise(peers=SelectedPeers(rollouts))) + OnSelected(past, stored)
    return Recipe(
        advantage=credit, gate=Clip(clip, clip), keep=AnyOf((rollouts, past)),
        penalties=(ranking, binary, likelihood), replay=WeightedPool(),
    )  # fmt: skip


# ---------------------------------------------------------------------- teachers


class TeacherLogRatio(Term):
    """λ(log T − log π_ref) − (log π_old − log π_ref) per token; λ = 1 is log T − log π_old and needs no reference.

    π_old is the sampler or, with ``proximal``, the policy at the start of this batch. λ > 1 extrapolates beyond the
    teacher."""

    requires = frozenset({"teacher"})
    lam: float = 1.0
    proximal: bool = False

    @property
    def reads(self) -> frozenset[Signal]:
        anchors = {Signal.REFERENCE: self.lam != 1, Signal.PROXIMAL: self.proximal}
        return frozenset({Signal.TEACHER, *(s for s, used in anchors.items() if used)})

    def __call__(self, batch: Batch) -> Field:
        teacher = batch[Signal.TEACHER]
        old = batch[Signal.PROXIMAL] if self.proximal else behaviour(batch)
        if self.lam == 1:
            return teacher - old
        reference = batch[Signal.REFERENCE]
        return self.lam * (teacher - reference) - (old - reference)


def opd(lam: float = 1.25, clip: float = 0.2) -> Recipe:
    """G-OPD: on-policy distillation, token advantage is the teacher's log-ratio; λ > 1 extrapolates beyond the teacher.

    Aₜ = λ (log T − log π_ref) − (log π_old − log π_ref);  clipped, token mean;  λ = 1 is on-policy distillation

    Paper: Learning beyond Teacher: Generalized On-Policy Distillation with Reward Extrapolation, arXiv 2602.12125.
    Settings: lambda 1.25 (1.5 can destabilise), one sample a task, batch 1024, temperature 1."""
    rollouts = FromOrigin("policy")
    credit = OnSelected(rollouts, TeacherLogRatio(lam))
    return Recipe(advantage=credit, gate=Clip(clip, clip), aggregate=Mean(TOKEN), keep=rollouts)


def opd_corrected(lam: float = 1.25, clip: float = 0.2, cap: float = 5.0) -> Recipe:
    """G-OPD with rollout correction: clips around the proximal policy, with truncated weights proximal over sampler.

    Aₜ as `opd` with the learner's π_old;  Σₜ min(π_old/μ, cap) · clipped(π/π_old, Aₜ)

    Paper: Learning beyond Teacher: Generalized On-Policy Distillation with Reward Extrapolation, arXiv 2602.12125.
    Settings: as `opd`, cap 5."""
    return replace(
        opd(lam, clip),
        advantage=OnSelected(FromOrigin("policy"), TeacherLogRatio(lam, proximal=True)),
        ratio=Importance(proximal=True),
        gate=Clip(clip, clip) * TruncatedImportance(cap),
    )


class PerplexityWeighted(Term):
    """w · term, w = PPL^{±1/τ} / Σ over the selected trajectories of a group, 0 elsewhere; PPL = exp(−mean
    log-probability)."""

    term: Term
    selector: Selector
    # whose log-probability, PROXIMAL for the policy at the start of this batch, TEACHER for the teacher
    signal: Signal = Signal.PROXIMAL
    # a higher perplexity weighs more (+), else a lower one (−)
    favour_high: bool = True
    tau: float = number(1.0, above=0)

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({self.signal})

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"teacher"} if self.signal is Signal.TEACHER else set())

    def __call__(self, batch: Batch) -> Field:
        mean, selected = batch[self.signal].mean(TRAJECTORY), self.selector.select(batch)
        score = (-mean if self.favour_high else mean) / self.tau
        top = where(selected, score, -torch.inf).max(GROUP)
        weight = where(selected, (score - top).exp(), 0.0)
        total = weight.sum(GROUP)
        return weight / where(total > 0, total, 1.0) * self.term(batch)


def scope(tau: float = 1.0) -> Recipe:
    """SCOPE: reinforces right answers by the policy's perplexity, distils wrong ones by the teacher's.

    right: A = w, w ∝ PPL_π^{1/τ};  wrong: Aₜ = w (log T − log π), w ∝ PPL_T^{−1/τ};  Σₜ ρₜAₜ, mean over tasks

    Paper: SCOPE: Signal-Calibrated On-Policy Distillation, arXiv 2604.10688.
    Settings: tau 1, rollout temperature 0.6, batch 256.
    Deviation: weights and credit are of the policy at the start of the batch, not of each update."""
    rollouts = AllOf((FromOrigin("policy"), HasTokens()))
    right, wrong = AllOf((rollouts, Succeeded())), AllOf((rollouts, Not(Succeeded())))
    return Recipe(
        advantage=PerplexityWeighted(Constant(1.0), right, Signal.PROXIMAL, favour_high=True, tau=tau)
        + PerplexityWeighted(TeacherLogRatio(1.0, proximal=True), wrong, Signal.TEACHER, favour_high=False, tau=tau),
        aggregate=Sum(GROUP),
        keep=rollouts,
    )


class OneTokenRolloutLoss(Penalty):
    """−(matches · log π(y) + negative · Σ log π(a))/K: of K candidates drawn at each token those equal to the token
    earn 1, the others ``negative``; their Σ is the signal CANDIDATE_LOGP."""

    reads = frozenset({Signal.CANDIDATE_MATCHES, Signal.CANDIDATE_LOGP})
    candidates: int = number(256, least=1)
    negative: float = number(-0.1, most=0, why="it is what a wrong token earns")

    @property
    def draws_candidates(self) -> int:
        return self.candidates

    def __call__(self, view: MicroBatchView) -> Field:
        hits = view[Signal.CANDIDATE_MATCHES].to(view.logp.x.dtype)
        return -(hits * view.logp + self.negative * view[Signal.CANDIDATE_LOGP]) / self.candidates


def otr(negative: float = -0.1, candidates: int = 8) -> Recipe:
    """OTR: one-token rollouts at each demonstration token; matching candidates earn 1, the others a negative reward.

    L = −mean over rows of 1/|y| Σₜ [ hits · log π(yₜ) + negative · Σ_{a ≠ yₜ} log π(a) ] / candidates

    Paper: One-Token Rollout: Guiding Supervised Fine-Tuning of LLMs with Policy Gradient, arXiv 2509.26313.
    Settings: 256 candidates at temperature 1.3, negative −0.1 (recalled).
    Deviation: 8 candidates by default, at the temperature of the turn."""
    cost = OneTokenRolloutLoss(candidates, negative)
    penalty = WeightedPenalty(1.0, cost, Mean(TRAJECTORY), rows=FromOrigin("expert"))
    return Recipe(advantage=Constant(0.0), ratio=OnPolicy(), penalties=(penalty,))
