"""Check that generator and learner are the same policy, by comparing log-probabilities of freshly sampled tokens.

Off-policy corrections compensate for a learner that has moved on; they also hide one that never matched. This module does not
know how either side computes, only what was recorded and what the learner measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.core.batch import Batch, pack
from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.core.protocols import Generator, Learner
from turnwise.core.records import Group, Task, Trajectory
from turnwise.core.signals import Signal
from turnwise.errors import PolicyMismatch

TOLERANCE = 1e-3  # of the mean difference when both sides compute in float32
TOLERANCE_BF16 = 3e-2  # when either side computes in bfloat16
MIN_TOKENS, MIN_TRAJECTORIES = 64, 4  # selected by ``fresh_trajectories``, if there are that many
TOLERANCES = {torch.bfloat16: TOLERANCE_BF16, torch.float16: TOLERANCE_BF16, torch.float8_e4m3fn: 0.3}

REMEDY = (
    "Check that both hold the same weights (did the last publish succeed?), compute in the same dtype (bfloat16 needs about "
    f"{TOLERANCE_BF16}), record the temperature that was used, and read the same ids (chat template, special tokens)"
)


@dataclass(frozen=True, slots=True)
class PolicyMismatchReport:
    """|recorded − learner's| log-probability of the compared tokens."""

    tokens: int
    mean: float
    max: float
    tolerance: float

    @property
    def matches(self) -> bool:
        return self.mean <= self.tolerance


def same_policy(
    learner: Learner, records: Batch | Sequence[Trajectory], tolerance: float = TOLERANCE
) -> PolicyMismatchReport:
    """Compare the log-probabilities recorded at sampling with the learner's of the same tokens.

    Only tokens sampled at the learner's version count, and no expert's. Raises PolicyMismatch if the mean difference exceeds
    ``tolerance``, or if no token can be compared."""
    batch = records if isinstance(records, Batch) else _pack(records)
    fresh = ((batch.version.x == learner.version) & ~batch.expert.at(TOKEN).x).nonzero().squeeze(1)
    if not fresh.numel():
        versions = sorted(set(batch.version.x.tolist()))
        raise PolicyMismatch(
            f"nothing to compare: the learner is at version {learner.version}, the {batch.version.x.numel()} recorded "
            f"tokens are of versions {versions}; publish the learner's weights and sample again"
        )
    logp = learner.measure(batch, frozenset({Signal.LOGP}))[Signal.LOGP].x
    recorded = batch.behaviour.x + batch.mass.x  # undo the renormalisation of top-p and top-k
    difference = (logp - recorded.to(logp.dtype)).abs()[fresh]
    report = PolicyMismatchReport(difference.numel(), float(difference.mean()), float(difference.max()), tolerance)
    if not report.matches:
        raise PolicyMismatch(
            f"generator and learner disagree on {report.tokens} tokens of version {learner.version}: log-probabilities "
            f"differ by {report.mean:.2g} on average and {report.max:.2g} at most (tolerance {tolerance:.2g}). {REMEDY}"
        )
    return report


def fresh_trajectories(batch: Batch, version: int) -> Tensor:
    """The first trajectories with tokens that our policy sampled at this version, enough of them for a stable mean: the mean of
    a dozen tokens raises false alarms."""
    tokens = batch.version.map(lambda v: (v == version).float()).sum(TRAJECTORY)
    ours = ((tokens > 0) & ~(batch.expert | batch.replayed | batch.guided)).x.nonzero().squeeze(1)
    too_few = int((tokens.x[ours].cumsum(0) < MIN_TOKENS).sum())
    return ours[: max(MIN_TRAJECTORIES, too_few + 1)]


@dataclass(frozen=True)
class PolicyCheck:
    """Checks every step over all tokens that our policy sampled at this version, at no cost: ``prepare`` marks the tokens, the
    first update reports the mean difference from its own forward pass, ``check`` compares it with the tolerance."""

    tolerance: float = TOLERANCE

    def prepare(self, learner: Learner, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with fresh tokens marked, and the metrics known before the update."""
        ours = ~(batch.expert | batch.replayed | batch.guided)
        return batch.put(current_version=ours.at(TOKEN) & batch.version.map(lambda v: v == learner.version)), {}

    def published(self, generator: Generator, groups: Sequence[Group], version: int) -> None:
        """Nothing to do: the next batch is sampled at this version."""

    def check(self, difference: float, version: int) -> None:
        """Raise PolicyMismatch if the difference exceeds the tolerance. NaN passes: no token was fresh."""
        if difference > self.tolerance:
            raise PolicyMismatch(
                f"generator and learner disagree on the tokens of version {version}: log-probabilities differ by "
                f"{difference:.2g} on average (tolerance {self.tolerance:.2g}). {REMEDY}"
            )


@dataclass(frozen=True)
class SeparatePolicyCheck(PolicyCheck):
    """Measures a few trajectories in a separate forward pass, for updates whose own pass is not the policy's (layer noise)."""

    def prepare(self, learner: Learner, batch: Batch) -> tuple[Batch, dict[str, float]]:
        owners = fresh_trajectories(batch, learner.version)
        difference = same_policy(learner, batch.select(owners), self.tolerance).mean if owners.numel() else math.nan
        return batch, {"policy_check": difference}


def _pack(trajectories: Sequence[Trajectory]) -> Batch:
    """Pack all trajectories as one group; groups do not matter here."""
    task = trajectories[0].task if trajectories else Task("policy_check", seed=0)
    return pack([Group("policy_check", task, tuple(trajectories))])
