"""``turnwise replay RUN --step N``: take a step again from the nearest checkpoint before it, bit for bit, or with another method.

A replay resumes a copy of the run, so what it does is what the run did: same draws, same seeds, same threads. The original is
only read. With another method, the steps before N are taken with the run's own method, and N and later ones with the other.
"""

from __future__ import annotations

import math
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from turnwise.config.settings import Settings, split_method
from turnwise.core.protocols import Listener
from turnwise.errors import SettingError
from turnwise.inspector.replay.divergence import Divergence, RunRecord, first_divergence
from turnwise.inspector.replay.other_method import switch_method
from turnwise.inspector.replay.run_copy import copy_run, nearest_checkpoint
from turnwise.recipes import signatures
from turnwise.store.checkpoint import load_checkpoint
from turnwise.store.rundir import RunDir
from turnwise.training.interrupt import RunStopped, StopSignals
from turnwise.training.plan import GivenObjects
from turnwise.training.watch import silent

NEVER = 10**9  # steps between checkpoints of a replay: only its last step writes one
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
        lines = [f"step {self.step} of {self.run}, replayed from {start} with {self.method}: {self._verdict()}"]
        if self.other_method:
            lines.append(f"the same step with {self.other_method} (steps {self.step} to {self.last_step}):")
            lines.append(f"  cosine of the two updates of the weights: {self.cosine:.4f}")
        heads = (self.method, self.other_method) if self.other_method else ("recorded", "replayed")
        lines.append(f"  {'':<16}{heads[0]:>14}{heads[1]:>14}")
        lines += [f"  {name:<16}{_number(a):>14}{_number(b):>14}" for name, (a, b) in self.metrics.items()]
        return "\n".join(lines + ([f"the replayed run: {self.folder}"] if self.folder else []))

    def _verdict(self) -> str:
        if self.divergence is not None:
            return f"it differs from what was recorded, first at {self.divergence.text()}"
        if self.weights_equal is False:
            return "metrics and tokens are the same, and the weights differ"
        return "the same bit for bit" + (
            ", weights too" if self.weights_equal else "; weights of that step were not kept"
        )

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
        changes = {"checkpoint_every": NEVER, "keep_checkpoints": 3}
        copy = copy_run(self.run_dir, keep or self.scratch / "same", checkpoint, changes)
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
        changes = {"checkpoint_every": NEVER, "keep_checkpoints": 3}
        copy = copy_run(same, keep or self.scratch / "other", checkpoint, changes)
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
        found, path = nearest_checkpoint(self.run_dir, step)
        if path is None or found != step:
            return None
        a, b = _weights(self.run_dir, step), _weights(copy, step)
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _weights(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    """The trained tensors of the checkpoint of ``step``."""
    found, path = nearest_checkpoint(run, step)
    assert path is not None and found == step, f"no checkpoint of step {step} in {run.path}"
    tensors = load_checkpoint(path).tensors
    return {name: tensors[name] for name in tensors if name.startswith("model/")}


def _initial(run: RunDir) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {f"model/{name}": t for name, t in load_file(run.path / "initial" / "model.safetensors").items()}


def _cosine(start: Mapping[str, torch.Tensor], a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """The cosine of the two changes of the weights; NaN where one of them is zero."""
    names = [name for name in a if name in b and name in start]
    if not names:
        return math.nan
    first, second = (torch.cat([(x[n].double() - start[n].double()).flatten() for n in names]) for x in (a, b))
    size = float(first.norm() * second.norm())
    return float(first @ second) / size if size else math.nan


def _side_by_side(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[float | None, float | None]]:
    return {name: (a.get(name), b.get(name)) for name in SHOWN if name in a or name in b}


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"
