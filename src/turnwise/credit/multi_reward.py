"""Several rewards: any number of them, each compared by itself before they are put together."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from turnwise.algebra.piece import Piece, check
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, Field, where
from turnwise.errors import SignalError


def component(batch: Batch, name: str | None) -> Field:
    """One reward of each trajectory by name, in float64; None is the outcome, the sum of all it was paid.

    A trajectory that was not given this reward has 0 there, and its 0 counts like any other: decided here alone."""
    if name is None:
        return batch.reward.sum(TRAJECTORY).to(torch.float64)
    if name not in batch.named:
        raise SignalError(f"no trajectory carries a reward named {name!r}; this batch has: {sorted(batch.named)}")
    return batch.named[name].to(torch.float64).map(lambda x: torch.nan_to_num(x, nan=0.0))


@dataclass(frozen=True)
class Rewards(Piece):
    """The rewards of a trajectory, each with its weight (1 unless told): those named, or, by (), all that are named.

    ``names=None`` is the outcome alone. Where the environment names none, the outcome is the only one."""

    names: tuple[str, ...] | None = ()
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        fits = not self.weights or len(self.weights) == len(self.names or ())
        check(
            fits, f"{len(self.weights)} weights for {len(self.names or ())} named rewards; write one for each, or none"
        )
        check(all(w >= 0 for w in self.weights), f"the weights of rewards are {self.weights}; write numbers >= 0")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset(f"reward {name}" for name in self.names or ())

    def __call__(self, batch: Batch) -> list[tuple[float, Field]]:
        """Weight and value of each."""
        told = sorted(batch.named) if self.names == () else self.names
        names = tuple(told or (None,))
        return [(w, component(batch, name)) for w, name in zip(self.weights or (1.0,) * len(names), names)]


@dataclass(frozen=True)
class EachStandardised(Term):
    """A = Σₖ wₖ (Rᵏ − meanᵏ)/(stdᵏ + ε) among the group: rewards of different scales weigh alike."""

    rewards: Rewards = field(default_factory=Rewards)
    eps: float = 1e-4

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        return total(w * ((r - r.mean(GROUP)) / (r.std(GROUP) + self.eps)) for w, r in self.rewards(batch))


@dataclass(frozen=True)
class SharedScale(Term):
    """A = Σₖ wₖ (Rᵏ − meanᵏ) / (Σₖ wₖ stdᵏ + ε) among the group: a reward weighs as much as it varies there."""

    rewards: Rewards = field(default_factory=Rewards)
    eps: float = 1e-6

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        found = self.rewards(batch)
        scale = total(w * r.std(GROUP) for w, r in found)
        return total(w * (r - r.mean(GROUP)) for w, r in found) / (scale + self.eps)


@dataclass(frozen=True)
class OverBatch(Term):
    """A ← (A − mean)/(std + ε) over the batch: ``each`` trajectory one vote ("rows"), each sampled token one ("tokens"), or
    A as it is ("none")."""

    term: Term
    each: str = "rows"
    eps: float = 1e-4

    def __post_init__(self) -> None:
        check(self.each in ("rows", "tokens", "none"), f"no vote for {self.each!r}; write rows, tokens or none")

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch)
        if self.each == "none":
            return a
        a = a.at(TOKEN) if self.each == "tokens" else a
        return (a - a.mean(BATCH)) / (a.std(BATCH) + self.eps)


# ------------------------------------------------------------- Beta densities


@dataclass(frozen=True)
class BetaScaled(Term):
    """A = (r − p)/f(p; α, β), averaged over the rewards: p is the mean of the group, f the Beta density of least variance.

    r in [0, 1] is the reward between ``bottom`` and ``top``. α = max(1, 1 + a/3), β = max(1, 1 + b/3), and (a, b) has the
    mean and variance of p over the groups. 1/f is held below 10⁶; p of 0 or 1 gives 0."""

    rewards: Rewards = field(default_factory=lambda: Rewards(None))
    bottom: float = 0.0
    top: float = 1.0

    def __post_init__(self) -> None:
        check(self.bottom < self.top, f"rewards between {self.bottom} and {self.top}; write bottom < top")

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        found = self.rewards(batch)
        return total(self._one(unit(r, self.bottom, self.top)) for _, r in found) / len(found)

    def _one(self, r: Field) -> Field:
        p = r.mean(GROUP)
        alpha, beta = beta_shape(p.x)
        inside = (p > 0) & (p < 1)
        density = log_beta(where(inside, p, 0.5).x, alpha, beta)
        return where(inside, (r - p) * Field(p.tree, GROUP, (-density).exp().clamp(max=1e6)), 0.0)


def beta_shape(p: Tensor) -> tuple[Tensor, Tensor]:
    """(α, β) by moments of the success rates of groups; 1 and 1 where there is one group, or all rates are equal."""
    one = p.new_tensor(1.0)
    spread = p.var() if p.numel() > 1 else one * 0
    if p.numel() < 2 or float(spread) < 1e-12:
        return one, one
    m = p.mean()
    both = m * (1 - m) / spread - 1
    return (1 + both * m / 3).clamp(min=1), (1 + both * (1 - m) / 3).clamp(min=1)


def log_beta(p: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """log f(p; α, β) for 0 < p < 1."""
    scale = torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
    return scale + (alpha - 1) * p.log() + (beta - 1) * torch.log1p(-p)


def unit(value: Field, bottom: float, top: float) -> Field:
    """A value between ``bottom`` and ``top`` as one in [0, 1]; what lies outside is cut."""
    return ((value - bottom) / (top - bottom)).clamp(0.0, 1.0)


@dataclass(frozen=True)
class Unit(Term):
    """The outcome between ``bottom`` and ``top`` as a number in [0, 1]."""

    bottom: float = 0.0
    top: float = 1.0

    def __post_init__(self) -> None:
        check(self.bottom < self.top, f"rewards between {self.bottom} and {self.top}; write bottom < top")

    def __call__(self, batch: Batch) -> Field:
        return unit(component(batch, None), self.bottom, self.top)


def total(fields: Iterable[Field]) -> Field:
    """Σ of one field or more."""
    return reduce(operator.add, fields)


__all__ = [
    "BetaScaled", "EachStandardised", "OverBatch", "Rewards", "SharedScale", "Unit", "beta_shape", "component",
    "log_beta", "total", "unit",
]  # fmt: skip
