"""Gates: how a ratio limits the update. A gate turns (ρ, A) into a weight w so that the gain is always w · A."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from turnwise.algebra.term import check
from turnwise.levels import Field, where


class Gate(Protocol):
    def __call__(self, rho: Field, adv: Field) -> Field: ...


@dataclass(frozen=True)
class Open:
    """w = ρ: nothing is limited."""

    def __call__(self, rho: Field, adv: Field) -> Field:
        return rho


@dataclass(frozen=True)
class Clip:
    """w·A = min(ρA, clip(ρ, 1 − low, 1 + high)·A), written as a weight: the sign of A picks the bound that binds.

    ``dual`` c > 1 also bounds ρ from above where A < 0 (there, PPO's minimum has no floor)."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        check(0 <= self.low <= 1, f"clip low is {self.low}; write a number in [0, 1]: ratios below 1 − low are cut")
        check(self.high >= 0, f"clip high is {self.high}; write a number >= 0: ratios above 1 + high are cut")
        check(self.dual is None or self.dual > 1, f"dual clip is {self.dual}; write a number > 1, or None for off")

    def __call__(self, rho: Field, adv: Field) -> Field:
        return where(adv > 0, rho.clamp(high=1 + self.high), rho.clamp(1 - self.low, self.dual))
