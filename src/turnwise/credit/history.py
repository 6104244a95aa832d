"""Credit from earlier steps: returns of the last batches, KL of the last updates. State lives in the objective's
memory, not here."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from turnwise.algebra.piece import State, StepView
from turnwise.algebra.ratio import LOG_RATIO_LIMIT
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.credit.selectors import FromOrigin
from turnwise.maths.divergences import k3
from turnwise.maths.lazy_torch import torch

SAMPLED = FromOrigin("policy")


@dataclass(frozen=True)
class ImprovementWeighted(Term):
    """φ(ξ) · term: weights the credit of earlier batches by how this batch fared after their update.

    ξ = (μ − mean)/(std + ε): this step's mean return against those of the last ``window`` batches. φ(ξ) = ξ, or damp ·
    ξ below 0; 0 until ``window`` batches are known. An improvement reinforces the last update, a decline reverses
    it."""

    term: Term
    window: int = number(3, least=1)
    damp: float = number(0.5, least=0, most=1)
    eps: float = 1e-6

    updates_after_credit = True

    def initial_state(self) -> State:
        return {"means": []}

    def next_state(self, state: State, view: StepView) -> State:
        if not bool(SAMPLED.select(view.batch).x.any()):
            return state
        return {"means": [*state["means"], float(self._mean(view.batch).item)][-self.window :]}

    def memory_columns(self, state: State, batch: Batch) -> dict[object, Field]:
        means = state["means"]
        ready = len(means) >= self.window
        mean = statistics.fmean(means) if ready else float("nan")
        std = statistics.stdev(means) if ready and len(means) > 1 else 0.0
        return {(self, name): batch.tree.full(BATCH, x, torch.float64) for name, x in (("mean", mean), ("std", std))}

    def _mean(self, batch: Batch) -> Field:
        weight = where(SAMPLED.select(batch), 1.0, 0.0)
        return (weight * batch.reward.sum(TRAJECTORY)).sum(BATCH) / weight.sum(BATCH).clamp(low=1.0)

    def improvement(self, batch: Batch) -> Field:
        """φ. At BATCH."""
        mean = batch[self, "mean"]
        xi = (self._mean(batch) - mean) / (batch[self, "std"] + self.eps)
        return where(mean.map(torch.isnan), 0.0, where(xi < 0, self.damp * xi, xi))

    def __call__(self, batch: Batch) -> Field:
        return self.improvement(batch) * self.term(batch)


# -------------------------------------------------------------------- retention


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class CappedEntropyBonus(Term):
    """Aₜ = A + min(|A|/γ, weight · Hₜ): a bonus for uncertain tokens, bounded by A. At TOKEN."""

    reads = frozenset({Signal.OLD_ENTROPY})

    term: Term
    gamma: float = number(0.4, above=0)
    weight: float = number(2.0, least=0)

    def __call__(self, batch: Batch) -> Field:
        a, entropy = self.term(batch).at(TOKEN), batch[Signal.OLD_ENTROPY]
        return a + (a.abs() / self.gamma).minimum(self.weight * entropy.to(a.x.dtype))


__all__ = ["CappedEntropyBonus", "ImprovementWeighted", "RetentionByKL"]
