"""Several rewards: each is normalised by itself before they are combined. Knows no environment; rewards are found by
name."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

from turnwise.algebra.piece import Piece, check
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, Field, where
from turnwise.core.limits import choice, number
from turnwise.errors import SignalError
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def named_reward(batch: Batch, name: str | None) -> Field:
    """One reward of each trajectory by name, in float64; None is the return, the sum of all its rewards.

    A trajectory without this reward has 0, and that 0 counts like any other. Only this function decides that."""
    if name is None:
        return batch.reward.sum(TRAJECTORY).to(torch.float64)
    if name not in batch.reward_components:
        raise SignalError(
            f"no trajectory carries a reward named {name!r}; this batch has: {sorted(batch.reward_components)}"
        )
    return batch.reward_components[name].to(torch.float64).map(lambda x: torch.nan_to_num(x, nan=0.0))


@dataclass(frozen=True)
class WeightedRewards(Piece):
    """The rewards of a trajectory, each with its weight (default 1): the named ones, or with () all named ones of the
    batch.

    ``names=None`` is the return alone; so is () where the environment names no rewards."""

    names: tuple[str, ...] | None = ()
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        fits = not self.weights or len(self.weights) == len(self.names or ())
        check(
            fits, f"{len(self.weights)} weights for {len(self.names or ())} named rewards; write one for each, or none"
        )
        check(all(w >= 0 for w in self.weights), f"the weights of rewards are {self.weights}; write numbers >= 0")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset(f"reward {name}" for name in self.names or ())

    def __call__(self, batch: Batch) -> list[tuple[float, Field]]:
        """Weight and value of each reward."""
        selected = sorted(batch.reward_components) if self.names == () else self.names
        names = tuple(selected or (None,))
        return [(w, named_reward(batch, name)) for w, name in zip(self.weights or (1.0,) * len(names), names)]


@dataclass(frozen=True)
class SumOfStandardised(Term):
    """A = Σₖ wₖ (Rᵏ − meanᵏ)/(stdᵏ + ε) within the group: rewards of different scales weigh alike."""

    compares_peers = True

    rewards: WeightedRewards = field(default_factory=WeightedRewards)
    eps: float = 1e-4

    def __call__(self, batch: Batch) -> Field:
        return sum_fields(w * ((r - r.mean(GROUP)) / (r.std(GROUP) + self.eps)) for w, r in self.rewards(batch))


@dataclass(frozen=True)
class CentredOverTotalStd(Term):
    """A = Σₖ wₖ (Rᵏ − meanᵏ) / (Σₖ wₖ stdᵏ + ε) within the group: a reward weighs as much as it varies there."""

    compares_peers = True

    rewards: WeightedRewards = field(default_factory=WeightedRewards)
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        rewards = self.rewards(batch)
        scale = sum_fields(w * r.std(GROUP) for w, r in rewards)
        return sum_fields(w * (r - r.mean(GROUP)) for w, r in rewards) / (scale + self.eps)


@dataclass(frozen=True)
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


# ------------------------------------------------------------- Beta densities


@dataclass(frozen=True)
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


def rescale_to_unit(value: Field, bottom: float, top: float) -> Field:
    """A value from [bottom, top] as a number in [0, 1]; values outside are clipped."""
    return ((value - bottom) / (top - bottom)).clamp(0.0, 1.0)


@dataclass(frozen=True)
class UnitOutcome(Term):
    """The return rescaled from [bottom, top] to [0, 1]."""

    bottom: float = number(0.0, below="top")
    top: float = 1.0

    def __call__(self, batch: Batch) -> Field:
        return rescale_to_unit(named_reward(batch, None), self.bottom, self.top)


def sum_fields(fields: Iterable[Field]) -> Field:
    """Σ of at least one field."""
    return reduce(operator.add, fields)


__all__ = [
    "BetaNormalised", "CentredOverTotalStd", "StandardiseOverBatch", "SumOfStandardised", "UnitOutcome",
    "WeightedRewards", "beta_log_density", "fit_beta", "named_reward", "rescale_to_unit", "sum_fields",
]  # fmt: skip
