"""The entropy of a token relative to all tokens of the step, as a number in [−1, 1]."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.piece import Piece, StepView
from turnwise.core.levels import Field, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.maths.lazy_torch import torch


@dataclass(frozen=True)
class NormalisedEntropy(Piece):
    """h = (x − q)/s with x = log H, q its ρ-quantile, s = √mean (x − q)²; each side then scaled to reach ±1."""

    reads = frozenset({Signal.OLD_ENTROPY})

    quantile: float = number(0.8, least=0, most=1)

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: view[Signal.OLD_ENTROPY].map(self._normalise)}

    def _normalise(self, entropy: torch.Tensor) -> torch.Tensor:
        x = entropy.double().clamp(min=1e-8).log()
        if not x.numel():
            return x
        q = x.sort().values[round(self.quantile * (x.numel() - 1))]
        s = (x - q).square().mean().sqrt()
        if s == 0:
            return torch.zeros_like(x)
        h = (x - q) / s
        top, bottom = h.max().clamp(min=0), (-h.min()).clamp(min=0)
        return torch.where(h > 0, h / top.clamp(min=1e-30), h / bottom.clamp(min=1e-30))

    @staticmethod
    def bounds(h: Field, low: float, high: float, alpha: float) -> tuple[Field, Field]:
        """Clip bounds: a wider upper one for uncertain tokens, a wider lower one for certain ones."""
        return where(h > 0, low, low * (1 - alpha * h)), where(h > 0, high * (1 + alpha * h), high)


__all__ = ["NormalisedEntropy"]
