"""Imitation next to reinforcement: weighted likelihood of expert text, and a schedule that shifts weight from one loss
to the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from turnwise.algebra.factor import Factor
from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import MicroBatchView, StepView
from turnwise.algebra.weight import Weight, batch_index
from turnwise.core.levels import BATCH, Field
from turnwise.core.limits import choice, number
from turnwise.maths.lazy_torch import torch

TOKEN_WEIGHTS: dict[str, Callable[[Field], Field]] = {
    "none": lambda p: p.map(torch.ones_like),
    "phi": lambda p: p * (1 - p),
    "is": lambda p: p,
}


@dataclass(frozen=True)
class WeightedNegativeLogLikelihood(Penalty):
    """−sg[w] min(log π, log cutoff). w = 1 (``none``), p(1 − p) (``phi``: tokens the policy is uncertain about) or p
    (``is``: as if the policy had sampled the token). Tokens more likely than ``cutoff`` have no gradient."""

    weight: str = choice(*TOKEN_WEIGHTS, default="none")
    cutoff: float = number(1.0, above=0, most=1, why="a probability, 1 for off")

    def __call__(self, view: MicroBatchView) -> Field:
        logp = view.logp if self.cutoff == 1 else view.logp.clamp(high=math.log(self.cutoff))
        return -(TOKEN_WEIGHTS[self.weight](view.logp.detach().exp()) * logp)


@dataclass(frozen=True)
class WarmupCosine(Weight):
    """peak·t/warmup during ``warmup``, then half a cosine of ``decay`` steps down to ``valley``, constant afterwards."""

    warmup: int = number(0, least=0)
    decay: int = number(200, least=0)
    peak: float = number(0.9, least=0, most=1)
    valley: float = number(0.05, least=0, most=1)

    def at(self, t: float) -> float:
        """The weight at step t."""
        if t < self.warmup:
            return self.peak * t / self.warmup
        if t < self.warmup + self.decay:
            return self.valley + (self.peak - self.valley) * cosine_decay(t - self.warmup, self.decay)
        return self.valley

    def __call__(self, view: StepView) -> Field:
        return view.batch.tree.full(BATCH, self.at(batch_index(view)), torch.float64)


def cosine_decay(t: float, horizon: float) -> float:
    """½(1 + cos(πt/horizon)): 1 at t = 0, 0 from the horizon on."""
    return 0.5 * (1 + math.cos(math.pi * t / horizon)) if t <= horizon else 0.0


@dataclass(frozen=True)
class OneMinus(Factor):
    """1 − weight: the share that another loss leaves to the policy gradient."""

    weight: Weight

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return 1 - view[self.weight].to(rho.x.dtype)


__all__ = ["OneMinus", "WarmupCosine", "WeightedNegativeLogLikelihood", "cosine_decay"]
