"""The trainer: one run on one machine, from preparation over cold start, evaluation and RL to its summary.

Each stage writes its result to the run directory before the next begins, so a killed run resumes at the stage it was in.
Knows no engine class and no formula.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.core.protocols import Generator, Learner, Tracker
from turnwise.core.records import Group
from turnwise.core.signals import Signal
from turnwise.data.mixing import GroupSource, Mixture
from turnwise.data.offline_source import split_held_out
from turnwise.errors import RankFault, ServerFault
from turnwise.evaluation.evaluator import Evaluator
from turnwise.evaluation.policy_metrics import NOT_EVALUATED, as_evaluation, rank_pairs
from turnwise.models.fetch import resolve
from turnwise.models.loading import save_lossless
from turnwise.observe.profile import PAGE, Profile
from turnwise.observe.rules import RunHealth, RunLimits
from turnwise.observe.trackers import MESSAGES, JsonLines, MessageLog, Service, TensorBoard, Trackers
from turnwise.store.atomic import check_digest, read_object, read_sealed, write_sealed
from turnwise.store.checkpoint import (
    discard_after,
    keep_newest,
    load_latest,
    save_checkpoint,
    save_model,
    verify_model,
)
from turnwise.store.ledger import SqliteLedger, WriteBehindLedger
from turnwise.store.rundir import RunDir
from turnwise.training import build, engines, memory
from turnwise.training.certificate import run_certificate
from turnwise.training.cold_start import cold_start
from turnwise.training.collector import Collector, StalenessPolicy
from turnwise.training.events import RunEvents
from turnwise.training.interrupt import RunStopped, StopSignals
from turnwise.training.loop import CheckpointSchedule, Loop, frozen_gc
from turnwise.training.plan import RunPlan
from turnwise.training.refusals import staleness_notes
from turnwise.training.resume import changes_since_start, check_files, is_evaluated, require_file, resume_messages
from turnwise.training.rewards import chained, describe_functions, open_judge, open_scorer
from turnwise.training.summary import RunSummary, evaluation_metrics, write_cards
from turnwise.training.task_feed import TaskFeed, score_tasks

COLD_STEPS = 100


@dataclass
class Trainer:
    """One run, from its first stage to its last. ``events`` tells listeners what happens."""

    plan: RunPlan
    run_dir: RunDir
    events: RunEvents
    threads: int = 0  # CPU threads to compute with; 0: as many as torch has now
    stop: StopSignals = field(default_factory=StopSignals)
    notes: Sequence[str] = ()  # what to tell at the start: settings chosen for the model
    died: str = ""  # the id of the process that worked on this run before, if it died without a word

    def __post_init__(self) -> None:
        self.settings, self.recipe, self.env_spec = self.plan.settings, self.plan.recipe, self.plan.env_spec
        self.objective = self.recipe.objective
        self.held_out: list[Group] = []  # pairs of a file that are ranked and not trained on
        self.schedule = CheckpointSchedule(self.settings.checkpoint_every)
        self.paths: dict[str, str] = {}  # which implementation generator and learner use

    def run(self) -> dict[str, Any]:
        """Start or resume the run; returns its summary."""
        if self.run_dir.summary.is_file():
            return read_object(self.run_dir.summary)
        with self.stop.handled(), engines.cpu_threads(self.threads):
            try:
                return self._run()
            except RunStopped as stopped:
                raise RunStopped(stopped.number, self._stopped_message()) from None
            except ServerFault as fault:  # the judge, or the last generator server, is gone
                raise ServerFault(f"{fault}; {self._stopped_message()}") from fault
            except RankFault as fault:  # a process of the learner is gone
                raise RankFault(f"{fault}; {self._stopped_message()}") from fault

    def _stopped_message(self) -> str:
        step, path = self.run_dir.step, self.run_dir.path
        saved = f"at step {step}, with a checkpoint" if step else "before its first checkpoint"
        return f"stopped {saved}; `turnwise resume {path}` continues it"

    def _run(self) -> dict[str, Any]:
        self.messages = MessageLog(self.run_dir.path / MESSAGES, self.events.listen, self.run_dir.step)
        self.events.listen = self.messages
        notice = getattr(self.env_spec.env_class, "notice", None)
        if notice is not None:
            self.events.message(notice())
        check_files(self.run_dir, self.plan.data.digests())
        if self.plan.data.rows is not None and self.plan.data.rows.unused_columns:
            columns = ", ".join(f"{name} ({n} rows)" for name, n in sorted(self.plan.data.rows.unused_columns.items()))
            text = f"these columns hold neither numbers nor short texts and are not read: {columns}"
            self.events.message(text, "warning")
        machine = engines.describe_machine(self.settings, self.threads)
        for text in changes_since_start(self.run_dir, machine):
            self.events.message(text, "warning")
        for text in self.notes:
            self.events.message(text)
        for level, text in staleness_notes(self.settings, self.recipe):
            self.events.message(text, level)
        if self.threads and engines.select_device(self.settings).type == "cpu":
            self.events.message(f"CPU threads: {self.threads}")
        with self.events.stage("prepare"):
            tokenizer, model = self._initial()
        self.settings, notes = memory.report(self.settings, self.recipe, model)
        for text in notes:
            self.events.message(text)
        self.renderer = build.make_renderer(self.settings, tokenizer)
        self._announce_template()
        s, budget = self.settings, self.recipe.budget
        dialogues, exact = s.staleness.capacity(budget.groups, s.steps) * budget.size, s.staleness.deterministic
        warn = partial(self.events.message, level="warning")
        generator = memory.make_generator(s, self.recipe, model, self.renderer, exact, dialogues, tell=warn)
        generator, self.opponents = engines.with_opponents(s, generator, model, self.renderer)
        generator, policy = engines.make_policy_judge(s, generator, model, self.renderer)
        learner = engines.make_learner(s, model, self.recipe, build.load_teacher(s), folder=self.run_dir.path)
        self.events.uses(generator=generator, learner=learner)
        self.paths = {"generator": generator.describe(), "learner": learner.describe()}
        for name, path in self.paths.items():
            self.events.message(f"{name}: {path}")
        rewards = open_scorer(s, self.plan.given.rewards, self.renderer.decode)
        judging = open_judge(s, policy, self.run_dir.path, self.events.listen)
        with engines.closing(learner, generator), rewards as functions, judging as self.judge:
            self.scorer = chained(functions, self.judge)
            judge = [self.judge.describe()] if self.judge else []
            for text in (*self.plan.data.messages(), *describe_functions(functions), *judge):
                self.events.message(text)
            return self.stop.run_loop(self._learn(learner, generator, tokenizer))

    def _announce_template(self) -> None:
        """Tell what the chat template cannot render, and what is sent instead."""
        tools = tuple(self.env_spec.tools)
        for note in self.renderer.conversion.notes(bool(tools)):
            self.events.message(note)
        for warning in self.renderer.warnings(tools):
            self.events.message(warning, "warning")
        if tools and not self.settings.model.tiny:
            self.events.message(f"tool calls: the syntax {self.renderer.syntax.name}")

    def _initial(self) -> tuple[Any, Any]:
        """Tokenizer and model that RL starts from: the given ones, or tiny and cold-started; kept in the run directory."""
        s, folder = self.settings, self.run_dir.path / "initial"
        if not folder.is_dir():
            self._write_initial(folder)  # its model is given up before it is read again
        verify_model(folder)
        return build.load_tokenizer(s, self.env_spec, folder), build.load_model(s, 0, folder)

    def _write_initial(self, folder: Path) -> None:
        s, tokenizer = self.settings, self.plan.tokenizer
        model = self.plan.given.model or build.load_model(s, len(tokenizer))
        steps = (COLD_STEPS if s.model.tiny else 0) if s.cold_steps < 0 else s.cold_steps
        if steps:
            model = copy.deepcopy(model) if self.plan.given.model else model  # the caller's object stays as it is
            cold_start(s, self.env_spec, tokenizer, model, steps, self.events)
        _save(folder, partial(save_lossless, model), tokenizer)

    async def _learn(self, learner: Learner, generator: Generator, tokenizer: Any) -> dict[str, Any]:
        s, spec = self.settings, self.env_spec
        evaluator = build.make_evaluator(spec, self.renderer, generator, self.scorer, learner, self.recipe)
        with SqliteLedger(self.run_dir.ledger) as written, WriteBehindLedger(written) as ledger:
            start, collector, mixture = self._resume(learner, generator, ledger)
            tolerance = engines.policy_check_tolerance(s)
            limits = RunLimits(s.max_tokens, s.context, self.recipe.budget.size, s.temperature, s.lr, tolerance)
            self.health = RunHealth(limits, collector.dropped, self.messages.last_values)
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
                    save=lambda step: self._save(step, learner, collector, mixture, ledger),
                    report=self._report,
                    steps=s.steps,
                    seed=s.seed,
                    schedule=self.schedule,
                    start=start,
                    max_tokens=s.max_tokens,
                    keep_tokens=s.keep_tokens,
                    stop_requested=lambda: bool(self.stop.received),
                    after_step={
                        step: partial(self._evaluate_between, step, evaluator, learner)
                        for step in (range(s.eval_every, s.steps, s.eval_every) if s.eval_every else ())
                    },
                )
                if start in loop.after_step and not is_evaluated(self.run_dir, start):
                    await loop.after_step[start]()  # the run was stopped after this checkpoint, before its evaluation
                with self.events.loop_stage(loop), self._profiled(loop), frozen_gc(), self.stop.deferred():
                    self.schedule.begin()
                    await loop.run()
                self.stop.raise_if_received()
                after = await self._evaluate(evaluator, "after", learner)
            counts = ledger.group_counts()
        self._export(learner, tokenizer)
        paths = {when: self.run_dir.path / f"ranking_{when}.json" for when in ("before", "after") if self.held_out}
        ranking = {when: read_sealed(path) for when, path in paths.items()}  # how held-out pairs were ranked
        facts = {
            "steps_skipped": learner.skipped,
            "parameters": learner.parameter_count,
            "groups": asdict(counts),
            "device": str(engines.select_device(s)),
            "engines": self.paths,
            "checkpoints": self.schedule.facts(),
            "messages": self.messages.warnings,
            **({"ranking": ranking} if self.held_out else {}),
            **run_certificate(s, self.run_dir.ledger),
        }
        summary = RunSummary(self.run_dir, s, before, after).write(facts, self.events.seconds)
        write_cards(self.run_dir, s, summary)
        keep_newest(self.run_dir.checkpoints, 1)  # of a finished run: enough to extend it
        return summary

    def _export(self, learner: Learner, tokenizer: Any) -> None:
        """Write the trained model and, where adapters were trained, these alone."""
        _save(self.run_dir.model, learner.export, tokenizer)
        if self.settings.lora_rank:
            given = not self.settings.model.tiny and self.settings.cold_steps < 1
            base = resolve(self.settings.model.name) if given else str(self.run_dir.path / "initial")
            _save(self.run_dir.adapter, partial(learner.export_adapter, base=base), tokenizer)

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
            train, self.held_out = split_held_out(self.plan.data.groups(self.renderer))
            self.events.message(f"{len(train)} groups to train on, {len(self.held_out)} held out; no rollouts")
            return self.plan.data.offline_source(train, ledger)
        masked = Signal.LOGP_WITHOUT_FEEDBACK in self.objective.signals
        seats = build.seat_plan(s, self.env_spec.env_class, self.renderer, self.opponents)
        return Collector(
            self.recipe,
            generator,
            TaskFeed.open(self.recipe, self.plan.data.tasks()),
            ledger,
            build.make_play(self.env_spec, self.renderer, build.sampling_settings(s), masked, seats),
            s.seed,
            StalenessPolicy(s.staleness.limit, s.staleness.late),
            s.max_draws,
            self.scorer,
            s.steps,
        )

    def _resume(
        self, learner: Learner, generator: Generator, ledger: WriteBehindLedger
    ) -> tuple[int, GroupSource, Mixture]:
        """The step of the last checkpoint, a collector that re-issues what was in flight there, and the mixture."""
        s, collector = self.settings, self._collector(generator, ledger)
        mixture = self.plan.data.mixture(self.renderer, ledger.trajectory, generator, build.sampling_settings(s))
        start, saved = 0, load_latest(self.run_dir.checkpoints)
        if self.objective.signals & {Signal.REFERENCE, Signal.HELLINGER}:
            learner.reference()  # the initial policy, before anything moves it
        if saved is None:
            score_tasks(collector, learner, self.env_spec, self.renderer)
        else:
            learner.load_state_dict({"tensors": saved.tensors, "scalars": saved.state["learner"]})
            collector.sampler.load_state_dict(saved.state["sampler"])
            self.objective.memory.load_state_dict(saved.state["memory"])
            mixture.load_state_dict(saved.state["mixture"])
            collector.last_metrics = dict(saved.state["pulse"])
            if self.opponents is not None:
                self.opponents.load_state_dict(saved.state["opponents"])
            start = saved.step
            check_digest(self.run_dir.ledger, saved.state.get("ledger"), ledger.digest(start))
        discard_after(self.run_dir.checkpoints, start)
        owed = ledger.resume(start, keep_finished=not s.staleness.synchronous)
        for text in resume_messages(self.run_dir, self.died, start, owed):
            self.events.message(text)
        collector.to_reissue = deque(
            (f"{issued.group_id.split('~')[0]}~{start}", issued.task) for issued in owed.to_reissue
        )
        collector.restore(owed.pending, start)
        return start, collector, mixture

    def _save(
        self, step: int, learner: Learner, collector: GroupSource, mixture: Mixture, ledger: WriteBehindLedger
    ) -> None:
        ledger.seal(step)
        state = learner.checkpoint_state()
        memory = self.objective.memory.state_dict()
        facts = {"learner": state["scalars"], "mixture": mixture.state_dict(), "ledger": ledger.digest(step)}
        facts |= {"sampler": collector.sampler.state_dict(), "memory": memory, "pulse": collector.last_metrics}
        facts |= {"opponents": self.opponents.state_dict()} if self.opponents is not None else {}
        keep, replaces = self.settings.keep_checkpoints, self.schedule.between
        save_checkpoint(self.run_dir.checkpoints, step, state["tensors"], facts, keep=keep, replaces=replaces)

    def _trackers(self, start: int) -> Trackers:
        trackers: list[Tracker] = [JsonLines(self.run_dir.metrics, start + 1)]
        for kind in self.settings.trackers:
            if kind == "tensorboard":
                trackers.append(TensorBoard(self.run_dir.tensorboard, start + 1))
            else:
                trackers.append(Service(kind, "turnwise", self.run_dir.path.name, self.settings.as_dict()))
        return Trackers(trackers)

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        metrics = {**metrics, **(self.judge.metrics() if self.judge else {})}
        self.tracker.log(step, metrics)
        self.events.step("learn", step, self.settings.steps, metrics)
        for message in self.health.observe(metrics):
            self.events.message(f"step {step}: {message.text}", "warning", name=message.name, value=message.value)

    async def _evaluate_between(self, step: int, evaluator: Evaluator, learner: Learner) -> None:
        """An evaluation after a step that is not the last: its metrics only."""
        if self.settings.eval_tasks:
            evaluation = await evaluator.run()
            self.tracker.log(step, evaluation_metrics(evaluation.summary()))
        if self.held_out:
            self.tracker.log(step, {f"ranking/{k}": v for k, v in rank_pairs(learner, self.held_out).items()})
        self.schedule.pause()

    async def _evaluate(self, evaluator: Evaluator, when: str, learner: Learner) -> dict[str, Any]:
        """Evaluate once; a resumed run reads the recorded result. Without tasks, rank the held-out pairs, if there are any."""
        path, ranking = (self.run_dir.path / f"{kind}_{when}.json" for kind in ("evaluation", "ranking"))
        for file, wanted in ((path, self.settings.eval_tasks), (ranking, self.held_out)):
            if wanted and when == "before":
                # what is measured now would be taken for the untrained model's result
                require_file(self.run_dir, file, "what the model achieved before training cannot be measured any more")
        if self.held_out and not ranking.is_file():
            write_sealed(ranking, rank_pairs(learner, self.held_out))
        if not self.settings.eval_tasks and not self.held_out:
            return {"summary": dict(NOT_EVALUATED), "rows": []}
        if not self.settings.eval_tasks:
            return {"summary": as_evaluation(read_sealed(ranking)), "rows": []}
        if not path.is_file():
            with self.events.stage(f"evaluate {when}", self.settings.eval_tasks, "tasks"):
                evaluation = await evaluator.run()
            write_sealed(path, {"summary": evaluation.summary(self.settings.seed), "rows": evaluation.rows()})
        return read_sealed(path)


def _save(folder: Path, write: Callable[[Path], Any], tokenizer: Any) -> None:
    """Write a model and its tokenizer, both or nothing."""

    def both(path: Path) -> None:
        write(path)
        tokenizer.save_pretrained(path)

    save_model(folder, both)
