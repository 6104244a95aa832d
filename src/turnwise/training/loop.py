"""The training loop. Drives protocols only; knows no formula, no method's name and no engine.

    collect groups → mix in other data → pack → measure signals → credit → optimizer steps → publish weights → log → checkpoint

Staleness 0 is synchronous. With staleness k > 0 the learner runs in a thread while the generator continues; requests in
flight survive a weight update, and every token carries the policy version that sampled it.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.algebra import diagnostics
from turnwise.algebra.objective import Objective
from turnwise.core.batch import Batch, pack
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.core.protocols import Generator, Learner, LedgerProtocol, PolicyCheckProtocol
from turnwise.core.records import Group
from turnwise.core.seeds import stable_seed
from turnwise.credit.metrics import measure_credit
from turnwise.data.mixing import GroupSource, Mixture, mixed_in
from turnwise.errors import EnvironmentFault, GeneratorLost, HostFault, StoreError
from turnwise.recipes.recipe import Recipe
from turnwise.training.interrupt import in_background
from turnwise.training.meter import SlotMeter
from turnwise.training.step_records import TokenRecorder, describe

LOST_SECONDS = 9.0  # of work since the last checkpoint; writing one comes on top
COST_SHARE = 0.05  # of the time since the last checkpoint that writing one may take
GC_THRESHOLD = 50_000  # new containers between cycle collections; a step makes tens of thousands, the default is 700


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
    max_tokens: int = 0  # of a turn; metrics tell by it, and by the context window, which limit cut a turn
    context: int = 0
    keep_tokens: int = 0  # for how many steps the ledger keeps what was computed for each token; 0: none
    remeasure_tokens: int = 0  # of how many tokens of a kept step the log-probability is measured again after it
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
        except (GeneratorLost, HostFault, EnvironmentFault):
            if done != saved and self.learner.version == done:  # between two updates: nothing trained is lost
                with contextlib.suppress(StoreError, OSError):  # on a starved machine: then the last checkpoint serves
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
            metrics |= {f"mixed/{kind}": float(n) for kind, n in sorted(Counter(t.origin for t in other_data).items())}
            metrics |= await self._update(mixed, groups, step)
        else:
            metrics |= describe(groups, self.learner.version)
        self.collector.training = 0
        self.collector.last_metrics = {
            k: metrics[k] for k in ("entropy", "success", "reward") if math.isfinite(metrics.get(k, math.nan))
        } | self.objective.told
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
            rollout_metrics.update(describe(fresh, self.learner.version, self.max_tokens, self.context))
            batch = credited_batches[0]
            advantages.update(zip(batch.trajectory_ids, batch[Column.ADVANTAGE].at(TOKEN).mean(TRAJECTORY).x.tolist()))
            self.ledger.flush()

        recorder = TokenRecorder(step, mixed, self.remeasure_tokens) if self.keep_tokens else None
        hooks = (self.objective, self.policy_check, credited_batches.append, while_waiting, recorder)
        work = lambda: update_policy(self.learner, self.recipe, mixed, seed, *hooks)  # noqa: E731
        metrics = await in_background(work) if not self.collector.synchronous else work()
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
    meter = SlotMeter(recipe, objective)
    trained = meter.watch(recorder.watch(objective) if recorder is not None else objective)
    batch = pack(groups, learner.replay)
    metrics: dict[str, float] = {}
    if policy_check is not None:
        batch, metrics = policy_check.prepare(learner, batch)
    batch = objective.before_measuring(batch)
    signals = learner.measure(batch, objective.signals_before_batch) if objective.signals_before_batch else {}
    given = batch.put(signals)
    batch = objective.credit(given)
    if on_credited is not None:
        on_credited(batch)
    counts, credit_metrics = Counter[str](), dict[str, float]()
    host_work: list[Callable[[], object]] = [
        lambda: credit_metrics.update(measure_credit(batch) | meter.credit(given, batch))
    ]
    host_work += [while_waiting] if while_waiting else []

    def run_host_work() -> None:
        while host_work:
            host_work.pop(0)()

    for part in recipe.control.optimizer_steps(batch, seed, learner.measure):
        update_metrics = diagnostics.finish(learner.update(part, trained, run_host_work))
        update_metrics |= meter.update(update_metrics)
        mismatch = update_metrics.pop("policy_check", math.nan)
        if policy_check is not None and not counts:  # after the first update the policy has moved
            policy_check.check(mismatch, learner.version)
            metrics.setdefault("policy_check", mismatch)
        for name, value in update_metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
            counts[name] += 1
    summed = {"skipped", "policy_check"}  # every other metric is a mean over the updates that report it
    means = {name: v if name in summed else v / counts[name] for name, v in metrics.items()}
    means |= meter.steps(counts["loss"])
    run_host_work()  # if there was no update at all
    return means | credit_metrics | (recorder.measure_after(learner, batch) if recorder is not None else {})


# ----------------------------------------------------------------- beside the steps


@dataclass
class CheckpointSchedule:
    """When a checkpoint is written: every N steps, at the end, and in between as often as its own cost allows, so that a
    killed run loses about ten seconds of work. ``every``: steps between those that are kept; others replace each other."""

    every: int
    clock: Callable[[], float] = time.perf_counter
    seconds: list[float] = field(default_factory=list)  # what each checkpoint took
    between: int | None = None  # step of the last checkpoint, if it was one in between

    def begin(self) -> None:
        """The first step begins now."""
        self._saved = self._checked = self.clock()

    def due(self, done: int) -> bool:
        """Whether to write one after ``done`` steps. Asked once after each step: the next one is expected to take as long."""
        now = self.clock()
        age, step, self._checked = now - self._saved, now - self._checked, now
        cost = self.seconds[-1] if self.seconds else 0.0  # the first one is written to know it
        return done % self.every == 0 or (age + step > LOST_SECONDS and cost <= COST_SHARE * age)

    def write(self, done: int, save: Callable[[int], object]) -> None:
        """Call ``save``, which writes the checkpoint of ``done`` in place of ``between``, and measure it."""
        began = self.clock()
        save(done)
        self.begin()
        self.seconds.append(self._saved - began)
        self.between = None if done % self.every == 0 else done

    def pause(self) -> None:
        """Time until now belongs to no step: an evaluation has ended."""
        self._checked = self.clock()

    def facts(self) -> dict[str, float]:
        """How many were written, and the mean seconds of one, for the summary."""
        count = len(self.seconds)
        return {"written": count, "seconds_each": round(sum(self.seconds) / count, 3) if count else 0.0}


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """Freeze live objects so that the cyclic collector skips them, and collect seldom: libraries hold a million objects, a
    step makes tens of thousands of containers, and few of them form cycles."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
