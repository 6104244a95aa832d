"""Noise in the policy's layers during updates, so that small differences between learner and sampler matter less."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.piece import Piece, check


@dataclass(frozen=True)
class LayerNoise(Piece):
    """h ← h + σ e, e ~ N(0, 1), at the input of every decoder layer, in update passes only; σ is learned per layer."""

    sigma: float = 1e-6
    rate: float = 5e-4  # learning rate of log σ

    def __post_init__(self) -> None:
        check(self.sigma > 0, f"sigma is {self.sigma}; write a positive number")
        check(self.rate >= 0, f"the rate of sigma is {self.rate}; write a number >= 0")


__all__ = ["LayerNoise"]
