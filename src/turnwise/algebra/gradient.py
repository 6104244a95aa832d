"""How a gradient becomes a step: factors on the gradient or on the learning rate, computed over the whole step, and noise in
the layers that it is taken through.

A piece may request *side gradients*: those of other sums over the same tokens. The learner accumulates them and does not know
what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from turnwise.algebra.piece import MicroBatchView, Piece
from turnwise.core.levels import TOKEN, Field, where
from turnwise.core.limits import number
from turnwise.core.protocols import Scales
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

Grads: TypeAlias = "Sequence[Tensor]"


class Gradient(Piece):
    """Interface."""

    def side_losses(
        self, weight: Field, rho: Field, gated: Field, adv: Field, view: MicroBatchView
    ) -> Mapping[str, Tensor]:
        """Further scalars of this micro-batch whose gradients ``scales`` needs; they sum over micro-batches."""
        return {}

    def scales(self, view: MicroBatchView, side_gradients: Mapping[str, Grads]) -> Scales:
        return Scales()


class PlainGradient(Gradient):
    """The gradient, unscaled."""


class DivideByClippingBias(Gradient):
    """g ← g / max(‖C‖, floor), C = the gradient that the clip removed; unchanged where nothing was clipped.

    ∇J_clip = ∇J − C: the more the clip distorts the gradient, the shorter the step."""

    floor: float = number(1.0, above=0)

    def side_losses(
        self, weight: Field, rho: Field, gated: Field, adv: Field, view: MicroBatchView
    ) -> Mapping[str, Tensor]:
        # tokens whose weight is below ρ with A > 0, or above ρ with A < 0: the clip is active
        w, r = gated.detach(), rho.detach()
        removed = where(((adv > 0) & (w < r)) | ((adv < 0) & (w > r)), weight * adv * rho, 0.0)
        return {"clipped": removed.at(TOKEN).x.sum()}

    def scales(self, view: MicroBatchView, side_gradients: Mapping[str, Grads]) -> Scales:
        size = norm(side_gradients["clipped"])
        return Scales(gradient=1 / max(size, self.floor)) if size else Scales()


def norm(grads: Grads) -> float:
    """The L2 norm over all tensors together."""
    return float(torch.nn.utils.get_total_norm(list(grads))) if grads else 0.0


class LayerNoise(Piece):
    """h ← h + σ e, e ~ N(0, 1), at the input of every decoder layer, in update passes only; σ is learned per layer."""

    sigma: float = number(1e-6, above=0)
    rate: float = number(5e-4, least=0)  # learning rate of log σ
