"""The one composition: gain = gate(ratio, A) · A − Σ weight · penalty, averaged by the aggregate.

``credit`` sees the whole batch once; ``plan`` sees the whole of one optimiser step; ``__call__`` then sees one micro-batch
at a time, and micro-batches just sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from turnwise.algebra import diagnostics
from turnwise.algebra.aggregate import Aggregate, Mean
from turnwise.algebra.gate import Gate
from turnwise.algebra.gradient import Gradient, Grads, Plain, Scales
from turnwise.algebra.mask import All, Mask
from turnwise.algebra.penalty import Penalty, Weighted
from turnwise.algebra.piece import NOTHING, Memory, Now, Piece, Whole
from turnwise.algebra.ratio import Ratio
from turnwise.algebra.term import Term
from turnwise.algebra.weight import Weight
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, Field
from turnwise.core.signals import FORESEEN, FROZEN, LIVE, Signal


@dataclass(frozen=True)
class Loss:
    """What one micro-batch gives: a scalar to minimise, additive statistics, side scalars whose gradients are wanted."""

    loss: Tensor
    tell: Callable[[], dict[str, Tensor]]
    sides: Mapping[str, Tensor]

    @cached_property
    def stats(self) -> dict[str, Tensor]:
        """Computed when they are first asked for. Ask after the backward pass was begun, and a GPU is busy meanwhile."""
        return self.tell()


@dataclass(frozen=True)
class Objective:
    advantage: Term
    ratio: Ratio
    gate: Gate
    aggregate: Aggregate
    penalties: tuple[Weighted, ...] = ()
    reward: Term | None = None  # None: what the environment paid
    keep: Mask = field(default_factory=All)
    gradient: Gradient = field(default_factory=Plain)
    memory: Memory = field(default_factory=Memory, compare=False, repr=False)

    # ------------------------------------------------------------- signals
    def _crediting(self) -> Iterator[Piece]:
        yield from self.advantage.parts
        if self.reward is not None:
            yield from self.reward.parts

    def _planning(self) -> Iterator[Piece]:
        """Each piece once, though two slots may share it."""
        roots = (self.ratio, self.gate, self.keep, self.gradient, *self.penalties)
        yield from dict.fromkeys(piece for root in roots for piece in root.parts)

    @cached_property
    def needs(self) -> frozenset[Signal]:
        """Every signal any piece reads. Entropy always rides along: every run logs it."""
        pieces = [*self._crediting(), *self._planning()]
        return frozenset({Signal.LOGP, Signal.ENTROPY}).union(*(p.reads | p.foresight for p in pieces))

    @property
    def frozen(self) -> frozenset[Signal]:
        """The signals to measure once, before the first update on a batch."""
        return self.needs & FROZEN

    @property
    def live(self) -> frozenset[Signal]:
        """The signals that come with the gradient, in every forward pass of an update."""
        return self.needs & LIVE

    @cached_property
    def foresees(self) -> frozenset[Signal]:
        """The signals of the present policy that ``plan`` must find on the batch."""
        asked = NOTHING.union(*(p.foresight for p in self._planning()))
        coupled = {Signal.LOGP} if any(w.penalty.couples for w in self.penalties) else NOTHING
        return asked | (self.needs & FORESEEN) | (self.keep.needs & LIVE) | coupled

    # ------------------------------------------------------------ the whole
    def credit(self, batch: Batch) -> Batch:
        """Rewards and advantages of the whole batch, however it is later cut into updates."""
        pieces = list(dict.fromkeys(self._crediting()))
        batch = batch.put(clock=batch.tree.full(BATCH, float(self.memory.clock), torch.float64))
        self.memory.clock += 1
        self.memory.advance(
            (p for p in pieces if not p.late), Whole(batch, {})
        )  # running statistics include this batch
        batch = batch.put(self.memory.columns(iter(pieces), batch))
        if self.reward is not None:
            batch = replace(batch, reward=self.reward(batch))
        batch = batch.put(advantage=self.advantage(batch).detach())
        self.memory.advance((p for p in pieces if p.late), Whole(batch, {}, adv=batch["advantage"]))
        return batch

    @torch.no_grad()
    def plan(self, batch: Batch) -> Batch:
        """What one optimiser step over this batch must know of all of it: kept tokens, averaging weights, planned columns."""
        pieces = list(self._planning())
        batch = batch.put(self.memory.columns(iter(pieces), batch))
        whole = Whole(batch, {}, adv=batch["advantage"])
        if Signal.LOGP in self.foresees:
            precision = batch[Signal.LOGP].x.dtype
            whole = Whole(batch, {}, self.ratio(whole).detach(), batch["advantage"].to(precision))
        for piece in pieces:
            batch = batch.put({key: f.detach() for key, f in piece.plan(whole).items()})
            whole = replace(whole, batch=batch)
        self.memory.advance(iter(pieces), whole)
        kept = self._kept(whole)
        columns = {"weight": self.aggregate(kept), "share": Mean(TOKEN)(kept.map(torch.ones_like))}
        for i, weighted in enumerate(self.penalties):
            if weighted.aggregate is not None or weighted.rows is not None:
                rows = kept if weighted.rows is None else self._kept(whole, weighted.rows)
                columns[f"weight{i}"] = (weighted.aggregate or self.aggregate)(rows)
        batch = batch.put(columns)
        for i, weighted in enumerate(self.penalties):
            if weighted.penalty.couples:
                batch = batch.put(self._pulled(batch, i, weighted.penalty))
        if self.ratio.couples:
            return batch.put(pull=self._pull(batch))
        alone = not self.penalties and type(self.gradient) is Plain
        return batch.put(silent=_silent(batch)) if alone else batch

    def _kept(self, whole: Whole, mask: Mask | None = None) -> Field:
        """1 for each token that is trained on."""
        tree = whole.batch.tree
        ones = tree.full(TOKEN, 1.0, torch.float64)
        blank = whole.rho if whole.rho is not None else ones
        kept = (mask or self.keep)(blank, whole.advantage, whole).to(torch.float64) * ones
        focus = whole.batch.columns.get("focus")
        return kept if focus is None else kept * focus.to(torch.float64)

    @torch.enable_grad()
    def _pull(self, batch: Batch) -> Field:
        """∂ gain / ∂ log π of each token over the whole step, for ratios that reach across trajectories."""
        logp = batch[Signal.LOGP].map(lambda x: x.detach().requires_grad_())
        now = Now(batch, {Signal.LOGP: logp})
        adv, weight = (batch[name].to(logp.x.dtype) for name in ("advantage", "weight"))
        gain = _total(weight * (self.gate(self.ratio(now), adv, now) * adv))
        return Field(batch.tree, TOKEN, torch.autograd.grad(gain, logp.x)[0])

    @torch.enable_grad()
    def _pulled(self, batch: Batch, i: int, penalty: Penalty) -> dict[Any, Field]:
        """The same for a penalty that reaches across trajectories; its cost and what it tells are shared out evenly."""
        logp = batch[Signal.LOGP].map(lambda x: x.detach().requires_grad_())
        now = Now(batch, {Signal.LOGP: logp})
        cost = self._cost(now, i, penalty)
        slope = torch.autograd.grad(cost, logp.x)[0] if cost.requires_grad else torch.zeros_like(logp.x)
        told = {("told", i, name): float(value) * batch["share"] for name, value in penalty.tells(now).items()}
        return {f"pull{i}": Field(batch.tree, TOKEN, slope), f"cost{i}": float(cost.detach()) * batch["share"], **told}

    def _told(self, now: Now, i: int, penalty: Penalty) -> Mapping[str, Tensor]:
        if not penalty.couples:
            return penalty.tells(now)
        mine = [key for key in now.batch.columns if isinstance(key, tuple) and key[:2] == ("told", i)]
        return {key[2]: _total(now[key]) for key in mine}

    def _cost(self, now: Now, i: int, penalty: Penalty) -> Tensor:
        weight = now.batch.columns.get(f"weight{i}", now.batch["weight"])
        return _total(weight.to(now.logp.x.dtype) * penalty(now))

    # ------------------------------------------------------ one micro-batch
    def __call__(self, batch: Batch, policy: Mapping[Signal, Field]) -> Loss:
        now = Now(batch, policy)
        precision = now.logp.x.dtype
        adv, weight = batch["advantage"].to(precision), batch["weight"].to(precision)
        if self.ratio.couples:
            rho = gated = now.logp - now.logp.detach() + 1
            objective = _total(batch["pull"].to(precision) * rho)
        else:
            rho = self.ratio(now)
            gated = self.gate(rho, adv, now)
            objective = _total(weight * (gated * adv))
        if "still" in batch.columns:  # the policy waits: no gradient at all, or the optimiser's momentum would move it
            objective = 0.0 * objective.detach()
        sides = self.gradient.sides(weight, rho, gated, adv, now)
        own = _slope(objective, now.logp) if self.penalties else None
        costs: list[Tensor] = []
        for i, w in enumerate(self.penalties):
            if w.penalty.couples:
                step = now.logp - now.logp.detach()
                cost = _total(batch[f"pull{i}"].to(precision) * step + batch[f"cost{i}"].to(precision))
            else:
                cost = self._cost(now, i, w.penalty)
            costs.append(cost.detach())
            size = float(batch[w.weight].item) if isinstance(w.weight, Weight) else w.weight
            objective = objective - size * cost
        slope = _Slope(objective, now.logp)

        @torch.no_grad()
        def tell() -> dict[str, Tensor]:
            whole = slope()
            stats = diagnostics.sums(now, rho, gated, adv, whole if own is None else own)
            for i, (w, cost) in enumerate(zip(self.penalties, costs)):
                stats[f"penalty/{type(w.penalty).__name__}"] = cost
                stats = {**self._told(now, i, w.penalty), **stats}  # where two tell the same, the first is heard
            stats["objective"] = objective.detach()
            return stats | diagnostics.by_source(now, rho, gated, whole)

        return Loss(-objective, tell, sides)  # the only minus sign in the house

    def scales(self, batch: Batch, main: Grads, sides: Mapping[str, Grads]) -> Scales:
        """What the finished gradient of a planned step is multiplied with."""
        return self.gradient.scales(Now(batch, {}), main, sides)


def _total(value: Field) -> Tensor:
    return value.at(TOKEN).x.sum()


def _silent(batch: Batch) -> Field:
    """Trajectories of groups whose every token has advantage or weight 0: where no penalty pulls at them they have no gradient,
    only statistics, and a learner need not differentiate them. Whole groups: siblings are cheaper to read together."""
    size = (batch["advantage"] * batch["weight"]).at(TOKEN).abs().sum(GROUP)
    return size.map(lambda x: x == 0).at(TRAJECTORY)


class _Slope:
    """∂ objective / ∂ log π, for the diagnostics: overheard when −objective is differentiated, or asked for before that."""

    def __init__(self, objective: Tensor, logp: Field) -> None:
        self.objective, self.logp = objective, logp
        self.heard: list[Tensor] = []
        if objective.requires_grad and logp.x.requires_grad:
            logp.x.register_hook(self.heard.append)  # sides are differentiated before: the last one counts

    def __call__(self) -> Field:
        if self.heard:
            return Field(self.logp.tree, TOKEN, -self.heard[-1])
        return _slope(self.objective, self.logp)


def _slope(objective: Tensor, logp: Field) -> Field:
    """∂ objective / ∂ log π, for the diagnostics; the graph between the two is small."""
    if not objective.requires_grad:
        return logp.map(torch.zeros_like)
    found = torch.autograd.grad(objective, logp.x, retain_graph=True, allow_unused=True)[0]
    return logp.map(torch.zeros_like) if found is None else Field(logp.tree, TOKEN, found)


__all__ = ["Loss", "Objective"]
