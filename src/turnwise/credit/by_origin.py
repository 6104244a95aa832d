"""One batch, several origins: ratios and gates that depend on whose tokens they are, and the ratio of text whose sampler
nobody knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from turnwise.algebra.gate import Gate
from turnwise.algebra.piece import Now, check
from turnwise.algebra.ratio import Importance, Ratio
from turnwise.core.levels import Field, where
from turnwise.credit.selectors import From

SHAPES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "ratio": lambda logp, shape, power: logp.exp() / (logp.exp() + shape),
    "none": lambda logp, shape, power: logp.exp(),
    "power": lambda logp, shape, power: (power * logp).exp(),
    "log": lambda logp, shape, power: logp,
    "same": lambda logp, shape, power: (logp - logp.detach()).exp(),
}


@dataclass(frozen=True)
class Shaped(Ratio):
    """ρ = f(p), p = π(y), as if the expert had been certain (μ = 1). ``ratio``: p/(p + shape), so that rare tokens still
    learn (f′(0) = 1/shape); ``none``: p; ``power``: p^power; ``log``: log p; ``same``: 1 with the gradient of
    log p, as if the policy had said it. The gradient goes through f."""

    kind: str = "ratio"
    shape: float = 0.1
    power: float = 0.5

    def __post_init__(self) -> None:
        check(self.kind in SHAPES, f"no shape {self.kind!r}; write one of {', '.join(SHAPES)}")
        check(self.shape > 0, f"shape is {self.shape}; write a positive number")

    def __call__(self, now: Now) -> Field:
        return now.logp.map(lambda x: SHAPES[self.kind](x, self.shape, self.power))


@dataclass(frozen=True)
class RatioBy(Ratio):
    """One ratio on the rows from somewhere, another elsewhere."""

    rows: From
    there: Ratio
    elsewhere: Ratio = field(default_factory=Importance)

    def __call__(self, now: Now) -> Field:
        return where(self.rows.of(now.batch), self.there(now), self.elsewhere(now))


@dataclass(frozen=True)
class GateBy(Gate):
    """One gate on the rows from somewhere, another elsewhere."""

    rows: From
    there: Gate
    elsewhere: Gate

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return where(self.rows.of(now.batch), self.there(rho, adv, now), self.elsewhere(rho, adv, now))


__all__ = ["GateBy", "RatioBy", "Shaped"]
