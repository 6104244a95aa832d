"""The training loop. Drives protocols only; knows no formula, no method's name and no engine.

    collect groups → mix in other data → pack → measure signals → credit → optimizer steps → publish weights → log → checkpoint

Staleness 0 is synchronous. With staleness k > 0 the learner runs in a thread while the generator continues; requests in
flight survive a weight update, and every token carries the policy version that sampled it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.algebra import diagnostics
from turnwise.algebra.objective import Objective
from turnwise.config.staleness import steps_ahead
from turnwise.core.batch import Batch, pack
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.core.protocols import Generator, Learner, LedgerProtocol, PolicyCheckProtocol
from turnwise.core.records import Group, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.credit.metrics import measure_credit
from turnwise.data.mixing import GroupSource, Mixture, mixed_in
from turnwise.errors import GeneratorLost
from turnwise.recipes.recipe import Recipe
from turnwise.training.batch_metrics import describe
from turnwise.training.checkpoint_schedule import CheckpointSchedule
from turnwise.training.interrupt import in_background
from turnwise.training.kept_tokens import TokenRecorder


@dataclass
class Loop:
    """The steps of one run of one recipe. ``save(step)`` writes a checkpoint; ``report(step, metrics)`` logs a step."""

    recipe: Recipe
    objective: Objective  # the recipe's; keeps the memory of its pieces between steps
    learner: Learner
    generator: Generator
    collector: GroupSource
    mixture: Mixture
    ledger: LedgerProtocol
    policy_check: PolicyCheckProtocol
    save: Callable[[int], None]
    report: Callable[[int, Mapping[str, float]], None]
    steps: int
    seed: int = 0
    schedule: CheckpointSchedule = field(default_factory=lambda: CheckpointSchedule(20))
    start: int = 0
    max_tokens: int = 0  # of a turn; metrics tell by it which limit cut a turn
    keep_tokens: int = 0  # for how many steps the ledger keeps what was computed for each token; 0: none
    stop_requested: Callable[[], bool] = lambda: False  # checked after each step
    after_step: Mapping[int, Callable[[], Any]] = field(default_factory=dict)  # step → an evaluation, say

    async def run(self) -> int:
        """Take all steps, or stop early on request; the number of the last step, which has a checkpoint."""
        done = saved = self.start
        try:
            for step in range(self.start, self.steps):
                await self._step(step)
                done = step + 1
                stopping = self.stop_requested()
                if self.schedule.due(done) or done == self.steps or stopping:
                    self.schedule.write(done, self.save)
                    saved = done
                if stopping:
                    break
                if done in self.after_step:
                    await self.after_step[done]()
        except GeneratorLost:
            if done != saved and self.learner.version == done:  # between two updates: nothing trained is lost
                self.schedule.write(done, self.save)
            raise
        finally:
            await self.collector.stop()
        return done

    async def _step(self, step: int) -> None:
        start = time.perf_counter()
        groups = await self.collector.collect_step(step)
        collected = time.perf_counter()
        self.ledger.train([g.id for g in groups], step)
        metrics: dict[str, float] = {}
        if groups:
            self.collector.issue(step)  # with staleness, rollouts continue while the learner works
            mixed = await self.mixture.mix(groups, step)
            other_data = mixed_in(mixed, groups)
            self.ledger.record_mixed(other_data, step)
            metrics |= {**origins(other_data), **await self._update(mixed, groups, step)}
        else:
            metrics |= describe(groups, self.learner.version)
        self.collector.training = 0
        self.collector.last_metrics = {
            k: metrics[k] for k in ("entropy", "success", "reward") if math.isfinite(metrics.get(k, math.nan))
        }
        learned = time.perf_counter()
        self.learner.version = step + 1
        await self.generator.publish(self.learner.weights(), step + 1)
        if step + 1 < self.steps:
            self.policy_check.published(self.generator, groups, step + 1)
        for reason, count in self.collector.dropped.items():  # since the run was started or resumed
            metrics[f"dropped/{reason[:60]}"] = metrics.get(f"dropped/{reason[:60]}", 0.0) + count
        metrics |= {**self.collector.sampler.metrics(), **self.mixture.metrics()}
        now = time.perf_counter()
        metrics |= {
            "seconds": now - start,
            "seconds/rollout": collected - start,
            "seconds/learn": learned - collected,
            "seconds/publish": now - learned,
            "tokens_per_second": metrics.get("tokens", 0.0) / (now - start),
        }
        self.report(step + 1, metrics)

    async def _update(self, mixed: Sequence[Group], fresh: Sequence[Group], step: int) -> dict[str, float]:
        seed, credited_batches = stable_seed(self.seed, "passes", step), list[Batch]()
        rollout_metrics, advantages = dict[str, float](), dict[str, float]()

        def while_waiting() -> None:
            rollout_metrics.update(describe(fresh, self.learner.version, self.max_tokens))
            advantages.update(mean_advantages(credited_batches[0]))
            self.ledger.flush()

        recorder = TokenRecorder(step, mixed) if self.keep_tokens else None
        hooks = (self.objective, self.policy_check, credited_batches.append, while_waiting, recorder)
        work = lambda: update_policy(self.learner, self.recipe, mixed, seed, *hooks)  # noqa: E731
        metrics = await in_background(work) if steps_ahead(self.collector.staleness) else work()
        if recorder is not None:
            self.ledger.keep_tokens(recorder.columns, step, self.keep_tokens)
        self.mixture.observe(fresh, advantages, step)
        return rollout_metrics | metrics


def update_policy(
    learner: Learner,
    recipe: Recipe,
    groups: Sequence[Group],
    seed: int,
    objective: Objective | None = None,
    policy_check: PolicyCheckProtocol | None = None,
    on_credited: Callable[[Batch], object] | None = None,
    while_waiting: Callable[[], object] | None = None,
    recorder: TokenRecorder | None = None,
) -> dict[str, float]:
    """All optimizer steps on one batch of groups; their metrics.

    An objective kept from step to step keeps the memory of its pieces. ``on_credited`` receives the batch once it has
    advantages. ``while_waiting`` runs once, on the host, while the device computes the first update."""
    objective = objective or recipe.objective
    trained = recorder.watch(objective) if recorder is not None else objective
    batch = pack(groups)
    metrics: dict[str, float] = {}
    if policy_check is not None:
        batch, metrics = policy_check.prepare(learner, batch)
    batch = objective.before_measuring(batch)
    signals = learner.measure(batch, objective.signals_before_batch) if objective.signals_before_batch else {}
    batch = objective.credit(batch.put(signals))
    if on_credited is not None:
        on_credited(batch)
    counts, credit_metrics = Counter[str](), dict[str, float]()
    host_work: list[Callable[[], object]] = [lambda: credit_metrics.update(measure_credit(batch))]
    host_work += [while_waiting] if while_waiting else []

    def run_host_work() -> None:
        while host_work:
            host_work.pop(0)()

    for part in recipe.control.optimizer_steps(batch, seed, learner.measure):
        update_metrics = diagnostics.finish(learner.update(part, trained, run_host_work))
        mismatch = update_metrics.pop("policy_check", math.nan)
        if policy_check is not None and not counts:  # after the first update the policy has moved
            policy_check.check(mismatch, learner.version)
            metrics.setdefault("policy_check", mismatch)
        for name, value in update_metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
            counts[name] += 1
    summed = {"skipped", "policy_check"}  # every other metric is a mean over the updates that report it
    means = {name: v if name in summed else v / counts[name] for name, v in metrics.items()}
    run_host_work()  # if there was no update at all
    return means | credit_metrics


def mean_advantages(batch: Batch) -> dict[str, float]:
    """The mean advantage of each trajectory's tokens, by its id."""
    mean = batch[Column.ADVANTAGE].at(TOKEN).mean(TRAJECTORY)
    return dict(zip(batch.trajectory_ids, mean.x.tolist()))


def origins(other_data: Sequence[Trajectory]) -> dict[str, float]:
    """How many trajectories were mixed in, by origin."""
    return {f"mixed/{kind}": float(n) for kind, n in sorted(Counter(t.origin for t in other_data).items())}


__all__ = ["Loop", "describe", "update_policy"]
