"""Advantages: a value compared among peers, at the level of that value.

Who earned what inside a trajectory is decided by pieces beside their recipes; this module holds what any method may use.
"""

from __future__ import annotations

from dataclasses import field

from turnwise.algebra.peers import PeerSpec, resolve_peers
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, Field
from turnwise.core.limits import number


class Standardise(Term):
    """A = (v − mean) / (std + ε) among peers; a single peer gets 0. ``scale=False`` leaves the division out.

    The std has n − ``correction`` in its denominator: 1 is the sample's, 0 the population's."""

    value: Term = field(default_factory=Outcome)
    peers: PeerSpec = GROUP
    scale: bool = True
    eps: float = 1e-6
    correction: int = 1

    @property
    def compares_peers(self) -> bool:
        return self.peers != BATCH

    def __call__(self, batch: Batch) -> Field:
        v, peers = self.value(batch), resolve_peers(self.peers, batch)
        centred = v - v.mean(peers)
        return centred / (v.std(peers, self.correction) + self.eps) if self.scale else centred


class LeaveOneOut(Term):
    """A = v − mean of the *other* peers; a single peer is compared with 0."""

    compares_peers = True
    value: Term = field(default_factory=Outcome)
    peers: PeerSpec = GROUP

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch)
        return v - v.leave_one_out(resolve_peers(self.peers, batch))


class SoftBaseline(Term):
    """A = v − τ log mean exp(v/τ) among the group: between the mean (τ → ∞) and the maximum (τ → 0).

    None is the mean. ``shrink`` divides by 1 + τ; ``mean`` takes the mean as the baseline and shrinks by τ all the same."""

    compares_peers = True
    tau: float | None = number(1.0, above=0)
    shrink: bool = False
    mean: bool = False
    value: Term = field(default_factory=Outcome)

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch)
        if self.tau is None:
            return v - v.mean(GROUP)
        top = v.max(GROUP)
        a = v - (v.mean(GROUP) if self.mean else top + self.tau * ((v - top) / self.tau).exp().mean(GROUP).log())
        return a / (1 + self.tau) if self.shrink else a


class Whiten(Term):
    """A ← (A − mean) / √(var + ε) over all sampled tokens of the batch; with fewer than two tokens A stays unchanged."""

    term: Term
    eps: float = 1e-8

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch).at(TOKEN)
        if a.x.numel() < 2:
            return a
        return (a - a.mean(BATCH)) / (a.std(BATCH) ** 2 + self.eps) ** 0.5


class DivideByBatchStd(Term):
    """A ← A / (std of A over the trajectories of the batch + ε): one scale for all groups."""

    term: Term
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch)
        return a / (a.std(BATCH) + self.eps)
