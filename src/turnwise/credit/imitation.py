"""Imitation beside reinforcement: the likelihood of other people's text, how much each token of it counts, and a schedule
that hands over from the one to the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from turnwise.algebra.factor import Factor
from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import Now, Whole, check
from turnwise.algebra.weight import Weight, clock
from turnwise.core.levels import BATCH, Field

COUNTS: dict[str, Callable[[Field], Field]] = {
    "none": lambda p: p.map(torch.ones_like),
    "phi": lambda p: p * (1 - p),
    "is": lambda p: p,
}


@dataclass(frozen=True)
class Imitation(Penalty):
    """−sg[w] min(log π, log cutoff). w = 1 (``none``), p(1 − p) (``phi``: what the policy is unsure of), or p (``is``: as if it
    had sampled the token itself). Tokens likelier than ``cutoff`` teach nothing more."""

    weight: str = "none"
    cutoff: float = 1.0

    def __post_init__(self) -> None:
        check(self.weight in COUNTS, f"no weight {self.weight!r}; write one of {', '.join(COUNTS)}")
        check(0 < self.cutoff <= 1, f"cutoff is {self.cutoff}; write a probability, 1 for off")

    def __call__(self, now: Now) -> Field:
        logp = now.logp if self.cutoff == 1 else now.logp.clamp(high=math.log(self.cutoff))
        return -(COUNTS[self.weight](now.logp.detach().exp()) * logp)


@dataclass(frozen=True)
class WarmCosine(Weight):
    """peak·t/warmup up to ``warmup``, then down half a cosine of ``decay`` steps to ``valley``, and there it stays."""

    warmup: int = 0
    decay: int = 200
    peak: float = 0.9
    valley: float = 0.05

    def __post_init__(self) -> None:
        check(self.warmup >= 0 and self.decay >= 0, f"{self.warmup} and {self.decay} steps; write 0 or more")
        for value in (self.peak, self.valley):
            check(0 <= value <= 1, f"a share of imitation of {value}; write a number in [0, 1]")

    def at(self, t: float) -> float:
        if t < self.warmup:
            return self.peak * t / self.warmup
        if t < self.warmup + self.decay:
            return self.valley + (self.peak - self.valley) * falling(t - self.warmup, self.decay)
        return self.valley

    def __call__(self, whole: Whole) -> Field:
        return whole.batch.tree.full(BATCH, self.at(clock(whole)), torch.float64)


def falling(t: float, horizon: float) -> float:
    """½(1 + cos(πt/horizon)): from 1 at the beginning to 0 at the horizon and after."""
    return 0.5 * (1 + math.cos(math.pi * t / horizon)) if t <= horizon else 0.0


@dataclass(frozen=True)
class Rest(Factor):
    """1 − weight: what another term leaves to the gain."""

    weight: Weight

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return 1 - now[self.weight].to(rho.x.dtype)


__all__ = ["Imitation", "Rest", "WarmCosine", "falling"]
