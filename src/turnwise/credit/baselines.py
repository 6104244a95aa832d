"""Baselines and scales: what a return is compared with, and what its distance from that is divided by. Knows no
method."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome, token_reward
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, Field, Partition, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.credit.multi_reward import named_reward
from turnwise.credit.order import lower_median
from turnwise.credit.selectors import Selector
from turnwise.maths.lazy_torch import torch


@dataclass(frozen=True)
class StandardiseByMedian(Term):
    """A = (R − m)/(d + ε), m the median return of the group and d the median of |R − m|, so that one outlier moves
    neither.

    Both medians are members of the group: of an even number, the lower of the middle two. ``rescale`` multiplies
    non-zero A by members / members with A ≠ 0. ``fallback`` uses d = 1 where d = 0: that is the case whenever most
    returns are equal, and the others then get ±1/ε."""

    compares_peers = True

    eps: float = number(1e-3, above=0)
    rescale: bool = False
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


@dataclass(frozen=True)
class AtMedian(Selector):
    """Trajectories whose return is the (lower) median of their group: at least one per group."""

    def select(self, batch: Batch) -> Field:
        r = named_reward(batch, None)
        return (r - lower_median(batch, r)).map(lambda gap: gap == 0)


@dataclass(frozen=True)
class StandardiseByMeanDeviation(Term):
    """A = (v − mean)/(mean |v − mean| + ε) within the group: the size of the update does not depend on the success rate.

    ``summed`` is n (v − mean)/(Σ |v − mean| + ε): the same with an ε that is n times smaller."""

    compares_peers = True

    value: Term = field(default_factory=Outcome)
    eps: float = 1e-4
    summed: bool = False

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch).to(torch.float64)
        deviation = v - v.mean(GROUP)
        eps = self.eps / v.peer_count(GROUP) if self.summed else self.eps
        return deviation / (deviation.abs().mean(GROUP) + eps)


@dataclass(frozen=True)
class DifficultyWeighted(Term):
    """λA, λ = B softmax(−p/softness) over the B groups whose returns differ, 0 for the other groups; p is the group
    mean of the reward ``accuracy`` (None: of the return; p = 0 counts as 1, because then only other rewards vary).

    ``valid_tokens`` multiplies by all tokens / tokens of the B groups, so that a token mean runs over these groups
    alone."""

    term: Term
    softness: float = number(2.0, above=0)
    accuracy: str | None = None
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


# ------------------------------------------------------------------ predictions


@dataclass(frozen=True)
class LeaveOneOutProbeBaseline(Term):
    """A = R − mean of a probe's predictions from the *other* rollouts of the group: independent of this one, so unbiased.

    ``normalise`` then applies (A − mean)/(std + ε) over the batch. A rollout without others gets 0 and stays out of
    that mean and std."""

    reads = frozenset({Signal.REWARD_PROBE})
    compares_peers = True

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


@dataclass(frozen=True)
class ProbeBaseline(Term):
    """A = R − V, V the mean of a probe's predictions from the other rollouts of the group, or from this one where it is
    alone."""

    reads = frozenset({Signal.REWARD_PROBE})

    def __call__(self, batch: Batch) -> Field:
        r, probe = named_reward(batch, None), batch[Signal.REWARD_PROBE].to(torch.float64)
        return r - where(r.peer_count(GROUP) > 1, probe.leave_one_out(GROUP), probe)


@dataclass(frozen=True)
class AboveBaseline(Term):
    """A = value − baseline, two terms. ``AboveBaseline(Fact("greedy_reward"))`` compares each return with that of a greedy
    rollout of the same task, which does not depend on the sampled trajectory."""

    baseline: Term
    value: Term = field(default_factory=Outcome)

    def __call__(self, batch: Batch) -> Field:
        return self.value(batch) - self.baseline(batch)


@dataclass(frozen=True)
class LengthWeightedBaseline(Term):
    """A = R − Σ n R / Σ n over the group, n the tokens of a trajectory: the baseline of least variance when the squared norm
    of a trajectory's score grows with its length."""

    compares_peers = True

    value: Term = field(default_factory=Outcome)

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch)
        n = batch.tree.size(TOKEN, TRAJECTORY).to(v.x.dtype)
        return v - (n * v).sum(GROUP) / n.sum(GROUP).clamp(low=1.0)


@dataclass(frozen=True)
class BestAboveSecond(Term):
    """A = (largest − second largest)/(std + ε) for the best of a group, 0 for the others; the first of equals is the best.

    The gradient of the expected maximum of a group. ``scale=False`` leaves the division out."""

    compares_peers = True

    value: Term = field(default_factory=Outcome)
    scale: bool = True
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch)
        top = v.max(GROUP)
        at_top = where(v >= top, 1.0, 0.0)
        others = where(v >= top, -torch.inf, v).max(GROUP)
        lonely = at_top.sum(GROUP).map(lambda n: n == 1) & (others > -torch.inf)
        gap = where(lonely, top - where(lonely, others, 0.0), 0.0).to(v.x.dtype)
        gain = at_top.to(v.x.dtype) * gap
        return gain / (v.std(GROUP) + self.eps) if self.scale else gain


@dataclass(frozen=True)
class ScaleByInformative(Term):
    """A · n/m, n all trajectories of the batch and m those whose group has spread: the average counts only informative groups."""

    value: Term

    def __call__(self, batch: Batch) -> Field:
        a = self.value(batch)
        outcome = Outcome()(batch)
        spread = where(outcome.max(GROUP) > outcome.min(GROUP), 1.0, 0.0).at(TRAJECTORY)
        count = float(spread.x.sum())
        return a * (spread.x.numel() / max(1.0, count))


@dataclass(frozen=True)
class OptimalTokenBaseline(Term):
    """A = G − Σ G W / Σ W over the trajectories of the group at the same token index; G the reward to go, W the running sum of
    1 − 2π + Σₐ π(a)², the squared norm of ∂ log π / ∂ logits. Where one trajectory alone has that index, the baseline is 0."""

    reads = frozenset({Signal.PROXIMAL, Signal.COLLISION})

    eps: float = 1e-8

    def __call__(self, batch: Batch) -> Field:
        tree = batch.tree
        to_go = token_reward(batch).running_sum(TRAJECTORY, reverse=True).to(torch.float64)
        energy = 1 - 2 * batch[Signal.PROXIMAL].to(torch.float64).exp() + batch[Signal.COLLISION].to(torch.float64)
        path = energy.running_sum(TRAJECTORY)
        peers = Partition.by(tree, TOKEN, batch.group, tree.index(TOKEN, TRAJECTORY))
        baseline = (to_go * path).sum(peers) / (path.sum(peers) + self.eps)
        return to_go - where(to_go.peer_count(peers) > 1, baseline, 0.0)


__all__ = [
    "AboveBaseline", "AtMedian", "BestAboveSecond", "DifficultyWeighted", "LeaveOneOutProbeBaseline",
    "LengthWeightedBaseline", "OptimalTokenBaseline", "ProbeBaseline", "ScaleByInformative", "StandardiseByMeanDeviation",
    "StandardiseByMedian",
]  # fmt: skip
