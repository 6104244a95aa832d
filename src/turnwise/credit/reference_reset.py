"""A reference policy that is replaced during a run. Knows no divergence and no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import MicroBatchView
from turnwise.core.levels import Field
from turnwise.core.limits import number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ResetReference(Penalty):
    """``penalty``, but the policy before batch ``at`` (counted from 0) is the reference from that batch on; with ``every`` it is
    replaced again after each further ``every`` batches. 0: never."""

    penalty: Penalty
    at: int = number(50, least=0, why="0 for never")
    every: int = number(0, least=0, why="0 for never")

    @property
    def couples_trajectories(self) -> bool:  # type: ignore[override]
        return self.penalty.couples_trajectories

    def resets_reference(self, batch_index: int) -> bool:
        later = self.every > 0 and batch_index > self.at and (batch_index - self.at) % self.every == 0
        return (batch_index > 0 and batch_index == self.at) or later

    def __call__(self, view: MicroBatchView) -> Field:
        return self.penalty(view)

    def metrics(self, view: MicroBatchView) -> Mapping[str, Tensor]:
        return self.penalty.metrics(view)


__all__ = ["ResetReference"]
