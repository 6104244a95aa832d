"""Regression of a log-ratio onto an advantage, and weights that are active for a part of the run. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import MicroBatchView, StepView
from turnwise.algebra.ratio import moved
from turnwise.algebra.weight import Weight, batch_index
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, TRAJECTORY, Field
from turnwise.core.limits import number
from turnwise.maths.lazy_torch import torch


@dataclass(frozen=True)
class SamplerRegressionError(Penalty):
    """(β Σ over the trajectory of log π − log μ, minus A)²: 0 where π ∝ μ exp(A/β). One cost per trajectory."""

    beta: float = number(1e-3, above=0)

    def __call__(self, view: MicroBatchView) -> Field:
        log_ratio = moved(view).sum(TRAJECTORY)
        return (self.beta * log_ratio - view[Column.ADVANTAGE].at(TRAJECTORY).to(log_ratio.x.dtype)) ** 2


@dataclass(frozen=True)
class ActiveBatches(Weight):
    """``scale`` from batch ``begin`` on and before batch ``end`` (0: no end), 0 otherwise. What has weight 0 has no gradient: a
    critic whose loss has ended stays as it is."""

    scale: float = number(1.0, least=0)
    begin: int = number(0, least=0)
    end: int = number(0, least=0)

    def __call__(self, view: StepView) -> Field:
        now = batch_index(view)
        active = now >= self.begin and (not self.end or now < self.end)
        return view.batch.tree.full(BATCH, self.scale if active else 0.0, torch.float64)


__all__ = ["ActiveBatches", "SamplerRegressionError"]
