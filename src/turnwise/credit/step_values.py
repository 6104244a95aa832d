"""Values of steps as probabilities of success: cross-entropy, filters of steps and episodes by them, the best action of a state.

A step is a turn with tokens; its value is the sigmoid of the critic's estimate before its first token. Knows no network.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.algebra.mask import Mask
from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import MicroBatchView, StepView
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome, ReturnToGo
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import number
from turnwise.core.signals import TURN_CRITIC, Signal
from turnwise.credit.downsampling import DECIMALS, ceiling
from turnwise.credit.selectors import HasTokens, Selector
from turnwise.maths.lazy_torch import torch


def step_values(batch: Batch) -> tuple[Field, Field]:
    """The value of each step, and the value of the step after it, 0 after the last. At TURN; 0 for turns without tokens."""
    tree = batch.tree
    first = where(tree.index(TOKEN, TURN) < 1, batch[Signal.OLD_VALUE].map(torch.sigmoid), 0.0).sum(TURN)
    steps = (tree.size(TOKEN, TURN).x > 0).nonzero().squeeze(1)  # those of a trajectory are adjacent
    owner = tree.parents[1][steps]
    follows = torch.nn.functional.pad(owner[1:], (0, 1), value=-1) == owner
    after = torch.where(follows, torch.roll(first.x[steps], -1), 0.0)
    return first, Field(tree, TURN, torch.zeros_like(first.x).index_copy(0, steps, after))


@dataclass(frozen=True)
class StepCrossEntropy(Penalty):
    """Cross-entropy of a step's value to whether its trajectory has a positive return. On the first token of each turn:
    average it with ``Sum(TURN)``."""

    reads = frozenset({Signal.VALUE})

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: (Outcome()(view.batch) > 0).to(torch.float64)}

    def __call__(self, view: MicroBatchView) -> Field:
        value = view[Signal.VALUE]
        first = view.batch.tree.index(TOKEN, TURN) < 1
        return where(first, value.map(torch.nn.functional.softplus) - view[self] * value, 0.0)


@dataclass(frozen=True)
class GoodSteps(Term):
    """1 for each step with V(o′) − V(o) − cost + r + G > 0, G the discounted return from this step on; 0 for the others."""

    reads = frozenset({Signal.OLD_VALUE})

    gamma: float = number(0.5, least=0, most=1)
    cost: float = 0.05

    def __call__(self, batch: Batch) -> Field:
        before, after = step_values(batch)
        paid = batch.reward.sum(TURN) + ReturnToGo(self.gamma)(batch).at(TURN)
        a = after - before - self.cost + paid.to(before.x.dtype)
        return (a > 0).to(torch.float64)


@dataclass(frozen=True)
class OutcomeAboveValue(Term):
    """R − V(o₀): how much better a trajectory ended than its first state promised. At TRAJECTORY."""

    reads = frozenset({Signal.OLD_VALUE})

    def __call__(self, batch: Batch) -> Field:
        value = batch[Signal.OLD_VALUE].map(torch.sigmoid)
        promised = where(batch.tree.index(TOKEN, TRAJECTORY) < 1, value, 0.0).sum(TRAJECTORY)
        return Outcome()(batch).to(promised.x.dtype) - promised


@dataclass(frozen=True)
class TopOfBatch(Selector):
    """The share of the trajectories with the largest ``by``, at least one; those without tokens do not count."""

    share: float = number(0.1, above=0, most=1, why="which part is trained on")
    by: Term = field(default_factory=Outcome)

    reason = "another trajectory did better than its task promised"

    def select(self, batch: Batch) -> Field:
        rows = HasTokens().select(batch).x.nonzero().squeeze(1)
        rows = rows[torch.argsort(batch.seed.x[rows], stable=True)]
        score = self.by(batch).at(TRAJECTORY).x[rows].double().round(decimals=DECIMALS)
        best = rows[torch.argsort(score, descending=True, stable=True)[: ceiling(self.share * len(rows))]]
        selected = torch.zeros(batch.tree.count(TRAJECTORY), dtype=torch.bool, device=rows.device)
        selected[best] = True
        return Field(batch.tree, TRAJECTORY, selected)


@dataclass(frozen=True)
class BestActionOfState(Mask):
    """Of the turns that a group took in one state, the one with the largest A = max(Q, Q′) − max(V, V′), if A > ``least``.
    Critics of the moment before the step."""

    requires = frozenset({"state"})
    reads_before_step = frozenset(TURN_CRITIC)

    least: float = 0.1

    reason = "another action of the state is better, or none is good enough"

    def plan(self, view: StepView) -> dict[object, Field]:
        batch, tree = view.batch, view.batch.tree
        q, q_twin, v, v_twin = (view[s].detach() for s in TURN_CRITIC)
        a = q.maximum(q_twin) - v.maximum(v_twin)
        rounded = a.map(lambda x: x.double().round(decimals=DECIMALS))
        has_tokens = (tree.size(TOKEN, TURN) > 0).to(torch.int64)
        peers = Partition.by(tree, TURN, batch.group, batch.state, has_tokens)
        lot = where(rounded >= rounded.max(peers), batch.uniform_draws(TURN).to(torch.float64), -1.0)
        chosen = (lot >= lot.max(peers)) & (lot >= 0) & (a > self.least) & (has_tokens > 0)
        return {self: chosen}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view[self]


__all__ = [
    "BestActionOfState", "GoodSteps", "OutcomeAboveValue", "StepCrossEntropy", "TopOfBatch", "step_values",
]  # fmt: skip
