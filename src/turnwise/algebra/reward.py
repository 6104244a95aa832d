"""Rewards: what each turn or token earned. What belongs to the whole episode is paid at its last turn."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from turnwise.algebra.piece import State, Whole, check
from turnwise.algebra.term import Term
from turnwise.algebra.value import token_reward
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field, where
from turnwise.core.signals import Signal
from turnwise.errors import SignalError


def paid_at_end(value: Field) -> Field:
    """A TRAJECTORY value as a TURN field: all of it on the last turn."""
    tree = value.tree
    remaining = tree.size(TURN, TRAJECTORY) - tree.index(TURN, TRAJECTORY)
    return where(remaining <= 1, value.at(TURN), 0.0)


@dataclass(frozen=True)
class Environment(Term):
    """What the environment paid, turn by turn."""

    def __call__(self, batch: Batch) -> Field:
        return batch.reward.sum(TURN)


@dataclass(frozen=True)
class Named(Term):
    """One named component of the reward (``info["rewards"]``); a trajectory without it earns 0."""

    name: str

    def __call__(self, batch: Batch) -> Field:
        if self.name not in batch.named:
            raise SignalError(
                f"no trajectory carries a reward named {self.name!r}; this batch has: {sorted(batch.named)}"
            )
        return paid_at_end(batch.named[self.name].map(lambda x: torch.nan_to_num(x, nan=0.0)))


@dataclass(frozen=True)
class Overlong(Term):
    """Soft length penalty on n sampled tokens: 0 up to limit − cache, then linear, −1 from limit on.

    r = clip((limit − cache − n) / cache, −1, 0)
    """

    limit: int
    cache: int

    def __post_init__(self) -> None:
        check(
            0 < self.cache <= self.limit,
            f"overlong needs 0 < cache <= limit, got cache {self.cache}, limit {self.limit}",
        )

    def __call__(self, batch: Batch) -> Field:
        n = batch.tree.size(TOKEN, TRAJECTORY).to(batch.reward.x.dtype)
        return paid_at_end(((self.limit - self.cache - n) / self.cache).clamp(-1.0, 0.0))


@dataclass(frozen=True)
class OnTokens(Term):
    """Turn rewards as token rewards: each on the last token of its turn."""

    reward: Term = field(default_factory=Environment)

    def __call__(self, batch: Batch) -> Field:
        return token_reward(replace(batch, reward=self.reward(batch)))


@dataclass(frozen=True)
class Drift(Term):
    """−k1 = log π_ref − log π_prox of each token, before the update: as a reward its gradient is that of the KL."""

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.PROXIMAL, Signal.REFERENCE})

    def __call__(self, batch: Batch) -> Field:
        return batch[Signal.REFERENCE] - batch[Signal.PROXIMAL]


@dataclass(frozen=True)
class RunningScale(Term):
    """The outcome over its running mean and std, clipped to ±limit, paid at the end. Statistics of all batches so far.

    ``centre=False`` only divides by the std."""

    limit: float = 10.0
    centre: bool = True
    eps: float = 1e-8

    def start(self) -> State:
        return {"count": 0.0, "mean": 0.0, "square": 0.0}

    def advance(self, state: State, whole: Whole) -> State:
        """Welford over batches: mean and sum of squared deviations."""
        x = whole.batch.reward.sum(TRAJECTORY).x.double()
        n, total = float(x.numel()), state["count"] + x.numel()
        shift = float(x.mean()) - state["mean"]
        square = state["square"] + float(((x - x.mean()) ** 2).sum()) + shift**2 * state["count"] * n / total
        return {"count": total, "mean": state["mean"] + shift * n / total, "square": square}

    def __call__(self, batch: Batch) -> Field:
        count, mean, square = (batch[self, name] for name in ("count", "mean", "square"))
        std = where(count > 1, (square / (count - 1).clamp(low=1.0)) ** 0.5, 1.0)
        outcome = batch.reward.sum(TRAJECTORY)
        scaled = (outcome - mean if self.centre else outcome) / (std + self.eps)
        return paid_at_end(scaled.clamp(-self.limit, self.limit).to(outcome.x.dtype))


__all__ = ["Drift", "Environment", "Named", "OnTokens", "Overlong", "RunningScale", "paid_at_end"]
