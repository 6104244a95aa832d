"""Ratios and gates by origin of a trajectory (policy, replay, expert), and the ratio of text without recorded
probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnwise.algebra.gate import Gate
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.ratio import Importance, Ratio
from turnwise.core.levels import Field, where
from turnwise.core.limits import choice, number
from turnwise.credit.selectors import FromOrigin

if TYPE_CHECKING:
    from torch import Tensor

SHAPES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "ratio": lambda logp, shape, power: logp.exp() / (logp.exp() + shape),
    "none": lambda logp, shape, power: logp.exp(),
    "power": lambda logp, shape, power: (power * logp).exp(),
    "log": lambda logp, shape, power: logp,
    "same": lambda logp, shape, power: (logp - logp.detach()).exp(),
}


@dataclass(frozen=True)
class ShapedProbability(Ratio):
    """ρ = f(p), p = π(y): the ratio for expert text, whose sampler is taken to be certain (μ = 1). The gradient flows
    through f.

    ``ratio``: p/(p + shape), which keeps a gradient on rare tokens (f′(0) = 1/shape); ``none``: p; ``power``: p^power;
    ``log``: log p; ``same``: 1 with the gradient of log p, as if the policy had sampled the token."""

    kind: str = choice(*SHAPES, default="ratio")
    shape: float = number(0.1, above=0)
    power: float = 0.5

    def __call__(self, view: MicroBatchView) -> Field:
        return view.logp.map(lambda x: SHAPES[self.kind](x, self.shape, self.power))


@dataclass(frozen=True)
class RatioByOrigin(Ratio):
    """One ratio on the trajectories of ``origin``, another on the others."""

    origin: FromOrigin
    selected: Ratio
    others: Ratio = field(default_factory=Importance)

    def __call__(self, view: MicroBatchView) -> Field:
        return where(self.origin.select(view.batch), self.selected(view), self.others(view))


@dataclass(frozen=True)
class GateByOrigin(Gate):
    """One gate on the trajectories of ``origin``, another on the others."""

    origin: FromOrigin
    selected: Gate
    others: Gate

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return where(self.origin.select(view.batch), self.selected(rho, adv, view), self.others(rho, adv, view))


__all__ = ["GateByOrigin", "RatioByOrigin", "ShapedProbability"]
