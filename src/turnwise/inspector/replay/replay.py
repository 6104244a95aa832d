"""``turnwise replay RUN --step N``: take a step again from the nearest checkpoint before it, bit for bit, or with another method.

A replay resumes a copy of the run, so what it does is what the run did: same draws, same seeds, same threads. The original is
only read. With another method, the steps before N are taken with the run's own method, and N and later ones with the other:
weights, the optimiser's state of shared parameters and the position in the stream of tasks are carried over; the memory of
pieces, replay buffers and critics that the first method did not have begin as in a new run.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from turnwise.config.settings import Settings, split_method
from turnwise.core.protocols import Listener
from turnwise.errors import SettingError, StoreError
from turnwise.inspector.replay.divergence import Divergence, RunRecord, first_divergence
from turnwise.recipes import signatures
from turnwise.store.atomic import remove, write_json
from turnwise.store.checkpoint import checkpoints, latest, load_checkpoint, save_checkpoint, verify
from turnwise.store.rundir import CHECKPOINT_NAME, RunDir
from turnwise.training.interrupt import RunStopped, StopSignals
from turnwise.training.plan import GivenObjects, RunPlan
from turnwise.training.rewards import CACHE
from turnwise.training.watch import silent

NEVER = 10**9  # steps between checkpoints of a replay: only its last step writes one
COPIED = ("metrics.jsonl", "messages.jsonl", "sources.json", "evaluation_before.json", "ranking_before.json")
# settings that change nothing in the steps themselves
QUIET = {"trackers": [], "eval_every": 0, "profile": False, "checkpoint_every": NEVER, "keep_checkpoints": 3}
OPTIMISER = "optimiser/"
SHOWN = ("reward", "success", "loss", "grad_norm", "entropy", "clip_share", "advantage/size", "lr")


@dataclass(frozen=True)
class ReplayReport:
    """``divergence``: the first difference to what the run recorded; None: none. ``weights_equal`` is None where the run kept no
    weights of that step. With another method, ``cosine`` compares the two updates of step ``step``."""

    run: str
    step: int
    began: int  # the step of the checkpoint that the replay started from; 0: the initial model
    method: str
    divergence: Divergence | None
    weights_equal: bool | None
    metrics: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    other_method: str = ""
    cosine: float = math.nan
    last_step: int = 0
    folder: str = ""  # where the replayed run was kept

    @property
    def ok(self) -> bool:
        return self.divergence is None and self.weights_equal is not False

    def text(self) -> str:
        start = f"the checkpoint of step {self.began}" if self.began else "the initial model"
        if self.divergence is not None:
            verdict = f"it differs from what was recorded, first at {self.divergence.text()}"
        elif self.weights_equal is False:
            verdict = "metrics and tokens are the same, and the weights differ"
        else:
            weights = ", weights too" if self.weights_equal else "; weights of that step were not kept"
            verdict = f"the same bit for bit{weights}"
        lines = [f"step {self.step} of {self.run}, replayed from {start} with {self.method}: {verdict}"]
        if self.other_method:
            lines.append(f"the same step with {self.other_method} (steps {self.step} to {self.last_step}):")
            lines.append(f"  cosine of the two updates of the weights: {self.cosine:.4f}")
        heads = (self.method, self.other_method) if self.other_method else ("recorded", "replayed")
        lines.append(f"  {'':<16}{heads[0]:>14}{heads[1]:>14}")
        for name, pair in self.metrics.items():
            a, b = ("–" if value is None else f"{value:.6g}" for value in pair)
            lines.append(f"  {name:<16}{a:>14}{b:>14}")
        return "\n".join(lines + ([f"the replayed run: {self.folder}"] if self.folder else []))

    def as_dict(self) -> dict[str, Any]:
        values = {k: getattr(self, k) for k in ("run", "step", "began", "method", "weights_equal", "other_method")}
        first = None if self.divergence is None else self.divergence.as_dict()
        cosine = None if math.isnan(self.cosine) else self.cosine
        more = {"ok": self.ok, "divergence": first, "metrics": {k: list(v) for k, v in self.metrics.items()}}
        return {**values, **more, "cosine": cosine, "last_step": self.last_step, "folder": self.folder}


def replay_step(
    run: str | Path,
    step: int,
    method: str = "",
    until: int = 0,
    keep: str | Path = "",
    listen: Listener = silent,
    given: GivenObjects | None = None,
) -> ReplayReport:
    """Take step ``step`` of ``run`` again. ``method``: take it also with this method, and go on with it up to step ``until``.
    ``keep``: a new folder for the replayed run."""
    run_dir, record = RunDir.open(run), RunRecord.read(run)
    settings = Settings.of(run_dir.metadata()["settings"])
    _check(settings, record, step, method, until)
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        replay = _Replay(run_dir, settings, record, Path(scratch), listen, given or GivenObjects())
        report = replay.same(step, Path(keep) if keep and not method else None)
        return replay.other(report, method, max(step, until), Path(keep) if keep else None) if method else report


def _check(settings: Settings, record: RunRecord, step: int, method: str, until: int) -> None:
    last = max(record.metrics, default=0)
    if not 1 <= step <= last:
        raise SettingError(f"step is {step}, and the run recorded steps 1 to {last}; write one of them")
    if until and not method:
        raise SettingError("--until belongs to --method: the run's own method is replayed for one step")
    if until and not step <= until <= settings.steps:
        raise SettingError(f"until is {until}; write a step from {step} to {settings.steps}, where the schedule ends")
    # refused before a step is taken: no number of tries would repeat it
    if not settings.staleness.deterministic:
        raise SettingError(
            f"this run sampled as its tools answered (staleness {settings.staleness}), so its rollouts depended on timing and "
            "cannot be repeated; a run with --staleness 0 can"
        )
    for name in split_method(method):
        if name:
            signatures.check_method(name)


@dataclass(frozen=True)
class _Replay:
    """One replay in a scratch folder."""

    run_dir: RunDir
    settings: Settings
    record: RunRecord
    scratch: Path
    listen: Listener
    given: GivenObjects

    def same(self, step: int, keep: Path | None) -> ReplayReport:
        """Two stages: up to the step before, whose weights the other method starts from, then the step itself."""
        began, checkpoint = nearest_checkpoint(self.run_dir, step - 1)
        copy = copy_run(self.run_dir, keep or self.scratch / "same", checkpoint)
        # with a checkpoint before the step: its weights are what another method starts from
        if began < step - 1:
            self._continue(copy, step - 1)
        self._continue(copy, step)
        again = RunRecord.read(copy.path)
        divergence = first_divergence(self.record, again, range(began + 1, step + 1))
        metrics = _side_by_side(self.record.metrics[step], again.metrics[step])
        equal = self._weights_equal(copy, step)
        title = self.settings.title
        folder = str(keep) if keep else ""
        return ReplayReport(str(self.run_dir.path), step, began, title, divergence, equal, metrics, folder=folder)

    def other(self, report: ReplayReport, method: str, until: int, keep: Path | None) -> ReplayReport:
        """The same step from the same weights with another method."""
        step, same = report.step, RunDir(self.scratch / "same")
        before, checkpoint = nearest_checkpoint(same, step - 1)
        copy = copy_run(same, keep or self.scratch / "other", checkpoint)
        start = _weights(copy, before) if before else _initial(copy)
        switch_method(copy, method, self.given)
        self._continue(copy, step)
        cosine = _cosine(start, _weights(same, step), _weights(copy, step))
        if until > step:
            self._continue(copy, until)
        again = RunRecord.read(copy.path)
        metrics = _side_by_side(self.record.metrics[step], again.metrics[step])
        return ReplayReport(
            report.run, step, report.began, report.method, report.divergence, report.weights_equal, metrics,
            other_method=method, cosine=cosine, last_step=until, folder=str(keep) if keep else "",
        )  # fmt: skip

    def _continue(self, copy: RunDir, until: int) -> None:
        """Resume the copy and stop it after step ``until``, with a checkpoint."""
        from turnwise.training.trainer import continue_run

        stop = StopSignals()

        def listen(event: str, facts: Mapping[str, Any]) -> None:
            if event == "step" and facts.get("stage") == "learn" and facts["step"] >= until:
                stop.received = stop.received or signal.SIGINT
            self.listen(event, facts)

        settings = Settings.of(copy.metadata()["settings"])
        try:
            continue_run(copy, settings, None, self.given, listen, stop)
        except RunStopped:
            if copy.step < until:  # the user's own Ctrl-C
                raise

    def _weights_equal(self, copy: RunDir, step: int) -> bool | None:
        nearest, path = nearest_checkpoint(self.run_dir, step)
        if path is None or nearest != step:
            return None
        a, b = _weights(self.run_dir, step), _weights(copy, step)
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _weights(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    """The trained tensors of the checkpoint of ``step``."""
    nearest, path = nearest_checkpoint(run, step)
    assert path is not None and nearest == step, f"no checkpoint of step {step} in {run.path}"
    tensors = load_checkpoint(path).tensors
    return {name: tensors[name] for name in tensors if name.startswith("model/")}


def _initial(run: RunDir) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {f"model/{name}": t for name, t in load_file(run.path / "initial" / "model.safetensors").items()}


def _cosine(start: Mapping[str, torch.Tensor], a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """The cosine of the two changes of the weights; NaN where one of them is zero."""
    # a critic that only one of the methods has is no part of the policy
    names = [name for name in a if name in b and name in start]
    if not names:
        return math.nan
    first, second = (torch.cat([(x[n].double() - start[n].double()).flatten() for n in names]) for x in (a, b))
    size = float(first.norm() * second.norm())
    return float(first @ second) / size if size else math.nan


def _side_by_side(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[float | None, float | None]]:
    return {name: (a.get(name), b.get(name)) for name in SHOWN if name in a or name in b}


# -------------------------------------------------------------- copies of a run


def nearest_checkpoint(run: RunDir, step: int) -> tuple[int, Path | None]:
    """The newest valid checkpoint that contains at most ``step`` steps; (0, None) if the run must begin at its start."""
    for path in checkpoints(run.checkpoints):
        match = CHECKPOINT_NAME.fullmatch(path.name)
        if match is None or int(match[1]) > step:
            continue
        with contextlib.suppress(StoreError):  # a damaged one: an older one serves
            return verify(path), path
    return 0, None


def copy_run(run: RunDir, target: Path, checkpoint: Path | None) -> RunDir:
    """Copy what a resume from ``checkpoint`` needs into ``target``. Hard links instead of copies where the disk allows it:
    weights and checkpoints are replaced by renaming, never written in place."""
    if target.exists() and any(target.iterdir()):
        raise SettingError(f"{target} is not empty; give a new folder")
    target.mkdir(parents=True, exist_ok=True)
    metadata = run.metadata()
    write_json(target / "run.json", {**metadata, "settings": {**metadata["settings"], **QUIET}})
    for name in COPIED:
        if (run.path / name).is_file():
            shutil.copy2(run.path / name, target / name)
    if (run.path / "initial").is_dir():
        shutil.copytree(run.path / "initial", target / "initial", copy_function=link_or_copy)
    copy = RunDir(target)
    if checkpoint is not None:
        shutil.copytree(checkpoint, copy.checkpoints / checkpoint.name, copy_function=link_or_copy)
    for database in (run.ledger, run.path / CACHE):  # what a judge or helper answered is not asked again
        if database.is_file():
            source = f"{database.resolve().as_uri()}?mode=ro"
            with (
                contextlib.closing(sqlite3.connect(source, uri=True)) as old,
                contextlib.closing(sqlite3.connect(target / database.name)) as new,
            ):
                old.backup(new)  # consistent, also while the run is writing
    return copy


def link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
    return target


def switch_method(run: RunDir, method: str, given: GivenObjects) -> None:
    """Rewrite settings and the newest checkpoint of ``run``, so that it continues with ``method`` and its defaults."""
    metadata = run.metadata()
    name, credit = split_method(method)
    others = {"method": name, "credit": credit, "method_options": {}, "credit_options": {}}
    settings = Settings.of({**metadata["settings"], **others})
    plan = RunPlan.from_settings(settings, None, given)
    path = latest(run.checkpoints)
    if path is not None:
        saved = load_checkpoint(path)
        tensors, state = _converted(plan, run, saved.tensors, saved.state)
        remove(path)
        save_checkpoint(run.checkpoints, saved.step, tensors, state, keep=settings.keep_checkpoints)
    write_json(run.path / "run.json", {**metadata, "settings": settings.as_dict(), "recipe": repr(plan.recipe)})


def _converted(plan: Any, run: RunDir, tensors: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[Any, Any]:
    """Tensors and state of a learner, sampler and mixture of the new method, with what the old ones share with them."""
    from turnwise.training import build, engines

    settings = plan.settings
    folder = run.path / "initial"
    tokenizer = build.load_tokenizer(settings, plan.env_spec, folder)
    renderer = build.make_renderer(settings, tokenizer)
    learner = engines.make_learner(
        settings, build.load_model(settings, 0, folder), plan.recipe, build.load_teacher(settings)
    )
    fresh = learner.checkpoint_state()
    names = fresh["tensors"]
    # adapters, heads and moments that the other method does not have are left behind
    carried = {
        name: tensors[name]
        for name in tensors
        if name in names or (name.startswith(OPTIMISER) and name.removeprefix(OPTIMISER).split("/", 1)[-1] in names)
    }
    counts = {name: state["learner"][name] for name in ("version", "steps", "skipped")}
    mixture = plan.data.mixture(renderer, lambda _: None).state_dict()
    before = state["mixture"]
    same_replay = mixture.keys() == before.keys() and mixture["replay"].keys() == before["replay"].keys()
    return {**names, **carried}, {
        **state,
        "learner": {**fresh["scalars"], **counts},
        "memory": {"clock": state["memory"]["clock"], "states": {}},
        "mixture": before if same_replay else mixture,
        "sampler": _feed_state(plan, state["sampler"]),
    }


def _feed_state(plan: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the feed of tasks: parts of the same kind go on; a sampler of another kind goes on after the draws so far, so
    that no id is issued twice."""
    from turnwise.training.task_feed import TaskFeed

    if plan.settings.offline:
        return dict(before)
    fresh = TaskFeed.open(plan.recipe, plan.data.tasks()).state_dict()
    old = before if "sampler" in before else {"sampler": before}

    def same_kind(a: Any, b: Any) -> bool:
        return a.keys() == b.keys() if isinstance(a, Mapping) and isinstance(b, Mapping) else type(a) is type(b)

    carried = {name: old[name] for name in fresh if name in old and same_kind(fresh[name], old[name])}
    drawn = {"drawn": old["sampler"]["drawn"]} if "drawn" in fresh["sampler"] and "drawn" in old["sampler"] else {}
    return {**fresh, **carried, "sampler": carried.get("sampler", {**fresh["sampler"], **drawn})}
