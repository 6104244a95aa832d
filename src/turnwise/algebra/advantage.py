"""Advantages: who gets the credit. A value compared among peers, at the level where the value lives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from turnwise.algebra.peers import Peers, among
from turnwise.algebra.piece import check
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome
from turnwise.batch import Batch
from turnwise.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.maths import returns
from turnwise.signals import Signal


@dataclass(frozen=True)
class Standardise(Term):
    """A = (v − mean) / (std + ε) among peers; a lone peer gets 0. ``scale=False`` leaves the division out.

    The std has n − ``correction`` in its denominator: 1 is the sample's, 0 the population's."""

    value: Term = field(default_factory=Outcome)
    peers: Peers = GROUP
    scale: bool = True
    eps: float = 1e-6
    correction: int = 1

    @property
    def judges(self) -> bool:
        return self.peers != BATCH

    def __call__(self, batch: Batch) -> Field:
        v, peers = self.value(batch), among(self.peers, batch)
        centred = v - v.mean(peers)
        return centred / (v.std(peers, self.correction) + self.eps) if self.scale else centred


@dataclass(frozen=True)
class LeaveOneOut(Term):
    """A = v − mean of the *other* peers; a lone peer is compared with 0."""

    value: Term = field(default_factory=Outcome)
    peers: Peers = GROUP

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch)
        return v - v.leave_one_out(among(self.peers, batch))


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
class SoftBaseline(Term):
    """A = v − τ log mean exp(v/τ) among the group: between the mean (τ → ∞) and the best (τ → 0).

    ``shrink`` divides by 1 + τ."""

    tau: float = 1.0
    shrink: bool = False
    value: Term = field(default_factory=Outcome)

    def __post_init__(self) -> None:
        check(self.tau > 0, f"tau is {self.tau}; write a positive number")

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch)
        top = v.max(GROUP)
        a = v - (top + self.tau * ((v - top) / self.tau).exp().mean(GROUP).log())
        return a / (1 + self.tau) if self.shrink else a


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
class Whiten(Term):
    """A ← (A − mean) / √(var + ε) over all sampled tokens of the batch; fewer than two tokens stay as they are."""

    term: Term
    eps: float = 1e-8

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch).at(TOKEN)
        if a.x.numel() < 2:
            return a
        return (a - a.mean(BATCH)) / (a.std(BATCH) ** 2 + self.eps) ** 0.5


@dataclass(frozen=True)
class OverSpread(Term):
    """A ← A / (std of A over the trajectories of the batch + ε): one scale for all groups."""

    term: Term
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch)
        return a / (a.std(BATCH) + self.eps)


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


@dataclass(frozen=True)
class InformationGain(Term):
    """Dₖ = 1/√(n−k) Σ_{j≥k} γ^{j−k} zⱼ: what the turns from here on tell about the gold answer, discounted.

    zⱼ standardises the rise of the answer's log-probability among turns of equal index; the last turn has none."""

    gamma: float = 1.0
    eps: float = 1e-6

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.ANSWER})

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        z, tree = answer_gain(batch, self.eps), batch.tree
        left = tree.size(TURN, TRAJECTORY) - 1 - tree.index(TURN, TRAJECTORY)  # information turns from here on
        last = (tree.size(TURN, TRAJECTORY) - tree.index(TURN, TRAJECTORY) <= 1).x
        total = z.map(lambda x: returns.discounted(x, self.gamma, last))
        return where(left > 0, total / left.to(z.x.dtype).clamp(low=1) ** 0.5, 0.0)


def answer_gain(batch: Batch, eps: float = 1e-6) -> Field:
    """z of each turn's rise of the gold answer's log-probability, among turns of equal index; 0 for last and lone turns."""
    score, tree = batch[Signal.ANSWER], batch.tree
    final = tree.size(TURN, TRAJECTORY) - tree.index(TURN, TRAJECTORY) <= 1
    after = torch.cat([score.x[1:], score.x[:1]])  # turns of a trajectory lie together: the next turn's score
    gain = Field(tree, TURN, torch.where(final.x, 0.0, after - score.x))
    index = tree.index(TURN, TRAJECTORY)
    peers = Partition.by(tree, TURN, batch.group, index, final.to(torch.int64))
    z = (gain - gain.mean(peers)) / (gain.std(peers) + eps)
    return where(final, 0.0, z)


__all__ = [
    "EarlyTools", "Guided", "InformationGain", "LeastVariance", "LeaveOneOut", "OverSpread", "SoftBaseline",
    "Standardise", "Unless", "Whiten", "WithIdeal", "answer_gain",
]  # fmt: skip
