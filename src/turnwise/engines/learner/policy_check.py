"""Are generator and learner the same policy? Asked of fresh tokens, answered by numbers.

Off-policy corrections forgive a learner that has moved on; they also hide one that was never the same. This module does
not know how either side computes, only what was recorded and what the learner says of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.core.batch import Batch, pack
from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.core.protocols import Learner
from turnwise.core.records import Group, Task, Trajectory
from turnwise.core.signals import Signal
from turnwise.errors import PolicyMismatch

TOLERANCE = 1e-3  # of the mean difference when both sides compute in float32
TOLERANCE_BF16 = 3e-2  # when either computes in bfloat16
TOKENS, TRAJECTORIES = 64, 4  # asked for by ``fresh``, at least
TOLERANCES = {torch.bfloat16: TOLERANCE_BF16, torch.float16: TOLERANCE_BF16, torch.float8_e4m3fn: 0.3}

CHECK = (
    "Check that both hold the same weights (was the last publish taken?), compute in the same dtype (bfloat16 needs about "
    f"{TOLERANCE_BF16}), recorded the temperature really used, and read the same ids (chat template, special tokens)"
)


@dataclass(frozen=True, slots=True)
class Report:
    """|recorded − learner's| log-probability over the compared tokens."""

    tokens: int
    mean: float
    max: float
    tolerance: float

    @property
    def same(self) -> bool:
        return self.mean <= self.tolerance


def same_policy(learner: Learner, records: Batch | Sequence[Trajectory], tolerance: float = TOLERANCE) -> Report:
    """Compare what was recorded when tokens were sampled with what the learner says of the same tokens now.

    Only tokens sampled by the learner's own version count, and no expert's. Raises PolicyMismatch if the mean
    difference exceeds ``tolerance``, or if no token can be compared."""
    batch = records if isinstance(records, Batch) else _pack(records)
    fresh = ((batch.version.x == learner.version) & ~batch.expert.at(TOKEN).x).nonzero().squeeze(1)
    if not fresh.numel():
        seen = sorted(set(batch.version.x.tolist()))
        raise PolicyMismatch(
            f"nothing to compare: the learner is at version {learner.version}, the {batch.version.x.numel()} recorded "
            f"tokens are of versions {seen}; publish the learner's weights and sample again"
        )
    found = learner.measure(batch, frozenset({Signal.LOGP}))[Signal.LOGP].x
    recorded = batch.behaviour.x + batch.mass.x  # what was kept by top-p/k is given back: the whole distribution
    gap = (found - recorded.to(found.dtype)).abs()[fresh]
    report = Report(gap.numel(), float(gap.mean()), float(gap.max()), tolerance)
    if not report.same:
        raise PolicyMismatch(
            f"generator and learner disagree on {report.tokens} tokens of version {learner.version}: log-probabilities "
            f"differ by {report.mean:.2g} on average and {report.max:.2g} at most (tolerance {tolerance:.2g}). {CHECK}"
        )
    return report


def fresh(batch: Batch, version: int) -> Tensor:
    """The first trajectories with tokens that our own policy sampled at this version, as many as give a mean worth looking at:
    over a dozen tokens it would cry wolf."""
    tokens = batch.version.map(lambda v: (v == version).float()).sum(TRAJECTORY)
    ours = ((tokens > 0) & ~(batch.expert | batch.replayed | batch.guided)).x.nonzero().squeeze(1)
    short = int((tokens.x[ours].cumsum(0) < TOKENS).sum())
    return ours[: max(TRAJECTORIES, short + 1)]


@dataclass(frozen=True)
class Probe:
    """Asks it of every step, over all tokens that our own policy sampled at this version, of the pass that is differentiated
    anyway: ``mark`` the tokens, let the first update tell the difference, ``judge`` it."""

    tolerance: float = TOLERANCE

    def mark(self, learner: Learner, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The marked batch, and what is known of it before the update."""
        ours = ~(batch.expert | batch.replayed | batch.guided)
        return batch.put(fresh=ours.at(TOKEN) & batch.version.map(lambda v: v == learner.version)), {}

    def judge(self, found: float, version: int) -> None:
        """Raises PolicyMismatch; a difference that is not a number is nobody's (no token was fresh)."""
        if found > self.tolerance:
            raise PolicyMismatch(
                f"generator and learner disagree on the tokens of version {version}: log-probabilities differ by {found:.2g} on "
                f"average (tolerance {self.tolerance:.2g}). {CHECK}"
            )


@dataclass(frozen=True)
class Apart(Probe):
    """Reads a few trajectories by itself: where the differentiated pass is not the policy's own, as with noise in its layers."""

    def mark(self, learner: Learner, batch: Batch) -> tuple[Batch, dict[str, float]]:
        owners = fresh(batch, learner.version)
        found = same_policy(learner, batch.select(owners), self.tolerance).mean if owners.numel() else math.nan
        return batch, {"probe": found}


def _pack(trajectories: Sequence[Trajectory]) -> Batch:
    """One group of all: who is whose peer does not matter here."""
    task = trajectories[0].task if trajectories else Task("probe", seed=0)
    return pack([Group("probe", task, tuple(trajectories))])
