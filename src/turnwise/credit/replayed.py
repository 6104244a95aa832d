"""Imitating one's own past: replayed rows, credited against what is usual today, in a loss of their own."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import torch

from turnwise.algebra.gate import Gate
from turnwise.algebra.mask import Mask
from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import Now, State, Whole, check
from turnwise.algebra.ratio import Importance, Ratio
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome
from turnwise.algebra.weight import Weight, clock
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, Field, Partition, where
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact
from turnwise.credit.selectors import Rows

# ----------------------------------------------------------------------- credit


@dataclass(frozen=True)
class ToolBonus(Term):
    """min(1, rate · turns that call a tool) · (cos(πt/T) + 1)/2, t batches so far: 0 from T = ``horizon`` on. At TRAJECTORY."""

    rate: float = 0.1
    horizon: float = 200.0

    def __post_init__(self) -> None:
        check(self.horizon > 0, f"the horizon is {self.horizon}; write a positive number of steps")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"tools"})

    def __call__(self, batch: Batch) -> Field:
        calls = where(batch.tool_calls > 0, 1.0, 0.0).sum(TRAJECTORY)
        t = min(float(batch["clock"].item), self.horizon)
        return (self.rate * calls).clamp(high=1.0) * ((math.cos(math.pi * t / self.horizon) + 1) / 2)


@dataclass(frozen=True)
class Recalibrated(Term):
    """Fresh rows: ``value`` − its mean over the fresh rows of the group. Replayed rows: R − median of the groups' mean R over
    the last ``history`` groups, today's included; ``scale`` divides by the median of their std."""

    value: Term = field(default_factory=Outcome)
    scale: bool = False
    history: int = 10240
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check(self.history >= 1, f"the history is {self.history}; write at least 1 group")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"replay"})

    @property
    def judges(self) -> bool:
        return True

    def start(self) -> State:
        return {"means": [], "stds": []}

    def advance(self, state: State, whole: Whole) -> State:
        batch, tree = whole.batch, whole.batch.tree
        outcome, peers = batch.reward.sum(TRAJECTORY).to(torch.float64), self._peers(batch)
        fresh = ~batch.replayed.x
        groups = tree.ancestor(TRAJECTORY, GROUP)[fresh]
        present = torch.zeros(tree.count(GROUP), dtype=torch.bool, device=tree.device).index_fill(0, groups, True)
        of_group = lambda x: x.x.new_zeros(tree.count(GROUP)).index_copy(0, groups, x.x[fresh])[present].tolist()  # noqa: E731
        means, stds = of_group(outcome.mean(peers)), of_group(outcome.std(peers))
        return {name: (state[name] + new)[-self.history :] for name, new in (("means", means), ("stds", stds))}

    def recall(self, state: State, batch: Batch) -> dict[object, Field]:
        middle = {name: statistics.median(state[name]) if state[name] else 0.0 for name in ("means", "stds")}
        return {(self, name): batch.tree.full(BATCH, value, torch.float64) for name, value in middle.items()}

    def _peers(self, batch: Batch) -> Partition:
        return Partition.by(batch.tree, TRAJECTORY, batch.group, batch.replayed.to(torch.int64))

    def __call__(self, batch: Batch) -> Field:
        value = self.value(batch)
        past = batch.reward.sum(TRAJECTORY) - batch[self, "means"]
        past = past / (batch[self, "stds"] + self.eps) if self.scale else past
        fresh = value - value.mean(self._peers(batch))
        return where(batch.replayed, past, fresh.to(past.x.dtype))


# ------------------------------------------------------------------ which of them


@dataclass(frozen=True)
class WorthRepeating(Rows):
    """Replayed rows at most ``oldest`` steps old whose advantage is not negative: of these a power of two, at most ``size``, in
    the order of their numbers."""

    oldest: int = 5
    size: int = 2048

    def __post_init__(self) -> None:
        check(self.oldest >= 0 and self.size >= 1, f"oldest is {self.oldest}, size {self.size}; write >= 0 and >= 1")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"replay"})

    def of(self, batch: Batch) -> Field:
        tree = batch.tree
        good = (batch["advantage"].at(TOKEN).mean(TRAJECTORY) >= 0) & (tree.size(TOKEN, TRAJECTORY) > 0)
        able = (batch.replayed & good & (Fact("age", missing=0.0)(batch) <= self.oldest)).x
        limit = min(int(able.sum()), self.size)
        number = 1 << (limit.bit_length() - 1) if limit else 0
        lots = torch.where(able, batch.seed.x, torch.iinfo(torch.int64).max)
        kept = torch.zeros_like(able).index_fill(0, torch.argsort(lots, stable=True)[:number], True)
        return Field(tree, TRAJECTORY, kept)


@dataclass(frozen=True)
class LessCovariance(Mask):
    """All but a ``fraction`` of the tokens of ``rows``, drawn by lot among those of them whose (A − mean A)(log π − mean log π)
    lies in (low, high), means over the rows."""

    rows: Rows
    fraction: float = 0.02
    low: float = 2.0
    high: float = 60.0

    def __post_init__(self) -> None:
        check(0 <= self.fraction <= 1, f"the fraction is {self.fraction}; write a number in [0, 1]")

    @property
    def foresight(self) -> frozenset[Signal]:
        return frozenset({Signal.LOGP})

    def plan(self, whole: Whole) -> dict[object, Field]:
        inside = self.rows.of(whole.batch).at(TOKEN)
        one = where(inside, 1.0, 0.0)
        count = one.sum(BATCH).clamp(low=1.0)
        centred = lambda x: x - (one * x).sum(BATCH) / count  # noqa: E731
        cov = centred(whole.advantage.at(TOKEN)) * centred(whole.logp.detach())
        able = (inside & (cov > self.low) & (cov < self.high)).x
        number = min(int(able.sum()), math.floor(self.fraction * float(one.sum(BATCH).item)))
        lots = torch.where(able, whole.batch.lots().x, torch.inf)
        kept = torch.ones_like(able).index_fill(0, torch.argsort(lots, stable=True)[:number], False)
        return {self: Field(cov.tree, TOKEN, kept)}

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return now[self]


# ------------------------------------------------------------------------- loss


@dataclass(frozen=True)
class Repeated(Penalty):
    """−w A, w = gate(ρ, A): the gain of other rows than the objective's own, as a cost with its own weight and count."""

    gate: Gate
    ratio: Ratio = field(default_factory=Importance)

    def __call__(self, now: Now) -> Field:
        adv = now["advantage"].to(now.logp.x.dtype)
        return -(self.gate(self.ratio(now), adv, now) * adv)


@dataclass(frozen=True)
class Warming(Weight):
    """scale · (1 − cos(πt/T))/2, t batches so far; from T = ``steps`` on, scale."""

    scale: float = 1.0
    steps: float = 100.0

    def __post_init__(self) -> None:
        check(self.scale >= 0 and self.steps > 0, f"scale {self.scale}, steps {self.steps}; write >= 0 and > 0")

    def __call__(self, whole: Whole) -> Field:
        share = (1 - math.cos(math.pi * min(clock(whole), self.steps) / self.steps)) / 2
        return whole.batch.tree.full(BATCH, self.scale * share, torch.float64)


__all__ = [
    "LessCovariance", "Recalibrated", "Repeated", "ToolBonus", "Warming", "WorthRepeating",
]  # fmt: skip
