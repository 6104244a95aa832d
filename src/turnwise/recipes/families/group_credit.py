"""Group-level credit: peers, baselines and scales of a trajectory's return, and several rewards in one advantage."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Literal

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.control import Passes
from turnwise.algebra.gate import Clip, Gate
from turnwise.algebra.peers import Peers
from turnwise.algebra.penalty import SquaredLogRatio, WeightedPenalty
from turnwise.algebra.piece import MicroBatchView, Piece, State, StepView, check
from turnwise.algebra.ratio import LOG_RATIO_LIMIT, behaviour
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import choice, number
from turnwise.core.signals import Signal
from turnwise.credit.fact import SameAnswer, SameFact, _codes, named_reward, rescale_to_unit
from turnwise.credit.selectors import BestOfGroup, Not, Selector
from turnwise.credit.tracker import SuccessTracker
from turnwise.maths import segments
from turnwise.maths.divergences import k3
from turnwise.maths.lazy_torch import torch
from turnwise.recipes.families.critic_free import grpo
from turnwise.recipes.recipe import Kind, Recipe
from turnwise.rollout.guidance import SolvedExamples
from turnwise.tasks.budgets import Fixed, RoundsOfUncertainty
from turnwise.tasks.samplers import CyclePool

if TYPE_CHECKING:
    from torch import Tensor

KIND = Kind.CREDIT


def rank_in_group(batch: Batch, value: Field) -> Field:
    """0-based rank of each trajectory in ascending order of a value inside its group; the seed breaks ties."""
    tree = batch.tree
    by_seed = torch.argsort(batch.seed.x, stable=True)
    order = by_seed[torch.argsort(value.x[by_seed], stable=True)]
    rank = segments.rank_within(tree.ancestor(TRAJECTORY, GROUP)[order], tree.count(GROUP))
    return Field(tree, TRAJECTORY, torch.empty_like(order).index_copy(0, order, rank))


def lower_median(batch: Batch, value: Field) -> Field:
    """The median of a group as one of its members: of an even number, the lower of the middle two. At GROUP."""
    middle = (batch.tree.size(TRAJECTORY, GROUP) - 1).map(lambda n: n // 2)
    is_median = (rank_in_group(batch, value) - middle).map(lambda gap: gap == 0)
    return where(is_median, value, 0.0).sum(GROUP)


class StandardiseByMedian(Term):
    """A = (R − m)/(d + ε), m the median return of the group and d the median of |R − m|, so that one outlier moves
    neither.

    Both medians are members of the group: of an even number, the lower of the middle two."""

    compares_peers = True
    eps: float = number(1e-3, above=0)
    # non-zero A times members / members with A ≠ 0
    rescale: bool = False
    # d = 1 where d = 0: that is the case whenever most returns are equal, and the others then get ±1/ε
    fallback: bool = False

    def __call__(self, batch: Batch) -> Field:
        r = named_reward(batch, None)
        deviation = r - lower_median(batch, r)
        mad = lower_median(batch, deviation.abs())
        a = deviation / ((where(mad > 0, mad, 1.0) if self.fallback else mad) + self.eps)
        if not self.rescale:
            return a
        non_zero = where(a.abs() > 0, 1.0, 0.0).sum(GROUP)
        return a * (a.peer_count(GROUP) / non_zero.clamp(low=1.0))


class AtMedian(Selector):
    """Trajectories whose return is the (lower) median of their group: at least one per group."""

    def select(self, batch: Batch) -> Field:
        r = named_reward(batch, None)
        return (r - lower_median(batch, r)).map(lambda gap: gap == 0)


def mc_grpo(eps: float = 1e-3, rescale: bool = False, fallback: bool = False, clip: float = 0.2) -> Recipe:
    """MC-GRPO: median-centred advantages for small groups; one extra rollout serves as the median and is not trained on.

    m = median R, d = median |R − m|;  A = (R − m)/(d + ε);  one rollout at the median is not trained on

    Paper: MC-GRPO: Median-Centered GRPO for Small-Rollout RL, arXiv 2601.22582.
    Settings: groups of G + 1 (9 here), eps 1e-3. rescale is the GSM8K script's n/(members with A ≠ 0); fallback takes d
    = 1 where d is 0: with rewards of 0 and 1 it always is, and the minority gets ±1/eps, left to gradient clipping. Of
    an even group the median is the lower of the middle two, so that it is a member there, too."""
    return Recipe(
        advantage=StandardiseByMedian(eps, rescale, fallback),
        gate=Clip(clip, clip),
        keep=Not(BestOfGroup(AtMedian())),
        budget=Fixed(8, 9),
        control=Passes(epochs=2),
    )


class WeightedRewards(Piece):
    """The rewards of a trajectory, each with its weight (default 1): the named ones, or with () all named ones of the
    batch.

    ``names=None`` is the return alone; so is () where the environment names no rewards."""

    names: tuple[str, ...] | None = ()
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        given, named = len(self.weights), len(self.names or ())
        check(given in (0, named), f"{given} weights for {named} named rewards; write one for each, or none")
        check(all(w >= 0 for w in self.weights), f"the weights of rewards are {self.weights}; write numbers >= 0")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset(f"reward {name}" for name in self.names or ())

    @property
    def idle_without(self) -> frozenset[str]:
        return frozenset({"several rewards"} if self.names == () else ())

    def __call__(self, batch: Batch) -> list[tuple[float, Field]]:
        """Weight and value of each reward."""
        selected = sorted(batch.reward_components) if self.names == () else self.names
        names = tuple(selected or (None,))
        return [(w, named_reward(batch, name)) for w, name in zip(self.weights or (1.0,) * len(names), names)]


def fit_beta(p: Tensor) -> tuple[Tensor, Tensor]:
    """(α, β) by moments of the groups' success rates; (1, 1) for a single group or equal rates."""
    one = p.new_tensor(1.0)
    variance = p.var() if p.numel() > 1 else one * 0
    if p.numel() < 2 or float(variance) < 1e-12:
        return one, one
    m = p.mean()
    total = m * (1 - m) / variance - 1
    return (1 + total * m / 3).clamp(min=1), (1 + total * (1 - m) / 3).clamp(min=1)


def beta_log_density(p: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """log f(p; α, β) for 0 < p < 1."""
    scale = torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
    return scale + (alpha - 1) * p.log() + (beta - 1) * torch.log1p(-p)


def sum_fields(fields: Iterable[Field]) -> Field:
    """Σ of at least one field."""
    return reduce(operator.add, fields)


class BetaNormalised(Term):
    """A = (r − p)/f(p; α, β), averaged over the rewards: p the group mean, f the Beta density that minimises the
    variance.

    r in [0, 1] is the reward rescaled from [bottom, top]. α = max(1, 1 + a/3), β = max(1, 1 + b/3), and Beta(a, b) has
    the mean and variance of p over the groups. 1/f is capped at 10⁶; p of 0 or 1 gives 0."""

    compares_peers = True
    rewards: WeightedRewards = field(default_factory=lambda: WeightedRewards(None))
    bottom: float = number(0.0, below="top")
    top: float = 1.0

    def __call__(self, batch: Batch) -> Field:
        rewards = self.rewards(batch)
        return sum_fields(self._one(rescale_to_unit(r, self.bottom, self.top)) for _, r in rewards) / len(rewards)

    def _one(self, r: Field) -> Field:
        p = r.mean(GROUP)
        alpha, beta = fit_beta(p.x)
        interior = (p > 0) & (p < 1)
        density = beta_log_density(where(interior, p, 0.5).x, alpha, beta)
        return where(interior, (r - p) * Field(p.tree, GROUP, (-density).exp().clamp(max=1e6)), 0.0)


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
    mean; () takes all that are named, None the outcome. bottom and top: what counts as 0 and as 1."""
    credit = BetaNormalised(WeightedRewards(rewards), bottom, top)
    return Recipe(advantage=credit, gate=Clip(low, high, dual), aggregate=Sum(TRAJECTORY))


class SumOfStandardised(Term):
    """A = Σₖ wₖ (Rᵏ − meanᵏ)/(stdᵏ + ε) within the group: rewards of different scales weigh alike."""

    compares_peers = True
    rewards: WeightedRewards = field(default_factory=WeightedRewards)
    eps: float = 1e-4
    # divides the sum by Σₖ wₖ stdᵏ + ε instead: a reward weighs as much as it varies there
    total_std: bool = False

    def __call__(self, batch: Batch) -> Field:
        rewards = self.rewards(batch)
        if not self.total_std:
            return sum_fields(w * ((r - r.mean(GROUP)) / (r.std(GROUP) + self.eps)) for w, r in rewards)
        scale = sum_fields(w * r.std(GROUP) for w, r in rewards)
        return sum_fields(w * (r - r.mean(GROUP)) for w, r in rewards) / (scale + self.eps)


class StandardiseOverBatch(Term):
    """(A − mean)/(std + ε) over the batch: over trajectories ("rows"), over sampled tokens ("tokens"), or A unchanged
    ("none")."""

    term: Term
    over: str = choice("rows", "tokens", "none")
    eps: float = 1e-4

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch)
        if self.over == "none":
            return a
        a = a.at(TOKEN) if self.over == "tokens" else a
        return (a - a.mean(BATCH)) / (a.std(BATCH) + self.eps)


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
    Settings: all named rewards with weight 1, eps 1e-4, token mean, no KL; whiten by rows or, as the other released version, by
    tokens. A reward a trajectory was not given counts as 0.
    Deviation: to condition one reward on another, let the environment name the conditioned one."""
    decoupled = SumOfStandardised(WeightedRewards(rewards, weights), eps)
    credit = StandardiseOverBatch(decoupled, whiten, eps)
    return Recipe(advantage=credit, gate=Clip(clip, clip), aggregate=Mean(TOKEN), control=Passes(minibatches=4))


def dvao(
    rewards: tuple[str, ...] = (), weights: tuple[float, ...] = (), eps: float = 1e-6, clip: float = 0.2
) -> Recipe:
    """DVAO: weights each reward by its std within the group.

    A = Σₖ wₖ (Rᵏ − meanᵏ) / (Σₖ wₖ stdᵏ + ε)

    Paper: Dynamic Variance-adaptive Advantage Optimization for Multi-reward RL, arXiv 2605.25604.
    Settings: all named rewards with weight 1, G 16."""
    credit = SumOfStandardised(WeightedRewards(rewards, weights), eps, total_std=True)
    return Recipe(advantage=credit, gate=Clip(clip, clip))


LEVELS = tuple(0.05 * k for k in range(1, 20))
"""Levels of the quantiles that are tracked across batches."""


def segment_quantile(x: Tensor, label: Tensor, count: int, level: float) -> Tensor:
    """Empirical quantile of each segment, linear between neighbours, [count]. No segment may be empty."""
    by_value = torch.argsort(x, stable=True)
    ordered = x[by_value[torch.argsort(label[by_value], stable=True)]]
    n = segments.size(label, count)
    at = level * (n - 1).to(x.dtype)
    below = at.floor().long()
    start = torch.cumsum(n, 0) - n
    low, high = ordered[start + below], ordered[start + torch.minimum(below + 1, n - 1)]
    return low + (at - below) * (high - low)


@dataclass(frozen=True)
class BundledRollouts:
    """Rollouts of a bundle of tasks: bundled rollout s holds the s-th trajectory of each task that has one."""

    index: Tensor  # [K] the bundled rollout of each trajectory
    bundle: Tensor  # [S] its bundle
    score: Tensor  # [S] Σ of the returns in it
    bundles: int

    @classmethod
    def draw(cls, batch: Batch, size: int) -> BundledRollouts:
        """Bundle tasks in a random order; trajectories join bundled rollouts in the order of their seeds."""
        tree, r = batch.tree, named_reward(batch, None)
        order = torch.argsort(batch.seed.sum(GROUP).x % 2**32, stable=True)  # of the groups, at random
        rank = torch.empty_like(order).index_copy(0, order, torch.arange(order.numel(), device=order.device))
        bundle = (rank // size)[tree.ancestor(TRAJECTORY, GROUP)]
        rollouts = Partition.by(tree, TRAJECTORY, bundle, rank_in_group(batch, batch.seed))
        owner = torch.zeros(rollouts.count, dtype=torch.int64, device=tree.device).index_copy(0, rollouts.label, bundle)
        score = segments.total(r.x, rollouts.label, rollouts.count)
        return cls(rollouts.label, owner, score, -(-tree.count(GROUP) // size))

    def bundle_quantile(self, level: float) -> Tensor:
        """Quantile of the scores of each bundle, one value per bundled rollout."""
        return segment_quantile(self.score, self.bundle, self.bundles, level)[self.bundle]

    def quantiles(self) -> list[float]:
        """Quantiles of all scores at the tracked levels."""
        one_segment = torch.zeros_like(self.bundle)
        return [float(segment_quantile(self.score, one_segment, 1, level)) for level in LEVELS]


class TailRisk(Term):
    """g = (ω g_low + g_mid)/(ω + 1) divided by the std of the scores S of a bundle, distributed among the members of a
    rollout:

    g_mid = [(S − q_a)₊ − (S − q_b)₊]/(b − a),  g_low = −(q_a − S)₊/a;  ``baseline`` adds q_a − q_b inside the bracket.

    The quantiles are those of the "batch" (of the bundle), those "track"ed over batches, q ← q + η (level − share below
    q), or the mean of both ("mix"). ``share``: "uniform" gives every member all of it; "std" divides by the std of its
    task; "sum-mean" distributes it by R − mean of the task; "score" gives right ones ½ of it, wrong ones 1½."""

    compares_peers = True
    updates_after_credit = True
    bundle: int = number(5, least=1)
    a: float = number(0.2, above=0, below="b")
    b: float = number(0.8, below=1)
    omega: float = number(1.5, least=0)
    eta: float = number(0.1, least=0)
    mode: str = choice("batch", "track", "mix", default="track")
    share: str = choice("uniform", "std", "sum-mean", "score", default="sum-mean")
    baseline: bool = False
    eps: float = 1e-6

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"verdict"}) if self.share == "score" else frozenset()

    def initial_state(self) -> State:
        return {"quantiles": []}

    def memory_columns(self, state: State, batch: Batch) -> dict[object, Field]:
        """The tracked quantiles nearest to a and b; NaN before the first batch, which uses its own."""
        tracked = state["quantiles"] or [float("nan")] * len(LEVELS)
        nearest = lambda level: tracked[min(range(len(LEVELS)), key=lambda k: abs(LEVELS[k] - level))]  # noqa: E731
        full = lambda level: batch.tree.full(BATCH, nearest(level), torch.float64)  # noqa: E731
        return {(self, "a"): full(self.a), (self, "b"): full(self.b)}

    def next_state(self, state: State, view: StepView) -> State:
        rollouts, tracked = BundledRollouts.draw(view.batch, self.bundle), state["quantiles"]
        if not tracked:
            return {"quantiles": rollouts.quantiles()}
        share_below = lambda q: float((rollouts.score < q - 1e-9).double().mean())  # noqa: E731
        return {"quantiles": [q + self.eta * (level - share_below(q)) for q, level in zip(tracked, LEVELS)]}

    def __call__(self, batch: Batch) -> Field:
        rollouts = BundledRollouts.draw(batch, self.bundle)
        spread = segments.std(rollouts.score, rollouts.bundle, rollouts.bundles)[rollouts.bundle]
        has_peers = segments.size(rollouts.bundle, rollouts.bundles)[rollouts.bundle] > 1
        risk = self.risk(rollouts.score, *self._bounds(batch, rollouts))
        advantage = torch.where(has_peers, risk / (spread + self.eps), 0.0)
        return Field(batch.tree, TRAJECTORY, advantage[rollouts.index]) * self._share(batch, rollouts)

    def risk(self, score: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """g before the division by the std, from the scores and the quantiles q_a, q_b."""
        middle = (score - low).clamp(min=0) - (score - high).clamp(min=0)
        middle = (middle + (low - high) if self.baseline else middle) / (self.b - self.a + self.eps)
        return (middle - self.omega * (low - score).clamp(min=0) / (self.a + self.eps)) / (self.omega + 1)

    def _bounds(self, batch: Batch, rollouts: BundledRollouts) -> tuple[Tensor, Tensor]:
        low, high = (rollouts.bundle_quantile(level) for level in (self.a, self.b))
        if self.mode == "batch":
            return low, high
        tracked: dict[object, Field] = {(self, name): batch[self, name] for name in ("a", "b")}
        if bool(torch.isnan(batch[self, "a"].x).any()):  # the first batch is judged by its own quantiles
            tracked = self.memory_columns({"quantiles": rollouts.quantiles()}, batch)
        past_low, past_high = tracked[self, "a"].x, tracked[self, "b"].x
        if self.mode == "mix":
            return (low + past_low) / 2, (high + past_high) / 2
        return past_low.expand_as(low), past_high.expand_as(high)

    def _share(self, batch: Batch, rollouts: BundledRollouts) -> Field:
        r = named_reward(batch, None)
        if self.share == "std":
            width = r.std(GROUP)
            return where(width > 1e-3, 1 / where(width > 1e-3, width, 1.0), 1.0).at(TRAJECTORY)
        if self.share == "score":
            return where(batch.success > 0.5, 0.5, 1.5)
        if self.share == "uniform":
            return batch.tree.full(TRAJECTORY, 1.0, torch.float64)
        gap, n = r - r.mean(GROUP), rollouts.score.numel()
        total = Field(batch.tree, TRAJECTORY, segments.total(gap.x, rollouts.index, n)[rollouts.index])
        members = Field(batch.tree, TRAJECTORY, segments.size(rollouts.index, n)[rollouts.index].to(r.x.dtype))
        degenerate = total.abs() < 1e-6
        return where(degenerate, 1 / members, gap / where(degenerate, 1.0, total))


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
    Deviation: tasks are bundled at random, not in batch order, so that packing does not change the credit."""
    credit = TailRisk(bundle, a, b, omega, eta, mode, share, baseline, eps)
    return Recipe(advantage=credit, gate=Clip(clip, clip), aggregate=Mean(TOKEN), control=Passes(minibatches=4))


class ConditionalAdvantage(Term):
    """A = μ (R − mean of the other half) + (1 − μ)(R − mean of the own half): halves of a group by mean token "entropy"
    or by "length", the lower half with ⌊n/2⌋ members.

    ``mu=None`` is the mean return of the batch. ``alpha`` scales, in the first bracket only, the returns of the high half
    ("length": below 1, long answers lose) or of the low half ("entropy"). A group of one gets 0."""

    compares_peers = True
    mu: float | None = number(1.0, least=0, most=1)
    alpha: float = number(1.0, least=0)
    metric: str = choice("entropy", "length")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.OLD_ENTROPY}) if self.metric == "entropy" else frozenset()

    def __call__(self, batch: Batch) -> Field:
        r, tree = named_reward(batch, None), batch.tree
        by_length = self.metric == "length"
        metric = tree.size(TOKEN, TRAJECTORY) if by_length else batch[Signal.OLD_ENTROPY].mean(TRAJECTORY)
        high = rank_in_group(batch, metric) >= tree.size(TRAJECTORY, GROUP).map(lambda n: n // 2)
        same_half = Partition.by(tree, TRAJECTORY, batch.group, high.to(torch.int64))
        n = r.peer_count(GROUP)
        other_mean = (r.sum(GROUP) - r.sum(same_half)) / (n - r.peer_count(same_half)).clamp(low=1.0)
        weighted_side, other_side = (high, ~high) if by_length else (~high, high)  # the side whose reward alpha scales
        across = where(weighted_side, self.alpha * r, r) - where(other_side, self.alpha * other_mean, other_mean)
        mu = r.mean(BATCH) if self.mu is None else self.mu
        return where(n > 1, mu * across + (1 - mu) * (r - r.mean(same_half)), 0.0)


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
    Deviation: no cosine schedule of mu."""
    credit = ConditionalAdvantage(mu, alpha, metric)
    return Recipe(advantage=credit, gate=Clip(low, high), aggregate=Sum(TRAJECTORY, length=length))


class SameCount(Peers):
    """Trajectories of one group with the same number of tool calls, or of turns."""

    what: str = choice("tool_calls", "turns")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"tools"} if self.what == "tool_calls" else ())

    def __call__(self, batch: Batch) -> Partition:
        counts = batch.tree.size(TURN, TRAJECTORY) if self.what == "turns" else batch.tool_calls.sum(TRAJECTORY)
        return Partition.by(batch.tree, TRAJECTORY, batch.group, counts)


class Blend(Term):
    """share · left + (1 − share) · right."""

    left: Term
    right: Term
    share: float = number(least=0, most=1)

    def __call__(self, batch: Batch) -> Field:
        return self.share * self.left(batch) + (1 - self.share) * self.right(batch)


def stratified_grpo(
    alpha: float = 0.8, by: Literal["tool_calls", "turns"] = "tool_calls", eps: float = 1e-6, clip: float = 0.2
) -> Recipe:
    """Stratified GRPO: z-score within strata of equal structure, blended with the z-score of the group.

    A = α z-score among those with as many calls + (1 − α) z-score among the group

    Paper: Stratified GRPO: Handling Structural Heterogeneity in RL of LLM Search Agents, arXiv 2510.06214.
    Settings: alpha 0.8."""
    strata = Standardise(Outcome(), SameCount(by), eps=eps)
    return Recipe(advantage=Blend(strata, Standardise(eps=eps), share=alpha), gate=Clip(clip, clip))


class StandardiseByMeanDeviation(Term):
    """A = (v − mean)/(mean |v − mean| + ε) within the group: the size of the update does not depend on the success rate."""

    compares_peers = True
    value: Term = field(default_factory=Outcome)
    eps: float = 1e-4
    # n (v − mean)/(Σ |v − mean| + ε): the same with an ε that is n times smaller
    summed: bool = False

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch).to(torch.float64)
        deviation = v - v.mean(GROUP)
        eps = self.eps / v.peer_count(GROUP) if self.summed else self.eps
        return deviation / (deviation.abs().mean(GROUP) + eps)


class DifficultyWeighted(Term):
    """λA, λ = B softmax(−p/softness) over the B groups whose returns differ, 0 for the other groups; p is the group
    mean of the reward ``accuracy`` (None: of the return; p = 0 counts as 1, because then only other rewards vary)."""

    term: Term
    softness: float = number(2.0, above=0)
    accuracy: str | None = None
    # multiplies by all tokens / tokens of the B groups, so that a token mean runs over these groups alone
    valid_tokens: bool = True

    @property
    def requires(self) -> frozenset[str]:
        return frozenset() if self.accuracy is None else frozenset({f"reward {self.accuracy}"})

    def __call__(self, batch: Batch) -> Field:
        outcome, p = named_reward(batch, None), named_reward(batch, self.accuracy).mean(GROUP)
        mixed = outcome.max(GROUP) - outcome.min(GROUP) > 1e-9
        score = where(mixed, -where(p.abs() > 1e-12, p, 1.0) / self.softness, -torch.inf)
        top = where(score.max(BATCH) > -torch.inf, score.max(BATCH), 0.0)
        share = (score - top).exp()
        weight = share / share.mean(BATCH).clamp(low=1e-300) * where(mixed, 1.0, 0.0).mean(BATCH)
        if self.valid_tokens:
            tokens = batch.tree.size(TOKEN, GROUP).to(torch.float64)
            counted = where(mixed, tokens, 0.0).sum(BATCH)
            weight = weight * where(counted > 0, tokens.sum(BATCH) / counted.clamp(low=1.0), 1.0)
        return weight * self.term(batch)


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
    is p, None for the outcome. The mean runs over tokens of these tasks (valid_tokens). Rewrites: --env calculator,rewrites=3."""
    term = StandardiseByMeanDeviation(Outcome(), eps, summed)
    credit = DifficultyWeighted(term, softness, accuracy, valid_tokens)
    return Recipe(advantage=credit, gate=Clip(clip, clip), aggregate=Mean(TOKEN))


def mean_logp(batch: Batch) -> Field:
    """Mean log-probability of a trajectory's tokens at sampling time; 0 without tokens."""
    return behaviour(batch).to(torch.float64).mean(TRAJECTORY)


class PairwiseCalibration(Term):
    """A = Σ over wrong peers of σ((l′ − l)/τ) for a right trajectory, −Σ over right peers of σ((l − l′)/τ) for a wrong
    one: credit where the mean log-probability l ranks a pair wrongly.

    A right trajectory with reference perplexity above ``high`` and a wrong one below ``low`` get 0, but stay in the pairs of
    others."""

    reads = frozenset({Signal.REFERENCE})
    requires = frozenset({"verdict"})
    compares_peers = True
    tau: float = number(0.6, above=0)
    high: float = number(2.5, least=0)
    low: float = number(1.05, least=0)
    # keeps the factor 1/τ
    scaled: bool = False

    def __call__(self, batch: Batch) -> Field:
        tree, logp, right = batch.tree, mean_logp(batch).x, batch.success.x > 0.5
        # all ordered pairs (i, j) of trajectories of the same group, i = j included
        group, size = tree.ancestor(TRAJECTORY, GROUP), tree.size(TRAJECTORY, GROUP).x
        members = torch.argsort(group, stable=True)
        begin = (torch.cumsum(size, 0) - size)[group]
        i = torch.repeat_interleave(torch.arange(group.numel(), device=group.device), size[group])
        j = members[begin[i] + segments.rank_within(i, group.numel())]
        sign = right[i].double() - right[j].double()  # 1: right against wrong, −1: wrong against right, 0: no pair
        pull = sign * torch.sigmoid(-sign * (logp[i] - logp[j]) / self.tau)
        a = torch.zeros_like(logp).index_add(0, i, pull)
        perplexity = (-batch[Signal.REFERENCE].to(torch.float64).mean(TRAJECTORY).x).exp()
        plausible = torch.where(right, perplexity <= self.high, perplexity >= self.low)
        return Field(tree, TRAJECTORY, torch.where(plausible, a / self.tau if self.scaled else a, 0.0))


def capo_calibration(
    tau: float = 0.6, high: float = 2.5, low: float = 1.05, scaled: bool = False, clip: float = 0.2
) -> Recipe:
    """CAPO (calibration): pairwise credit that makes right answers likelier than wrong ones of the group.

    Aᵢ = Σ over wrong j of σ((lⱼ − lᵢ)/τ) for a right i, −Σ over right j of σ((lᵢ − lⱼ)/τ) for a wrong one; l = mean log π

    Paper: Calibration-Aware Policy Optimization for Reasoning LLMs, arXiv 2604.12632.
    Settings: tau 0.6 (1.5B) or 0.5 (7B); right answers of reference perplexity above 2.5 and wrong ones below 1.05 get 0;
    G 8, clip 0.2, no KL. scaled keeps the derivative's 1/τ.
    Deviation: l is taken from the log-probabilities of sampling."""
    return Recipe(advantage=PairwiseCalibration(tau, high, low, scaled), gate=Clip(clip, clip))


def answer_entropy(batch: Batch, same: Peers) -> Field:
    """H = −Σ p log₂ p over the distinct answers of a group, in bits. At GROUP."""
    peers = same(batch)
    ones = batch.tree.full(TRAJECTORY, 1.0, torch.float64)
    share = ones.peer_count(peers) / ones.peer_count(GROUP)
    return -share.map(torch.log2).mean(GROUP)


class DisagreementWeighted(Term):
    """wA, w = σ(k (H − b)), H the entropy of the group's answers: comparison within the group counts where answers
    differ.

    With ``across`` the result is (1 − w) · across, for the groups that agree."""

    term: Term
    same: Peers = field(default_factory=SameAnswer)
    b: float = 0.5
    k: float = 1.0
    # w = 0 where A is 0
    forced: bool = False
    across: Term | None = None

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch)
        w = (self.k * (answer_entropy(batch, self.same) - self.b)).map(torch.sigmoid)
        if self.forced:
            w = where(a.abs() > 1e-9, w, 0.0)
        return w * a if self.across is None else (1 - w) * self.across(batch)


class ConsistencyAdvantage(Term):
    """A = z-score over the tasks of the batch of mean R · (1 − κH), κ = (1 − 1/n)/log₂ n: equal for all members of a
    group, larger where they are right and agree. A batch of one task gets 0. At GROUP."""

    same: Peers = field(default_factory=SameAnswer)
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        r = named_reward(batch, None)
        n = r.peer_count(GROUP)
        kappa = where(n > 1, (1 - 1 / n) / n.clamp(low=2.0).map(torch.log2), 0.0)
        value = r.mean(GROUP) * (1 - kappa * answer_entropy(batch, self.same))
        return (value - value.mean(BATCH)) / (value.std(BATCH) + self.eps)


class ClipEachPart(Gate):
    """Clips each part of a sum advantage by its own sign: w = s clip(ρ; part) + (1 − s) clip(ρ; A − part), s = part/A.

    The objective is the sum of two clipped objectives; where the parts cancel exactly, it is 0."""

    # planned over whole groups: a micro-batch may hold a part of one
    part: Term
    low: float = number(0.2, least=0, most=1, why="ratios below 1 − low are cut")
    high: float = number(0.2, least=0, why="ratios above 1 + high are cut")

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: self.part(view.batch)}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        clip, part = Clip(self.low, self.high), view[self].to(adv.x.dtype)
        share = where(adv.abs() > 0, part / where(adv.abs() > 0, adv, 1.0), 1.0)
        return share * clip(rho, part, view) + (1 - share) * clip(rho, adv - part, view)


def copo(b: float = 0.5, k: float = 1.0, forced: bool = False, clip: float = 0.2, eps: float = 1e-6) -> Recipe:
    """COPO: blends the group advantage with an across-task consistency advantage by the entropy of the group's answers.

    J = w J_local + (1 − w) J_across, w = σ(k (H − b)), H the entropy of the answers in bits; A_across = z-score over the
    tasks of mean R (1 − κH), κ = (1 − 1/G)/log₂ G; two clipped objectives

    Paper: COPO: Consistency-Aware Policy Optimization, arXiv 2508.04138.
    Settings: b 0.5, k 1 (its script: b 1, k 5), G 8, eps 1e-6; forced sets w = 0 where the local advantage is 0.
    Deviation: the answer of an episode is its last message: what stands in <answer> tags, a box or after ####, else all of it,
    without regard to case and marks; an unfinished episode has none."""
    near, same = Standardise(eps=eps), SameAnswer()
    local = DisagreementWeighted(near, same, b, k, forced)
    both = replace(local) + replace(local, across=ConsistencyAdvantage(same, eps))
    return Recipe(advantage=both, gate=ClipEachPart(local, clip, clip), control=Passes(minibatches=4))


class LengthDampedGroups(Term):
    """A in groups whose longest right answer is longer than their mean wrong answer, ``damp`` · A in the others.

    Right: the return exceeds ``threshold``. Truncated wrong answers do not count. A group without right answers is
    damped, one without wrong answers is not; ``lenient`` swaps both."""

    term: Term
    damp: float = number(0.1, least=0)
    threshold: float = 0.5
    lenient: bool = False

    def __call__(self, batch: Batch) -> Field:
        length = batch.tree.size(TOKEN, TRAJECTORY).to(torch.float64)
        right = named_reward(batch, None) > self.threshold
        longest = where(right, length, -torch.inf).max(GROUP)
        wrong = where(~right & ~batch.truncated, 1.0, 0.0)
        count = wrong.sum(GROUP)
        without = torch.inf if self.lenient else -torch.inf
        full = longest > where(count > 0, (wrong * length).sum(GROUP) / count.clamp(low=1.0), without)
        if self.lenient:
            full = full | ~(longest > -torch.inf)
        return where(full, 1.0, self.damp) * self.term(batch)


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
    pays 1) and above 0.5 for its vision models, where lenient reverses the rule for groups of only right or wrong answers."""
    credit = LengthDampedGroups(Standardise(eps=eps), damp, threshold, lenient)
    return replace(grpo(clip, kl), advantage=credit, aggregate=Mean(TOKEN), control=Passes(minibatches=2))


class UnlikelinessReward(Term):
    """R (1 − β k/n), k the likelihood rank of a trajectory among the n of its group, 0 for the least likely: rarer
    successes earn more."""

    beta: float = number(0.25, least=0, most=1)

    def __call__(self, batch: Batch) -> Field:
        r = named_reward(batch, None)
        return r * (1 - self.beta * rank_in_group(batch, mean_logp(batch)).to(r.x.dtype) / r.peer_count(GROUP))


def unlikeliness(beta: float = 0.25, kl: float = 0.1, clip: float = 0.2, eps: float = 1e-6) -> Recipe:
    """Unlikeliness reward: right answers that were less likely earn more, against distribution sharpening.

    R ← R (1 − β k/G), k = 0 for the least likely of the group;  A = z-score

    Paper: Rewarding the Unlikely: Lifting GRPO Beyond Distribution Sharpening, arXiv 2506.02355.
    Settings: beta 0.25, G 32, two passes, token mean, KL 0.1.
    Deviation: trajectories with a tiny advantage are kept."""
    credit = Standardise(UnlikelinessReward(beta), eps=eps)
    return replace(grpo(clip, kl), advantage=credit, aggregate=Mean(TOKEN), control=Passes(epochs=2))


class NoveltyBonus(Term):
    """A + min(weight (1 − η)₊, cap · A) where A > 0, η = exp(l − mean l), l the mean log-probability of a trajectory
    and mean l that of the group: a bonus for unexpected good trajectories."""

    term: Term
    weight: float = number(2.5, least=0)
    cap: float = number(0.5, least=0)

    def __call__(self, batch: Batch) -> Field:
        a, logp = self.term(batch), mean_logp(batch)
        gain = (self.weight * (1 - (logp - logp.mean(GROUP)).exp())).clamp(low=0.0)
        return a + where(a > 0, gain.minimum(self.cap * a.to(gain.x.dtype)), 0.0)


def xrpo(novelty: float = 2.5, kappa: float = 0.5, eps: float = 1e-6, clip: float = 0.2) -> Recipe:
    """XRPO: a bounded novelty bonus for good answers that were unlikely, rollouts where they are uncertain, solved examples.

    A + min(λ (1 − η)₊, κA) where A > 0, η = exp(l − mean l), l = mean log π

    Paper: XRPO: Pushing the Limits of GRPO with Targeted Exploration and Exploitation, arXiv 2510.06672.
    Settings: novelty 2.5, kappa 0.5; 4 rollouts first, then the rest of the budget where the mean reward is most uncertain
    (`--budget xrpo`); 2 solved examples in the prompt of a group that fails (`--guidance xrpo`).
    Deviation: those of the budget and the guidance; --budget fixed --guidance none leaves the bonus alone."""
    return Recipe(
        advantage=NoveltyBonus(Standardise(eps=eps), novelty, kappa),
        gate=Clip(clip, clip),
        budget=RoundsOfUncertainty(8, 8),
        guidance=SolvedExamples(),
    )


class UnitOutcome(Term):
    """The return rescaled from [bottom, top] to [0, 1]."""

    bottom: float = number(0.0, below="top")
    top: float = 1.0

    def __call__(self, batch: Batch) -> Field:
        return rescale_to_unit(named_reward(batch, None), self.bottom, self.top)


def miss_probability(total: Tensor, marked: Tensor, drawn: Tensor) -> Tensor:
    """C(total − marked, drawn)/C(total, drawn): the probability that none of the marked is drawn. 1 where nothing is
    drawn."""
    unmarked = total - marked
    possible = (drawn > 0) & (unmarked >= drawn)
    n, m, k = (torch.where(possible, x, 1.0) for x in (total, unmarked, drawn))
    log = torch.lgamma(m + 1) - torch.lgamma(m - k + 1) - torch.lgamma(n + 1) + torch.lgamma(n - k + 1)
    return torch.where(possible, log.exp(), (drawn <= 0).to(total.dtype))


class SetAdvantage(Term):
    """A = mean of f over the sets a trajectory is in − mean of f over all sets of ``size`` of its group, with
    f(set) = mean reward · share of distinct members: exploring members are credited together with successful ones.

    A group smaller than ``size`` forms one set. In closed form: with n of N drawn, classes c of m_c equal members each,
    and a(m), b(m) the probabilities that n − 1 of N − 1 and n − 2 of N − 2 others contain none of m given ones, n² E[f
    | i] = rᵢ (K − Σ_{c≠cᵢ} a) + (n−1)/(N−1) Σ_{j≠i} rⱼ (K − Σ_{c≠cᵢ,cⱼ} b), K the number of classes; its mean over i is
    the mean over all sets."""

    compares_peers = True
    size: int = number(4, least=1)
    same: Peers = field(default_factory=lambda: SameFact("key"))
    value: Term = field(default_factory=UnitOutcome)

    def __call__(self, batch: Batch) -> Field:
        tree, r, same = batch.tree, self.value(batch).to(torch.float64), self.same(batch)
        members = r.peer_count(GROUP).at(TRAJECTORY).x
        drawn = members.clamp(max=self.size)
        class_size = segments.size(same.label, same.count)[same.label].to(members.dtype)
        one = lambda x: Field(tree, TRAJECTORY, x)  # noqa: E731
        each = one(1 / class_size)  # Σ over the members of a group of 1/m_c h(m_c) is Σ over its keys of h
        missed, missed_twice = (one(miss_probability(members - k, class_size, drawn - k)) for k in (1, 2))
        keys = each.sum(GROUP)
        with_one = keys - (each * missed).sum(GROUP) + missed
        with_two = keys - (each * missed_twice).sum(GROUP) + missed_twice
        others = with_two * (r.sum(GROUP) - r) + (r * missed_twice).sum(GROUP) - (r * missed_twice).sum(same)
        pair_probability = one((drawn - 1) / (members - 1).clamp(min=1))
        f = (r * with_one + pair_probability * others) / one(drawn**2)
        return f - f.mean(GROUP)


def polychromic(size: int = 4, bottom: float = 0.0, top: float = 1.0, beta: float = 0.01, clip: float = 0.2) -> Recipe:
    """Polychromic objective: scores sets of trajectories by mean reward times diversity; members share the advantage.

    f(set) = mean R · share of distinct members;  A = mean of f over its sets − mean over all sets of n in the group

    Paper: Polychromic Objectives for Reinforcement Learning, arXiv 2509.25424.
    Settings: N 8, n 4; a penalty (log π − log μ)² keeps the policy near the sampler. bottom and top: what counts as 0
    and as 1.
    Deviation: the state is the task and all sets of its group count, in closed form; no vines inside an episode, no
    critic. Trajectories are equal by the fact `key`; where it is not recorded, by all their actions."""
    return Recipe(
        advantage=SetAdvantage(size, SameFact("key"), UnitOutcome(bottom, top)),
        gate=Clip(clip, clip),
        penalties=(WeightedPenalty(beta, SquaredLogRatio()),),
    )


class PublicBaseline(Term):
    """A = Rᵢⱼ − mean over all agents of one function in all rollouts of the group, Rᵢⱼ the return of agent j in rollout
    i: each acting agent counts once, however many turns it took. At TURN.

    The turn fact ``function`` names the function; without it each agent is its own function. A single return gets 0."""

    compares_peers = True
    # divides by the std
    scale: bool = False
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        tree, recorded = batch.tree, batch.facts.get("function")
        function = batch.agent.x if recorded is None else _codes(recorded.at(TURN).x)
        owner = tree.ancestor(TURN, TRAJECTORY)
        agents = Partition.by(tree, TURN, owner, batch.agent.x, function)  # one class per (rollout, agent)
        peers = Partition.by(tree, TURN, tree.ancestor(TURN, GROUP), function)
        agent_return = segments.total(batch.reward.sum(TURN).x.double(), agents.label, agents.count)
        function_class = torch.zeros_like(agent_return, dtype=torch.int64).index_copy(0, agents.label, peers.label)
        a = agent_return - segments.mean(agent_return, function_class, peers.count)[function_class]
        if self.scale:
            a = a / (segments.std(agent_return, function_class, peers.count)[function_class] + self.eps)
        return Field(tree, TURN, a[agents.label])


def public_baseline(scale: bool = False, eps: float = 1e-6, clip: float = 0.2) -> Recipe:
    """AdvEvo-MARL's public baseline (needs several agents): one baseline for all agents of a function.

    A = Rᵢⱼ − mean of R over all agents j of the function and all rollouts i

    Paper: AdvEvo-MARL: Shaping Internalized Safety through Adversarial Co-Evolution, arXiv 2510.01586.
    Settings: clipped ratio, token mean; scale divides by the std.
    Deviation: any number of agents and functions; the turn fact `function` names it, without it each agent is its own."""
    return Recipe(advantage=PublicBaseline(scale, eps), gate=Clip(clip, clip), aggregate=Mean(TOKEN))


class RetentionByKL(Term):
    """η = high − min(K/target, 1)(high − low), K the mean KL of the last ``window`` updates: the further the policy
    moved, the less of a tracker's counts is kept. At BATCH.

    The KL of an update is measured on the batch after it: mean k3 of the log-probabilities before and after."""

    reads = frozenset({Signal.PROXIMAL, Signal.PREVIOUS})
    low: float = number(0.875, least=0, most="high")
    high: float = number(0.96, most=1)
    window: int = number(20, least=1)
    target: float = number(0.01, above=0)

    def initial_state(self) -> State:
        return {"batches": 0, "kl": []}

    def next_state(self, state: State, view: StepView) -> State:
        """The first batch has no update before it."""
        step = (view[Signal.PREVIOUS] - view[Signal.PROXIMAL]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        kl = float(step.to(torch.float64).map(k3).mean(BATCH).item)
        history = [*state["kl"], kl] if state["batches"] else []
        return {"batches": state["batches"] + 1, "kl": history[-self.window :]}

    def memory_columns(self, state: State, batch: Batch) -> dict[object, Field]:
        mean = statistics.fmean(state["kl"]) if state["kl"] else 0.0
        return {(self, "kl"): batch.tree.full(BATCH, mean, torch.float64)}

    def __call__(self, batch: Batch) -> Field:
        share = (batch[self, "kl"] / self.target).clamp(high=1.0)
        return self.high - share * (self.high - self.low)


class CappedEntropyBonus(Term):
    """Aₜ = A + min(|A|/γ, weight · Hₜ): a bonus for uncertain tokens, bounded by A. At TOKEN."""

    reads = frozenset({Signal.OLD_ENTROPY})
    term: Term
    gamma: float = number(0.4, above=0)
    weight: float = number(2.0, least=0)

    def __call__(self, batch: Batch) -> Field:
        a, entropy = self.term(batch).at(TOKEN), batch[Signal.OLD_ENTROPY]
        return a + (a.abs() / self.gamma).minimum(self.weight * entropy.to(a.x.dtype))


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
    Deviation: the KL of an update is measured on the batch after it; rollouts of one task in one batch are one visit."""
    keep = RetentionByKL(least, most, window, target)
    surprise = UnitOutcome(bottom, top) - SuccessTracker(UnitOutcome(bottom, top), keep, strength, average=True)
    credit = CappedEntropyBonus(Standardise(surprise, BATCH), gamma, weight)
    return replace(grpo(clip, kl), advantage=credit, budget=Fixed(64, 1), sampler=CyclePool(pool))


class LeaveOneOutProbeBaseline(Term):
    """A = R − mean of a probe's predictions from the *other* rollouts of the group: independent of this one, so unbiased.

    A rollout without others gets 0."""

    reads = frozenset({Signal.REWARD_PROBE})
    compares_peers = True
    # (A − mean)/(std + ε) over the batch, of the rollouts that have others
    normalise: bool = True
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        r, probe = named_reward(batch, None), batch[Signal.REWARD_PROBE].to(torch.float64)
        has_peers = r.peer_count(GROUP).at(TRAJECTORY) > 1
        a = where(has_peers, r - probe.leave_one_out(GROUP), 0.0)
        if not self.normalise:
            return a
        peers = Partition.by(batch.tree, TRAJECTORY, has_peers.to(torch.int64))
        return (a - a.mean(peers)) / (a.std(peers) + self.eps)


def poise(normalise: bool = True, eps: float = 1e-6, low: float = 0.2, high: float = 0.28) -> Recipe:
    """POISE: the baseline is a probe of the policy's hidden states, read from the other rollouts of the group.

    A = R − mean over the other rollouts j of V(zⱼ), then the z-score over the batch

    Paper: Your Language Model is Its Own Critic, arXiv 2605.07579.
    Settings: two rollouts per task in the paper (any number here), DAPO's clip and token mean."""
    return Recipe(advantage=LeaveOneOutProbeBaseline(normalise, eps), gate=Clip(low, high), aggregate=Mean(TOKEN))


class ProbeBaseline(Term):
    """A = R − V, V the mean of a probe's predictions from the other rollouts of the group, or from this one where it is
    alone."""

    reads = frozenset({Signal.REWARD_PROBE})

    def __call__(self, batch: Batch) -> Field:
        r, probe = named_reward(batch, None), batch[Signal.REWARD_PROBE].to(torch.float64)
        return r - where(r.peer_count(GROUP) > 1, probe.leave_one_out(GROUP), probe)


def probe_baseline(clip: float = 0.2) -> Recipe:
    """Probe baseline: the success rate of the task as a probe of hidden states predicts it; V₀'s baseline without V₀'s model.

    A = R − V₀(x | recent outcomes)

    Paper: V₀: A Generalist Value Model for Any Policy at State Zero, arXiv 2602.03584.
    Settings: none. The paper's allocation of rollouts is `--budget v0`.
    Deviation: a probe of hidden states, refitted on recent batches, stands in for the embedding model and its in-context
    classifier; V₀ is its mean over the other rollouts of the task. No routing between models."""
    return Recipe(advantage=ProbeBaseline(), gate=Clip(clip, clip))
