"""The trainer: one run on one machine, from preparation over cold start, evaluation and RL to its summary.

Each stage writes its result to the run directory before the next begins, so a killed run resumes at the stage it was in.
Knows no engine class and no formula.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turnwise.core.protocols import Generator, Learner, Tracker
from turnwise.core.records import Group
from turnwise.core.signals import Signal
from turnwise.data.mixing import GroupSource, Mixture
from turnwise.errors import SettingError, StoreError
from turnwise.evaluation.evaluator import Evaluator
from turnwise.evaluation.preference import as_evaluation, rank_pairs
from turnwise.observe.profile import PAGE, Profile
from turnwise.observe.tracker_services import SERVICES, service
from turnwise.observe.trackers import JsonLines, TensorBoard, Trackers
from turnwise.rollout.renderer import Renderer
from turnwise.store.atomic import write_json
from turnwise.store.checkpoint import (
    discard_after,
    latest,
    latest_step,
    load_checkpoint,
    save_checkpoint,
    save_model,
    verify_model,
)
from turnwise.store.ledger import SqliteLedger
from turnwise.store.rundir import RunDir
from turnwise.store.write_behind import WriteBehindLedger
from turnwise.training import build, engines
from turnwise.training.cold_start import cold_start
from turnwise.training.collector import Collector, usable
from turnwise.training.data_sources import split
from turnwise.training.events import RunEvents
from turnwise.training.interrupt import RunStopped, StopSignals
from turnwise.training.loop import Loop
from turnwise.training.plan import RunPlan
from turnwise.training.summary import RunSummary

COLD_STEPS = 100
TRACKERS = ("tensorboard", *SERVICES)
GC_THRESHOLD = 50_000  # new containers between cycle collections; a step makes tens of thousands, the default is 700


@dataclass
class Trainer:
    """One run, from its first stage to its last. ``events`` tells listeners what happens."""

    plan: RunPlan
    run_dir: RunDir
    events: RunEvents
    threads: int = 0  # CPU threads to compute with; 0: as many as torch has now

    def __post_init__(self) -> None:
        self.settings, self.recipe, self.env_spec = self.plan.settings, self.plan.recipe, self.plan.env_spec
        self.objective = self.recipe.objective
        self.stop = StopSignals()
        self.held_out: list[Group] = []  # pairs of a file that are ranked and not trained on
        self.paths: dict[str, str] = {}  # which implementation generator and learner use

    def run(self) -> dict[str, Any]:
        """Start or resume the run; returns its summary."""
        if self.run_dir.summary.is_file():
            return dict(json.loads(self.run_dir.summary.read_text()))
        with self.stop.handled(), engines.cpu_threads(self.threads):
            try:
                return self._run()
            except RunStopped as stopped:
                raise RunStopped(stopped.number, self._stopped_message()) from None

    def _stopped_message(self) -> str:
        step, path = latest_step(self.run_dir.checkpoints), self.run_dir.path
        saved = f"at step {step}, with a checkpoint" if step else "before its first checkpoint"
        return f"stopped {saved}; `turnwise resume {path}` continues it"

    def _run(self) -> dict[str, Any]:
        notice = getattr(self.env_spec.env_class, "notice", None)
        if notice is not None:
            self.events.message(notice())
        self._check_files()
        if self.threads and engines.select_device(self.settings).type == "cpu":
            self.events.message(f"CPU threads: {self.threads}")
        with self.events.stage("prepare"):
            tokenizer, model = self._initial()
        self.renderer = Renderer(tokenizer)
        self._warn_of_hidden_tools()
        s, budget = self.settings, self.recipe.budget
        dialogues = budget.groups * budget.size * (s.staleness + 1)
        generator = engines.make_generator(s, self.recipe, model, self.renderer, s.staleness == 0, dialogues)
        learner = engines.make_learner(s, model, self.recipe, build.load_teacher(s))
        self.paths = {"generator": generator.describe(), "learner": learner.describe()}
        for name, path in self.paths.items():
            self.events.message(f"{name}: {path}")
        return asyncio.run(self._learn(learner, generator, tokenizer))

    def _warn_of_hidden_tools(self) -> None:
        """A model whose prompt does not list the tools can only guess at them."""
        tools = list(self.env_spec.tools)
        if tools and not self.renderer.renders_tools(tools):
            names = ", ".join(tool["function"]["name"] for tool in tools)
            self.events.message(
                f"the model's chat template shows no tools, so the prompt does not mention: {names}; give one that does with "
                "--template FILE.jinja, or let the environment's first message say how to call them", "warning",
            )  # fmt: skip

    def _check_files(self) -> None:
        """Refuse to resume without the ledger, or on data files whose content has changed."""
        step, ledger = latest_step(self.run_dir.checkpoints), self.run_dir.ledger
        if step and not ledger.is_file():
            raise StoreError(
                f"{ledger} is missing, and the run has a checkpoint of step {step}: which groups were trained on is unknown; "
                "restore the file, or start a new run"
            )
        path, digests = self.run_dir.path / "sources.json", self.plan.data.digests()
        recorded = json.loads(path.read_text()) if path.is_file() else digests
        changed = [name for name in recorded if recorded[name] != digests.get(name)]
        if changed:
            raise SettingError(
                f"{changed[0]} has changed since this run began; restore the old file, or start a new run"
            )
        if digests and not path.is_file():
            write_json(path, digests)
        if self.plan.data.rows is not None and self.plan.data.rows.unused_columns:
            columns = ", ".join(f"{name} ({n} rows)" for name, n in sorted(self.plan.data.rows.unused_columns.items()))
            self.events.message(
                f"these columns hold neither numbers nor short texts and are not read: {columns}", "warning"
            )

    def _initial(self) -> tuple[Any, Any]:
        """Tokenizer and model that RL starts from: the given ones, or tiny and cold-started; kept in the run directory."""
        s, folder = self.settings, self.run_dir.path / "initial"
        if not folder.is_dir():
            tokenizer = self.plan.tokenizer
            model = build.load_model(s, len(tokenizer))
            steps = (COLD_STEPS if s.model == build.TINY else 0) if s.cold_steps < 0 else s.cold_steps
            if steps:
                cold_start(s, self.env_spec, tokenizer, model, steps, self.events)
            save_model(folder, lambda path: _write(path, model.save_pretrained, tokenizer.save_pretrained))
        verify_model(folder)
        return build.load_tokenizer(s, self.env_spec, folder), build.load_model(s, 0, folder)

    async def _learn(self, learner: Learner, generator: Generator, tokenizer: Any) -> dict[str, Any]:
        s, evaluator = self.settings, build.make_evaluator(self.env_spec, self.renderer, generator)
        with SqliteLedger(self.run_dir.ledger) as written, WriteBehindLedger(written) as ledger:
            start, collector, mixture = self._resume(learner, generator, ledger)
            with contextlib.closing(self._trackers(start)) as self.tracker:
                await generator.publish(learner.weights(), start)
                before = await self._evaluate(evaluator, "before", learner)
                loop = Loop(
                    recipe=self.recipe,
                    objective=self.objective,
                    learner=learner,
                    generator=generator,
                    collector=collector,
                    mixture=mixture,
                    ledger=ledger,
                    policy_check=engines.make_policy_check(s, self.recipe),
                    save=lambda step: self._save(step, learner, collector, mixture),
                    report=self._report,
                    listen=self.events.listen,
                    steps=s.steps,
                    seed=s.seed,
                    checkpoint_every=s.checkpoint_every,
                    start=start,
                    stop_requested=lambda: bool(self.stop.received),
                    after_step=self._evaluations(evaluator, learner),
                )
                with self.events.stage("learn", s.steps), self._profiled(loop), _frozen_gc(), self.stop.deferred():
                    await loop.run()
                self.stop.raise_if_received()
                after = await self._evaluate(evaluator, "after", learner)
            counts = ledger.group_counts()
        save_model(self.run_dir.model, lambda path: _write(path, learner.export, tokenizer.save_pretrained))
        facts = {
            "steps_skipped": learner.skipped,
            "parameters": learner.parameter_count,
            "groups": asdict(counts),
            "device": str(engines.select_device(s)),
            "engines": self.paths,
            **self._ranked(),
        }
        return RunSummary(self.run_dir, s, before, after).write(facts, self.events.seconds)

    @contextlib.contextmanager
    def _profiled(self, loop: Loop) -> Iterator[None]:
        """Profile the loop once, if the settings ask for it."""
        page = self.run_dir.path / PAGE
        if not self.settings.profile or page.is_file():
            yield
            return
        title = f"{self.settings.title} on {self.settings.env}, model {self.settings.model}"
        render = (self.renderer, ("open", "append_sampled", "append_observation"))
        with Profile(self.run_dir.path, title).over(loop, render=render):
            yield
        if page.is_file():
            self.events.message(f"time per step, by phase: {page}")

    def _collector(self, generator: Generator, ledger: WriteBehindLedger) -> GroupSource:
        """Rollouts, or the rows of a file."""
        s = self.settings
        if self.plan.data.offline:
            train, self.held_out = split(self.plan.data.groups(self.renderer), s)
            self.events.message(f"{len(train)} groups to train on, {len(self.held_out)} held out; no rollouts")
            return self.plan.data.offline_source(train, ledger)
        masked = Signal.LOGP_WITHOUT_FEEDBACK in self.objective.signals
        return Collector(
            self.recipe,
            generator,
            self.recipe.sampler.open(self.plan.data.tasks()),
            ledger,
            build.make_play(self.env_spec, self.renderer, build.sampling_settings(s), masked),
            s.seed,
            s.staleness,
            s.max_draws,
        )

    def _resume(
        self, learner: Learner, generator: Generator, ledger: WriteBehindLedger
    ) -> tuple[int, GroupSource, Mixture]:
        """The step of the last checkpoint, a collector that re-issues what was in flight there, and the mixture."""
        s, collector = self.settings, self._collector(generator, ledger)
        mixture = self.plan.data.mixture(self.renderer, ledger.trajectory)
        path = latest(self.run_dir.checkpoints)
        if self.objective.signals & {Signal.REFERENCE, Signal.HELLINGER}:
            learner.reference()  # the initial policy, before anything moves it
        start = 0
        if path is not None:
            saved = load_checkpoint(path)
            learner.load_state_dict({"tensors": saved.tensors, "scalars": saved.state["learner"]})
            collector.sampler.load_state_dict(saved.state["sampler"])
            self.objective.memory.load_state_dict(saved.state["memory"])
            mixture.load_state_dict(saved.state["mixture"])
            collector.last_metrics = dict(saved.state["pulse"])
            start = saved.step
        discard_after(self.run_dir.checkpoints, start)
        owed = ledger.resume(start, keep_finished=s.staleness > 0)
        collector.to_reissue = deque(
            (f"{issued.group_id.split('~')[0]}~{start}", issued.task) for issued in owed.to_reissue
        )
        collector.ready = deque(usable(group)[0] for group in owed.pending)
        return start, collector, mixture

    def _save(self, step: int, learner: Learner, collector: GroupSource, mixture: Mixture) -> None:
        state = learner.state_dict()
        memory = self.objective.memory.state_dict()
        own = {"sampler": collector.sampler.state_dict(), "memory": memory, "pulse": collector.last_metrics}
        facts = {"learner": state["scalars"], "mixture": mixture.state_dict(), **own}
        save_checkpoint(self.run_dir.checkpoints, step, state["tensors"], facts, keep=self.settings.keep_checkpoints)

    def _trackers(self, start: int) -> Trackers:
        return Trackers(
            [JsonLines(self.run_dir.metrics, start + 1), *(self._tracker(t, start) for t in self.settings.trackers)]
        )

    def _tracker(self, kind: str, start: int) -> Tracker:
        if kind == "tensorboard":
            return TensorBoard(self.run_dir.tensorboard, start + 1)
        return service(kind, "turnwise", self.run_dir.path.name, self.settings.as_dict())

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        self.tracker.log(step, metrics)
        self.events.step("learn", step, self.settings.steps, metrics)

    def _evaluations(
        self, evaluator: Evaluator, learner: Learner
    ) -> dict[int, Callable[[], Coroutine[Any, Any, None]]]:
        every = self.settings.eval_every
        if not every:
            return {}

        def at(step: int) -> Callable[[], Coroutine[Any, Any, None]]:
            async def run() -> None:
                if self.settings.eval_tasks:
                    evaluation = await evaluator.run()
                    self.tracker.log(step, {"eval/success": evaluation.summary()["success"]})
                if self.held_out:
                    self.tracker.log(step, {f"ranking/{k}": v for k, v in rank_pairs(learner, self.held_out).items()})

            return run

        return {step: at(step) for step in range(every, self.settings.steps, every)}

    async def _evaluate(self, evaluator: Evaluator, when: str, learner: Learner) -> dict[str, Any]:
        """Evaluate once; a resumed run reads the recorded result. Without tasks, rank the held-out pairs."""
        path = self.run_dir.path / f"evaluation_{when}.json"
        if self.held_out and not (self.run_dir.path / f"ranking_{when}.json").is_file():
            write_json(self.run_dir.path / f"ranking_{when}.json", rank_pairs(learner, self.held_out))
        if not self.settings.eval_tasks:
            return {
                "summary": as_evaluation(json.loads((self.run_dir.path / f"ranking_{when}.json").read_text())),
                "rows": [],
            }
        if not path.is_file():
            with self.events.stage(f"evaluate {when}", self.settings.eval_tasks, "tasks"):
                evaluation = await evaluator.run()
            rows = [
                {"task": t.key, "success": bool(r[0].success), "messages": list(r[0].messages)}
                for t, r in zip(evaluation.tasks, evaluation.trajectories)
            ]
            write_json(path, {"summary": evaluation.summary(self.settings.seed), "rows": rows})
        return dict(json.loads(path.read_text()))

    def _ranked(self) -> dict[str, Any]:
        """How held-out pairs were ranked before and after."""
        paths = {when: self.run_dir.path / f"ranking_{when}.json" for when in ("before", "after")}
        return {"ranking": {w: json.loads(p.read_text()) for w, p in paths.items()}} if self.held_out else {}


def _write(path: Path, *writers: Callable[[Path], Any]) -> None:
    for writer in writers:
        writer(path)


@contextlib.contextmanager
def _frozen_gc() -> Iterator[None]:
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
