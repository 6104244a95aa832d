"""Loss and gradients of an objective on a batch, as a learner computes them: a batch is credited, planned, cut into
micro-batches, and each sees only the signals that the pieces declare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.algebra.objective import Objective
from turnwise.checks.synthetic import numbered, policy_of
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.signals import WITH_GRADIENT, Signal

Cut = Callable[[Batch], Iterable[Batch]]


@dataclass(frozen=True)
class LossGradient:
    """A loss, its gradients by signal, and the statistics of its first micro-batch."""

    loss: Tensor
    of: dict[Signal, Tensor]
    stats: dict[str, Tensor]

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.loss)) and all(bool(torch.isfinite(g).all()) for g in self.of.values())


def whole(batch: Batch) -> list[Batch]:
    """One micro-batch."""
    return [batch]


def planned(objective: Objective, batch: Batch) -> Batch:
    """The batch of one optimiser step, with what the learner measures for this objective and nothing else."""
    hidden = set(Signal) - (objective.signals - WITH_GRADIENT) - objective.signals_before_step
    kept = {key: column for key, column in batch.columns.items() if key not in hidden}
    return numbered(objective.plan(objective.credit(replace(batch, columns=kept))))


def gradient(objective: Objective, batch: Batch, leaves: Mapping[Signal, Tensor], cut: Cut = whole) -> LossGradient:
    """Sum of the losses of all micro-batches, and its gradients with respect to the leaves."""
    live = {s: x for s, x in leaves.items() if s in objective.signals_with_gradient}
    total, stats = torch.zeros((), dtype=torch.float64), dict[str, Tensor]()
    for part in cut(planned(objective, batch)):
        loss = objective(part, policy_of(part, live))
        total = total + loss.loss
        stats = stats or dict(loss.stats)
    if not total.requires_grad:
        return LossGradient(total.detach(), {}, stats)
    gradients = torch.autograd.grad(total, list(live.values()), allow_unused=True)
    return LossGradient(total.detach(), {s: g for s, g in zip(live, gradients) if g is not None}, stats)


def push(batch: Batch, found: LossGradient) -> Tensor:
    """By how much a step raises the log-probability of each trajectory, [K], to first order in the log-probabilities."""
    slope = found.of.get(Signal.LOGP)
    slope = torch.zeros_like(batch.behaviour.x, dtype=torch.float64) if slope is None else slope
    return Field(batch.tree, TOKEN, -slope).sum(TRAJECTORY).x
