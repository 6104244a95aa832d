"""Importance ratios of the present policy to the behaviour policy, at the level of a token, turn or trajectory."""

from __future__ import annotations

from turnwise.algebra.piece import NOTHING, MicroBatchView, Piece
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, Field, Level
from turnwise.core.signals import Signal

LOG_RATIO_LIMIT = 20.0  # e²⁰ is far outside any trust region; larger values only overflow


class Ratio(Piece):
    """Interface: ρ of a micro-batch, differentiable."""

    @property
    def couples_trajectories(self) -> bool:
        """Whether a token's ratio depends on other trajectories, so that it must be computed over the whole step."""
        return False

    @property
    def corrects_off_policy(self) -> bool:
        """Whether it compares the policy with the behaviour policy."""
        return True

    def __call__(self, view: MicroBatchView) -> Field:
        raise NotImplementedError


def behaviour(batch: Batch) -> Field:
    """Log-probability under the behaviour policy at the sampling temperature, normalised as the learner's: over the ids that
    top-p, top-k or min-p kept where they are recorded, else over the whole vocabulary, by the recorded ``mass``."""
    return batch.behaviour + batch.mass


def moved(view: MicroBatchView, proximal: bool = False) -> Field:
    """log π − log μ of each token (or against the policy at the start of this batch), clamped to ±20."""
    anchor = view[Signal.PROXIMAL] if proximal else behaviour(view.batch)
    return (view.logp - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def mismatch(view: MicroBatchView, level: Level = TOKEN) -> Field:
    """log of π_prox/μ, learner against sampler: of a token, or summed over a turn or trajectory. Clamped to ±20."""
    log = (view[Signal.PROXIMAL] - behaviour(view.batch)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log if level == TOKEN else log.sum(level).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


class Importance(Ratio):
    """ρ = exp( mean over the level of log π − log μ ): TOKEN is PPO's, TURN the turn ratio, TRAJECTORY is GSPO's."""

    level: Level = TOKEN
    # compare with the policy at the start of this batch instead of the behaviour policy
    proximal: bool = False
    # largest log ρ (each token's log ratio is also clamped to ±20)
    cap: float = LOG_RATIO_LIMIT

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.PROXIMAL}) if self.proximal else NOTHING

    @property
    def corrects_off_policy(self) -> bool:
        return not self.proximal

    def __call__(self, view: MicroBatchView) -> Field:
        return moved(view, self.proximal).mean(self.level).clamp(high=self.cap).exp()


class Product(Ratio):
    """ρ = Π over the level of π/μ: the exact weight of a trajectory (or turn), of large variance."""

    level: Level = TRAJECTORY

    def __call__(self, view: MicroBatchView) -> Field:
        return moved(view).sum(self.level).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


class PerToken(Ratio):
    """The value of a coarser ratio with each token's own gradient: sg[ρ] · exp(log π − sg[log π]).

    A token keeps its own advantage instead of the mean over its turn."""

    ratio: Ratio
    # no gradient above this log ρ
    cap: float = LOG_RATIO_LIMIT

    @property
    def corrects_off_policy(self) -> bool:
        return self.ratio.corrects_off_policy

    def __call__(self, view: MicroBatchView) -> Field:
        straight_through = view.logp - view.logp.detach()
        return (self.ratio(view).detach().log() + straight_through).clamp(high=self.cap).exp()


class OnPolicy(Ratio):
    """ρ = 1 with the gradient of log π: the data is treated as on-policy."""

    corrects_off_policy = False

    def __call__(self, view: MicroBatchView) -> Field:
        return (view.logp - view.logp.detach()).exp()
