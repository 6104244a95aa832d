"""Splits the gradient of a step into factors and summands, for every token and any method.

The objective of a step is Σ weight · gate(ρ, A) · A − Σ λ · penalty. With g the averaged gain and i(t) the item (token, turn,
trajectory) that the ratio of token t belongs to:

    ∂ objective / ∂ log π(t) = credit · gate slope · ratio slope + coupled + by gate + Σ penalties

    credit       Σ weight · advantage over the tokens of i(t); for a token-level ratio, those of t alone
    gate slope   ∂ g / ∂ ρ of i(t), divided by credit: 1 where the gate passes, 0 where it clips
    ratio slope  ∂ ρ of i(t) / ∂ log π(t): ρ itself for a token-level ratio
    coupled      what reaches t through ratios of other items, or where credit is 0 and the gate's parts are not
    by gate      what reaches t through the gate directly, not through its ratio
    penalties    −λ ∂ cost / ∂ log π(t), one summand each

Every number comes from the method's own pieces and automatic differentiation through the log-probabilities; no method is
written again here. Positive numbers make a token more likely. Knows no run and no page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.algebra.objective import Objective
from turnwise.algebra.penalty import Weight
from turnwise.algebra.piece import MicroBatchView, text
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, Field
from turnwise.core.signals import Signal


@dataclass(frozen=True, eq=False)
class GradientFactors:
    """One number for each token in every field; see the module for what they mean."""

    advantage: Tensor
    weight: Tensor
    ratio: Tensor
    gate: Tensor  # gate(ρ, A)
    credit: Tensor
    gate_slope: Tensor
    ratio_slope: Tensor
    coupled: Tensor
    by_gate: Tensor
    penalties: Mapping[str, Tensor]
    frozen: bool = False  # the step updates critics only: the gain has no gradient

    @property
    def product(self) -> Tensor:
        """credit · gate slope · ratio slope."""
        return self.credit * self.gate_slope * self.ratio_slope

    @property
    def total(self) -> Tensor:
        """∂ objective / ∂ log π of each token: the product and all summands."""
        gain = torch.zeros_like(self.product) if self.frozen else self.product + self.coupled + self.by_gate
        return gain + sum(self.penalties.values(), torch.zeros_like(gain))

    @property
    def share(self) -> Tensor:
        """The part of Σ |gradient| that each token has."""
        size = self.total.abs()
        return size / size.sum().clamp(min=1e-30)


def decompose(objective: Objective, planned: Batch, policy: Mapping[Signal, Field]) -> GradientFactors:
    """``planned``: all of one optimiser step, as ``Objective.plan`` returns it. ``policy``: its signals; LOGP is a leaf."""
    view, logp = MicroBatchView(planned, policy), policy[Signal.LOGP].x
    adv, weight = (planned[name].to(logp.dtype).at(TOKEN) for name in (Column.ADVANTAGE, Column.WEIGHT))
    ratio = objective.ratio(view)
    # a leaf of its own separates what passes the ratio from what the gate adds directly
    leaf = ratio.map(lambda x: x.detach().clone().requires_grad_())
    gated = objective.gate(leaf, planned[Column.ADVANTAGE].to(logp.dtype), view)
    gain = (weight * (gated * adv)).at(TOKEN).x.sum()
    by_ratio, by_gate = _gradients(gain, [leaf.x, logp])
    (through,) = _gradients(ratio.x, [logp], by_ratio)
    (ratio_slope,) = _gradients(ratio.x, [logp], torch.ones_like(ratio.x))
    credit = (weight * adv).sum(ratio.level)
    # where credit is 0 the quotient is undefined, and `coupled` takes the whole
    slope = Field(ratio.tree, ratio.level, torch.where(credit.x != 0, by_ratio / credit.x, 0.0))
    product = credit.at(TOKEN).x * slope.at(TOKEN).x * ratio_slope
    return GradientFactors(
        advantage=adv.x,
        weight=weight.x,
        ratio=ratio.at(TOKEN).x.detach(),
        gate=gated.at(TOKEN).x.detach(),
        credit=credit.at(TOKEN).x,
        gate_slope=slope.at(TOKEN).x,
        ratio_slope=ratio_slope,
        coupled=through - product,
        by_gate=by_gate,
        penalties=_penalties(objective, view),
        frozen=Column.FREEZE_POLICY in planned.columns,
    )


def _penalties(objective: Objective, view: MicroBatchView) -> dict[str, Tensor]:
    """−λ ∂ cost / ∂ log π of each penalty, by its text; two equal ones are numbered."""
    parts: dict[str, Tensor] = {}
    for i, weighted in enumerate(objective.penalties):
        size = float(view.batch[weighted.weight].item) if isinstance(weighted.weight, Weight) else weighted.weight
        # its gradient needs the whole step and was computed when the step was planned
        if weighted.penalty.couples_trajectories:
            slope = view.batch[Column.PENALTY_GRADIENT, i].to(view.logp.x.dtype).x
        else:
            (slope,) = _gradients(objective._cost(view, i, weighted.penalty), [view.logp.x])
        name = text(weighted.penalty)
        parts[name if name not in parts else f"{name} ({i + 1})"] = -float(size) * slope
    return parts


def _gradients(value: Tensor, inputs: Sequence[Tensor], outer: Tensor | None = None) -> list[Tensor]:
    """∂ value / ∂ each input, or the product of ``outer`` with it; 0 where there is no path."""
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    slopes = torch.autograd.grad(value, inputs, outer, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if slope is None else slope for slope, x in zip(slopes, inputs)]
