"""Gates and factors: how a ratio limits the update. A gate turns (ρ, A) into a weight w so that the gain is always w · A; a
factor multiplies a gate and carries no gradient.

A gate times a factor is a gate, and so is a masked gate: ``Clip(0.2, 0.28) * TruncatedImportance(2.0)``,
``ScoreFunction().where(OneSided())``. A gate does not know how its gains are averaged.
"""

from __future__ import annotations

from dataclasses import field

from turnwise.algebra.mask import Mask
from turnwise.algebra.piece import MicroBatchView, Piece, StepView, text
from turnwise.algebra.ratio import mismatch
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome
from turnwise.core.levels import TOKEN, Field, Level, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.maths.lazy_torch import torch


class Gate(Piece):
    """Interface: the weight of a micro-batch, differentiable."""

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        raise NotImplementedError

    def __mul__(self, factor: Factor) -> Gate:
        return Scaled(self, factor)

    def where(self, mask: Mask) -> Gate:
        return Masked(self, mask)


class Scaled(Gate):
    """gate · factor."""

    gate: Gate
    factor: Factor

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return self.gate(rho, adv, view) * self.factor(rho, adv, view)

    def as_text(self) -> str:
        return f"{text(self.gate)} * {text(self.factor)}"


class Masked(Gate):
    """The gate where the mask is true, 0 elsewhere; the average still counts masked tokens."""

    gate: Gate
    mask: Mask

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return where(self.mask(rho.detach(), adv, view), self.gate(rho, adv, view), 0.0)

    def as_text(self) -> str:
        inner = text(self.gate)
        return f"({inner}).where({text(self.mask)})" if " " in inner else f"{inner}.where({text(self.mask)})"


class NoGate(Gate):
    """w = ρ: no limit."""

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return rho


class Clip(Gate):
    """w·A = min(ρA, clip(ρ, 1 − low, 1 + high)·A), written as a weight: the sign of A selects the bound.

    ``dual`` c > 1 also bounds ρ from above where A < 0 (there, PPO's minimum has no floor)."""

    low: float = number(0.2, least=0, most=1, why="ratios below 1 − low are cut")
    high: float = number(0.2, least=0, why="ratios above 1 + high are cut")
    dual: float | None = number(None, above=1)

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return where(adv > 0, rho.clamp(high=1 + self.high), rho.clamp(1 - self.low, self.dual))


def score_function(view: MicroBatchView) -> Field:
    """1 with the gradient of log π, for each token: a weight times this is sg[w] ∇ log π."""
    return (view.logp - view.logp.detach()).exp()


class ScoreFunction(Gate):
    """w = 1 with the gradient of log π: the score function, without an importance weight."""

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return score_function(view)


class CappedWeight(Gate):
    """w = sg[clip(ρ, low, high)] with the gradient of log π: the *weight* is capped, and every token keeps its gradient."""

    high: float
    low: float = number(0.0, least=0, most="high")

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return rho.detach().clamp(self.low, self.high) * score_function(view)


class ClipByOutcome(Gate):
    """w = sg[clip(ρ, low, high)] with the gradient of log π, and one window for outcomes ≥ 0, another for those below.

    With the defaults good trajectories have weight 1; the weight of bad ones falls with their probability (0, 1)."""

    good: tuple[float, float] = (1.0, 1.0)
    bad: tuple[float, float] = (0.0, 1.0)
    by: Term = field(default_factory=Outcome)

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: self.by(view.batch)}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        value = rho.detach()
        return where(view[self] >= 0, value.clamp(*self.good), value.clamp(*self.bad)) * score_function(view)


class RatioRegression(Gate):
    """w·A = −|ρ − ρ*| |A|,  ρ* = 1 − low + (low + high) σ(a/temperature): regression of the ratio to a bounded target.

    Inside the bounds the gradient is that of ρA; outside it points back, where a clip would have none."""

    by: Term
    temperature: float = number(above=0)
    low: float = 0.3
    high: float = 0.3

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: self.by(view.batch)}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        soft = (view[self] / self.temperature).map(torch.sigmoid)
        target = 1 - self.low + (self.low + self.high) * soft
        return -(rho - target).abs() * adv.map(torch.sign)


def clipped(
    rho: Field, adv: Field, low: Field | float, high: Field | float, dual: Field | float | None = None
) -> Field:
    """The weight of a clip to [low, high], bounds of the ratio itself: A > 0 is bounded from above, the rest from below."""
    field = lambda x: x if isinstance(x, Field) else rho.detach() * 0 + x  # noqa: E731
    below = rho.maximum(field(low))
    return where(adv > 0, rho.minimum(field(high)), below if dual is None else below.minimum(field(dual)))


class Factor(Piece):
    """Interface: a weight for each token of a micro-batch, detached."""

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view[self]  # a factor that depends on the whole step is its plan


class TruncatedImportance(Factor):
    """min(π_prox/μ, cap): corrects the mismatch between sampler and learner, by token or by the product over a level."""

    reads = frozenset({Signal.PROXIMAL})
    cap: float = number(2.0, above=0, why="inf for none")
    level: Level = TOKEN

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return mismatch(view, self.level).exp().clamp(high=self.cap)


class ZeroGate(Gate):
    """w = 0: the policy-gradient term vanishes; a penalty reads the advantage instead."""

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return rho.map(torch.zeros_like)
