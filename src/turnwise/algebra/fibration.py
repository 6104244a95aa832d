"""A ratio in two parts, as a fibre bundle has a base and fibres: the drift of the whole, and each token's residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turnwise.algebra.piece import NOTHING, Now, check
from turnwise.algebra.ratio import Ratio, moved
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, Field, Partition, where
from turnwise.core.signals import Signal


@dataclass(frozen=True)
class Fibration(Ratio):
    """Gₜ = W Fₜ: trajectory drift and token residual, each within a trust region of its own.

    S± = mean over the trajectory of max(±l, 0);  W = exp( g(S⁺, C⁺) − g(S⁻, C⁻) )
    Fₜ = exp( clip(lₜ − sₜ S^{sₜ}, ±ε) − clip(−sₜ S^{−sₜ}, ±ε) ),  sₜ = sign(lₜ)
    g(x, C) = x up to C, then back to 0 with slope −T, T tokens: beyond its budget a drift is pulled back.

    ``domains`` splits the drift into that of the domain, of the group inside it and of the trajectory inside that, each
    gated by itself. Groups and domains span micro-batches, so the ratio is then told of the whole step."""

    plus: float = 0.12
    minus: float = 0.05
    eps: float = 0.04
    domains: bool = False

    def __post_init__(self) -> None:
        for name in ("plus", "minus", "eps"):
            check(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; write a number >= 0")

    @property
    def couples(self) -> bool:
        return self.domains

    @property
    def foresight(self) -> frozenset[Signal]:
        return frozenset({Signal.LOGP}) if self.domains else NOTHING

    def __call__(self, now: Now) -> Field:
        log_ratio = moved(now)
        up = (log_ratio >= 0).detach()
        rises, falls = where(up, log_ratio, 0.0), where(up, 0.0, -log_ratio)  # an unmoved token counts as rising
        base = self._drift(rises, self.plus, now) - self._drift(falls, self.minus, now)
        own = where(up, rises.mean(TRAJECTORY), falls.mean(TRAJECTORY))
        other = where(up, falls.mean(TRAJECTORY), rises.mean(TRAJECTORY))
        sign = where(up, 1.0, -1.0).to(log_ratio.x.dtype)
        residual = _clip(log_ratio - sign * own, self.eps) - _clip(-sign * other, self.eps)
        return (base + residual).exp()

    def _drift(self, part: Field, budget: float, now: Now) -> Field:
        """One channel of the base, gated at each of its levels."""
        trajectory, tree = part.mean(TRAJECTORY), part.tree
        length = tree.size(TOKEN, TRAJECTORY).to(part.x.dtype)
        if not self.domains:
            return _rollback(trajectory, budget, length)
        some = where(length > 0, 1.0, 0.0).to(part.x.dtype)
        domain = Partition.by(tree, TRAJECTORY, now.batch.domain)
        mean = lambda over: (trajectory * some).sum(over) / some.sum(over).clamp(low=1.0)  # noqa: E731
        group, kind = mean(GROUP), mean(domain)
        return (
            _rollback(kind, budget, length.sum(domain))
            + _rollback(group - kind, budget, length.sum(GROUP))
            + _rollback(trajectory - group, budget, length)
        )


def _rollback(x: Field, budget: float, length: Field) -> Field:
    """g(x, C, T): the identity up to |x| = C, slope −T down to 0 at (1 + 1/T) C, 0 beyond."""
    length = length.clamp(low=1.0)
    back = x.map(torch.sign).detach() * ((length + 1) * budget) - length * x
    size = x.abs().detach()
    return where(size <= budget, x, where(size < (1 + 1 / length) * budget, back, 0.0))


def _clip(x: Field, eps: float) -> Field:
    return x.clamp(-eps, eps)


__all__ = ["Fibration"]
