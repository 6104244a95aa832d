"""The loop. Ports in, steps out; it knows no formula, no method's name and no engine.

    gather groups → mix in → pack → measure signals → credit → optimiser steps → publish → record → checkpoint

Synchronous is staleness 0. With staleness k > 0 the learner works in a thread while the generator goes on; requests in
flight survive a publication and every token carries the version that sampled it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.algebra import diagnostics
from turnwise.algebra.objective import Objective
from turnwise.core.batch import Batch, pack
from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.core.protocols import Generator, Learner, Ledger, Listener, Probe
from turnwise.core.records import Group, Status, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.credit.metrics import diagnose
from turnwise.data.mixing import Mixture, Source, foreign
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.strategies import DRAFT_TOKENS


@dataclass
class Loop:
    """One run of one recipe. ``save(step)`` writes a checkpoint; ``report(step, metrics)`` logs a step."""

    recipe: Recipe
    objective: Objective  # of the recipe; its memory outlives the steps
    learner: Learner
    generator: Generator
    collector: Source
    mixture: Mixture
    ledger: Ledger
    probe: Probe
    save: Callable[[int], None]
    report: Callable[[int, Mapping[str, float]], None]
    listen: Listener
    steps: int
    seed: int = 0
    checkpoint_every: int = 20
    start: int = 0
    asides: Mapping[int, Callable[[], Any]] = field(default_factory=dict)  # coroutines to run after a step (evaluation)

    async def run(self) -> None:
        try:
            for step in range(self.start, self.steps):
                await self._step(step)
                done = step + 1
                if done % self.checkpoint_every == 0 or done == self.steps:
                    self.ledger.seal(done)
                    self.save(done)
                if done in self.asides:
                    await self.asides[done]()
        finally:
            await self.collector.stop()

    async def _step(self, step: int) -> None:
        began = time.perf_counter()
        groups = await self.collector.gather(step)
        gathered = time.perf_counter()
        self.ledger.train([g.id for g in groups], step)
        metrics: dict[str, float] = {}
        if groups:
            self.collector.pump(step)  # with staleness, rollouts go on while the learner works
            mixed = await self.mixture.mix(groups, step)
            extra = foreign(mixed, groups)
            self.ledger.mix(extra, step)
            metrics |= {**origins(extra), **await self._improve(mixed, groups, step)}
        else:
            metrics |= describe(groups, self.learner.version)
            self.listen(
                "message", {"level": "warning", "text": f"step {step}: no group could be trained on; see dropped/*"}
            )
        self.collector.training = 0
        self.collector.pulse = {
            k: metrics[k] for k in ("entropy", "success", "reward") if math.isfinite(metrics.get(k, math.nan))
        }
        learned = time.perf_counter()
        self.learner.version = step + 1
        await self.generator.publish(self.learner.weights(), step + 1)
        metrics |= {f"dropped/{reason[:60]}": float(n) for reason, n in self.collector.dropped.items()}
        metrics |= {**self.collector.sampler.metrics(), **self.mixture.metrics()}
        now = time.perf_counter()
        metrics |= {
            "seconds": now - began,
            "seconds/gather": gathered - began,
            "seconds/learn": learned - gathered,
            "seconds/publish": now - learned,
            "tokens_per_second": metrics.get("tokens", 0.0) / (now - began),
        }
        self.report(step + 1, metrics)

    async def _improve(self, mixed: Sequence[Group], fresh: Sequence[Group], step: int) -> dict[str, float]:
        seed, seen = stable_seed(self.seed, "passes", step), list[Batch]()
        told, credit = dict[str, float](), dict[str, float]()

        def meanwhile() -> None:
            told.update(describe(fresh, self.learner.version))
            credit.update(credited(seen[0]))
            self.ledger.drain()

        rest = (self.objective, self.probe, seen.append, meanwhile)
        work = lambda: improve(self.learner, self.recipe, mixed, seed, *rest)  # noqa: E731
        metrics = await asyncio.to_thread(work) if self.collector.staleness else work()
        self.mixture.observe(fresh, credit, step)
        return told | metrics


def improve(
    learner: Learner,
    recipe: Recipe,
    groups: Sequence[Group],
    seed: int,
    objective: Objective | None = None,
    probe: Probe | None = None,
    watch: Callable[[Batch], object] | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> dict[str, float]:
    """All optimiser steps on one batch of groups. An objective kept from step to step keeps the memory of its pieces;
    ``watch`` sees the batch when it has been credited; ``meanwhile`` is called once, while the first step is computed."""
    objective = objective or recipe.objective
    batch = pack(groups)
    metrics: dict[str, float] = {}
    if probe is not None:
        batch, metrics = probe.mark(learner, batch)
    measured = learner.measure(batch, objective.frozen) if objective.frozen else {}
    batch = objective.credit(batch.put(measured))
    if watch is not None:
        watch(batch)
    said, seen = Counter[str](), dict[str, float]()
    aside: list[Callable[[], object]] = [lambda: seen.update(diagnose(batch)), *([meanwhile] if meanwhile else [])]

    def spend() -> None:
        while aside:
            aside.pop(0)()

    for part in recipe.control.parts_of(batch, seed, learner.measure):
        told = diagnostics.finish(learner.update(part, objective, spend))
        found = told.pop("probe", math.nan)
        if probe is not None and not said:  # afterwards the policy has moved
            probe.judge(found, learner.version)
            metrics.setdefault("probe", found)
        for name, value in told.items():
            metrics[name] = metrics.get(name, 0.0) + value
            said[name] += 1
    summed = {"skipped", "probe"}  # everything else is a mean over the updates of the step that tell of it
    means = {name: v if name in summed else v / said[name] for name, v in metrics.items()}
    spend()  # where there was no step at all
    return means | seen


def credited(batch: Batch) -> dict[str, float]:
    """The mean advantage of each trajectory's tokens, by its id."""
    mean = batch["advantage"].at(TOKEN).mean(TRAJECTORY)
    return dict(zip(batch.keys, mean.x.tolist()))


def origins(extra: Sequence[Trajectory]) -> dict[str, float]:
    """How many rows were mixed in, by whose they are."""
    return {f"mixed/{kind}": float(n) for kind, n in sorted(Counter(t.origin for t in extra).items())}


def describe(groups: Sequence[Group], version: int) -> dict[str, float]:
    """What a person wants to see of a batch of rollouts."""
    trajectories = [t for g in groups for t in g.trajectories]
    if not trajectories:
        return {"groups": 0.0, "trajectories": 0.0, "tokens": 0.0}
    n = len(trajectories)
    turns = [turn for t in trajectories for turn in t.turns]
    judged = [t.success for t in trajectories if t.success is not None]
    versions = [v for turn in turns for v in turn.version]
    flat = sum(len({t.reward for t in g.trajectories}) == 1 for g in groups)
    named = sorted({name for t in trajectories for name in t.rewards})
    drafted = sum(float(t.facts.get(DRAFT_TOKENS, 0.0)) for t in trajectories)
    return {
        "groups": float(len(groups)),
        "trajectories": float(n),
        "tokens": float(sum(t.sampled for t in trajectories)),
        **({"tokens/drafts": drafted} if drafted else {}),
        "success": sum(judged) / len(judged) if judged else float("nan"),
        "reward": sum(t.reward for t in trajectories) / n,
        "turns": len(turns) / n,
        "tool_calls": sum(turn.tool_calls for turn in turns) / n,
        "tool_errors": sum(turn.tool_errors for turn in turns) / n,
        "truncated": sum(t.status == Status.TRUNCATED for t in trajectories) / n,
        "restarts": sum(turn.restart for turn in turns) / n,
        "groups_without_spread": flat / len(groups),
        "staleness": version - sum(versions) / len(versions) if versions else 0.0,
        "staleness/oldest": float(version - min(versions, default=version)),
        "staleness/span": max(map(_span, trajectories), default=0.0),  # versions inside one trajectory
        **{f"reward/{name}": sum(t.rewards.get(name, 0.0) for t in trajectories) / n for name in named},
    }


def _span(trajectory: Trajectory) -> float:
    versions = set().union(*(turn.version for turn in trajectory.turns))
    return float(max(versions) - min(versions)) if versions else 0.0


__all__ = ["Loop", "describe", "improve"]
