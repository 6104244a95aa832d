"""A ratio in two parts, as a fibre bundle has base and fibres: the drift of a whole trajectory, and each token's residual."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.piece import NOTHING, MicroBatchView
from turnwise.algebra.ratio import Ratio, moved
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, Field, Partition, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.maths.lazy_torch import torch


@dataclass(frozen=True)
class Fibration(Ratio):
    """Gₜ = W Fₜ: trajectory drift and token residual, each within its own trust region.

    S± = mean over the trajectory of max(±l, 0);  W = exp( g(S⁺, C⁺) − g(S⁻, C⁻) )
    Fₜ = exp( clip(lₜ − sₜ S^{sₜ}, ±ε) − clip(−sₜ S^{−sₜ}, ±ε) ),  sₜ = sign(lₜ)
    g(x, C) = x up to C, then back to 0 with slope −T, T tokens: a drift beyond its budget has a gradient back.

    ``domains`` splits the drift into that of the domain, of the group inside it and of the trajectory inside that, each
    gated separately. Groups and domains span micro-batches, so the ratio is then computed over the whole step."""

    plus: float = number(0.12, least=0)
    minus: float = number(0.05, least=0)
    eps: float = number(0.04, least=0)
    domains: bool = False

    @property
    def couples_trajectories(self) -> bool:
        return self.domains

    @property
    def reads_before_step(self) -> frozenset[Signal]:
        return frozenset({Signal.LOGP}) if self.domains else NOTHING

    def __call__(self, view: MicroBatchView) -> Field:
        log_ratio = moved(view)
        up = (log_ratio >= 0).detach()
        rises, falls = where(up, log_ratio, 0.0), where(up, 0.0, -log_ratio)  # an unchanged token counts as rising
        base = self._drift(rises, self.plus, view) - self._drift(falls, self.minus, view)
        same_sign = where(up, rises.mean(TRAJECTORY), falls.mean(TRAJECTORY))
        other_sign = where(up, falls.mean(TRAJECTORY), rises.mean(TRAJECTORY))
        sign = where(up, 1.0, -1.0).to(log_ratio.x.dtype)
        residual = _clip(log_ratio - sign * same_sign, self.eps) - _clip(-sign * other_sign, self.eps)
        return (base + residual).exp()

    def _drift(self, part: Field, budget: float, view: MicroBatchView) -> Field:
        """One channel of the base, gated at each of its levels."""
        trajectory, tree = part.mean(TRAJECTORY), part.tree
        length = tree.size(TOKEN, TRAJECTORY).to(part.x.dtype)
        if not self.domains:
            return _rollback(trajectory, budget, length)
        has_tokens = where(length > 0, 1.0, 0.0).to(part.x.dtype)
        domain = Partition.by(tree, TRAJECTORY, view.batch.domain)
        mean = lambda over: (trajectory * has_tokens).sum(over) / has_tokens.sum(over).clamp(low=1.0)  # noqa: E731
        of_group, of_domain = mean(GROUP), mean(domain)
        return (
            _rollback(of_domain, budget, length.sum(domain))
            + _rollback(of_group - of_domain, budget, length.sum(GROUP))
            + _rollback(trajectory - of_group, budget, length)
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
