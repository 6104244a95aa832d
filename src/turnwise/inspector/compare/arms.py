"""Arms and their runs: the one runner of ``compare``, ``sweep`` and ``search``.

An arm is a label and the settings that make it. All arms of a seed play the same tasks with the same draws, from one cold start:
the first run of a seed makes it, the others link to it. A run that exists is continued, or only read. No run outlives the
deadline: it stops after its step, and the same command goes on with it later.
"""

from __future__ import annotations

import itertools
import math
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from turnwise.config.settings import (
    AmountSection,
    EvaluationSection,
    MethodSection,
    OutputSection,
    RewardSection,
    Settings,
)
from turnwise.core.protocols import Listener
from turnwise.core.records import Group
from turnwise.core.signals import Signal
from turnwise.errors import SettingError, TurnwiseError
from turnwise.inspector.compare.comparison import RunOutcome, read_outcome
from turnwise.inspector.queries import RunReader
from turnwise.inspector.replay.replay import link_or_copy
from turnwise.store.atomic import atomic_write
from turnwise.store.rundir import RunDir
from turnwise.training import dry_run
from turnwise.training.interrupt import RunStopped, StopSignals
from turnwise.training.plan import GivenObjects, RunPlan
from turnwise.training.refusals import AT_ONCE, WITH_RECIPE, refuse
from turnwise.training.watch import silent

Variant = tuple[str, Mapping[str, Any]]
PROBE, PROBE_STEPS = "probe", 3
OF_METHOD = {f.name for f in fields(MethodSection)}
# none of these changes the cold start
AFTER_START = {"lr", "schedule", "warmup", "weight_decay", "clip_norm", "critic", "value_lr"}
for part in (MethodSection, AmountSection, RewardSection, EvaluationSection, OutputSection):
    AFTER_START |= {f.name for f in fields(part)}
# slots that act on a batch from the first step on; a penalty may begin with the distance to the start, which is zero there
LEARNT = {"advantage", "reward", "ratio", "gate", "aggregate", "keep", "control", "gradient", "smoothing"}
SAMPLED = ("strategy", "guidance", "replay", "precision")  # arms that differ here have no batch in common
SAME = 0.999  # cosine from which two updates are one
KEPT_NUMBERS = 20_000_000  # of a gradient, evenly spread over it


class BudgetSpent(Exception):
    """The deadline came while a run went on."""


@dataclass(frozen=True)
class Arm:
    """``plan`` is that of its first seed."""

    label: str
    settings: Mapping[str, Any]
    plan: RunPlan = field(compare=False)

    @classmethod
    def of(cls, label: str, settings: Mapping[str, Any]) -> Arm:
        """Refuses settings that cannot run, with the label."""
        try:
            plan = RunPlan.from_caller(settings)
            refuse(plan, (*AT_ONCE, *WITH_RECIPE))
            return cls(label, settings, plan.resolved())
        except SettingError as fault:
            raise SettingError(f"{label}: {fault}") from fault

    @property
    def digest(self) -> tuple[str, str]:
        """Equal for arms that are one and the same: all settings but the method's names, and the pieces that they make."""
        plain = self.plan.settings.as_dict()
        return repr([v for k, v in plain.items() if k not in OF_METHOD]), repr(self.plan.recipe)

    @property
    def start(self) -> str:
        """Equal for arms that begin from one cold start."""
        return repr([v for k, v in self.plan.settings.as_dict().items() if k not in AFTER_START])


def arms_of(variants: Sequence[Variant], settings: Mapping[str, Any]) -> list[Arm]:
    """Refuses arms that are the same, before anything is spent."""
    arms = [Arm.of(label, {**settings, **changes}) for label, changes in variants]
    for a, b in itertools.combinations(arms, 2):
        if a.label == b.label or a.digest == b.digest:
            raise SettingError(
                f"{a.label} and {b.label} are one and the same: equal pieces, equal settings; leave one of them out"
            )
    return arms


@dataclass
class ArmRunner:
    arms: Sequence[Arm]
    folder: Path
    deadline: float = math.inf  # of time.monotonic
    listen: Listener = silent
    changes: dict[str, Any] = field(default_factory=dict)  # for all arms: steps and threads, once they are known
    seconds: list[float] = field(default_factory=list)  # of each run that was trained here, without its cold start
    cold_seconds: float = 0.0

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def path(self, arm: Arm, seed: int) -> Path:
        return self.folder / f"variant{self.arms.index(arm)}-seed{seed}"

    def outcome(self, arm: Arm, seed: int) -> RunOutcome:
        path = self.path(arm, seed)
        if not (path / "summary.json").is_file():
            self._train(arm, path, {"seed": seed, **self.changes})
        return replace(read_outcome(path, arm.label), seed=seed)

    def _train(self, arm: Arm, path: Path, changes: Mapping[str, Any]) -> None:
        seed, began = changes["seed"], time.monotonic()
        others = [self.path(other, seed) for other in self.arms if other.start == arm.start]
        others += (
            [self.folder / PROBE] if seed == self.arms[0].plan.settings.seed and arm.start == self.arms[0].start else []
        )
        starts = [one / "initial" for one in others if one != path and (one / "initial").is_dir()]
        values = {**arm.settings, **changes, "out": str(self.folder), "name": path.name}
        train_run(values, starts[0] if starts else None, self.listen, self.deadline)
        if starts:
            self.seconds.append(time.monotonic() - began)

    # ------------------------------------------------------------------ before any training

    def probe(self, steps: int) -> float:
        """A run of few steps of the first arm. Returns the seconds of a run of ``steps`` steps from a start that exists."""
        arm, path = self.arms[0], self.folder / PROBE
        wanted = arm.plan.settings
        if not (path / "summary.json").is_file():
            few = {"steps": PROBE_STEPS, "eval_every": 0, "trackers": (), "seed": wanted.seed}
            self._train(arm, path, few)
        with RunReader(path) as reader:
            summary, self.changes["threads"] = reader.summary or {}, reader.settings["threads"]
            seconds = [float(row["seconds"] or 0.0) for row in reader.metrics()]
        stages = summary.get("seconds", {})
        self.cold_seconds = sum(stages.get(name, 0.0) for name in ("demonstrations", "cold start"))
        expected = dry_run.estimate(replace(wanted, steps=steps), summary, seconds, wanted.eval_tasks)
        return expected["seconds_of_run"] + stages.get("prepare", 0.0)

    def common_batches(self) -> list[list[Group]]:
        """The groups that each step of the probe trained on."""
        with RunReader(self.folder / PROBE) as reader:
            steps = [[row for row in reader.groups(step=n + 1) if row.state == "trained"] for n in range(PROBE_STEPS)]
            return [[reader.group(row.id) for row in rows] for rows in steps]

    def gradients(self, batches: Sequence[Sequence[Group]]) -> dict[str, list[torch.Tensor]]:
        """Of each arm that samples and begins as the first one does: the gradients of its steps on these batches. Arms that
        cannot learn from them are left out."""
        first, by_label, weights = self.arms[0], dict[str, list[torch.Tensor]](), list[list[torch.Tensor]]()
        for arm in self.arms:
            alike = all(getattr(arm.plan.recipe, slot) == getattr(first.plan.recipe, slot) for slot in SAMPLED)
            if alike and arm.start == first.start:
                try:
                    by_label[arm.label] = step_gradients(arm.plan, self.folder / PROBE / "initial", batches, weights)
                except (TurnwiseError, LookupError, ValueError) as fault:
                    self.say(f"{arm.label} has no gradient on the common batch: {fault}")
        return by_label

    def say(self, text: str) -> None:
        self.listen("message", {"level": "info", "text": text})


def train_run(values: Mapping[str, Any], start: Path | None, listen: Listener, deadline: float) -> None:
    """Begin the run of these settings, or continue it. ``start``: the model that it begins with, instead of a cold start."""
    from turnwise.training.trainer import continue_run, create_run

    stop, path = StopSignals(), Path(values["out"], values["name"])

    def heard(event: str, facts: Mapping[str, Any]) -> None:
        if time.monotonic() > deadline and not stop.received:
            stop.request(signal.SIGINT)
        if event != "message" or facts.get("level") != "info":  # what each run tells about itself stands in its folder
            listen(event, facts)

    if not (path / "run.json").is_file():
        plan = RunPlan.from_caller(values)
        refuse(plan, (*AT_ONCE, *WITH_RECIPE))
        create_run(plan.resolved())
    run = RunDir.open(path)
    if start is not None and not (path / "initial").is_dir():
        with atomic_write(path / "initial", replace=False) as folder:
            shutil.copytree(start, folder, copy_function=link_or_copy)
    try:
        continue_run(run, Settings.of(run.metadata()["settings"]), None, GivenObjects(), heard, stop)
    except RunStopped:
        if time.monotonic() > deadline:
            raise BudgetSpent from None
        raise


def step_gradients(
    plan: RunPlan, initial: Path, batches: Sequence[Sequence[Group]], weights: list[list[torch.Tensor]]
) -> list[torch.Tensor]:
    """The gradients of one step on each batch. ``weights``: those before each step, which the first arm fills and moves."""
    from turnwise.training import build, engines
    from turnwise.training.loop import update_policy

    s, objective, sums = plan.settings, plan.recipe.objective, dict[int, torch.Tensor]()
    renderer = build.make_renderer(s, build.load_tokenizer(s, plan.env_spec, initial))
    learner = engines.make_learner(
        s, build.load_model(s, 0, initial), plan.recipe, build.load_teacher(s), None, renderer
    )
    if objective.signals & {Signal.REFERENCE, Signal.HELLINGER}:
        learner.reference()
    policy = [p for p in learner.model.parameters() if p.requires_grad]  # type: ignore[attr-defined]
    stride = 1 + sum(p.numel() for p in policy) // KEPT_NUMBERS

    def add(optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The gradients of one optimiser step: whatever it makes of them, two methods with equal ones are equal."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for p in policy:
            if id(p) in mine and p.grad is not None:
                part = p.grad.flatten()[::stride].float().cpu()
                sums[id(p)] = sums[id(p)] + part if id(p) in sums else part.clone()

    def step(number: int, groups: Sequence[Group]) -> torch.Tensor:
        sums.clear()
        with torch.no_grad():
            if len(weights) == number:
                weights.append([p.detach().clone() for p in policy])
            for p, before in zip(policy, weights[number], strict=True):  # a batch is on policy for these weights alone
                p.copy_(before)
        if groups:
            update_policy(learner, plan.recipe, groups, number, objective)
        return torch.cat([sums.get(id(p), torch.zeros(len(p.flatten()[::stride]))) for p in policy])

    handle = register_optimizer_step_pre_hook(add)
    try:
        with engines.closing(learner), engines.cpu_threads(s.threads):
            return [step(*numbered) for numbered in enumerate(batches)]
    finally:
        handle.remove()


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """NaN where one of them is zero."""
    size = float(a.double().norm() * b.double().norm())
    return float(a.double() @ b.double()) / size if size else math.nan


@dataclass(frozen=True)
class Likeness:
    """Cosines of two arms' gradients on the common batches: of the first step, and of the steps after it."""

    left: str
    right: str
    first: float
    later: float
    same: bool  # one update, and nothing else differs

    def text(self) -> str:
        if math.isnan(self.first) or math.isnan(self.later):
            return f"{self.left} and {self.right}: a step has no gradient to compare: no group of it had two different rewards"
        words = "; the same update, so this comparison cannot separate them" if self.same else ""
        if not self.same and min(self.first, self.later) >= SAME:
            words = (
                "; the same update so far: only what acts later or elsewhere (a penalty, tasks, rates) can part them"
            )
        return f"{self.left} and {self.right}: cosine {self.first:.4f}, {self.later:.4f} in the steps after it{words}"


def likenesses(arms: Sequence[Arm], gradients: Mapping[str, Sequence[torch.Tensor]]) -> list[Likeness]:
    """Of all pairs that have a gradient on the common batches."""
    pairs = []
    for a, b in itertools.combinations([arm for arm in arms if arm.label in gradients], 2):
        # step by step: the size of a step's gradient is the learning rate's affair
        first, *others = (cosine(x, y) for x, y in zip(gradients[a.label], gradients[b.label]))
        later = min(others)
        mine, other = a.plan.recipe.slots(), b.plan.recipe.slots()
        apart = {slot for slot in mine if mine[slot] != other[slot]}
        same = apart <= LEARNT and a.digest[0] == b.digest[0] and min(first, later) >= SAME
        pairs.append(Likeness(a.label, b.label, first, later, same))
    return pairs
