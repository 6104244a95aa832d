"""Penalties: further losses beside the gain. A penalty is a cost for each token, subtracted from the gain; its weight is a
number, or a ``Weight`` that changes during a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from turnwise.algebra.aggregate import Aggregate
from turnwise.algebra.mask import Mask
from turnwise.algebra.piece import MicroBatchView, Piece, StepView, check
from turnwise.algebra.ratio import LOG_RATIO_LIMIT, Importance, moved
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, TOKEN, TURN, Field, where
from turnwise.core.limits import choice, number
from turnwise.core.signals import Signal
from turnwise.maths.divergences import ESTIMATORS
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


class Penalty(Piece):
    """Interface: the cost of a micro-batch, differentiable. One that ``couples_trajectories`` is differentiated by log π over the
    whole step, before the split; it may read no other signal with gradient."""

    couples_trajectories = False

    def __call__(self, view: MicroBatchView) -> Field:
        raise NotImplementedError

    def metrics(self, view: MicroBatchView) -> Mapping[str, Tensor]:
        """Metrics to log, by name: sums over a micro-batch, or over the whole step where it ``couples_trajectories``."""
        return {}


class WeightedPenalty(Piece):
    """weight · penalty, averaged like the gain or by its own aggregate, over the gain's tokens or its own ``rows`` (each cost is
    divided by its own count). The weight is a number or a ``Weight`` that changes during the run."""

    weight: float | Weight
    penalty: Penalty
    aggregate: Aggregate | None = None
    rows: Mask | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Weight):  # the message names the penalty: a method may have several
            check(self.weight >= 0, f"the weight of {self.penalty!r} is {self.weight}; write a number >= 0")


class KL(Penalty):
    """KL(π‖reference) by a single-sample estimator (see maths/divergences.py for bias and gradients)."""

    estimator: str = choice(*ESTIMATORS, default="k3")
    # another frozen policy instead: PREVIOUS, PROXIMAL
    to: Signal = Signal.REFERENCE
    # multiplies by the ratio π/μ, so that the gradient of k3 (and k1) is that of the reverse KL also on off-policy data
    corrected: bool = False

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({self.to})

    def __call__(self, view: MicroBatchView) -> Field:
        x = (view[self.to] - view.logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        cost = x.map(ESTIMATORS[self.estimator])
        return Importance()(view) * cost if self.corrected else cost


class SquaredLogRatio(Penalty):
    """(log π − log μ)²: keeps the policy near the behaviour policy."""

    def __call__(self, view: MicroBatchView) -> Field:
        return moved(view) ** 2


class ClippedValueLoss(Penalty):
    """½ max( (v − G)², (clip(v, v_old ± clip) − G)² ): the critic's regression to its target G, with PPO's value clip."""

    reads = frozenset({Signal.VALUE, Signal.OLD_VALUE})
    target: Term
    clip: float = number(0.5, above=0, why="inf for off")
    # only on episodes that were not truncated (their return is known), as a mean over those tokens
    finished: bool = False

    def plan(self, view: StepView) -> dict[object, Field]:
        columns: dict[object, Field] = {self: self.target(view.batch).at(TOKEN)}
        if self.finished:
            ended = where(view.batch.truncated, 0.0, 1.0).at(TOKEN)
            columns[self, "weight"] = ended * (ended.x.numel() / max(1.0, float(ended.x.sum())))
        return columns

    def __call__(self, view: MicroBatchView) -> Field:
        v, old, target = view[Signal.VALUE], view[Signal.OLD_VALUE], view[self]
        near = old + (v - old).clamp(-self.clip, self.clip)
        cost = 0.5 * ((v - target) ** 2).maximum((near - target) ** 2)
        return view[self, "weight"].to(v.x.dtype) * cost if self.finished else cost


class NegativeLogLikelihood(Penalty):
    """−log π: without a gain this is supervised learning on the batch."""

    def __call__(self, view: MicroBatchView) -> Field:
        return -view.logp


class Weight(Piece):
    """Interface: one number for a whole step, computed in ``plan``."""

    def __call__(self, view: StepView) -> Field:
        raise NotImplementedError

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: self(view)}


class Schedule(Weight):
    """Interface: a weight that depends only on the number t of batches that were credited before."""

    def at(self, t: float) -> float:
        raise NotImplementedError

    def __call__(self, view: StepView) -> Field:
        return view.batch.tree.full(BATCH, self.at(float(view[Column.BATCH_INDEX].item)), torch.float64)


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


class StepCrossEntropy(Penalty):
    """Cross-entropy of a step's value to whether a return is positive, on each turn's first token: average with ``Sum(TURN)``."""

    reads = frozenset({Signal.VALUE})
    of: Term = field(default_factory=Outcome)

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: (self.of(view.batch) > 0).to(torch.float64)}

    def __call__(self, view: MicroBatchView) -> Field:
        value = view[Signal.VALUE]
        first = view.batch.tree.index(TOKEN, TURN) < 1
        return where(first, value.map(torch.nn.functional.softplus) - view[self] * value, 0.0)
