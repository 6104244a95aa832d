"""Effective rank of hidden states as a potential: explore while the rank accelerates, exploit while it slows. Does not
compute ranks."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.piece import State, StepView, check
from turnwise.algebra.term import Term
from turnwise.algebra.value import is_last
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.maths.lazy_torch import torch

SIGNALS = {
    "push": Signal.EFFECTIVE_RANK_ACCELERATION,
    "speed": Signal.EFFECTIVE_RANK_VELOCITY,
    "rank": Signal.EFFECTIVE_RANK,
}


@dataclass(frozen=True)
class EffectiveRankPotential(Term):
    """Φ = Σ w tanh(rel), rel = clip((x − μ)/(|μ| + ε), ±5) of acceleration, velocity and rank against their running
    means μ.

    w = β · explore + (1 − β) · exploit, β = σ(sharpness · rel of the acceleration). μ ← (1 − rate) μ + rate · batch
    mean, after the batch is credited; before the first batch Φ = 0. At TRAJECTORY."""

    reads = frozenset(SIGNALS.values())

    rate: float = number(0.3, least=0, most=1)
    sharpness: float = 2.0
    explore: tuple[float, ...] = (0.0, 0.0, 1.0)
    exploit: tuple[float, ...] = (0.0, 1.0, 0.0)
    eps: float = 1e-6

    updates_after_credit = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, weights in (("explore", self.explore), ("exploit", self.exploit)):
            check(len(weights) == 3, f"{name} has {len(weights)} weights; write three: of push, speed and rank")

    def initial_state(self) -> State:
        return {"seen": 0.0, **dict.fromkeys(SIGNALS, 0.0)}

    def next_state(self, state: State, view: StepView) -> State:
        batch = view.batch
        has_tokens = where(batch.tree.size(TOKEN, TRAJECTORY) > 0, 1.0, 0.0)
        count = float(has_tokens.sum(BATCH).item)
        if not count:
            return state
        mean = {name: float((has_tokens * batch[s]).sum(BATCH).item) / count for name, s in SIGNALS.items()}
        step = self.rate if state["seen"] else 1.0
        return {"seen": 1.0, **{name: (1 - step) * state[name] + step * mean[name] for name in SIGNALS}}

    def __call__(self, batch: Batch) -> Field:
        relative = []
        for name, signal in SIGNALS.items():
            mu = batch[self, name]
            relative.append(((batch[signal].to(torch.float64) - mu) / (mu.abs() + self.eps)).clamp(-5.0, 5.0))
        beta = (self.sharpness * relative[0]).map(torch.sigmoid)
        phi = batch.tree.full(TRAJECTORY, 0.0, torch.float64)
        for x, up, down in zip(relative, self.explore, self.exploit):
            phi = phi + (beta * up + (1 - beta) * down) * x.map(torch.tanh)
        return where(batch[self, "seen"] > 0, phi, 0.0)


@dataclass(frozen=True)
class CappedBonus(Term):
    """A + min(max(bonus, 0), |A|/κ): for κ > 1 the sign stays. Only at a trajectory's last token, or at
    ``every_token``."""

    term: Term
    bonus: Term
    kappa: float = number(2.0, above=0, why="inf for no bonus")
    every_token: bool = False

    def __call__(self, batch: Batch) -> Field:
        a = self.term(batch)
        shaped = a + self.bonus(batch).clamp(low=0.0).minimum(a.abs() / self.kappa)
        return shaped if self.every_token else where(Field(batch.tree, TOKEN, is_last(batch, TOKEN)), shaped, a)


__all__ = ["CappedBonus", "EffectiveRankPotential"]
