"""The one composition: gain = gate(ratio, A) · A − Σ weight · penalty, averaged by the aggregate.

``credit`` sees the whole batch once; ``plan`` sees all of one optimiser step; ``__call__`` then sees one micro-batch at a time,
and micro-batches just sum. This module does not know any method, optimiser or model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

from turnwise.algebra import diagnostics
from turnwise.algebra.aggregate import Aggregate, Mean
from turnwise.algebra.gate import Gate
from turnwise.algebra.gradient import Gradient, Grads, PlainGradient
from turnwise.algebra.mask import AllTokens, Mask
from turnwise.algebra.penalty import Penalty, Weight, WeightedPenalty
from turnwise.algebra.piece import NOTHING, Memory, MicroBatchView, Piece, StepView
from turnwise.algebra.ratio import Ratio
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, Field
from turnwise.core.protocols import Loss, Scales
from turnwise.core.signals import BEFORE_BATCH, BEFORE_STEP, POLICY_SIGNALS, WITH_GRADIENT, Signal
from turnwise.maths.lazy_torch import torch, with_gradient, without_gradient

if TYPE_CHECKING:
    from torch import Tensor


class Listener(Protocol):
    """Looks at an update and changes nothing about it. ``slope``: ∂ loss / ∂ log π of each token of a micro-batch."""

    def planned(self, batch: Batch) -> None: ...

    def micro_batch(self, batch: Batch, policy: Mapping[Signal, Field], slope: Tensor) -> None: ...


@dataclass(frozen=True)
class Objective:
    """The composition of a recipe's pieces: credit, plan, and the loss of a micro-batch."""

    advantage: Term
    ratio: Ratio
    gate: Gate
    aggregate: Aggregate
    penalties: tuple[WeightedPenalty, ...] = ()
    reward: Term | None = None  # None: the environment's reward
    keep: Mask = field(default_factory=AllTokens)
    gradient: Gradient = field(default_factory=PlainGradient)
    memory: Memory = field(default_factory=Memory, compare=False, repr=False)
    listeners: tuple[Listener, ...] = field(default=(), compare=False, repr=False)

    # ------------------------------------------------------------- signals
    def _crediting(self) -> Iterator[Piece]:
        yield from self.advantage.parts
        if self.reward is not None:
            yield from self.reward.parts

    def _planning(self) -> Iterator[Piece]:
        """Each piece once, even where two slots share it."""
        roots = (self.ratio, self.gate, self.keep, self.gradient, *self.penalties)
        yield from dict.fromkeys(piece for root in roots for piece in root.parts)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (*self._crediting(), *self._planning())

    @cached_property
    def signals(self) -> frozenset[Signal]:
        """Every signal any piece reads, and the entropy, which every run logs."""
        return frozenset({Signal.LOGP, Signal.ENTROPY}).union(*(p.reads | p.reads_before_step for p in self.pieces))

    @property
    def signals_before_batch(self) -> frozenset[Signal]:
        """The signals to measure once, before the first update on a batch."""
        return self.signals & BEFORE_BATCH

    @property
    def signals_with_gradient(self) -> frozenset[Signal]:
        """The signals that every forward pass of an update computes, with gradient."""
        return self.signals & WITH_GRADIENT

    @cached_property
    def signals_before_step(self) -> frozenset[Signal]:
        """The signals of the present policy that must be on the batch when ``plan`` is called."""
        planned = NOTHING.union(*(p.reads_before_step for p in self._planning()))
        coupled = {Signal.LOGP} if any(w.penalty.couples_trajectories for w in self.penalties) else NOTHING
        return planned | (self.signals & BEFORE_STEP) | (self.keep.signals & WITH_GRADIENT) | coupled

    @property
    def told(self) -> dict[str, float]:
        """What the rollouts of the next step may read of the pieces' states."""
        return {name: value for p in self._planning() if p.told for name, value in self.memory.of(p).items()}

    # ------------------------------------------------------ the whole batch
    def before_measuring(self, batch: Batch) -> Batch:
        """The batch with what a measurement must know of the pieces: how many candidates to draw, which reference to take."""
        if any(piece.resets_reference(self.memory.clock) for piece in self.pieces):
            batch = batch.put(reset_reference=batch.tree.full(BATCH, 1.0))
        count = max(piece.draws_candidates for piece in self.pieces)
        return batch.put({(Column.CANDIDATE, "count"): batch.tree.full(BATCH, count, torch.int64)}) if count else batch

    def credit(self, batch: Batch) -> Batch:
        """Rewards and advantages of the whole batch, however it is later split into updates."""
        pieces = list(dict.fromkeys(self._crediting()))
        batch = batch.put(batch_index=batch.tree.full(BATCH, float(self.memory.clock), torch.float64))
        self.memory.clock += 1
        early = (p for p in pieces if not p.updates_after_credit)  # running statistics include this batch
        self.memory.advance(early, StepView(batch, {}))
        batch = batch.put(self.memory.columns(iter(pieces), batch))
        if self.reward is not None:
            batch = replace(batch, reward=self.reward(batch))
        batch = batch.put(advantage=self.advantage(batch).detach())
        late = (p for p in pieces if p.updates_after_credit)
        self.memory.advance(late, StepView(batch, {}, adv=batch[Column.ADVANTAGE]))
        return batch

    @without_gradient
    def plan(self, batch: Batch) -> Batch:
        """The columns that depend on all of one optimiser step: kept tokens, averaging weights, plans of the pieces."""
        pieces = list(self._planning())
        batch = batch.put(self.memory.columns(iter(pieces), batch))
        view = StepView(batch, {}, adv=batch[Column.ADVANTAGE])
        if Signal.LOGP in self.signals_before_step:
            precision = batch[Signal.LOGP].x.dtype
            view = StepView(batch, {}, self.ratio(view).detach(), batch[Column.ADVANTAGE].to(precision))
        for piece in pieces:
            batch = batch.put({key: f.detach() for key, f in piece.plan(view).items()})
            view = replace(view, batch=batch)
        self.memory.advance(iter(pieces), view)
        trained = self._kept(view)
        even = Mean(TOKEN)(trained.map(torch.ones_like))
        columns: dict[Any, Field] = {Column.WEIGHT: self.aggregate(trained), Column.TOKEN_SHARE: even}
        for i, weighted in enumerate(self.penalties):
            if weighted.aggregate is not None or weighted.rows is not None:
                rows = trained if weighted.rows is None else self._kept(view, weighted.rows)
                columns[Column.PENALTY_WEIGHT, i] = (weighted.aggregate or self.aggregate)(rows)
        batch = batch.put(columns)
        for i, weighted in enumerate(self.penalties):
            if weighted.penalty.couples_trajectories:
                batch = batch.put(self._penalty_gradient(batch, i, weighted.penalty))
        if self.ratio.couples_trajectories:
            batch = batch.put(gain_gradient=self._gain_gradient(batch))
        elif not self.penalties and type(self.gradient) is PlainGradient:
            # Where every token of a group has advantage or weight 0, its gradient is 0, and the learner needs only its
            # statistics. By whole groups, because trajectories of one group share a prompt and are cheaper to read together.
            size = (batch[Column.ADVANTAGE] * batch[Column.WEIGHT]).at(TOKEN).abs().sum(GROUP)
            batch = batch.put(no_gradient=size.map(lambda x: x == 0).at(TRAJECTORY))
        for listener in self.listeners:
            listener.planned(batch)
        return batch

    def _kept(self, view: StepView, mask: Mask | None = None) -> Field:
        """1 for each token that is trained on."""
        tree = view.batch.tree
        ones = tree.full(TOKEN, 1.0, torch.float64)
        rho = view.rho if view.rho is not None else ones
        trained = (mask or self.keep)(rho, view.advantage, view).to(torch.float64) * ones
        updated = view.batch.columns.get(Column.UPDATED_TURNS)
        return trained if updated is None else trained * updated.to(torch.float64)

    @with_gradient
    def _gain_gradient(self, batch: Batch) -> Field:
        """∂ gain / ∂ log π of each token over the whole step, for ratios that couple trajectories."""
        logp = batch[Signal.LOGP].map(lambda x: x.detach().requires_grad_())
        view = MicroBatchView(batch, {Signal.LOGP: logp})
        adv, weight = (batch[name].to(logp.x.dtype) for name in (Column.ADVANTAGE, Column.WEIGHT))
        gain = _total(weight * (self.gate(self.ratio(view), adv, view) * adv))
        return logp.map(partial(gradient, gain))

    @with_gradient
    def _penalty_gradient(self, batch: Batch, i: int, penalty: Penalty) -> dict[Any, Field]:
        """The same for a penalty that couples trajectories; its cost and its metrics are spread evenly over the tokens."""
        logp = batch[Signal.LOGP].map(lambda x: x.detach().requires_grad_())
        view, share = MicroBatchView(batch, {Signal.LOGP: logp}), batch[Column.TOKEN_SHARE]
        cost = self._cost(view, i, penalty)
        columns: dict[Any, Field] = {
            (Column.PENALTY_METRIC, i, name): float(value) * share for name, value in penalty.metrics(view).items()
        }
        columns[Column.PENALTY_GRADIENT, i] = logp.map(partial(gradient, cost))
        columns[Column.PENALTY_COST, i] = float(cost.detach()) * share
        return columns

    def _cost(self, view: MicroBatchView, i: int, penalty: Penalty) -> Tensor:
        weight = view.batch.columns.get((Column.PENALTY_WEIGHT, i), view.batch[Column.WEIGHT])
        return _total(weight.to(view.logp.x.dtype) * penalty(view))

    # ------------------------------------------------------ one micro-batch
    def __call__(self, batch: Batch, policy: Mapping[Signal, Field]) -> Loss:
        if Column.FREEZE_POLICY in batch.columns:  # no gradient instead of 0, on which momentum would move
            policy = {s: f.detach() if s in POLICY_SIGNALS else f for s, f in policy.items()}
        view = MicroBatchView(batch, policy)
        precision = view.logp.x.dtype
        adv, weight = batch[Column.ADVANTAGE].to(precision), batch[Column.WEIGHT].to(precision)
        if self.ratio.couples_trajectories:
            rho = gated = view.logp - view.logp.detach() + 1
            objective = _total(batch[Column.GAIN_GRADIENT].to(precision) * rho)
        else:
            rho = self.ratio(view)
            gated = self.gate(rho, adv, view)
            objective = _total(weight * (gated * adv))
        if Column.FREEZE_POLICY in batch.columns:
            objective = 0.0 * objective
        side_losses = self.gradient.side_losses(weight, rho, gated, adv, view)
        gain_slope = view.logp.map(partial(gradient, objective)) if self.penalties else None
        costs: list[Tensor] = []
        for i, w in enumerate(self.penalties):
            if w.penalty.couples_trajectories:
                step = view.logp - view.logp.detach()
                slope, value = (batch[name, i].to(precision) for name in (Column.PENALTY_GRADIENT, Column.PENALTY_COST))
                cost = _total(slope * step + value)
            else:
                cost = self._cost(view, i, w.penalty)
            costs.append(cost.detach())
            size = float(batch[w.weight].item) if isinstance(w.weight, Weight) else w.weight
            objective = objective - size * cost if size else objective  # a frozen critic has no gradient, not 0
        full_slope = _Slope(objective, view.logp)

        @without_gradient
        def compute_stats() -> dict[str, Tensor]:
            slope = full_slope()
            gain = slope if gain_slope is None else gain_slope
            clipped = diagnostics.cut(rho, gated, adv, gain)
            stats = diagnostics.sums(view, rho, clipped, adv, gain)
            for i, (w, cost) in enumerate(zip(self.penalties, costs)):
                stats[f"penalty/{type(w.penalty).__name__}"] = cost
                keys = [k for k in batch.columns if isinstance(k, tuple) and k[:2] == (Column.PENALTY_METRIC, i)]
                planned = {key[2]: _total(view[key]) for key in keys}
                metrics = planned if w.penalty.couples_trajectories else w.penalty.metrics(view)
                stats = {**metrics, **stats}  # of two equal names the first one stays
            stats["objective"] = objective.detach()
            for mask in (p for p in self._planning() if isinstance(p, Mask) and p.reason and p in batch.columns):
                stats[f"dropped/tokens: {mask.reason}"] = (~batch[mask]).at(TOKEN).x.double().sum()
            for listener in self.listeners:
                listener.micro_batch(batch, policy, -slope.x)
            return stats | diagnostics.by_source(view, rho, clipped, slope)

        return Loss(-objective, compute_stats, side_losses)  # the only place where the sign is flipped

    def scales(self, batch: Batch, side_gradients: Mapping[str, Grads]) -> Scales:
        """What multiplies the finished gradient and the learning rate of a planned step."""
        return self.gradient.scales(MicroBatchView(batch, {}), side_gradients)


def _total(value: Field) -> Tensor:
    return value.at(TOKEN).x.sum()


class _Slope:
    """∂ objective / ∂ log π, for the diagnostics: taken from the backward pass of −objective by a hook, or computed if it is
    needed before that pass."""

    def __init__(self, objective: Tensor, logp: Field) -> None:
        self.objective, self.logp = objective, logp
        self.gradients: list[Tensor] = []
        if objective.requires_grad and logp.x.requires_grad:
            logp.x.register_hook(self.gradients.append)  # side losses come first: the last gradient counts

    def __call__(self) -> Field:
        return self.logp.map(lambda x: -self.gradients[-1] if self.gradients else gradient(self.objective, x))


def gradient(of: Tensor, at: Tensor) -> Tensor:
    """∂ of / ∂ at, where the graph between the two is small; zeros where one does not depend on the other."""
    connected = of.requires_grad and at.requires_grad
    slope = torch.autograd.grad(of, at, retain_graph=True, allow_unused=True)[0] if connected else None
    return torch.zeros_like(at) if slope is None else slope.detach()
