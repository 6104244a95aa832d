"""The rank of hidden states as a potential: explore while it speeds up, exploit while it slows down."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turnwise.algebra.piece import State, Whole, check
from turnwise.algebra.term import Term
from turnwise.algebra.value import ends
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, Field, where
from turnwise.core.signals import Signal

SIGNALS = {"push": Signal.RANK_PUSH, "speed": Signal.RANK_SPEED, "rank": Signal.RANK}


@dataclass(frozen=True)
class RankPotential(Term):
    """Φ = Σ w tanh(rel), rel = clip((x − μ)/(|μ| + ε), ±5) of push, speed and rank against their running means μ. At TRAJECTORY.

    w = β · explore + (1 − β) · exploit, β = σ(sharpness · rel of the push). μ ← (1 − follow) μ + follow · mean of the batch,
    after it was read; before the first batch there is no μ and Φ = 0."""

    follow: float = 0.3
    sharpness: float = 2.0
    explore: tuple[float, ...] = (0.0, 0.0, 1.0)
    exploit: tuple[float, ...] = (0.0, 1.0, 0.0)
    eps: float = 1e-6

    late = True

    def __post_init__(self) -> None:
        check(0 <= self.follow <= 1, f"follow is {self.follow}; write a number in [0, 1]")
        for name, weights in (("explore", self.explore), ("exploit", self.exploit)):
            check(len(weights) == 3, f"{name} has {len(weights)} weights; write three: of push, speed and rank")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset(SIGNALS.values())

    def start(self) -> State:
        return {"seen": 0.0, **dict.fromkeys(SIGNALS, 0.0)}

    def advance(self, state: State, whole: Whole) -> State:
        batch = whole.batch
        written = where(batch.tree.size(TOKEN, TRAJECTORY) > 0, 1.0, 0.0)
        count = float(written.sum(BATCH).item)
        if not count:
            return state
        mean = {name: float((written * batch[s]).sum(BATCH).item) / count for name, s in SIGNALS.items()}
        rate = self.follow if state["seen"] else 1.0
        return {"seen": 1.0, **{name: (1 - rate) * state[name] + rate * mean[name] for name in SIGNALS}}

    def __call__(self, batch: Batch) -> Field:
        rel = []
        for name, signal in SIGNALS.items():
            mu = batch[self, name]
            rel.append(((batch[signal].to(torch.float64) - mu) / (mu.abs() + self.eps)).clamp(-5.0, 5.0))
        beta = (self.sharpness * rel[0]).map(torch.sigmoid)
        phi = batch.tree.full(TRAJECTORY, 0.0, torch.float64)
        for x, up, down in zip(rel, self.explore, self.exploit):
            phi = phi + (beta * up + (1 - beta) * down) * x.map(torch.tanh)
        return where(batch[self, "seen"] > 0, phi, 0.0)


@dataclass(frozen=True)
class Bonus(Term):
    """A + min(max(bonus, 0), |A|/κ): for κ > 1 the sign stays. Only at a trajectory's last token, or ``everywhere``."""

    term: Term
    bonus: Term
    kappa: float = 2.0
    everywhere: bool = False

    def __post_init__(self) -> None:
        check(self.kappa > 0, f"kappa is {self.kappa}; write a positive number, or inf for no bonus")

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch)
        shaped = a + self.bonus(batch).clamp(low=0.0).minimum(a.abs() / self.kappa)
        return shaped if self.everywhere else where(Field(batch.tree, TOKEN, ends(batch, TOKEN)), shaped, a)


__all__ = ["Bonus", "RankPotential"]
