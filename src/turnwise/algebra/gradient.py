"""How a gradient becomes a step: factors on the gradient or on the learning rate, told of the whole step.

A piece may ask for *side gradients*: those of other sums over the same tokens. The learner collects them; only this file
knows what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.algebra.piece import Now, Piece, Whole, check
from turnwise.algebra.ratio import LOG_RATIO_LIMIT, moved
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, Field, where
from turnwise.core.signals import Signal

Grads = Sequence[Tensor]


@dataclass(frozen=True)
class Scales:
    """What multiplies the gradient (before it is clipped) and the learning rate of one step."""

    gradient: float = 1.0
    rate: float = 1.0


class Gradient(Piece):
    """Interface."""

    def sides(self, weight: Field, rho: Field, gated: Field, adv: Field, now: Now) -> Mapping[str, Tensor]:
        """Scalars of this micro-batch whose gradients are wanted besides; they sum over micro-batches."""
        return {}

    def scales(self, whole: Now, main: Grads, sides: Mapping[str, Grads]) -> Scales:
        return Scales()


@dataclass(frozen=True)
class Plain(Gradient):
    """The gradient as it is."""


@dataclass(frozen=True)
class OverClippingBias(Gradient):
    """g ← g / max(‖C‖, floor), C = the gradient of what the clip took away; unchanged where nothing was clipped.

    ∇J_clip = ∇J − C: the more of the gradient the clip distorts, the shorter the step."""

    floor: float = 1.0

    def __post_init__(self) -> None:
        check(self.floor > 0, f"the floor is {self.floor}; write a positive number")

    def sides(self, weight: Field, rho: Field, gated: Field, adv: Field, now: Now) -> Mapping[str, Tensor]:
        silent = _clipped(rho, gated, adv)
        lost = where(silent, weight * adv * rho, 0.0)
        return {"clipped": lost.at(TOKEN).x.sum()}

    def scales(self, whole: Now, main: Grads, sides: Mapping[str, Grads]) -> Scales:
        size = norm(sides["clipped"])
        return Scales(gradient=1 / max(size, self.floor)) if size else Scales()


def _clipped(rho: Field, gated: Field, adv: Field) -> Field:
    """Tokens whose weight is below what A > 0 wants, or above what A < 0 wants: the clip has bound."""
    w, r = gated.detach(), rho.detach()
    return ((adv > 0) & (w < r)) | ((adv < 0) & (w > r))


@dataclass(frozen=True)
class ByEffectiveSamples(Gradient):
    """lr ← lr √min(1, (ESS/B) / base), ESS = (Σw)² / Σw² of the trajectories' whole ratios π/μ: few that count, small step."""

    base: float = 1.0

    @property
    def foresight(self) -> frozenset[Signal]:
        return frozenset({Signal.LOGP})

    def plan(self, whole: Whole) -> dict[object, Field]:
        tree = whole.batch.tree
        some = (tree.size(TOKEN, TRAJECTORY) > 0).x
        log = moved(whole).sum(TRAJECTORY).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).x[some].double()
        w = (log - log.max()).exp() if log.numel() else log.new_ones(1)  # a common factor cancels
        ess = float(w.sum() ** 2 / ((w**2).sum() + 1e-8))
        return {self: tree.full(BATCH, (min(1.0, ess / w.numel() / self.base)) ** 0.5, torch.float64)}

    def scales(self, whole: Now, main: Grads, sides: Mapping[str, Grads]) -> Scales:
        return Scales(rate=float(whole[self].item))


@dataclass(frozen=True)
class BySignalToNoise(Gradient):
    """lr ← lr |g|² / (|g|² + Var), Var from the gradients of ``shares`` equal parts of the groups."""

    shares: int = 4

    def __post_init__(self) -> None:
        check(self.shares >= 2, f"shares is {self.shares}; a variance needs at least 2")

    def sides(self, weight: Field, rho: Field, gated: Field, adv: Field, now: Now) -> Mapping[str, Tensor]:
        gain = (weight * (gated * adv)).at(TOKEN)
        mine = now.batch.group.at(TOKEN).x % self.shares
        return {str(k): self.shares * gain.x[mine == k].sum() for k in range(self.shares)}

    def scales(self, whole: Now, main: Grads, sides: Mapping[str, Grads]) -> Scales:
        used = [g for g in sides.values() if norm(g)]
        if len(used) < 2:
            return Scales()
        mean = [torch.stack(parts).mean(0) for parts in zip(*used)]
        noise = sum(norm([a - b for a, b in zip(g, mean)]) ** 2 for g in used) / len(used) / (len(used) - 1)
        signal = norm(mean) ** 2
        return Scales(rate=signal / (signal + noise) if signal + noise else 1.0)


def norm(grads: Grads) -> float:
    return float(torch.nn.utils.get_total_norm(list(grads))) if grads else 0.0


__all__ = [
    "ByEffectiveSamples", "BySignalToNoise", "Gradient", "OverClippingBias", "Plain", "Scales", "norm",
]  # fmt: skip
