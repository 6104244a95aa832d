"""Credit that looks back: at how the batches before fared, at how far the updates before went."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from turnwise.algebra.piece import State, Whole, check
from turnwise.algebra.ratio import LOG_RATIO_LIMIT
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, Field, where
from turnwise.core.signals import Signal
from turnwise.credit.selectors import From
from turnwise.maths.divergences import k3

OWN = From("policy")


@dataclass(frozen=True)
class Verdict(Term):
    """φ(ξ) · term: what was done when the batches before were credited, judged by how this one fared.

    ξ = (μ − mean)/(std + ε): the mean outcome of what this step sampled against those of the last ``window`` batches.
    φ(ξ) = ξ, or damp · ξ below 0; 0 until there are as many batches. What went well is repeated, what did not is undone."""

    term: Term
    window: int = 3
    damp: float = 0.5
    eps: float = 1e-6

    late = True

    def __post_init__(self) -> None:
        check(self.window >= 1, f"the window is {self.window}; write at least 1 batch")
        check(0 <= self.damp <= 1, f"damp is {self.damp}; write a number in [0, 1]")

    def start(self) -> State:
        return {"means": []}

    def advance(self, state: State, whole: Whole) -> State:
        if not bool(OWN.of(whole.batch).x.any()):
            return state
        return {"means": [*state["means"], float(self._mean(whole.batch).item)][-self.window :]}

    def recall(self, state: State, batch: Batch) -> dict[object, Field]:
        means = state["means"]
        ready = len(means) >= self.window
        mean = statistics.fmean(means) if ready else float("nan")
        std = statistics.stdev(means) if ready and len(means) > 1 else 0.0
        return {(self, name): batch.tree.full(BATCH, x, torch.float64) for name, x in (("mean", mean), ("std", std))}

    def _mean(self, batch: Batch) -> Field:
        own = where(OWN.of(batch), 1.0, 0.0)
        return (own * batch.reward.sum(TRAJECTORY)).sum(BATCH) / own.sum(BATCH).clamp(low=1.0)

    def verdict(self, batch: Batch) -> Field:
        """φ. At BATCH."""
        mean = batch[self, "mean"]
        xi = (self._mean(batch) - mean) / (batch[self, "std"] + self.eps)
        return where(mean.map(torch.isnan), 0.0, where(xi < 0, self.damp * xi, xi))

    def __call__(self, batch: Batch) -> Field:
        return self.verdict(batch) * self.term(batch)


# --------------------------------------------------------------------- trackers


@dataclass(frozen=True)
class ByUpdates(Term):
    """η = high − min(K/target, 1)(high − low), K the mean KL of the last ``window`` updates: the further the policy went, the
    less of what was known is kept. At BATCH.

    The KL of an update is told by the batch after it: mean k3 of the log-probabilities before and after."""

    low: float = 0.875
    high: float = 0.96
    window: int = 20
    target: float = 0.01

    def __post_init__(self) -> None:
        check(0 <= self.low <= self.high <= 1, f"need 0 <= low <= high <= 1, got {self.low}, {self.high}")
        check(self.window >= 1, f"the window is {self.window}; write at least 1 update")
        check(self.target > 0, f"the target is {self.target}; write a positive KL")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.PROXIMAL, Signal.PREVIOUS})

    def start(self) -> State:
        return {"batches": 0, "kl": []}

    def advance(self, state: State, whole: Whole) -> State:
        """The first batch has no update before it."""
        step = (whole[Signal.PREVIOUS] - whole[Signal.PROXIMAL]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        kl = float(step.to(torch.float64).map(k3).mean(BATCH).item)
        seen = [*state["kl"], kl] if state["batches"] else []
        return {"batches": state["batches"] + 1, "kl": seen[-self.window :]}

    def recall(self, state: State, batch: Batch) -> dict[object, Field]:
        mean = statistics.fmean(state["kl"]) if state["kl"] else 0.0
        return {(self, "kl"): batch.tree.full(BATCH, mean, torch.float64)}

    def __call__(self, batch: Batch) -> Field:
        gone = (batch[self, "kl"] / self.target).clamp(high=1.0)
        return self.high - gone * (self.high - self.low)


@dataclass(frozen=True)
class WithEntropy(Term):
    """Aₜ = A + min(|A|/γ, weight · Hₜ): uncertain tokens are credited a little more, never more than A allows. At TOKEN."""

    term: Term
    gamma: float = 0.4
    weight: float = 2.0

    def __post_init__(self) -> None:
        check(self.gamma > 0, f"gamma is {self.gamma}; write a positive number")
        check(self.weight >= 0, f"the weight of the entropy is {self.weight}; write a number >= 0")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.OLD_ENTROPY})

    def __call__(self, batch: Batch) -> Field:
        a, entropy = self.term(batch).at(TOKEN), batch[Signal.OLD_ENTROPY]
        return a + (a.abs() / self.gamma).minimum(self.weight * entropy.to(a.x.dtype))


__all__ = ["ByUpdates", "Verdict", "WithEntropy"]
