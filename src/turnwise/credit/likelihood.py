"""Credit by likelihood: how probable a trajectory was when it was sampled, relative to its group. Knows no method."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.ratio import behaviour
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.credit.multi_reward import named_reward
from turnwise.credit.order import ordered_pairs, rank_in_group
from turnwise.maths.lazy_torch import torch


def mean_logp(batch: Batch) -> Field:
    """Mean log-probability of a trajectory's tokens at sampling time; 0 without tokens."""
    return behaviour(batch).to(torch.float64).mean(TRAJECTORY)


@dataclass(frozen=True)
class UnlikelinessReward(Term):
    """R (1 − β k/n), k the likelihood rank of a trajectory among the n of its group, 0 for the least likely: rarer
    successes earn more."""

    beta: float = number(0.25, least=0, most=1)

    def __call__(self, batch: Batch) -> Field:
        r = named_reward(batch, None)
        return r * (1 - self.beta * rank_in_group(batch, mean_logp(batch)).to(r.x.dtype) / r.peer_count(GROUP))


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class PairwiseCalibration(Term):
    """A = Σ over wrong peers of σ((l′ − l)/τ) for a right trajectory, −Σ over right peers of σ((l − l′)/τ) for a wrong
    one: credit where the mean log-probability l ranks a pair wrongly.

    ``scaled`` keeps the factor 1/τ. A right trajectory with reference perplexity above ``high`` and a wrong one below
    ``low`` get 0, but stay in the pairs of others."""

    reads = frozenset({Signal.REFERENCE})
    requires = frozenset({"verdict"})
    compares_peers = True

    tau: float = number(0.6, above=0)
    high: float = number(2.5, least=0)
    low: float = number(1.05, least=0)
    scaled: bool = False

    def __call__(self, batch: Batch) -> Field:
        tree, logp, right = batch.tree, mean_logp(batch).x, batch.success.x > 0.5
        i, j = ordered_pairs(tree)
        sign = right[i].double() - right[j].double()  # 1: right against wrong, −1: wrong against right, 0: no pair
        pull = sign * torch.sigmoid(-sign * (logp[i] - logp[j]) / self.tau)
        a = torch.zeros_like(logp).index_add(0, i, pull)
        perplexity = (-batch[Signal.REFERENCE].to(torch.float64).mean(TRAJECTORY).x).exp()
        plausible = torch.where(right, perplexity <= self.high, perplexity >= self.low)
        return Field(tree, TRAJECTORY, torch.where(plausible, a / self.tau if self.scaled else a, 0.0))


__all__ = ["NoveltyBonus", "PairwiseCalibration", "UnlikelinessReward", "mean_logp"]
