"""Weights of penalties that change during a run: by a schedule, by a dual variable, by a controller."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turnwise.algebra.piece import Piece, State, StepView
from turnwise.algebra.ratio import LOG_RATIO_LIMIT, moved
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, TRAJECTORY, Field, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.maths.divergences import k2
from turnwise.maths.lazy_torch import torch


class Weight(Piece):
    """Interface: one number for a whole step, computed in ``plan``."""

    def __call__(self, view: StepView) -> Field:
        raise NotImplementedError

    def plan(self, view: StepView) -> dict[object, Field]:
        return {self: self(view)}


def batch_index(view: StepView) -> float:
    """How many batches were credited before this one."""
    return float(view[Column.BATCH_INDEX].item)


@dataclass(frozen=True)
class DualVariable(Weight):
    """λ ← max(0, λ + rate (mean (ρ − 1)² − target)) after each step: the multiplier of a bound on the ratio's variance."""

    reads_before_step = frozenset({Signal.LOGP})

    initial: float = 0.04
    target: float = 0.02
    rate: float = 0.01

    def initial_state(self) -> State:
        return {"lambda": self.initial}

    def next_state(self, state: State, view: StepView) -> State:
        variance = float(((moved(view).exp() - 1) ** 2).mean(BATCH).item)
        return {"lambda": max(0.0, state["lambda"] + self.rate * (variance - self.target))}

    def __call__(self, view: StepView) -> Field:
        return view[self, "lambda"]


@dataclass(frozen=True)
class StepSchedule(Weight):
    """scale · max(1 − drop ⌈(t − from)₊ / every⌉, floor), or ``scale`` minus that with ``complement``:
    two of them shift the weight from one reference policy to another in steps."""

    scale: float
    begin: int = 50
    every: int = 10
    drop: float = 0.1
    floor: float = 0.5
    complement: bool = False

    def __call__(self, view: StepView) -> Field:
        share = step_schedule(batch_index(view), self.begin, self.every, self.drop, self.floor)
        return view.batch.tree.full(BATCH, self.scale * (1 - share if self.complement else share), torch.float64)


def step_schedule(t: float, begin: int, every: int, drop: float, floor: float) -> float:
    """1 until ``begin``, then ``drop`` less for every ``every`` steps, never below ``floor``."""
    return max(1 - drop * math.ceil(max(t - begin, 0) / every), floor)


@dataclass(frozen=True)
class DecayingWeight(Weight):
    """scale · (1 + exp(−rate · t / half)), t batches so far: decays from 2 · scale to scale."""

    scale: float
    half: int = number(50, above=0)
    rate: float = 1.0

    def __call__(self, view: StepView) -> Field:
        value = self.scale * (1 + math.exp(-self.rate * batch_index(view) / self.half))
        return view.batch.tree.full(BATCH, value, torch.float64)


PHASES = {"warm-up": 1.5, "climb": 1.2, "plateau": 0.8, "converged": 1.0}


def pid_threshold(error: float, integral: float, before: float, phase: str, gains: tuple[float, float, float]) -> float:
    """clip((0.3 + Kp e + Ki ∫e + Kd Δe) · phase, 0.1, 0.6)."""
    kp, ki, kd = gains
    free = 0.3 + kp * error + ki * integral + kd * (error - before)
    return min(0.6, max(0.1, free * PHASES[phase]))


@dataclass(frozen=True)
class KLController(Weight):
    """c (K − θ) max(½, 2/(H + 0.1)) once the smoothed KL K exceeds θ, else 0. A PID controller sets θ from the
    reward's velocity: a rising reward allows more KL, a stalling one less; low entropy makes the weight larger."""

    reads_before_step = frozenset({Signal.LOGP, Signal.ENTROPY})
    reads = frozenset({Signal.REFERENCE})

    penalty: float = 0.1
    gains: tuple[float, float, float] = (0.3, 0.01, 0.05)
    goal: float = 1e-3  # target reward velocity
    warmup: int = 10

    def initial_state(self) -> State:
        return {"kl": 0.0, "reward": 0.0, "error": 0.0, "integral": 0.0, "threshold": 0.3, "steps": 0.0}

    def next_state(self, state: State, view: StepView) -> State:
        first = state["steps"] == 0
        reward = float(view.batch.reward.sum(TRAJECTORY).mean(BATCH).item)
        smooth = reward if first else 0.95 * state["reward"] + 0.05 * reward
        velocity = 0.0 if first else smooth - state["reward"]
        error = velocity - self.goal
        integral = min(1.0, max(-1.0, state["integral"] + error))
        phase = "warm-up" if state["steps"] < self.warmup else "climb" if velocity > self.goal else "plateau"
        bound = pid_threshold(error, integral, state["error"], phase, self.gains)
        kl = self._kl(view)
        smooth_kl = kl if first else 0.9 * state["kl"] + 0.1 * kl
        state_now = {"kl": smooth_kl, "reward": smooth, "error": error, "integral": integral, "threshold": bound}
        return {**state_now, "steps": state["steps"] + 1}

    def _kl(self, view: StepView) -> float:
        x = (view[Signal.REFERENCE] - view.logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return float(x.map(k2).mean(BATCH).item)

    def __call__(self, view: StepView) -> Field:
        entropy = view[Signal.ENTROPY].mean(BATCH).to(torch.float64)
        over = view[self, "kl"] - view[self, "threshold"]
        strict = (2 / (entropy + 0.1)).clamp(low=0.5)
        return where(over > 0, self.penalty * over * strict, 0.0)


__all__ = [
    "DecayingWeight", "DualVariable", "KLController", "StepSchedule", "Weight", "batch_index", "pid_threshold",
    "step_schedule",
]  # fmt: skip
