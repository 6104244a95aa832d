"""Rewards of turns and tokens. A reward of the whole episode is put on its last turn."""

from __future__ import annotations

from dataclasses import field, replace

from turnwise.algebra.piece import State, StepView
from turnwise.algebra.term import Term
from turnwise.algebra.value import token_reward
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.errors import SignalError
from turnwise.maths.lazy_torch import torch


def on_last_turn(value: Field) -> Field:
    """A TRAJECTORY value as a TURN field, on the last turn."""
    tree = value.tree
    remaining = tree.size(TURN, TRAJECTORY) - tree.index(TURN, TRAJECTORY)
    return where(remaining <= 1, value.at(TURN), 0.0)


class EnvironmentReward(Term):
    """The environment's reward of each turn."""

    def __call__(self, batch: Batch) -> Field:
        return batch.reward.sum(TURN)


class NamedReward(Term):
    """One named component of the reward (``info["rewards"]``); 0 for a trajectory without it."""

    name: str

    def __call__(self, batch: Batch) -> Field:
        if self.name not in batch.reward_components:
            names = sorted(batch.reward_components)
            raise SignalError(f"no trajectory carries a reward named {self.name!r}; this batch has: {names}")
        return on_last_turn(batch.reward_components[self.name].map(lambda x: torch.nan_to_num(x, nan=0.0)))


class OverlongPenalty(Term):
    """Soft length penalty on n sampled tokens: 0 up to limit − cache, then linear, −1 from limit on.

    r = clip((limit − cache − n) / cache, −1, 0)"""

    limit: int
    cache: int = number(above=0, most="limit")

    def __call__(self, batch: Batch) -> Field:
        n = batch.tree.size(TOKEN, TRAJECTORY).to(batch.reward.x.dtype)
        return on_last_turn(((self.limit - self.cache - n) / self.cache).clamp(-1.0, 0.0))


class OnLastToken(Term):
    """Turn rewards as token rewards: each on the last token of its turn."""

    reward: Term = field(default_factory=EnvironmentReward)

    def __call__(self, batch: Batch) -> Field:
        return token_reward(replace(batch, reward=self.reward(batch)))


class NegativeReferenceKL(Term):
    """−k1 = log π_ref − log π_prox of each token, before the update: as a reward its gradient is that of the KL."""

    reads = frozenset({Signal.PROXIMAL, Signal.REFERENCE})

    def __call__(self, batch: Batch) -> Field:
        return batch[Signal.REFERENCE] - batch[Signal.PROXIMAL]


class RunningNormalised(Term):
    """The outcome over its running mean and std, clipped to ±limit, put on the last turn. Statistics of all batches so far.

    ``centre=False``: only divide by the std."""

    limit: float = 10.0
    centre: bool = True
    eps: float = 1e-8

    def initial_state(self) -> State:
        return {"count": 0.0, "mean": 0.0, "square": 0.0}

    def next_state(self, state: State, view: StepView) -> State:
        """Welford over batches: mean and sum of squared deviations."""
        x = view.batch.reward.sum(TRAJECTORY).x.double()
        n, total = float(x.numel()), state["count"] + x.numel()
        shift = float(x.mean()) - state["mean"]
        square = state["square"] + float(((x - x.mean()) ** 2).sum()) + shift**2 * state["count"] * n / total
        return {"count": total, "mean": state["mean"] + shift * n / total, "square": square}

    def __call__(self, batch: Batch) -> Field:
        count, mean, square = (batch[self, name] for name in ("count", "mean", "square"))
        std = where(count > 1, (square / (count - 1).clamp(low=1.0)) ** 0.5, 1.0)
        outcome = batch.reward.sum(TRAJECTORY)
        scaled = (outcome - mean if self.centre else outcome) / (std + self.eps)
        return on_last_turn(scaled.clamp(-self.limit, self.limit).to(outcome.x.dtype))


class PaidAtEnd(Term):
    """A trajectory's value, paid at its last turn."""

    value: Term

    def __call__(self, batch: Batch) -> Field:
        return on_last_turn(self.value(batch))
