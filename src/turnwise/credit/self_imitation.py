"""Self-imitation (SPEAR): replay good trajectories of earlier steps against the present baseline, in a loss of their own.

Also a tool-call bonus that decays while the replay loss warms up, and a mask on tokens whose update would lower the
entropy most. One set of pieces for both SPEAR recipes. Does not know where replayed trajectories are stored
(``data.replay``).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import field

from turnwise.algebra.gate import Gate
from turnwise.algebra.mask import Mask
from turnwise.algebra.penalty import Penalty, Schedule
from turnwise.algebra.piece import NOTHING, MicroBatchView, State, StepView
from turnwise.algebra.ratio import Importance
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, Field, where
from turnwise.core.limits import choice, number
from turnwise.core.signals import Signal
from turnwise.credit.selectors import FromOrigin, SelectedPeers, Selector
from turnwise.maths.lazy_torch import torch

# ----------------------------------------------------------------------- credit


class ToolCallBonus(Term):
    """min(1, rate · n) · ½(1 + cos(πt/T)), n tool calls, t batches so far: 0 from T = ``horizon`` on. At TRAJECTORY."""

    idle_without = frozenset({"tools"})
    rate: float = 0.1
    horizon: float = number(200.0, above=0)
    # n is the number of turns that call a tool, however many calls each makes
    per_turn: bool = True

    def __call__(self, batch: Batch) -> Field:
        if self.per_turn:
            calls = where(batch.tool_calls > 0, 1.0, 0.0).sum(TRAJECTORY)
        else:
            calls = batch.tool_calls.sum(TRAJECTORY).to(batch.reward.x.dtype)
        return cosine_decay(float(batch[Column.BATCH_INDEX].item), self.horizon) * (self.rate * calls).clamp(high=1.0)


class PastMedian(Term):
    """The median, over the last ``window`` groups, of each group's mean (or std) of a value. In float64, at BATCH.

    Counts the trajectories of ``selector`` only; the groups of this batch are included."""

    value: Term = field(default_factory=Outcome)
    selector: Selector = field(default_factory=lambda: FromOrigin("policy"))
    window: int = number(10240, above=0)
    statistic: str = choice("mean", "std")

    def initial_state(self) -> State:
        return {"means": []}

    def next_state(self, state: State, view: StepView) -> State:
        batch = view.batch
        selected = self.selector.select(batch)
        weight, value = where(selected, 1.0, 0.0), self.value(batch)
        count = weight.sum(GROUP)
        if self.statistic == "std":
            spread = value.to(torch.float64).std(SelectedPeers(self.selector)(batch))
            per_group = where(selected, spread, 0.0).max(GROUP)
        else:
            per_group = (weight * value).sum(GROUP) / count.clamp(low=1.0)
        return {"means": [*state["means"], *per_group.x[count.x > 0].tolist()][-self.window :]}

    def memory_columns(self, state: State, batch: Batch) -> dict[object, Field]:
        median = statistics.median(state["means"]) if state["means"] else 0.0
        return {(self, "median"): batch.tree.full(BATCH, median, torch.float64)}

    def __call__(self, batch: Batch) -> Field:
        return batch[self, "median"]


# -------------------------------------------------------------------- selection


class DropHighCovariance(Mask):
    """All tokens but a few random ones of ``selector`` whose (A − mean A)(log π − mean log π) lies in (low, high): such
    updates lower the entropy most. Means run over the tokens of ``selector``.

    ``fraction`` counts all tokens of ``selector``, in the window or not. ``clip`` = (low, high): tokens that such a clip
    leaves without a gradient are not eligible. A fraction of 0 drops nothing."""

    selector: Selector
    fraction: float = number(0.02, least=0, most=1)
    low: float = 2.0
    high: float = 60.0
    clip: tuple[float, float] | None = None

    @property
    def reads_before_step(self) -> frozenset[Signal]:
        return frozenset({Signal.LOGP}) if self.fraction else NOTHING

    def plan(self, view: StepView) -> dict[object, Field]:
        if not self.fraction:
            return {}
        inside = self.selector.select(view.batch).at(TOKEN)
        weight = where(inside, 1.0, 0.0)
        count = weight.sum(BATCH)
        centred = lambda x: x - (weight * x).sum(BATCH) / count.clamp(low=1.0)  # noqa: E731
        adv = view.advantage.at(TOKEN)
        cov = centred(adv) * centred(view.logp.detach())
        eligible = inside & (cov > self.low) & (cov < self.high)
        if self.clip is not None:
            rho = view.ratio.at(TOKEN)
            clipped = ((adv > 0) & (rho > 1 + self.clip[1])) | ((adv < 0) & (rho < 1 - self.clip[0]))
            eligible = eligible & ~clipped
        available = int(eligible.x.sum())
        number = math.floor(self.fraction * float(count.item))
        order = torch.argsort(torch.where(eligible.x, view.batch.uniform_draws().x, torch.inf), stable=True)
        dropped = order[: min(available, number)]
        return {self: Field(cov.tree, TOKEN, torch.ones_like(eligible.x).index_fill(0, dropped, False))}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view[self] if self.fraction else rho.map(lambda x: torch.ones_like(x, dtype=torch.bool))


# ------------------------------------------------------------------------- loss


class ReplayLoss(Penalty):
    """−w A, w = gate(ρ, A): the policy-gradient loss of the replayed trajectories, with a weight and an average of its
    own."""

    gate: Gate

    def __call__(self, view: MicroBatchView) -> Field:
        adv = view[Column.ADVANTAGE].to(view.logp.x.dtype)
        return -(self.gate(Importance()(view), adv, view) * adv)


class CosineWarmup(Schedule):
    """scale · (1 − cos(πt/T))/2, t batches so far; from T = ``steps`` on, scale."""

    scale: float = number(1.0, least=0)
    steps: float = number(100.0, above=0)

    def at(self, t: float) -> float:
        return self.scale * ((1 - math.cos(math.pi * min(t, self.steps) / self.steps)) / 2)


def cosine_decay(t: float, horizon: float) -> float:
    """½(1 + cos(πt/horizon)): 1 at t = 0, 0 from the horizon on."""
    return 0.5 * (1 + math.cos(math.pi * t / horizon)) if t <= horizon else 0.0
