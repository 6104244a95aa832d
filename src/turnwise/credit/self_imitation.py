"""Self-imitation: past successes against today's baseline, a bonus that draws out skills, and a brake on entropy."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import torch

from turnwise.algebra.mask import Mask
from turnwise.algebra.piece import NOTHING, Now, State, Whole, check
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, Field, where
from turnwise.core.signals import Signal
from turnwise.credit.imitation import falling
from turnwise.credit.selectors import From, Rows


@dataclass(frozen=True)
class CallBonus(Term):
    """κ min(each · tool calls, 1), κ falling from 1 to 0 over ``horizon`` batches: first learn to call, then to win."""

    horizon: int = 100
    each: float = 0.1

    def __post_init__(self) -> None:
        check(self.horizon > 0, f"horizon is {self.horizon}; write a positive number of steps")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"tools"})

    def __call__(self, batch: Batch) -> Field:
        calls = batch.tool_calls.sum(TRAJECTORY).to(batch.reward.x.dtype)
        return falling(float(batch["clock"].item), self.horizon) * (self.each * calls).clamp(high=1.0)


@dataclass(frozen=True)
class PastMedian(Term):
    """The median of the groups' means of a value, over the last ``window`` groups, those of this batch included. At BATCH."""

    value: Term = field(default_factory=Outcome)
    among: Rows = field(default_factory=lambda: From("policy"))
    window: int = 10240

    def __post_init__(self) -> None:
        check(self.window > 0, f"window is {self.window}; write a positive number of groups")

    def start(self) -> State:
        return {"means": []}

    def advance(self, state: State, whole: Whole) -> State:
        mine = where(self.among.of(whole.batch), 1.0, 0.0)
        n = mine.sum(GROUP)
        means = (mine * self.value(whole.batch)).sum(GROUP) / n.clamp(low=1.0)
        return {"means": [*state["means"], *means.x[n.x > 0].tolist()][-self.window :]}

    def recall(self, state: State, batch: Batch) -> dict[object, Field]:
        middle = statistics.median(state["means"]) if state["means"] else 0.0
        return {(self, "median"): batch.tree.full(BATCH, middle, torch.float64)}

    def __call__(self, batch: Batch) -> Field:
        return batch[self, "median"].to(batch.reward.x.dtype)


@dataclass(frozen=True)
class Excess(Term):
    """max(value − bar, 0)."""

    value: Term
    bar: Term

    def __call__(self, batch: Batch) -> Field:
        return (self.value(batch) - self.bar(batch)).clamp(low=0.0)


@dataclass(frozen=True)
class SparingCovariance(Mask):
    """All but a ``share``, drawn by lot, of those tokens of ``rows`` whose (A − mean A)(log π − mean log π) lies in (low, high)
    and which a clip would not silence anyway; means over the tokens of ``rows``. A share of 0 spares nothing."""

    rows: Rows
    share: float = 0.02
    low: float = 1.0
    high: float = 40.0
    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        check(0 <= self.share <= 1, f"the share is {self.share}; write a number in [0, 1]")

    @property
    def foresight(self) -> frozenset[Signal]:
        return frozenset({Signal.LOGP}) if self.share else NOTHING

    def plan(self, whole: Whole) -> dict[object, Field]:
        if not self.share:
            return {}
        mine = self.rows.of(whole.batch).at(TOKEN)
        weight = where(mine, 1.0, 0.0)
        centred = lambda x: x - (weight * x).sum(BATCH) / weight.sum(BATCH).clamp(low=1.0)  # noqa: E731
        adv, rho = whole.advantage.at(TOKEN), whole.ratio.at(TOKEN)
        cov = centred(adv) * centred(whole.logp.detach())
        silent = ((adv > 0) & (rho > 1 + self.clip_high)) | ((adv < 0) & (rho < 1 - self.clip_low))
        able = (mine & (cov > self.low) & (cov < self.high) & ~silent).x
        drawn = torch.zeros_like(able)
        by_lot = torch.argsort(torch.where(able, whole.batch.lots().x, torch.inf), stable=True)
        drawn[by_lot[: int(self.share * int(able.sum()))]] = True
        return {self: Field(whole.batch.tree, TOKEN, ~drawn)}

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return now[self] if self.share else rho.map(lambda x: torch.ones_like(x, dtype=torch.bool))


__all__ = ["CallBonus", "Excess", "PastMedian", "SparingCovariance"]
