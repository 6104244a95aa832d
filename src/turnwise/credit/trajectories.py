"""Credit of whole trajectories that looks at more than their rewards: gradients, guidance, an ideal, when tools were called."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.signals import Signal


@dataclass(frozen=True)
class WithIdeal(Term):
    """The z-score of a group that has one more member, who got ``best``: a group that failed as a whole still learns."""

    best: float = 1.0
    value: Term = field(default_factory=Outcome)
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch)
        n = v.peers(GROUP)
        mean = (v.sum(GROUP) + self.best) / (n + 1)
        squares = ((v - mean) ** 2).sum(GROUP) + (self.best - mean) ** 2
        return (v - mean) / ((squares / n) ** 0.5 + self.eps)


@dataclass(frozen=True)
class LeastVariance(Term):
    """A = R − b*, b* = Σ ω R / Σ ω over the group, with ω = ‖∇ log π‖² (and w² for data of another policy).

    b* is the baseline that makes the gradient's variance smallest. ``offpolicy``: w = π_prox(y)/μ(y), the whole product.
    ``scale`` divides by the population std of the group. A lone member gets 0."""

    offpolicy: bool = False
    scale: bool = False
    eps: float = 1e-6

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.GRADIENT_NORM} | ({Signal.PROXIMAL} if self.offpolicy else set()))

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        outcome = batch.reward.sum(TRAJECTORY)
        weight = batch[Signal.GRADIENT_NORM] ** 2
        if self.offpolicy:
            moved = batch[Signal.PROXIMAL] - batch.behaviour - batch.mass
            weight = weight * (2 * moved.clamp(-20, 20).sum(TRAJECTORY).clamp(-20, 20)).exp()
        total = weight.sum(GROUP)
        weight = where(total > 0, weight, 1.0)  # nothing to weigh by: the plain mean
        baseline = (weight * outcome).sum(GROUP) / weight.sum(GROUP)
        adv = where(outcome.peers(GROUP) > 1, outcome - baseline, 0.0)
        return adv / (outcome.std(GROUP, 0) + self.eps) if self.scale else adv


@dataclass(frozen=True)
class Unless(Term):
    """``term``, but ``otherwise`` in every group where some |term| reaches ``limit``."""

    term: Term
    limit: float
    otherwise: Term

    def __call__(self, batch: Batch) -> Field:
        a, b = self.term(batch), self.otherwise(batch)
        return where(a.abs().max(GROUP) >= self.limit, b, a)


@dataclass(frozen=True)
class Guided(Term):
    """Trajectories sampled as the policy would get their z-score among themselves; guided ones get ``alpha`` where they
    beat the whole group by ``margin``, else 0."""

    alpha: float = 1.0
    margin: float = 0.05
    eps: float = 1e-6

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        outcome, tree = batch.reward.sum(TRAJECTORY), batch.tree
        peers = Partition.by(tree, TRAJECTORY, batch.group, batch.guided.to(torch.int64))
        own = (outcome - outcome.mean(peers)) / (outcome.std(peers) + self.eps)
        among_all = (outcome - outcome.mean(GROUP)) / (outcome.std(GROUP) + self.eps)
        return where(batch.guided, where(among_all > self.margin, self.alpha, 0.0).to(own.x.dtype), own)


@dataclass(frozen=True)
class EarlyTools(Term):
    """A ← A + clip(δ (p − mean p) / mean L, ±k A) for successful trajectories that call a tool and have A > 0.

    p is the token at which the first turn with a call begins, L the length; means over those trajectories of the group.
    δ < 0 rewards calling early."""

    term: Term
    delta: float = -2.0
    k: float = 0.7

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"verdict", "tools"})

    def __call__(self, batch: Batch) -> Field:
        a, tree = self.term(batch), batch.tree
        begins = (tree.size(TOKEN, TURN).x.cumsum(0) - tree.size(TOKEN, TURN).x).to(a.x.dtype)
        inside = Field(tree, TURN, begins) - Field(tree, TURN, begins).min(TRAJECTORY)
        first = where(batch.tool_calls > 0, inside, torch.inf).min(TRAJECTORY)
        chosen = (batch.success > 0.5) & (batch.tool_calls.max(TRAJECTORY) > 0)
        count = where(chosen, 1.0, 0.0).sum(GROUP).clamp(low=1.0)
        mean = lambda x: where(chosen, x, 0.0).sum(GROUP) / count  # noqa: E731
        length = tree.size(TOKEN, TRAJECTORY).to(a.x.dtype)
        shift = self.delta * (first - mean(first)) / mean(length).clamp(low=1e-9)
        bound = self.k * a
        shaped = a + shift.maximum(-bound).minimum(bound)
        return where(chosen & (a > 0), shaped, a)


__all__ = ["EarlyTools", "Guided", "LeastVariance", "Unless", "WithIdeal"]
