"""The policy check of asynchronous runs: after each publication a few tokens are sampled with the new weights and compared.

With staleness the tokens of a batch are older than the learner, so they cannot show whether its weights arrived. The sample
continues beginnings of dialogues that were trained on. It is drawn beside the rollouts, and measured before the next update.
Knows generators, learners and records; not how either side computes.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from turnwise.core.batch import Batch
from turnwise.core.protocols import Generator, Learner
from turnwise.core.records import Completion, Group, Sampling, Task, Trajectory, Turn
from turnwise.core.seeds import stable_seed
from turnwise.engines.learner.policy_check import MIN_TOKENS, PolicyCheck, same_policy

DIALOGUES, PROMPT, SAMPLED = 4, 128, 16  # of one sample: how many, ids that each begins with, tokens at most
KEPT = 20  # ids by top-k
PATIENCE = 5.0  # seconds that an update waits for a sample: once, then it takes only those that are there


@dataclass
class AsynchronousPolicyCheck:
    """Adds to the check of ``in_batch``, which finds tokens of the learner's version in the first steps only."""

    in_batch: PolicyCheck
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
        """As for ``in_batch``; the metric is the mean difference of the newest samples, where there are some."""
        batch, metrics = self.in_batch.prepare(learner, batch)
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

    def check(self, difference: float, version: int) -> None:
        """Raise PolicyMismatch if the difference exceeds the tolerance."""
        self.in_batch.check(difference, version)

    def _take_sample(self) -> list[Trajectory]:
        """What was sampled since the last publication. Nothing where it is late (rows of the cache may be short), or where
        sampling failed: rollouts meet the same failure and report it."""
        pending, self._sample = self._sample, None
        if pending is None:
            return []
        wait([pending], self.patience if threading.get_ident() != self._event_loop_thread else 0.0)
        if pending.cancel():  # not done
            self.patience = 0.0
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
        sampling = Sampling(max_tokens=SAMPLED, top_k=KEPT if getattr(generator, "lists_kept_ids", False) else 0)
        done = await asyncio.gather(*(s.generate(ids, sampling) for s, ids in zip(sessions, prompts)))
    finally:
        for session in sessions:
            session.close()
    return [_trajectory(f"{version}/{i}", *pair) for i, pair in enumerate(zip(prompts, done)) if pair[1].tokens]


def _trajectory(name: str, prompt: Sequence[int], done: Completion) -> Trajectory:
    sampled, version = (tuple(done.tokens), tuple(done.logp)), tuple(done.version)
    turn = Turn(tuple(prompt), *sampled, version=version, routes=done.routes, kept=done.kept)
    return Trajectory(name, Task("policy_check", seed=0), (turn,))
