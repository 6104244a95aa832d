"""Trajectory-level credit from more than rewards: gradient norms, guidance, a virtual best member, the time of tool
calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.signals import Signal
from turnwise.maths.lazy_torch import torch


@dataclass(frozen=True)
class StandardiseWithVirtualBest(Term):
    """The z-score in a group extended by a virtual member with value ``best``: a group that failed as a whole still
    learns."""

    best: float = 1.0
    value: Term = field(default_factory=Outcome)
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch)
        n = v.peer_count(GROUP)
        mean = (v.sum(GROUP) + self.best) / (n + 1)
        squares = ((v - mean) ** 2).sum(GROUP) + (self.best - mean) ** 2
        return (v - mean) / ((squares / n) ** 0.5 + self.eps)


@dataclass(frozen=True)
class MinimumVarianceBaseline(Term):
    """A = R − b*, b* = Σ ω R / Σ ω over the group, with ω = ‖∇ log π‖² (times w² for off-policy data).

    b* minimises the variance of the gradient. ``offpolicy``: w = π_prox(y)/μ(y), the product over the trajectory.
    ``scale`` divides by the population std of the group. A group of one gets 0."""

    compares_peers = True

    offpolicy: bool = False
    scale: bool = False
    eps: float = 1e-6

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.GRADIENT_NORM} | ({Signal.PROXIMAL} if self.offpolicy else set()))

    def __call__(self, batch: Batch) -> Field:
        outcome = batch.reward.sum(TRAJECTORY)
        weight = batch[Signal.GRADIENT_NORM] ** 2
        if self.offpolicy:
            log_ratio = batch[Signal.PROXIMAL] - batch.behaviour - batch.mass
            weight = weight * (2 * log_ratio.clamp(-20, 20).sum(TRAJECTORY).clamp(-20, 20)).exp()
        total = weight.sum(GROUP)
        weight = where(total > 0, weight, 1.0)  # all weights are 0: use the plain mean
        baseline = (weight * outcome).sum(GROUP) / weight.sum(GROUP)
        adv = where(outcome.peer_count(GROUP) > 1, outcome - baseline, 0.0)
        return adv / (outcome.std(GROUP, 0) + self.eps) if self.scale else adv


@dataclass(frozen=True)
class FallbackAboveLimit(Term):
    """``term``; ``fallback`` in every group where some |term| reaches ``limit``."""

    term: Term
    limit: float
    fallback: Term

    def __call__(self, batch: Batch) -> Field:
        a, b = self.term(batch), self.fallback(batch)
        return where(a.abs().max(GROUP) >= self.limit, b, a)


@dataclass(frozen=True)
class GuidedAdvantage(Term):
    """Unguided trajectories get their z-score among themselves; guided ones get ``alpha`` where their z-score in the
    whole group exceeds ``margin``, else 0."""

    compares_peers = True

    alpha: float = 1.0
    margin: float = 0.05
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        outcome, tree = batch.reward.sum(TRAJECTORY), batch.tree
        peers = Partition.by(tree, TRAJECTORY, batch.group, batch.guided.to(torch.int64))
        within = (outcome - outcome.mean(peers)) / (outcome.std(peers) + self.eps)
        over_group = (outcome - outcome.mean(GROUP)) / (outcome.std(GROUP) + self.eps)
        return where(batch.guided, where(over_group > self.margin, self.alpha, 0.0).to(within.x.dtype), within)


@dataclass(frozen=True)
class EarlyToolBonus(Term):
    """A + clip(δ (p − mean p) / mean L, ±k A) for successful trajectories that call a tool and have A > 0; A elsewhere.

    p is the token at which the first turn with a call starts, L the length; means over those trajectories of the group.
    δ < 0 rewards early calls."""

    requires = frozenset({"verdict", "tools"})

    term: Term
    delta: float = -2.0
    k: float = 0.7

    def __call__(self, batch: Batch) -> Field:
        a, tree = self.term(batch), batch.tree
        begins = (tree.size(TOKEN, TURN).x.cumsum(0) - tree.size(TOKEN, TURN).x).to(a.x.dtype)
        offset = Field(tree, TURN, begins) - Field(tree, TURN, begins).min(TRAJECTORY)
        first = where(batch.tool_calls > 0, offset, torch.inf).min(TRAJECTORY)
        eligible = (batch.success > 0.5) & (batch.tool_calls.max(TRAJECTORY) > 0)
        count = where(eligible, 1.0, 0.0).sum(GROUP).clamp(low=1.0)
        mean = lambda x: where(eligible, x, 0.0).sum(GROUP) / count  # noqa: E731
        length = tree.size(TOKEN, TRAJECTORY).to(a.x.dtype)
        shift = self.delta * (first - mean(first)) / mean(length).clamp(low=1e-9)
        bound = self.k * a
        shaped = a + shift.maximum(-bound).minimum(bound)
        return where(eligible & (a > 0), shaped, a)


__all__ = [
    "EarlyToolBonus", "FallbackAboveLimit", "GuidedAdvantage", "MinimumVarianceBaseline",
    "StandardiseWithVirtualBest",
]  # fmt: skip
