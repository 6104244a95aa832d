"""Binds settings to engines and drives a whole run: prepare, cold start, evaluate, learn, evaluate, report.

Every stage leaves its result in the run directory before the next begins, so that a killed run goes on where it was.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import resource
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from turnwise import assemble
from turnwise.assemble import World
from turnwise.batch import Batch
from turnwise.coldstart import demonstrations, imitate
from turnwise.collect import Collector, usable
from turnwise.data import Task, Trajectory
from turnwise.engines.generator import LocalGenerator
from turnwise.engines.learner import LearnerSettings, LocalLearner
from turnwise.engines.probe import same_policy
from turnwise.errors import SettingError, nearest
from turnwise.evaluate import Evaluation, evaluate
from turnwise.levels import TOKEN, TRAJECTORY
from turnwise.observe.metrics import JsonLines, TensorBoard, Trackers, read_rows
from turnwise.observe.plot import curves
from turnwise.observe.report import transcript
from turnwise.observe.services import SERVICES, service
from turnwise.ports import Learner, Listener, Tracker
from turnwise.recipe import Recipe
from turnwise.rollout.render import Renderer
from turnwise.run import Loop
from turnwise.settings import Settings
from turnwise.signals import Signal
from turnwise.store.aside import write_json
from turnwise.store.checkpoint import discard_after, latest, load_checkpoint, save_checkpoint, save_model
from turnwise.store.ledger import Ledger
from turnwise.store.rundir import RunDir
from turnwise.tasks.sampler import stable_seed

COLD_STEPS = 100
DEMONSTRATIONS = 2048


TRACKERS = ("tensorboard", *SERVICES)


def silent(event: str, facts: Mapping[str, Any]) -> None:
    """A listener that shows nothing."""


@dataclass
class Launch:
    """One run on one machine."""

    settings: Settings
    run: RunDir
    listen: Listener = silent
    own: Recipe | None = None  # instead of a named method
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recipe: Recipe = assemble.recipe_of(self.settings, self.own)
        self.objective = self.recipe.objective
        self.world = World.of(self.settings)
        self.device = assemble.device_of(self.settings)

    # ------------------------------------------------------------- stages
    def go(self) -> dict[str, Any]:
        """Run, or go on with, everything; returns the summary."""
        if self.run.summary.is_file():
            return dict(json.loads(self.run.summary.read_text()))
        notice = getattr(self.world.kind, "notice", None)
        if notice is not None:
            self._say(notice())
        with self._stage("prepare"):
            tokenizer, model = self._initial()
        self.renderer = Renderer(tokenizer)
        generator = self.generator(model)
        learner = assemble.learner_of(self.settings, model, self.recipe)
        return asyncio.run(self._learn(learner, generator, tokenizer))

    def _initial(self) -> tuple[Any, Any]:
        """The model RL starts from: given, or tiny and cold-started; kept in the run directory."""
        folder = self.run.path / "initial"
        if not folder.is_dir():
            tokenizer = assemble.tokenizer_of(self.settings, self.world)
            model = assemble.model_of(self.settings, len(tokenizer))
            steps = self.settings.cold_steps
            steps = (COLD_STEPS if self.settings.model == assemble.TINY else 0) if steps < 0 else steps
            if steps:
                self._cold_start(tokenizer, model, steps)
            save_model(folder, lambda path: _write(path, model.save_pretrained, tokenizer.save_pretrained))
        return assemble.tokenizer_of(self.settings, self.world, folder), assemble.model_of(self.settings, 0, folder)

    def _cold_start(self, tokenizer: Any, model: Any, steps: int) -> None:
        s = self.settings
        if not self.world.demonstrates:
            raise SettingError(f"{s.env} has no `demonstrate`, so there is nothing to imitate; write --cold-steps 0")
        tasks = self.world.tasks("train", "cold start")
        count = min(DEMONSTRATIONS, steps * s.cold_batch)
        with self._stage("demonstrations", count):
            demos = demonstrations(
                [tasks.draw(n) for n in range(count)], self.world.open, Renderer(tokenizer), self.world.limits
            )
        share = sum(bool(t.success) for t in demos) / len(demos)
        self._say(f"{len(demos)} demonstrations of mixed quality: {share:.0%} of them succeed")
        chosen = LearnerSettings(
            lr=s.cold_lr,
            weight_decay=0.1,
            warmup=min(20, steps),
            schedule="cosine",
            total_steps=steps,
            positions=s.positions,
            dtype=s.dtype,
        )
        learner = LocalLearner(model, chosen, device=self.device)
        with self._stage("cold start", steps):
            began = time.perf_counter()

            def report(step: int, metrics: dict[str, float]) -> None:
                rate = metrics["tokens"] * step / (time.perf_counter() - began)
                shown = {
                    "loss": metrics["loss"],
                    "entropy": metrics.get("entropy", math.nan),
                    "tokens_per_second": rate,
                }
                self.listen("step", {"stage": "cold start", "step": step, "total": steps, **shown})

            imitate(learner, demos, steps, s.cold_batch, stable_seed(s.seed, "cold start"), report)

    async def _learn(self, learner: LocalLearner, generator: LocalGenerator, tokenizer: Any) -> dict[str, Any]:
        s = self.settings
        with Ledger(self.run.ledger) as ledger:
            start, collector = self._resume(learner, generator, ledger)
            self.tracker = Trackers(
                [JsonLines(self.run.metrics, start + 1), *(self._tracker(t, start) for t in s.trackers)]
            )
            await generator.publish(learner.weights(), start)
            before = await self._evaluate(generator, "before")
            loop = Loop(
                recipe=self.recipe,
                objective=self.objective,
                learner=learner,
                generator=generator,
                collector=collector,
                ledger=ledger,
                probe=self._probe,
                save=lambda step: self._save(step, learner, collector),
                report=self._report,
                listen=self.listen,
                steps=s.steps,
                seed=s.seed,
                checkpoint_every=s.checkpoint_every,
                start=start,
                asides=self._asides(generator),
            )
            with self._stage("learn", s.steps):
                await loop.run()
            after = await self._evaluate(generator, "after")
            balance = ledger.balance()
        save_model(self.run.model, lambda path: _write(path, learner.export, tokenizer.save_pretrained))
        self.tracker.close()
        return self._finish(before, after, learner, balance)

    # ------------------------------------------------------------- pieces
    def generator(self, model: Any) -> LocalGenerator:
        s = self.settings
        return LocalGenerator(
            copy.deepcopy(model).to(self.device),
            self.renderer.decode,
            slots=s.slots,
            context=s.context,
            stop_ids=self.renderer.stop_ids,
            deterministic=s.staleness == 0,
            device=self.device,
        )

    def _resume(self, learner: LocalLearner, generator: LocalGenerator, ledger: Ledger) -> tuple[int, Collector]:
        """Where the last checkpoint stands, and a collector that owes what was in flight there."""
        s = self.settings
        sampler = self.recipe.sampler.open(self.world.tasks("train"))
        collector = Collector(
            self.recipe,
            generator,
            sampler,
            ledger,
            assemble.player(self.world, self.renderer, assemble.sampling_of(s)),
            s.seed,
            s.staleness,
            s.max_draws,
        )
        path = latest(self.run.checkpoints)
        if self.objective.needs & {Signal.REFERENCE, Signal.HELLINGER}:
            learner.reference()  # the initial policy, before anything moves it
        start = 0
        if path is not None:
            saved = load_checkpoint(path)
            learner.load_state_dict({"tensors": saved.tensors, "scalars": saved.state["learner"]})
            sampler.load_state_dict(saved.state["sampler"])
            self.objective.memory.load_state_dict(saved.state["memory"])
            start = saved.step
        discard_after(self.run.checkpoints, start)
        owed = ledger.resume(start, keep_finished=s.staleness > 0)
        collector.again = deque((f"{issued.group_id.split('~')[0]}~{start}", issued.task) for issued in owed.again)
        collector.ready = deque(usable(group)[0] for group in owed.pending)
        return start, collector

    def _save(self, step: int, learner: LocalLearner, collector: Collector) -> None:
        state = learner.state_dict()
        memory = self.objective.memory.state_dict()
        facts = {"learner": state["scalars"], "sampler": collector.sampler.state_dict(), "memory": memory}
        save_checkpoint(self.run.checkpoints, step, state["tensors"], facts, keep=self.settings.keep_checkpoints)

    def _probe(self, learner: Learner, batch: Batch) -> float:
        """Are generator and learner the same policy? Asked of a few fresh trajectories after each publication."""
        fresh = (batch.version.x == learner.version).nonzero().squeeze(1)
        if not fresh.numel():
            return math.nan
        owners = batch.tree.ancestor(TOKEN, TRAJECTORY)[fresh].unique()[:4]
        return same_policy(learner, batch.select(owners), self.settings.probe_tolerance).mean

    def _tracker(self, kind: str, start: int) -> Tracker:
        if kind == "tensorboard":
            return TensorBoard(self.run.tensorboard, start + 1)
        return service(kind, "turnwise", self.run.path.name, self.settings.as_dict())

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        self.tracker.log(step, metrics)
        self.listen("step", {"stage": "learn", "step": step, "total": self.settings.steps, **metrics})

    def _asides(self, generator: LocalGenerator) -> dict[int, Callable[[], Coroutine[Any, Any, None]]]:
        every = self.settings.eval_every
        if not every:
            return {}

        def at(step: int) -> Callable[[], Coroutine[Any, Any, None]]:
            async def run() -> None:
                found = await self.held_out(generator)
                self.tracker.log(step, {"eval/success": found.summary()["success"]})

            return run

        return {step: at(step) for step in range(every, self.settings.steps, every)}

    # --------------------------------------------------------- evaluation
    async def held_out(self, generator: LocalGenerator, split: str = "held_out") -> Evaluation:
        s = self.settings
        tasks = self.world.tasks(split)
        sampling = assemble.sampling_of(s, s.eval_temperature)
        play = assemble.player(self.world, self.renderer, sampling)

        def one(key: str, task: Task, sample: int) -> Coroutine[Any, Any, Trajectory]:
            return play(key, task, generator.open(stable_seed(s.seed, "evaluate", key)))

        return await evaluate([tasks.draw(n) for n in range(s.eval_tasks)], s.eval_samples, one, wave=s.slots)

    async def _evaluate(self, generator: LocalGenerator, when: str) -> dict[str, Any]:
        """Evaluate once; a resumed run reads what it already knows."""
        path = self.run.path / f"evaluation_{when}.json"
        if not path.is_file():
            with self._stage(f"evaluate {when}", self.settings.eval_tasks):
                found = await self.held_out(generator)
            rows = [
                {"task": t.key, "success": bool(r[0].success), "messages": list(r[0].messages)}
                for t, r in zip(found.tasks, found.trajectories)
            ]
            write_json(path, {"summary": found.summary(self.settings.seed), "rows": rows})
        return dict(json.loads(path.read_text()))

    # ------------------------------------------------------------- ending
    def _finish(
        self, before: dict[str, Any], after: dict[str, Any], learner: LocalLearner, balance: Any
    ) -> dict[str, Any]:
        s = self.settings
        rows = read_rows(self.run.metrics)
        summary = {
            "run": str(self.run.path),
            "method": s.method,
            "environment": s.env,
            "seed": s.seed,
            "success_before": _brief(before["summary"]),
            "success_after": _brief(after["summary"]),
            "steps": s.steps,
            "steps_skipped": learner.skipped,
            "tokens": int(sum(row.get("tokens", 0) for row in rows)),
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            "parameters": sum(p.numel() for p in learner.model.parameters()),
            "groups": asdict(balance),
            "device": str(self.device),
        }
        ends = [
            {"step": 0, "eval/success": before["summary"]["success"]},
            {"step": s.steps, "eval/success": after["summary"]["success"]},
        ]
        curves([ends[0], *rows, ends[1]], self.run.curves, title=f"{s.method} on {s.env}, seed {s.seed}")
        self._transcripts(before["rows"], after["rows"])
        self.run.write_summary(summary)
        return summary

    def _transcripts(self, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
        """A failure before and the same task after, preferably solved."""
        pairs = [(b, a) for b, a in zip(before, after) if not b["success"]] or list(zip(before, after))
        solved = [pair for pair in pairs if pair[1]["success"]] or pairs
        b, a = max(solved, key=lambda pair: len(pair[1]["messages"]))  # the longest shows most
        text = "\n".join(
            f"## {title}: {'solved' if row['success'] else 'failed'}\n\n{transcript(row['messages'])}\n"
            for title, row in (("Before RL", b), ("After RL", a))
        )
        self.run.transcripts.write_text(f"# One held-out task, before and after\n\n`{b['task']}`\n\n{text}")

    def _stage(self, name: str, total: int = 0) -> _Stage:
        return _Stage(self, name, total)

    def _say(self, text: str, level: str = "info") -> None:
        self.listen("message", {"level": level, "text": text})


@dataclass
class _Stage:
    """Announces a stage and keeps its time."""

    owner: Launch
    name: str
    total: int

    def __enter__(self) -> None:
        self.owner.listen("stage", {"name": self.name, "total": self.total})
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        taken = time.perf_counter() - self.began
        self.owner.seconds[self.name] = self.owner.seconds.get(self.name, 0.0) + taken


def _write(path: Path, *writers: Callable[[Path], Any]) -> None:
    for writer in writers:
        writer(path)


def _brief(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: summary[k]
        for k in ("success", "interval", "tasks", "samples", "turns", "tool_calls", "tool_errors", "by_difficulty")
    }


# --------------------------------------------------------------- the Python API


def train(listen: Listener = silent, recipe: Recipe | None = None, **settings: Any) -> dict[str, Any]:
    """Train an agent; the summary of the run.

    ``train(method="grpo", env="calculator", steps=50)``, or with pieces of your own: ``train(recipe=Recipe(...), ...)``
    """
    chosen = Settings.of({**settings, "method": "own"} if recipe else settings)
    described = repr(assemble.examine(chosen, recipe))  # refuses before anything is written
    for kind in chosen.trackers:
        if kind not in TRACKERS:
            raise SettingError(f"there is no tracker {kind!r}; {nearest(kind, TRACKERS)}")
    run = RunDir.create(chosen.out, chosen.name or free_name(chosen), chosen.as_dict(), described, chosen.seed)
    return Launch(chosen, run, listen, recipe).go()


def resume(path: str | Path, listen: Listener = silent, recipe: Recipe | None = None) -> dict[str, Any]:
    """Go on with a run that was stopped at any moment. A run with a recipe of your own needs it again."""
    run = RunDir.open(path)
    facts = run.facts()
    launch = Launch(Settings.of(facts["settings"]), run, listen, recipe)
    if repr(launch.recipe) != facts["recipe"]:
        raise SettingError(f"this run was started with another recipe: {facts['recipe']}")
    return launch.go()


def free_name(settings: Settings) -> str:
    env = settings.env.split(":")[-1].replace(".", "-")
    base = f"{settings.method}-{env}-s{settings.seed}"
    n = 1
    while (Path(settings.out) / f"{base}-{n}").exists():
        n += 1
    return f"{base}-{n}"


def dry_run(listen: Listener = silent, **settings: Any) -> dict[str, Any]:
    """Everything up to one real batch and one real update, in a folder that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = {**settings, "out": folder, "name": "dry", "steps": 1, "eval_tasks": 4, "trackers": ()}
        if int(wanted.get("cold_steps", -1)) != 0 and wanted.get("model", "tiny") == "tiny":
            wanted["cold_steps"] = 2
        return train(listen, **wanted)
