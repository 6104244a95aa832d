"""Weights of penalties that move with the run: by the clock, by a dual variable, by a controller."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from turnwise.algebra.piece import Piece, State, Whole, check
from turnwise.algebra.ratio import LOG_RATIO_LIMIT, moved
from turnwise.core.levels import BATCH, TRAJECTORY, Field, where
from turnwise.core.signals import Signal
from turnwise.maths.divergences import k2


class Weight(Piece):
    """Interface: one number for a whole step, planned."""

    def __call__(self, whole: Whole) -> Field:
        raise NotImplementedError

    def plan(self, whole: Whole) -> dict[object, Field]:
        return {self: self(whole)}


def clock(whole: Whole) -> float:
    """How many batches came before this one."""
    return float(whole["clock"].item)


@dataclass(frozen=True)
class Dual(Weight):
    """λ ← max(0, λ + rate (mean (ρ − 1)² − target)) after each step: the price of a bound on the ratio's variance."""

    start_at: float = 0.04
    target: float = 0.02
    rate: float = 0.01

    @property
    def foresight(self) -> frozenset[Signal]:
        return frozenset({Signal.LOGP})

    def start(self) -> State:
        return {"lambda": self.start_at}

    def advance(self, state: State, whole: Whole) -> State:
        seen = float(((moved(whole).exp() - 1) ** 2).mean(BATCH).item)
        return {"lambda": max(0.0, state["lambda"] + self.rate * (seen - self.target))}

    def __call__(self, whole: Whole) -> Field:
        return whole[self, "lambda"]


@dataclass(frozen=True)
class Staircase(Weight):
    """scale · max(1 − drop ⌈(t − from)₊ / every⌉, floor), or scale minus that: hands over from one anchor to another."""

    scale: float
    begin: int = 50
    every: int = 10
    drop: float = 0.1
    floor: float = 0.5
    rest: bool = False

    def __call__(self, whole: Whole) -> Field:
        share = staircase(clock(whole), self.begin, self.every, self.drop, self.floor)
        return whole.batch.tree.full(BATCH, self.scale * (1 - share if self.rest else share), torch.float64)


def staircase(t: float, begin: int, every: int, drop: float, floor: float) -> float:
    return max(1 - drop * math.ceil(max(t - begin, 0) / every), floor)


@dataclass(frozen=True)
class Relaxing(Weight):
    """scale · (1 + exp(−rate · t / half)), t batches so far: strict at first, then half as strict."""

    scale: float
    half: int = 50
    rate: float = 1.0

    def __post_init__(self) -> None:
        check(self.half > 0, f"half is {self.half}; write a positive number of steps")

    def __call__(self, whole: Whole) -> Field:
        value = self.scale * (1 + math.exp(-self.rate * clock(whole) / self.half))
        return whole.batch.tree.full(BATCH, value, torch.float64)


PHASES = {"warm-up": 1.5, "climb": 1.2, "plateau": 0.8, "converged": 1.0}


def threshold(error: float, integral: float, before: float, phase: str, gains: tuple[float, float, float]) -> float:
    """clip((0.3 + Kp e + Ki ∫e + Kd Δe) · phase, 0.1, 0.6)."""
    kp, ki, kd = gains
    free = 0.3 + kp * error + ki * integral + kd * (error - before)
    return min(0.6, max(0.1, free * PHASES[phase]))


@dataclass(frozen=True)
class Guard(Weight):
    """c (K − θ) max(½, 2/(H + 0.1)) once the smoothed KL K exceeds θ, else 0. θ follows a PID controller of reward velocity:
    while the reward rises more KL is allowed, when it stalls less; low entropy makes the guard stricter."""

    penalty: float = 0.1
    gains: tuple[float, float, float] = (0.3, 0.01, 0.05)
    goal: float = 1e-3  # reward velocity asked for
    warmup: int = 10

    @property
    def foresight(self) -> frozenset[Signal]:
        return frozenset({Signal.LOGP, Signal.ENTROPY})

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.REFERENCE})

    def start(self) -> State:
        return {"kl": 0.0, "reward": 0.0, "error": 0.0, "integral": 0.0, "threshold": 0.3, "steps": 0.0}

    def advance(self, state: State, whole: Whole) -> State:
        first = state["steps"] == 0
        reward = float(whole.batch.reward.sum(TRAJECTORY).mean(BATCH).item)
        smooth = reward if first else 0.95 * state["reward"] + 0.05 * reward
        velocity = 0.0 if first else smooth - state["reward"]
        error = velocity - self.goal
        integral = min(1.0, max(-1.0, state["integral"] + error))
        phase = "warm-up" if state["steps"] < self.warmup else "climb" if velocity > self.goal else "plateau"
        bound = threshold(error, integral, state["error"], phase, self.gains)
        kl = self._kl(whole)
        smooth_kl = kl if first else 0.9 * state["kl"] + 0.1 * kl
        now = {"kl": smooth_kl, "reward": smooth, "error": error, "integral": integral, "threshold": bound}
        return {**now, "steps": state["steps"] + 1}

    def _kl(self, whole: Whole) -> float:
        x = (whole[Signal.REFERENCE] - whole.logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return float(x.map(k2).mean(BATCH).item)

    def __call__(self, whole: Whole) -> Field:
        entropy = whole[Signal.ENTROPY].mean(BATCH).to(torch.float64)
        over = whole[self, "kl"] - whole[self, "threshold"]
        strict = (2 / (entropy + 0.1)).clamp(low=0.5)
        return where(over > 0, self.penalty * over * strict, 0.0)


__all__ = ["Dual", "Guard", "Relaxing", "Staircase", "Weight", "clock", "staircase", "threshold"]
