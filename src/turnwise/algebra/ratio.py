"""Ratios: how far the policy has moved since the data was sampled, and at which level that is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from turnwise.batch import Batch
from turnwise.levels import TOKEN, Field, Level
from turnwise.signals import Signal

LOG_RATIO_LIMIT = 20.0  # e²⁰ is far outside any trust region; beyond it only overflow waits


class Ratio(Protocol):
    @property
    def needs(self) -> frozenset[Signal]: ...

    def __call__(self, batch: Batch, policy: Mapping[Signal, Field]) -> Field: ...


def behaviour(batch: Batch) -> Field:
    """Log-probability when sampled, over the whole vocabulary at the sampling temperature.

    What top-p, top-k or min-p cut away is put back (``mass``), so that an unmoved policy has ratio 1."""
    return batch.behaviour + batch.mass


@dataclass(frozen=True)
class Importance:
    """ρ = exp( mean over the level of log π − log μ ): TOKEN is PPO's, TURN the turn ratio, TRAJECTORY is GSPO's.

    ``proximal``: measure from the policy at the start of this batch instead of the one that sampled it. ``cap``: largest
    log ρ (each token's own is held within ±20 besides)."""

    level: Level = TOKEN
    proximal: bool = False
    cap: float = LOG_RATIO_LIMIT

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({Signal.PROXIMAL}) if self.proximal else frozenset()

    def __call__(self, batch: Batch, policy: Mapping[Signal, Field]) -> Field:
        anchor = batch[Signal.PROXIMAL] if self.proximal else behaviour(batch)
        log_ratio = (policy[Signal.LOGP] - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return log_ratio.mean(self.level).clamp(high=self.cap).exp()


@dataclass(frozen=True)
class PerToken:
    """The value of a coarser ratio with each token's own gradient: sg[ρ] · exp(log π − sg[log π]).

    A token keeps its own advantage instead of the mean of its turn's."""

    ratio: Ratio

    @property
    def needs(self) -> frozenset[Signal]:
        return self.ratio.needs

    def __call__(self, batch: Batch, policy: Mapping[Signal, Field]) -> Field:
        logp = policy[Signal.LOGP]
        return self.ratio(batch, policy).detach() * (logp - logp.detach()).exp()


@dataclass(frozen=True)
class OnPolicy:
    """ρ = 1 with the gradient of log π: the data counts as sampled from the current policy."""

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset()

    def __call__(self, batch: Batch, policy: Mapping[Signal, Field]) -> Field:
        logp = policy[Signal.LOGP]
        return (logp - logp.detach()).exp()
