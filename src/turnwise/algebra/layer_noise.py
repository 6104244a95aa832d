"""Noise in the policy's layers during updates, so that small differences between learner and sampler matter less."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.piece import Piece
from turnwise.core.limits import number


@dataclass(frozen=True)
class LayerNoise(Piece):
    """h ← h + σ e, e ~ N(0, 1), at the input of every decoder layer, in update passes only; σ is learned per layer."""

    sigma: float = number(1e-6, above=0)
    rate: float = number(5e-4, least=0)  # learning rate of log σ


__all__ = ["LayerNoise"]
