"""Rewards: what each turn earned. A reward is a term at TURN; what belongs to the whole episode is paid at its last turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turnwise.algebra.term import Term, check
from turnwise.batch import Batch
from turnwise.errors import SignalError
from turnwise.levels import TOKEN, TRAJECTORY, TURN, Field, where


def paid_at_end(value: Field) -> Field:
    """A TRAJECTORY value as a TURN field: all of it on the last turn."""
    tree = value.tree
    remaining = tree.size(TURN, TRAJECTORY) - tree.index(TURN, TRAJECTORY)
    return where(remaining <= 1, value.at(TURN), 0.0)


@dataclass(frozen=True)
class Environment(Term):
    """What the environment paid."""

    def __call__(self, batch: Batch) -> Field:
        return batch.reward


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
