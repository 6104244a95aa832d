"""Ratios: how far the policy has moved since the data was sampled, and at which level that is judged."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turnwise.algebra.piece import NOTHING, Now, Piece
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, Field, Level, Tree
from turnwise.core.signals import Signal

LOG_RATIO_LIMIT = 20.0  # e²⁰ is far outside any trust region; beyond it only overflow waits


class Ratio(Piece):
    """Interface: ρ of a micro-batch, differentiable."""

    @property
    def couples(self) -> bool:
        """Whether a token's ratio depends on other trajectories, so that it can only be told of the whole step."""
        return False

    @property
    def corrects(self) -> bool:
        """Whether it compares the policy with what sampled the data."""
        return True

    def __call__(self, now: Now) -> Field:
        raise NotImplementedError


def behaviour(batch: Batch) -> Field:
    """Log-probability when sampled, over the whole vocabulary at the sampling temperature.

    What top-p, top-k or min-p cut away is put back (``mass``), so that an unmoved policy has ratio 1."""
    return batch.behaviour + batch.mass


def moved(now: Now, proximal: bool = False) -> Field:
    """log π − log μ of each token (or from the policy at the start of this batch), held within ±20."""
    anchor = now[Signal.PROXIMAL] if proximal else behaviour(now.batch)
    return (now.logp - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def mismatch(now: Now, level: Level = TOKEN) -> Field:
    """log of π_prox/μ, learner against sampler: of a token, or summed over a turn or trajectory. Held within ±20."""
    log = (now[Signal.PROXIMAL] - behaviour(now.batch)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log if level == TOKEN else log.sum(level).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True)
class Importance(Ratio):
    """ρ = exp( mean over the level of log π − log μ ): TOKEN is PPO's, TURN the turn ratio, TRAJECTORY is GSPO's.

    ``proximal``: measure from the policy at the start of this batch instead of the one that sampled it. ``cap``: largest
    log ρ (each token's own is held within ±20 besides)."""

    level: Level = TOKEN
    proximal: bool = False
    cap: float = LOG_RATIO_LIMIT

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.PROXIMAL}) if self.proximal else NOTHING

    @property
    def corrects(self) -> bool:
        return not self.proximal

    def __call__(self, now: Now) -> Field:
        return moved(now, self.proximal).mean(self.level).clamp(high=self.cap).exp()


@dataclass(frozen=True)
class Product(Ratio):
    """ρ = Π over the level of π/μ: the exact weight of a trajectory (or turn), of large variance."""

    level: Level = TRAJECTORY

    def __call__(self, now: Now) -> Field:
        return moved(now).sum(self.level).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True)
class PerToken(Ratio):
    """The value of a coarser ratio with each token's own gradient: sg[ρ] · exp(log π − sg[log π]).

    A token keeps its own advantage instead of the mean of its turn's. ``cap``: beyond this log ρ, no gradient."""

    ratio: Ratio
    cap: float = LOG_RATIO_LIMIT

    @property
    def corrects(self) -> bool:
        return self.ratio.corrects

    def __call__(self, now: Now) -> Field:
        own = now.logp - now.logp.detach()
        return (self.ratio(now).detach().log() + own).clamp(high=self.cap).exp()


@dataclass(frozen=True)
class OnPolicy(Ratio):
    """ρ = 1 with the gradient of log π: the data counts as sampled from the current policy."""

    @property
    def corrects(self) -> bool:
        return False

    def __call__(self, now: Now) -> Field:
        return (now.logp - now.logp.detach()).exp()


# -------------------------------------------------------------- along a prefix


@dataclass(frozen=True)
class PrefixProduct(Ratio):
    """ρₜ = sg[Π_{i<t} ρᵢ] ρₜ: the exact weight of a token given its prefix, with the token's own gradient."""

    cap: float = 10.0

    def __call__(self, now: Now) -> Field:
        along = moved(now).detach().running_sum(TRAJECTORY)
        return (along + now.logp - now.logp.detach()).clamp(-LOG_RATIO_LIMIT, self.cap).exp()


@dataclass(frozen=True)
class PrefixMinimum(Ratio):
    """ρₜ = sg[min_{i<t} ρᵢ] ρₜ, 1 for the first: the prefix counts as its least likely token, so it cannot explode."""

    def __call__(self, now: Now) -> Field:
        log_ratio = moved(now)
        least = log_ratio.detach().map(lambda x: _earlier_minimum(x, now.batch.tree))
        return (least + log_ratio).exp()


def _earlier_minimum(x: torch.Tensor, tree: Tree) -> torch.Tensor:
    """The smallest earlier value in the same trajectory, 0 for its first token; log₂ n passes instead of a loop."""
    owner = tree.ancestor(TOKEN, TRAJECTORY)
    ahead = lambda v, n, fill: torch.nn.functional.pad(v[:-n], (n, 0), value=fill)  # noqa: E731
    low = torch.where(ahead(owner, 1, -1) == owner, ahead(x, 1, torch.inf), torch.inf) if x.numel() else x
    shift = 1
    while shift < x.numel():
        low = torch.minimum(low, torch.where(ahead(owner, shift, -1) == owner, ahead(low, shift, torch.inf), torch.inf))
        shift *= 2
    return torch.where(torch.isinf(low), 0.0, low)


__all__ = [
    "LOG_RATIO_LIMIT", "Importance", "OnPolicy", "PerToken", "PrefixMinimum", "PrefixProduct", "Product", "Ratio",
    "behaviour", "mismatch", "moved",
]  # fmt: skip
