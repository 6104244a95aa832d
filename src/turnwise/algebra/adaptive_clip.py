"""Clips whose bounds are not two constants: wider at later tokens, centred elsewhere, searched per step, or set by entropy."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.advantage import answer_gain
from turnwise.algebra.entropy import NormalisedEntropy
from turnwise.algebra.gate import Gate
from turnwise.algebra.piece import MicroBatchView, StepView
from turnwise.algebra.ratio import mismatch
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, TURN, Field, where
from turnwise.core.limits import choice, number
from turnwise.core.signals import Signal
from turnwise.maths.lazy_torch import torch


def clipped(
    rho: Field, adv: Field, low: Field | float, high: Field | float, dual: Field | float | None = None
) -> Field:
    """The weight of a clip to [low, high], bounds of the ratio itself: A > 0 is bounded from above, the rest from below."""
    field = lambda x: x if isinstance(x, Field) else rho.detach() * 0 + x  # noqa: E731
    below = rho.maximum(field(low))
    return where(adv > 0, rho.minimum(field(high)), below if dual is None else below.minimum(field(dual)))


@dataclass(frozen=True)
class ProximalClip(Gate):
    """Clip to c ± eps, c = sg[π_prox/μ]: off-policy data get a window centred on the policy at the batch's start."""

    reads = frozenset({Signal.PROXIMAL})

    eps: float = 0.2

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        centre = mismatch(view, TOKEN).exp()
        return clipped(rho, adv, centre - self.eps, centre + self.eps)


@dataclass(frozen=True)
class WideningClip(Gate):
    """Clip in log space to [−low·tᵖ, high·tᵖ], dual at dual·tᵖ: the window widens with token index t like a random walk."""

    low: float = 0.025
    high: float = 0.05
    dual: float = 0.05
    power: float = 0.5

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        t = (view.batch.tree.index(TOKEN, TRAJECTORY) + 1).to(rho.x.dtype) ** self.power
        low, high, dual = ((bound * t).exp() for bound in (-self.low, self.high, self.dual))
        return clipped(rho, adv, low, high, dual)


@dataclass(frozen=True)
class BalancedClip(Gate):
    """A clip [low, high] widened at every step until tokens with A > 0 carry at least ``share`` of the objective.

    First the upper bound rises to ``high_end``, then the lower to ``low_end``. ``statistic``: what a token contributes,
    its "gradient" ρ|A| unless clipped, or the "value" |min(ρA, clip(ρ)A)| (which a higher lower bound never decreases)."""

    reads_before_step = frozenset({Signal.LOGP})

    share: float = 0.4
    low: float = number(0.6, least=0, most="low_end")
    high: float = number(1.2, least=1, most="high_end")
    low_end: float = number(0.9, most=1)
    high_end: float = 3.0
    low_step: float = 0.02
    high_step: float = 0.05
    dual: float | None = 3.0
    statistic: str = choice("gradient", "value")

    def plan(self, view: StepView) -> dict[object, Field]:
        rho, adv = view.ratio.at(TOKEN).x, view.advantage.at(TOKEN).x
        low, high, slack = self.low, self.high, 1e-9
        while self._positive_share(rho, adv, low, high) < self.share:
            if high < self.high_end - slack:
                high = min(self.high_end, high + self.high_step)
            elif low < self.low_end - slack:
                low = min(self.low_end, low + self.low_step)
            else:
                break
        full = lambda x: view.batch.tree.full(BATCH, x, rho.dtype)  # noqa: E731
        return {(self, "low"): full(low), (self, "high"): full(high)}

    def _positive_share(self, rho: torch.Tensor, adv: torch.Tensor, low: float, high: float) -> float:
        bounded = torch.where(adv > 0, rho.clamp(max=high), rho.clamp(min=low))
        size = (bounded * adv).abs()
        if self.statistic == "gradient":
            size = torch.where(bounded == rho, size, 0.0)
        total = float(size.sum())
        return float(size[adv > 0].sum()) / total if total > 0 else 1.0

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return clipped(rho, adv, view[self, "low"], view[self, "high"], self.dual)


@dataclass(frozen=True)
class EntropyClip(Gate):
    """Clip with a wider upper bound for uncertain tokens, high(1 + αh), and a wider lower one for certain ones, low(1 − αh)."""

    entropy: NormalisedEntropy
    alpha: float = 1.0
    low: float = 0.2
    high: float = 0.2
    dual: float | None = 10.0

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        low, high = self.entropy.bounds(view[self.entropy], self.low, self.high, self.alpha)
        return clipped(rho, adv, 1 - low, 1 + high, self.dual)


@dataclass(frozen=True)
class InformationClip(Gate):
    """Clip to [1 − low·c, 1 + high·c], c = 1 + β(2σ(z) − 1): turns that inform about the answer get a wider window.

    z is the standardised increase of the gold answer's log-probability; the answering turn has c = 1."""

    reads = frozenset({Signal.ANSWER_LOGP})

    beta: float = 0.3
    low: float = 0.2
    high: float = 0.2

    def plan(self, view: StepView) -> dict[object, Field]:
        tree = view.batch.tree
        final = tree.size(TURN, TRAJECTORY) - tree.index(TURN, TRAJECTORY) <= 1
        scale = 1 + self.beta * (2 * answer_gain(view.batch).map(torch.sigmoid) - 1)
        return {self: where(final, 1.0, scale)}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        c = view[self].to(rho.x.dtype)
        return clipped(rho, adv, 1 - self.low * c, 1 + self.high * c)


__all__ = ["BalancedClip", "EntropyClip", "InformationClip", "ProximalClip", "WideningClip", "clipped"]
