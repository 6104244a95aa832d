"""The trainer: one run on one machine, from preparation over cold start, evaluation and RL to its summary.

Each stage writes its result to the run directory before the next begins, so a killed run resumes at the stage it was in.
Knows no engine class and no formula.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import re
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.algebra.aggregate import Mean
from turnwise.algebra.diagnostics import finish
from turnwise.algebra.gate import NoGate
from turnwise.algebra.objective import Objective
from turnwise.algebra.penalty import NegativeLogLikelihood, WeightedPenalty
from turnwise.algebra.ratio import OnPolicy
from turnwise.algebra.value import Constant
from turnwise.config.settings import Settings
from turnwise.core.batch import pack
from turnwise.core.levels import TOKEN
from turnwise.core.protocols import Generator, Learner, Listener, Tracker
from turnwise.core.records import Group, Status, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.core.signals import Signal
from turnwise.data.mixing import GroupSource, Mixture
from turnwise.data.offline_source import split_held_out
from turnwise.errors import EnvironmentFault, HostFault, RankFault, ServerFault, SettingError
from turnwise.evaluation.evaluator import Evaluation, Evaluator
from turnwise.evaluation.policy_metrics import NOT_EVALUATED, as_evaluation, rank_pairs
from turnwise.models.fetch import resolve
from turnwise.models.loading import save_lossless
from turnwise.observe.profile import PAGE, Profile
from turnwise.observe.rules import RunHealth, RunLimits
from turnwise.observe.trackers import MESSAGES, JsonLines, MessageLog, Service, TensorBoard, Trackers
from turnwise.recipes.catalogue import changed_slots
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.episode import EpisodeLimits
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scoring import AnswerLabels
from turnwise.rollout.scripted import play_scripted
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
from turnwise.store.lock import ProcessLock
from turnwise.store.lost_ledger import ledger_since
from turnwise.store.rundir import RunDir
from turnwise.training import build, engines
from turnwise.training.agents import agent_demonstrator, play_demonstration, run_certificate, telling
from turnwise.training.collector import Collector, StalenessPolicy
from turnwise.training.engines import check_resumed_memory
from turnwise.training.interrupt import RunStopped, StopSignals, run_async
from turnwise.training.loop import CheckpointSchedule, Loop, frozen_gc
from turnwise.training.plan import EnvSpec, GivenObjects, RunPlan
from turnwise.training.refusals import (
    LOADED,
    check_model_name,
    held_out_note,
    mechanism_notes,
    rank_places,
    refuse,
    staleness_notes,
)
from turnwise.training.resume import changes_since_start, check_files, is_evaluated, require_file, resume_messages
from turnwise.training.rewards import chained, describe_functions, open_judge, open_model, open_scorer
from turnwise.training.summary import RunSummary, evaluation_metrics, write_cards
from turnwise.training.task_feed import TaskFeed, score_tasks
from turnwise.training.watch import RunEvents, watched

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COLD_STEPS = 100
STOPPING = (ServerFault, RankFault, HostFault, EnvironmentFault)  # what the user can mend, and then resume


@dataclass
class Trainer:
    """One run, from its first stage to its last. ``events`` tells listeners what happens."""

    plan: RunPlan
    run_dir: RunDir
    events: RunEvents
    threads: int = 0  # CPU threads to compute with; 0: as many as torch has now
    stop: StopSignals = field(default_factory=StopSignals)
    notes: Sequence[str] = ()  # what to tell at the start: settings chosen for method and model
    died: str = ""  # the id of the process that worked on this run before, if it died without a word

    def __post_init__(self) -> None:
        self.settings, self.recipe = self.plan.settings, self.plan.recipe
        self.env_spec = telling(self.plan.env_spec, self.events.message)
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
            # the judge, the last generator server or a process of the learner is gone, the machine is starved, or nobody can play
            except STOPPING as fault:
                kind = next(kind for kind in STOPPING if isinstance(fault, kind))
                raise kind(f"{fault}; {self._stopped_message()}") from fault

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
        for text in (*self.notes, *self.plan.data.messages()):
            self.events.message(text)
        notes_at_start = (
            *held_out_note(self.plan),
            *mechanism_notes(self.plan),
            *staleness_notes(self.settings, self.recipe),
        )
        for level, text in notes_at_start:
            self.events.message(text, level)
        if self.threads and engines.select_device(self.settings).type == "cpu":
            self.events.message(f"CPU threads: {self.threads}")
        with self.events.stage("prepare"):
            tokenizer, model = self._initial()
        self.settings, notes = engines.report(self.settings, self.recipe, model)
        for text in notes:
            self.events.message(text)
        self.renderer = build.make_renderer(self.settings, tokenizer)
        # tell what the chat template cannot render, and what is sent instead
        tools = tuple(self.env_spec.tools)
        for note in self.renderer.conversion.notes(bool(tools)):
            self.events.message(note)
        for warning in self.renderer.warnings(tools):
            self.events.message(warning, "warning")
        if tools and not self.settings.model.tiny:
            self.events.message(f"tool calls: the syntax {self.renderer.syntax.name}")
        s, budget = self.settings, self.recipe.budget
        dialogues, exact = s.staleness.capacity(budget.groups, s.steps) * budget.size, s.staleness.deterministic
        warn = partial(self.events.message, level="warning")
        generator = engines.make_generator(s, self.recipe, model, self.renderer, exact, dialogues, tell=warn)
        generator, self.opponents = engines.with_opponents(s, generator, model, self.renderer)
        generator, models = engines.with_local_models(s, generator, model, self.renderer)
        teacher, folder = build.load_teacher(s), self.run_dir.path
        learner = engines.make_learner(s, model, self.recipe, teacher, folder, self.renderer)
        self.events.uses(generator=generator, learner=learner)
        self.paths = {"generator": generator.describe(), "learner": learner.describe()}
        for name, path in self.paths.items():
            self.events.message(f"{name}: {path}")
        rewards = open_scorer(s, self.plan.given.rewards, self.renderer.decode)
        judging = open_judge(s, models, folder, self.events.listen)
        helping = open_model(s, "helper", models, folder, self.events.listen)
        with engines.closing(learner, generator), rewards as functions, judging as judge, helping as self.helper:
            labels = AnswerLabels() if "fact said" in self.recipe.requirements else None
            self.scorer = chained(functions, judge, labels)
            self.asked = tuple(model for model in (judge, self.helper) if model)
            for text in (*describe_functions(functions), *(model.describe() for model in self.asked)):
                self.events.message(text)
            return self.stop.run_loop(self._learn(learner, generator, tokenizer))

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
            self.health = RunHealth(limits, collector.dropped, self.messages.last_values, changed_slots(self.recipe))
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
                    context=s.context,
                    keep_tokens=s.keep_tokens,
                    remeasure_tokens=s.remeasure_tokens,
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
                if self.stop.received:
                    raise RunStopped(self.stop.received)
                after = await self._evaluate(evaluator, "after", learner)
            counts, episodes = ledger.group_counts(), written.episode_counts()
        _save(self.run_dir.model, learner.export, tokenizer)
        if s.lora_rank:  # the adapters alone, too; they name the model that they belong on
            given = not s.model.tiny and s.cold_steps < 1
            base = resolve(s.model.name) if given else str(self.run_dir.path / "initial")
            _save(self.run_dir.adapter, partial(learner.export_adapter, base=base), tokenizer)
        paths = {when: self.run_dir.path / f"ranking_{when}.json" for when in ("before", "after") if self.held_out}
        ranking = {when: read_sealed(path) for when, path in paths.items()}  # how held-out pairs were ranked
        facts = {
            "steps_skipped": learner.skipped,
            "parameters": learner.parameter_count,
            "groups": asdict(counts),
            "episodes": episodes,
            "device": str(engines.select_device(s)),
            "engines": self.paths,
            "checkpoints": self.schedule.facts(),
            "messages": self.messages.warnings,
            **({"ranking": ranking} if self.held_out else {}),
            **({"asked": self.asked[0].totals()} if self.asked else {}),
            **run_certificate(s, self.run_dir.ledger),
        }
        summary = RunSummary(self.run_dir, s, before, after).write(facts, self.events.seconds)
        write_cards(self.run_dir, s, summary)
        keep_newest(self.run_dir.checkpoints, 1)  # of a finished run: enough to extend it
        return summary

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
            build.make_play(self.env_spec, self.renderer, build.sampling_settings(s), masked, seats, self.helper),
            s.seed,
            StalenessPolicy(s.staleness.limit, s.staleness.late),
            s.max_draws,
            self.scorer,
            s.steps,
            helper=self.helper,
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
            if start > (since := ledger_since(self.run_dir)):
                check_digest(self.run_dir.ledger, saved.state.get("ledger"), ledger.digest(start))
            if since:
                self.events.message(
                    f"the ledger is a new one: which groups steps 1 to {since} trained on is unknown", "warning"
                )
        # a later one could not be read: it must not win the next resume
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
        # the ledger first: one that is older than its checkpoint does not know what the weights were trained on
        ledger.seal(step)
        state = learner.checkpoint_state()
        memory = self.objective.memory.state_dict()
        facts = {"learner": state["scalars"], "mixture": mixture.state_dict(), "ledger": ledger.digest(step)}
        facts |= {"sampler": collector.sampler.state_dict(), "memory": memory, "pulse": collector.last_metrics}
        facts |= {"opponents": self.opponents.state_dict()} if self.opponents is not None else {}
        keep, replaces = self.settings.keep_checkpoints, self.schedule.between
        save_checkpoint(self.run_dir.checkpoints, step, state["tensors"], facts, keep=keep, replaces=replaces)

    def _trackers(self, start: int) -> Trackers:
        directory, s = self.run_dir, self.settings
        others: list[Tracker] = [
            TensorBoard(directory.tensorboard, start + 1)
            if kind == "tensorboard"
            else Service(kind, "turnwise", directory.path.name, s.as_dict())
            for kind in s.trackers
        ]
        return Trackers([JsonLines(directory.metrics, start + 1), *others])

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        metrics = {**metrics, **{name: value for model in self.asked for name, value in model.metrics().items()}}
        self.tracker.log(step, metrics)
        self.events.step("learn", step, self.settings.steps, metrics)
        for message in self.health.observe(metrics):
            self.events.message(f"step {step}: {message.text}", "warning", name=message.name, value=message.value)

    async def _evaluate_between(self, step: int, evaluator: Evaluator, learner: Learner) -> None:
        """An evaluation after a step that is not the last: its metrics only."""
        if self.settings.eval_tasks:
            evaluation = await self._run_evaluation(evaluator, f"the evaluation after step {step}")
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
                evaluation = await self._run_evaluation(evaluator, f"the evaluation {when} training")
            write_sealed(path, {"summary": evaluation.summary(self.settings.seed), "rows": evaluation.rows()})
        return read_sealed(path)

    async def _run_evaluation(self, evaluator: Evaluator, what: str) -> Evaluation:
        evaluation = await evaluator.run()
        if note := evaluation.failure_note():  # it counts them as no success
            self.events.message(f"{what}: {note}", "warning")
        return evaluation


def _save(folder: Path, write: Callable[[Path], Any], tokenizer: Any) -> None:
    """Write a model and its tokenizer, both or nothing."""

    def both(path: Path) -> None:
        write(path)
        tokenizer.save_pretrained(path)

    save_model(folder, both)


# ----------------------------------------------------------- a run from its plan


def create_run(plan: RunPlan) -> RunDir:
    """Refuse what only torch and the model's files can tell, then create the run directory."""
    refuse(plan, LOADED)
    s = plan.settings
    # a resumed run uses as many threads: sums depend on it in the last bits
    recorded = {**s.as_dict(), "threads": engines.select_threads(s)}
    offered, chosen = plan.env_spec.tools, plan.notes
    return RunDir.create(s.out, s.name or free_name(s), recorded, repr(plan.recipe), s.seed, offered, chosen)


def start_run(plan: RunPlan, listen: Listener, stop: StopSignals) -> dict[str, Any]:
    """Create the run and train. Returns the summary."""
    run_dir, s = create_run(plan := plan.resolved()), plan.settings
    recorded = Settings.of(run_dir.metadata()["settings"])
    if s.cluster:
        return _on_cluster(run_dir, recorded, plan.notes, listen, stop)
    events = RunEvents(listen)
    with ProcessLock(run_dir.lock), watched(run_dir.path, events, s.env, s.steps):
        return Trainer(plan, run_dir, events, recorded.threads, stop, plan.notes).run()


def check_resumed(run_dir: RunDir, plan: RunPlan) -> None:
    """Refuse to go on where the model is gone, damaged or does not fit, before new settings are recorded and it is loaded."""
    refuse(plan, (rank_places,))
    settings, initial = plan.settings, run_dir.path / "initial"
    if not initial.is_dir():
        # refuse a run that has no copy of its model yet, where the model is gone: resuming cannot name another
        model = settings.model
        try:
            check_model_name(model)
        except SettingError as fault:
            if model.given_object:
                raise
            raise SettingError(
                f"the run {run_dir.path} has not copied its model yet, and the one that it began with is gone: {model}; put it "
                "back there, or start a new run with --model"
            ) from fault
    check_resumed_memory(plan.resolved().settings, plan.recipe, initial)
    recorded = Settings.of(run_dir.metadata()["settings"])
    if initial.is_dir() and settings != recorded:  # otherwise nothing will be recorded
        verify_model(initial)


def continue_run(
    run_dir: RunDir,
    settings: Settings,
    recipe: Recipe | None,
    given: GivenObjects,
    listen: Listener,
    stop: StopSignals,
    message: str = "",
    notes: Sequence[str] = (),
    here: bool = False,
) -> dict[str, Any]:
    """Continue a run from its last checkpoint. Returns the summary; that of a finished run if nothing is left to do. ``here``: in
    this process, also where the settings name a cluster."""
    plan = RunPlan.from_settings(settings, recipe, given)
    recorded = run_dir.metadata()["recipe"]
    if repr(plan.recipe) != recorded:
        raise SettingError(f"this run was started with another recipe: {recorded}")
    events = RunEvents(listen)
    if message:
        updates = plan.recipe.control.updates
        factor = engines.learner_settings(plan.settings, plan.recipe).lr_factor(run_dir.step * updates)
        events.message(f"{message}; the next step has the learning rate {settings.lr * factor:.3g}")
    if run_dir.summary.is_file():
        return Trainer(plan, run_dir, events, plan.settings.threads, stop).run()
    if settings.cluster and not here:
        return _on_cluster(run_dir, settings, notes, listen, stop)
    with ProcessLock(run_dir.lock) as lock, watched(run_dir.path, events, settings.env, settings.steps):
        return Trainer(plan, run_dir, events, plan.settings.threads, stop, notes, died=lock.left_by).run()


def _on_cluster(
    run_dir: RunDir, settings: Settings, notes: Sequence[str], listen: Listener, stop: StopSignals
) -> dict[str, Any]:
    from turnwise.training.cluster.driver import run_on_cluster  # late: imports ray

    return run_on_cluster(run_dir, settings, learn, notes, listen, stop)


def learn(path: Path, notes: Sequence[str], listen: Listener, stop: StopSignals) -> dict[str, Any]:
    """What the learner of a cluster does: the run of ``path`` from its last checkpoint, or from its beginning."""
    run_dir = RunDir.open(path)
    settings = Settings.of(run_dir.metadata()["settings"])
    return continue_run(run_dir, settings, None, GivenObjects(), listen, stop, notes=notes, here=True)


def free_name(settings: Settings) -> str:
    """A name that no run in the output folder has: method, environment, seed, a number."""
    method, env = (re.sub(r"[^\w+-]+", "-", name.split(":")[-1])[:40] for name in (settings.title, settings.env))
    base = f"{method}-{env}-s{settings.seed}"
    n = 1
    while (Path(settings.out) / f"{base}-{n}").exists():
        n += 1
    return f"{base}-{n}"


# ----------------------------------------------------- the supervised cold start


IMITATION = Objective(
    Constant(0.0), OnPolicy(), NoGate(), Mean(TOKEN), (WeightedPenalty(1.0, NegativeLogLikelihood()),)
)


def cold_start(
    settings: Settings, env_spec: EnvSpec, tokenizer: Any, model: PreTrainedModel, steps: int, events: RunEvents
) -> None:
    """Train ``model`` in place to imitate the environment's demonstrator. A killed one begins again, alike."""
    if not env_spec.can_demonstrate:
        raise SettingError(f"{settings.env} has no `demonstrate`, so there is nothing to imitate; write --cold-steps 0")
    tasks = env_spec.tasks("train", "cold start")
    count = min(settings.cold_demos, steps * settings.cold_batch)
    with events.stage("demonstrations", count, "episodes"):
        demo_tasks = [tasks.draw(n) for n in range(count)]
        renderer, wording = build.make_renderer(settings, tokenizer), agent_demonstrator(env_spec.agent)
        agent = env_spec.agent
        by_agent = partial(play_demonstration, agent, wording) if agent is not None and wording else None
        demos = demonstrations(demo_tasks, env_spec.make, renderer, env_spec.limits, play_one=by_agent)
    events.message(f"{len(demos)} demonstrations of mixed quality: {quality(demos)}")
    learner = engines.make_cold_start_learner(settings, model, steps)
    with events.stage("cold start", steps):
        start = time.perf_counter()

        def report(step: int, metrics: dict[str, float]) -> None:
            rate = metrics["tokens"] * step / (time.perf_counter() - start)
            events.step("cold start", step, steps, {**metrics, "tokens_per_second": rate})

        imitate(learner, demos, steps, settings.cold_batch, stable_seed(settings.seed, "cold start"), report)


def quality(demos: Sequence[Trajectory]) -> str:
    """The share that succeeds, or the mean reward where no success is reported."""
    if all(t.success is None for t in demos):
        return f"their mean reward is {sum(t.reward for t in demos) / len(demos):.3g}"
    return f"{sum(bool(t.success) for t in demos) / len(demos):.0%} of them succeed"


def demonstrations(
    tasks: Sequence[Task],
    open_environment: Callable[[Task], object],
    renderer: Renderer,
    limits: EpisodeLimits,
    player: str = "demonstrator",
    play_one: Callable[..., Coroutine[Any, Any, Trajectory]] | None = None,
) -> list[Trajectory]:
    """One episode of each task: of a scripted policy, or by ``play_one``."""
    play_one = play_one or partial(play_scripted, player)

    async def play() -> list[Trajectory]:
        played: list[Trajectory] = []
        for i in range(0, len(tasks), 64):  # enough at once to hide the tools' latency, few enough to fit in memory
            some = enumerate(tasks[i : i + 64], start=i)
            played += await asyncio.gather(
                *(play_one(open_environment(task), f"demo.{n}", task, renderer, limits) for n, task in some)
            )
        return played

    played = run_async(play())
    if lost := [t for t in played if t.lost]:  # the others would be those that need less of the machine
        raise HostFault(f"the machine failed {len(lost)} of {len(played)} demonstrations: {lost[0].reason}")
    good = [t for t in played if t.status != Status.FAILED]
    if not good:
        raise EnvironmentFault(f"no demonstration could be played: {played[0].reason if played else 'no tasks'}")
    return good


def imitate(
    learner: Learner,
    demos: Sequence[Trajectory],
    steps: int,
    size: int,
    seed: int,
    report: Callable[[int, dict[str, float]], None],
) -> None:
    """``steps`` supervised steps of ``size`` demonstrations each, every pass in a new seeded order."""
    order: list[int] = []
    epoch = 0
    for step in range(steps):
        while len(order) < size:
            fresh = list(range(len(demos)))
            random.Random(f"{seed}/{epoch}").shuffle(fresh)
            order, epoch = order + fresh, epoch + 1
        chosen, order = [demos[i] for i in order[:size]], order[size:]
        batch = pack([Group(str(i), t.task, (t,)) for i, t in enumerate(chosen)])
        metrics = learner.update(IMITATION.credit(batch), IMITATION)
        sampled = float(sum(t.sampled for t in chosen))
        metrics = finish(metrics)
        report(step + 1, {**metrics, "loss": metrics["penalty/NegativeLogLikelihood"], "tokens": sampled})
