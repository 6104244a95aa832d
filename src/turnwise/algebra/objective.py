"""The one composition: gain = gate(ratio, A) · A − Σ weight · penalty, averaged by the aggregate.

``plan`` runs once over the whole step and puts on the batch what depends on all of it: the advantage, the averaging
weights, what penalties must know. ``__call__`` then sees one micro-batch at a time, and micro-batches just sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.algebra.aggregate import Aggregate, Mean
from turnwise.algebra.gate import Gate
from turnwise.algebra.penalty import Weighted
from turnwise.algebra.ratio import Ratio, behaviour
from turnwise.algebra.term import Term
from turnwise.batch import Batch
from turnwise.levels import TOKEN, Field
from turnwise.maths.divergences import k3
from turnwise.signals import FROZEN, Signal


@dataclass(frozen=True)
class Objective:
    advantage: Term
    ratio: Ratio
    gate: Gate
    aggregate: Aggregate
    penalties: tuple[Weighted, ...] = ()
    reward: Term | None = None  # None: what the environment paid

    @property
    def needs(self) -> frozenset[Signal]:
        """Every signal any piece reads. Entropy always rides along: every run logs it."""
        pieces = [self.advantage.needs, self.ratio.needs, *(w.penalty.needs for w in self.penalties)]
        return frozenset({Signal.LOGP, Signal.ENTROPY}).union(*pieces, self.reward.needs if self.reward else ())

    @property
    def frozen(self) -> frozenset[Signal]:
        """The signals to measure once, before the first update on a batch."""
        return self.needs & FROZEN

    def credit(self, batch: Batch) -> Batch:
        """Rewards and advantages of the whole step, however it is later cut into updates."""
        if self.reward is not None:
            batch = replace(batch, reward=self.reward(batch))
        return batch.put(advantage=self.advantage(batch).detach())

    def plan(self, batch: Batch) -> Batch:
        """Averaging weights and penalties' targets for one optimiser step over this batch."""
        columns = {"weight": self.aggregate(batch.tree), "share": Mean(TOKEN)(batch.tree)}
        for i, weighted in enumerate(self.penalties):
            planned = weighted.penalty.plan(batch)
            if planned is not None:
                columns[f"planned{i}"] = planned.detach()
            if weighted.aggregate is not None:
                columns[f"weight{i}"] = weighted.aggregate(batch.tree)
        return batch.put(**columns)

    def __call__(self, batch: Batch, policy: Mapping[Signal, Field]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch and its additive statistics."""
        precision = policy[Signal.LOGP].x.dtype
        adv, weight = batch["advantage"].to(precision), batch["weight"].to(precision)
        rho = self.ratio(batch, policy)
        gated = self.gate(rho, adv)
        objective = _total(weight * (gated * adv))
        stats = _statistics(batch, policy, rho, gated, adv)
        for i, w in enumerate(self.penalties):
            cost = w.penalty(batch, policy, batch.columns.get(f"planned{i}"))
            cost_total = _total(batch.columns.get(f"weight{i}", weight).to(precision) * cost)
            stats[f"penalty/{type(w.penalty).__name__}"] = cost_total.detach()
            objective = objective - w.weight * cost_total
        stats["objective"] = objective.detach()
        return -objective, stats  # the only minus sign in the house


def _total(value: Field) -> Tensor:
    return value.at(TOKEN).x.sum()


@torch.no_grad()
def _statistics(
    batch: Batch, policy: Mapping[Signal, Field], rho: Field, gated: Field, adv: Field
) -> dict[str, Tensor]:
    """What every run logs, as shares of all tokens of the step."""
    share = batch["share"].to(policy[Signal.LOGP].x.dtype)
    clipped = (gated.detach().at(TOKEN) - rho.detach().at(TOKEN)).abs() > 0
    moved = (behaviour(batch) - policy[Signal.LOGP].detach()).clamp(-20.0, 20.0)
    stats = {
        "clip_share": _total(share * clipped.to(share.x.dtype)),
        "clip_share/up": _total(share * (clipped & (adv > 0)).to(share.x.dtype)),
        "clip_share/down": _total(share * (clipped & (adv < 0)).to(share.x.dtype)),
        "kl/behaviour": _total(share * moved.map(k3)),
        "ratio": _total(share * rho.detach()),
        "advantage/size": _total(share * adv.abs()),
    }
    if Signal.ENTROPY in policy:
        stats["entropy"] = _total(share * policy[Signal.ENTROPY].detach())
    return stats
