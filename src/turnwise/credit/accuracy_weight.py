"""A weight of a penalty that follows how often the policy succeeds."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.piece import StepView
from turnwise.algebra.weight import Weight
from turnwise.core.levels import BATCH, TRAJECTORY, Field
from turnwise.core.limits import number
from turnwise.maths.lazy_torch import torch


@dataclass(frozen=True)
class AccuracyWeight(Weight):
    """scale · (1 + tanh(mean reward of the step)) / 2: the more often the policy succeeds, the closer it is held."""

    scale: float = number(least=0)

    def __call__(self, view: StepView) -> Field:
        accuracy = view.batch.reward.sum(TRAJECTORY).mean(BATCH).to(torch.float64)
        return self.scale * (1 + accuracy.map(torch.tanh)) / 2
