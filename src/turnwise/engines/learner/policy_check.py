"""Check that generator and learner are the same policy, by comparing log-probabilities of freshly sampled tokens.

Off-policy corrections compensate for a learner that has moved on; they also hide one that never matched. This module does not
know how either side computes, only what was recorded and what the learner measures.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from turnwise.core.batch import Batch, pack
from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.core.protocols import Generator, Learner
from turnwise.core.records import Group, Sampling, Task, Trajectory, Turn
from turnwise.core.seeds import stable_seed
from turnwise.core.signals import Signal
from turnwise.errors import PolicyMismatch

TOLERANCE = 1e-3  # of the mean difference when both sides compute in float32
TOLERANCE_BF16 = 3e-2  # when either side computes in bfloat16
MIN_TOKENS, MIN_TRAJECTORIES = 64, 4  # selected by ``fresh_trajectories``, if there are that many
TOLERANCES = {torch.bfloat16: TOLERANCE_BF16, torch.float16: TOLERANCE_BF16, torch.float8_e4m3fn: 0.3}
# a sample of an asynchronous run: dialogues, ids that each begins with, tokens at most, and ids by top-k
DIALOGUES, PROMPT, SAMPLED, TOP_K = 4, 128, 16, 20
PATIENCE = 5.0  # seconds that an update waits for a sample: once, then it takes only those that are there

REMEDY = (
    "Check that both hold the same weights (did the last publish succeed?), compute in the same dtype (bfloat16 needs about "
    f"{TOLERANCE_BF16}), record the temperature that was used, and read the same ids (chat template, special tokens)"
)


class PolicyMismatchReport(NamedTuple):
    """|recorded − learner's| log-probability of the compared tokens."""

    tokens: int
    mean: float
    max: float


def same_policy(
    learner: Learner, records: Batch | Sequence[Trajectory], tolerance: float = TOLERANCE
) -> PolicyMismatchReport:
    """Compare the log-probabilities recorded at sampling with the learner's of the same tokens. Raises PolicyMismatch if the mean
    difference exceeds ``tolerance``, or if no token can be compared."""
    if isinstance(records, Batch):
        batch = records
    else:  # as one group: groups do not matter here
        task = records[0].task if records else Task("policy_check", seed=0)
        batch = pack([Group("policy_check", task, tuple(records))], learner.replay)
    # older tokens are of another policy, an expert's of none of ours
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
    report = PolicyMismatchReport(difference.numel(), float(difference.mean()), float(difference.max()))
    if not report.mean <= tolerance:  # nor is NaN a match
        raise PolicyMismatch(
            f"generator and learner disagree on {report.tokens} tokens of version {learner.version}: log-probabilities "
            f"differ by {report.mean:.2g} on average and {report.max:.2g} at most (tolerance {tolerance:.2g}). {REMEDY}"
        )
    return report


def fresh_trajectories(batch: Batch, version: int) -> Tensor:
    """The first trajectories with tokens that our policy sampled at this version, enough of them for a stable mean."""
    tokens = batch.version.map(lambda v: (v == version).float()).sum(TRAJECTORY)
    ours = ((tokens > 0) & ~(batch.expert | batch.replayed | batch.guided)).x.nonzero().squeeze(1)
    too_few = int((tokens.x[ours].cumsum(0) < MIN_TOKENS).sum())
    return ours[: max(MIN_TRAJECTORIES, too_few + 1)]


@dataclass
class PolicyCheck:
    """Checks every step over all tokens that our policy sampled at this version, at no cost: ``prepare`` marks the tokens, the
    first update reports the mean difference from its own forward pass, ``check`` compares it with the tolerance."""

    tolerance: float = TOLERANCE
    separate: bool = False  # measure a few trajectories apart: the update's own pass is not the policy's (layer noise)

    def prepare(self, learner: Learner, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with fresh tokens marked, and the metrics known before the update."""
        if self.separate:
            owners = fresh_trajectories(batch, learner.version)
            mean = same_policy(learner, batch.select(owners), self.tolerance).mean if owners.numel() else math.nan
            return batch, {"policy_check": mean}
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


# ----------------------------------------------------------------- asynchronous runs


@dataclass
class AsynchronousPolicyCheck(PolicyCheck):
    """With staleness the tokens of a batch are older than the learner, so they cannot show whether its weights arrived. After
    each publication a few tokens are sampled with the new weights: they continue beginnings of dialogues that were trained on,
    are drawn beside the rollouts, and measured before the next update. Adds to the check in the batch, which finds tokens
    of the learner's version in the first steps only."""

    patience: float = PATIENCE
    _sample: Future[list[Trajectory]] | None = None
    _event_loop_thread: int = 0
    _recent: list[tuple[int, float]] = field(default_factory=list)  # (tokens, mean difference) of samples, newest last

    def published(self, generator: Generator, groups: Sequence[Group], version: int) -> None:
        """Begin to sample with the weights of ``version``. Called in the event loop."""
        sampling = sample(generator, beginnings(groups), version)
        self._sample = asyncio.run_coroutine_threadsafe(sampling, asyncio.get_running_loop())
        self._event_loop_thread = threading.get_ident()

    def prepare(self, learner: Learner, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """As in the batch; the metric is the mean difference of the newest samples, where there are some."""
        batch, metrics = super().prepare(learner, batch)
        fresh = [t for t in self._take_sample() if set(t.turns[0].version) == {learner.version}]
        if not fresh:
            return batch, metrics
        report = same_policy(learner, fresh, math.inf)
        self._recent.append((report.tokens, report.mean))
        while sum(count for count, _ in self._recent[1:]) >= MIN_TOKENS:
            del self._recent[0]
        tokens = sum(count for count, _ in self._recent)
        difference = sum(count * mean for count, mean in self._recent) / tokens
        if tokens >= MIN_TOKENS:  # in half precision the mean of a dozen tokens raises false alarms
            self.check(difference, learner.version)
        return batch, {**metrics, "policy_check": difference}

    def _take_sample(self) -> list[Trajectory]:
        """What was sampled since the last publication, if it is there in time (rows of the cache may be short)."""
        pending, self._sample = self._sample, None
        if pending is None:
            return []
        wait([pending], self.patience if threading.get_ident() != self._event_loop_thread else 0.0)
        if pending.cancel():  # not done
            self.patience = 0.0
        # where sampling failed, rollouts meet the same failure and report it
        return [] if pending.cancelled() or pending.exception() else pending.result()


def beginnings(groups: Sequence[Group]) -> list[list[int]]:
    """What dialogues of different groups had read before their last turn, or the first ids of it."""
    in_turn = chain.from_iterable(zip_longest(*(group.trajectories for group in groups)))
    read = (t.ids()[: -len(t.turns[-1].tokens)] for t in in_turn if t is not None and t.sampled)
    return [ids[:PROMPT] for ids in read if ids][:DIALOGUES]


async def sample(generator: Generator, prompts: Sequence[Sequence[int]], version: int) -> list[Trajectory]:
    """Continue each prompt by a few tokens in a dialogue of its own, at temperature 1 and without a filter; with one that keeps
    few ids where the generator lists all that it kept with every token."""
    sessions = [generator.open(stable_seed("policy_check", version, i)) for i in range(len(prompts))]
    try:
        sampling = Sampling(max_tokens=SAMPLED, top_k=TOP_K if getattr(generator, "lists_kept_ids", False) else 0)
        done = await asyncio.gather(*(s.generate(ids, sampling) for s, ids in zip(sessions, prompts)))
    finally:
        for session in sessions:
            session.close()
    trajectories = []
    for i, (prompt, made) in enumerate(zip(prompts, done)):
        ids, logp, versions = tuple(made.tokens), tuple(made.logp), tuple(made.version)
        turn = Turn(tuple(prompt), ids, logp, version=versions, routes=made.routes, kept=made.kept)
        trajectories += [Trajectory(f"{version}/{i}", Task("policy_check", seed=0), (turn,))] if ids else []
    return trajectories
