"""How a gradient becomes a step: factors on the gradient or on the learning rate, computed over the whole step.

A piece may request *side gradients*: those of other sums over the same tokens. The learner accumulates them and does not know
what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from turnwise.algebra.piece import MicroBatchView, Piece, StepView
from turnwise.algebra.ratio import LOG_RATIO_LIMIT, moved
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

Grads: TypeAlias = "Sequence[Tensor]"


@dataclass(frozen=True)
class Scales:
    """Factors on the gradient (before it is clipped) and on the learning rate of one step."""

    gradient: float = 1.0
    rate: float = 1.0


class Gradient(Piece):
    """Interface."""

    def side_losses(
        self, weight: Field, rho: Field, gated: Field, adv: Field, view: MicroBatchView
    ) -> Mapping[str, Tensor]:
        """Further scalars of this micro-batch whose gradients ``scales`` needs; they sum over micro-batches."""
        return {}

    def scales(self, view: MicroBatchView, main: Grads, side_gradients: Mapping[str, Grads]) -> Scales:
        return Scales()


@dataclass(frozen=True)
class PlainGradient(Gradient):
    """The gradient, unscaled."""


@dataclass(frozen=True)
class DivideByClippingBias(Gradient):
    """g ← g / max(‖C‖, floor), C = the gradient that the clip removed; unchanged where nothing was clipped.

    ∇J_clip = ∇J − C: the more the clip distorts the gradient, the shorter the step."""

    floor: float = number(1.0, above=0)

    def side_losses(
        self, weight: Field, rho: Field, gated: Field, adv: Field, view: MicroBatchView
    ) -> Mapping[str, Tensor]:
        removed = where(_clipped(rho, gated, adv), weight * adv * rho, 0.0)
        return {"clipped": removed.at(TOKEN).x.sum()}

    def scales(self, view: MicroBatchView, main: Grads, side_gradients: Mapping[str, Grads]) -> Scales:
        size = norm(side_gradients["clipped"])
        return Scales(gradient=1 / max(size, self.floor)) if size else Scales()


def _clipped(rho: Field, gated: Field, adv: Field) -> Field:
    """Tokens whose weight is below ρ with A > 0, or above ρ with A < 0: the clip is active."""
    w, r = gated.detach(), rho.detach()
    return ((adv > 0) & (w < r)) | ((adv < 0) & (w > r))


@dataclass(frozen=True)
class ScaleByEffectiveSamples(Gradient):
    """lr ← lr √min(1, (ESS/B) / base), ESS = (Σw)² / Σw² of the trajectories' product ratios π/μ: a small effective sample
    size gives a small step."""

    reads_before_step = frozenset({Signal.LOGP})

    base: float = 1.0

    def plan(self, view: StepView) -> dict[object, Field]:
        tree = view.batch.tree
        has_tokens = (tree.size(TOKEN, TRAJECTORY) > 0).x
        log = moved(view).sum(TRAJECTORY).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).x[has_tokens].double()
        w = (log - log.max()).exp() if log.numel() else log.new_ones(1)  # a common factor cancels
        ess = float(w.sum() ** 2 / ((w**2).sum() + 1e-8))
        return {self: tree.full(BATCH, (min(1.0, ess / w.numel() / self.base)) ** 0.5, torch.float64)}

    def scales(self, view: MicroBatchView, main: Grads, side_gradients: Mapping[str, Grads]) -> Scales:
        return Scales(rate=float(view[self].item))


@dataclass(frozen=True)
class ScaleBySignalToNoise(Gradient):
    """lr ← lr |g|² / (|g|² + Var), Var from the gradients of ``shares`` equal parts of the groups."""

    shares: int = number(4, least=2, why="a variance needs two")

    def side_losses(
        self, weight: Field, rho: Field, gated: Field, adv: Field, view: MicroBatchView
    ) -> Mapping[str, Tensor]:
        gain = (weight * (gated * adv)).at(TOKEN)
        part = view.batch.group.at(TOKEN).x % self.shares
        return {str(k): self.shares * gain.x[part == k].sum() for k in range(self.shares)}

    def scales(self, view: MicroBatchView, main: Grads, side_gradients: Mapping[str, Grads]) -> Scales:
        nonzero = [g for g in side_gradients.values() if norm(g)]
        if len(nonzero) < 2:
            return Scales()
        mean = [torch.stack(parts).mean(0) for parts in zip(*nonzero)]
        noise = sum(norm([a - b for a, b in zip(g, mean)]) ** 2 for g in nonzero) / len(nonzero) / (len(nonzero) - 1)
        signal = norm(mean) ** 2
        return Scales(rate=signal / (signal + noise) if signal + noise else 1.0)


def norm(grads: Grads) -> float:
    """The L2 norm over all tensors together."""
    return float(torch.nn.utils.get_total_norm(list(grads))) if grads else 0.0


__all__ = [
    "DivideByClippingBias", "Gradient", "PlainGradient", "ScaleByEffectiveSamples", "ScaleBySignalToNoise", "Scales",
    "norm",
]  # fmt: skip
