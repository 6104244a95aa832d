"""The course of a run on one machine: prepare, cold start, evaluate, learn, evaluate, end.

Every stage leaves its result in the run directory before the next begins, so that a killed run goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.protocols import Generator, Tracker
from turnwise.core.records import Group
from turnwise.core.signals import Signal
from turnwise.data.mixing import Mixture, Source
from turnwise.engines.learner.learner import LocalLearner
from turnwise.engines.learner.policy_check import Apart, Probe
from turnwise.errors import SettingError
from turnwise.evaluation.evaluator import Evaluator
from turnwise.evaluation.preference import brief, ranking
from turnwise.observe.profile import PAGE, Profile
from turnwise.observe.tracker_services import SERVICES, service
from turnwise.observe.trackers import JsonLines, TensorBoard, Trackers
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.renderer import Renderer
from turnwise.store.atomic import write_json
from turnwise.store.checkpoint import discard_after, latest, load_checkpoint, save_checkpoint, save_model
from turnwise.store.ledger import Ledger
from turnwise.store.rundir import RunDir
from turnwise.store.write_behind import Behind
from turnwise.training import build
from turnwise.training.cold_start import cold_start
from turnwise.training.collector import Collector, usable
from turnwise.training.data_sources import Supply, split
from turnwise.training.env_spec import World
from turnwise.training.events import Stages
from turnwise.training.loop import Loop
from turnwise.training.summary import Ending

COLD_STEPS = 100
TRACKERS = ("tensorboard", *SERVICES)
SELDOM = 50_000  # new containers before cycles are looked for; Python says 700, and a step makes tens of thousands


@dataclass
class Course:
    """One run, from its first stage to its last."""

    settings: Settings
    run: RunDir
    stages: Stages
    own: Recipe | None = None  # instead of a named method

    def __post_init__(self) -> None:
        self.recipe: Recipe = build.recipe_of(self.settings, self.own)
        self.settings = build.precise(self.settings, self.recipe)
        self.objective = self.recipe.objective
        self.world = World.of(self.settings)
        self.held_back: list[Group] = []
        self.paths: dict[str, str] = {}  # which way generator and learner compute

    @cached_property
    def supply(self) -> Supply:
        """Read when it is first needed: a finished run needs no file any more."""
        return Supply.of(self.settings, self.world, self.recipe)

    def go(self) -> dict[str, Any]:
        """Run, or go on with, everything; returns the summary."""
        if self.run.summary.is_file():
            return dict(json.loads(self.run.summary.read_text()))
        notice = getattr(self.world.kind, "notice", None)
        if notice is not None:
            self.stages.say(notice())
        self._same_files()
        with self.stages.stage("prepare"):
            tokenizer, model = self._initial()
        self.renderer = Renderer(tokenizer)
        self._tell_tools()
        s, budget = self.settings, self.recipe.budget
        dialogues = budget.groups * budget.size * (s.staleness + 1)
        generator = build.drafting_of(s, self.recipe, model, self.renderer, s.staleness == 0, dialogues)
        learner = build.learner_of(self.settings, model, self.recipe)
        engines = {"generator": generator, "learner": learner}
        self.paths = {name: e.describe() for name, e in engines.items() if hasattr(e, "describe")}
        for name, path in self.paths.items():
            self.stages.say(f"{name}: {path}")
        return asyncio.run(self._learn(learner, generator, tokenizer))

    def _tell_tools(self) -> None:
        """A model that is not told of its tools can only guess at them."""
        tools = list(getattr(self.world.kind, "tools", ()))
        if tools and not self.renderer.shows(tools):
            named = ", ".join(tool["function"]["name"] for tool in tools)
            self.stages.say(
                f"the model's chat template shows no tools, so it is not told of: {named}; give one that does with "
                "--template FILE.jinja, or let the environment's first message say how to call them", "warning",
            )  # fmt: skip

    def _same_files(self) -> None:
        """A run goes on from the very rows it began with."""
        path, found = self.run.path / "sources.json", self.supply.digests()
        known = json.loads(path.read_text()) if path.is_file() else found
        changed = [name for name in known if known[name] != found.get(name)]
        if changed:
            raise SettingError(f"{changed[0]} has changed since this run began; bring the old file back, or start anew")
        if found and not path.is_file():
            write_json(path, found)
        if self.supply.rows is not None and self.supply.rows.unused:
            columns = ", ".join(f"{name} ({n} rows)" for name, n in sorted(self.supply.rows.unused.items()))
            self.stages.say(f"not numbers and not short texts, so not read: {columns}", "warning")

    def _initial(self) -> tuple[Any, Any]:
        """The model RL starts from: given, or tiny and cold-started; kept in the run directory."""
        s, folder = self.settings, self.run.path / "initial"
        if not folder.is_dir():
            tokenizer = build.tokenizer_of(s, self.world)
            model = build.model_of(s, len(tokenizer))
            steps = (COLD_STEPS if s.model == build.TINY else 0) if s.cold_steps < 0 else s.cold_steps
            if steps:
                cold_start(s, self.world, tokenizer, model, steps, self.stages)
            save_model(folder, lambda path: _write(path, model.save_pretrained, tokenizer.save_pretrained))
        return build.tokenizer_of(s, self.world, folder), build.model_of(s, 0, folder)

    async def _learn(self, learner: LocalLearner, generator: Generator, tokenizer: Any) -> dict[str, Any]:
        s, evaluator = self.settings, build.evaluator_of(self.world, self.renderer, generator)
        with Ledger(self.run.ledger) as written, Behind(written) as ledger:
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
                    probe=(Apart if self.recipe.smoothing else Probe)(build.tolerance_of(s)),
                    save=lambda step: self._save(step, learner, collector, mixture),
                    report=self._report,
                    listen=self.stages.listen,
                    steps=s.steps,
                    seed=s.seed,
                    checkpoint_every=s.checkpoint_every,
                    start=start,
                    asides=self._asides(evaluator, learner),
                )
                with self.stages.stage("learn", s.steps), self._profiled(loop), _standing():
                    await loop.run()
                after = await self._evaluate(evaluator, "after", learner)
            balance = ledger.balance()
        save_model(self.run.model, lambda path: _write(path, learner.export, tokenizer.save_pretrained))
        facts = {
            "steps_skipped": learner.skipped,
            "parameters": sum(p.numel() for p in learner.model.parameters()),
            "groups": asdict(balance),
            "device": str(build.device_of(s)),
            "engines": self.paths,
            **self._ranked(),
        }
        return Ending(self.run, s, before, after).write(facts, self.stages.seconds)

    @contextlib.contextmanager
    def _profiled(self, loop: Loop) -> Iterator[None]:
        """Where the steps go, once, if that is asked for."""
        page = self.run.path / PAGE
        if not self.settings.profile or page.is_file():
            yield
            return
        title = f"{self.settings.title} on {self.settings.env}, model {self.settings.model}"
        with Profile(self.run.path, title).over(loop, render=(self.renderer, ("open", "hear", "tell"))):
            yield
        if page.is_file():
            self.stages.say(f"where the steps went: {page}")

    def _collector(self, generator: Generator, ledger: Behind) -> Source:
        """Rollouts, or the rows of a file."""
        s = self.settings
        if self.supply.offline:
            learned, self.held_back = split(self.supply.groups(self.renderer), s)
            self.stages.say(f"{len(learned)} groups to learn from, {len(self.held_back)} held back; no rollouts")
            return self.supply.shelf(learned, ledger)
        return Collector(
            self.recipe,
            generator,
            self.recipe.sampler.open(self.supply.tasks()),
            ledger,
            build.player(self.world, self.renderer, build.sampling_of(s), Signal.BLIND in self.objective.needs),
            s.seed,
            s.staleness,
            s.max_draws,
        )

    def _resume(self, learner: LocalLearner, generator: Generator, ledger: Behind) -> tuple[int, Source, Mixture]:
        """Where the last checkpoint stands, a collector that owes what was in flight there, and what is mixed in."""
        s, collector = self.settings, self._collector(generator, ledger)
        mixture = self.supply.mixture(self.renderer, ledger.trajectory)
        path = latest(self.run.checkpoints)
        if self.objective.needs & {Signal.REFERENCE, Signal.HELLINGER}:
            learner.reference()  # the initial policy, before anything moves it
        start = 0
        if path is not None:
            saved = load_checkpoint(path)
            learner.load_state_dict({"tensors": saved.tensors, "scalars": saved.state["learner"]})
            collector.sampler.load_state_dict(saved.state["sampler"])
            self.objective.memory.load_state_dict(saved.state["memory"])
            mixture.load_state_dict(saved.state["mixture"])
            collector.pulse = dict(saved.state["pulse"])
            start = saved.step
        discard_after(self.run.checkpoints, start)
        owed = ledger.resume(start, keep_finished=s.staleness > 0)
        collector.again = deque((f"{issued.group_id.split('~')[0]}~{start}", issued.task) for issued in owed.again)
        collector.ready = deque(usable(group)[0] for group in owed.pending)
        return start, collector, mixture

    def _save(self, step: int, learner: LocalLearner, collector: Source, mixture: Mixture) -> None:
        state = learner.state_dict()
        memory = self.objective.memory.state_dict()
        own = {"sampler": collector.sampler.state_dict(), "memory": memory, "pulse": collector.pulse}
        facts = {"learner": state["scalars"], "mixture": mixture.state_dict(), **own}
        save_checkpoint(self.run.checkpoints, step, state["tensors"], facts, keep=self.settings.keep_checkpoints)

    def _trackers(self, start: int) -> Trackers:
        return Trackers(
            [JsonLines(self.run.metrics, start + 1), *(self._tracker(t, start) for t in self.settings.trackers)]
        )

    def _tracker(self, kind: str, start: int) -> Tracker:
        if kind == "tensorboard":
            return TensorBoard(self.run.tensorboard, start + 1)
        return service(kind, "turnwise", self.run.path.name, self.settings.as_dict())

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        self.tracker.log(step, metrics)
        self.stages.step("learn", step, self.settings.steps, metrics)

    def _asides(
        self, evaluator: Evaluator, learner: LocalLearner
    ) -> dict[int, Callable[[], Coroutine[Any, Any, None]]]:
        every = self.settings.eval_every
        if not every:
            return {}

        def at(step: int) -> Callable[[], Coroutine[Any, Any, None]]:
            async def run() -> None:
                if self.settings.eval_tasks:
                    found = await evaluator.run()
                    self.tracker.log(step, {"eval/success": found.summary()["success"]})
                if self.held_back:
                    self.tracker.log(step, {f"ranking/{k}": v for k, v in ranking(learner, self.held_back).items()})

            return run

        return {step: at(step) for step in range(every, self.settings.steps, every)}

    async def _evaluate(self, evaluator: Evaluator, when: str, learner: LocalLearner) -> dict[str, Any]:
        """Evaluate once; a resumed run reads what it already knows. Without tasks, by the pairs that were held back."""
        path = self.run.path / f"evaluation_{when}.json"
        if self.held_back and not (self.run.path / f"ranking_{when}.json").is_file():
            write_json(self.run.path / f"ranking_{when}.json", ranking(learner, self.held_back))
        if not self.settings.eval_tasks:
            return {"summary": brief(json.loads((self.run.path / f"ranking_{when}.json").read_text())), "rows": []}
        if not path.is_file():
            with self.stages.stage(f"evaluate {when}", self.settings.eval_tasks, "tasks"):
                found = await evaluator.run()
            rows = [
                {"task": t.key, "success": bool(r[0].success), "messages": list(r[0].messages)}
                for t, r in zip(found.tasks, found.trajectories)
            ]
            write_json(path, {"summary": found.summary(self.settings.seed), "rows": rows})
        return dict(json.loads(path.read_text()))

    def _ranked(self) -> dict[str, Any]:
        """How held-back rows were ranked before and after."""
        paths = {when: self.run.path / f"ranking_{when}.json" for when in ("before", "after")}
        return {"ranking": {w: json.loads(p.read_text()) for w, p in paths.items()}} if self.held_back else {}


def _write(path: Path, *writers: Callable[[Path], Any]) -> None:
    for writer in writers:
        writer(path)


@contextlib.contextmanager
def _standing() -> Iterator[None]:
    """What is there before the first step stays until the last: the collector of cycles need not walk through a million objects
    of libraries every few hundred episodes. Nor need it walk through the tokens of each few dozen: a step leaves few cycles."""
    often = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(SELDOM, *often[1:])
    try:
        yield
    finally:
        gc.set_threshold(*often)
        gc.unfreeze()
