"""What a run writes while it goes on: metrics as JSON lines, TensorBoard files and for tracking services, and its messages.

Does not know what a number or a message means. Weights & Biases, MLflow and Trackio are imported where they are asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.core.protocols import Listener, Tracker
from turnwise.errors import SettingError, StoreError, nearest
from turnwise.observe.numbers import finite_number

MESSAGES = "messages.jsonl"


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without a last line cut off by a kill; no rows for a missing file."""
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            # a kill may have cut off the last line
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


def drop_rows_from(path: Path, resume: int | None) -> None:
    """Rewrite the file without incomplete lines and without steps ≥ ``resume``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    earlier = [row for row in read_rows(path) if resume is None or row["step"] < resume]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in earlier), encoding="utf-8")
    os.replace(temporary, path)  # atomic: a kill loses nothing


# ---------------------------------------------------------------------- messages


class MessageLog:
    """Keeps the messages of a run, one line each, with the step at which they were told: a listener that records and passes on.
    A text is written once, however often it is sent. Messages of steps after ``start`` are removed, since those steps are taken
    again."""

    def __init__(self, path: Path, listen: Listener, start: int = 0) -> None:
        drop_rows_from(path, start + 1)
        self.path, self.listen, self.step = path, listen, start
        self.rows = read_rows(path)
        self.earlier = len(self.rows)  # told before this process began

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        if event == "message" and not any(row.get("text") == facts["text"] for row in self.rows):
            row = {"step": self.step, "time": round(time.time(), 3), **facts}
            self.rows.append(row)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        elif event == "step" and facts.get("stage") == "learn":
            self.step = int(facts["step"])
        self.listen(event, facts)

    @property
    def last_values(self) -> dict[str, float]:
        """The last number of each rule that was told."""
        return {row["name"]: float(row["value"]) for row in self.rows if "name" in row and "value" in row}

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """What a report repeats: step and text of everything that is more than information, and what was told before a resume."""
        rows = [({"earlier": True} if n < self.earlier else {}, row) for n, row in enumerate(self.rows)]
        return [{"step": r["step"], "text": r["text"], **mark} for mark, r in rows if r.get("level", "info") != "info"]


# ----------------------------------------------------------------------- metrics


class JsonLines:
    """One line per call: ``{"step": 3, "time": 1700000000.0, "reward": 0.5}``. A value that is not finite becomes null.

    ``resume=s`` first removes the lines of steps ≥ s, which the resumed run writes again, so that nothing is logged twice.
    """

    def __init__(self, path: str | Path, resume: int | None = None) -> None:
        self.path = Path(path)
        try:
            drop_rows_from(self.path, resume)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise StoreError(f"cannot write metrics to {self.path}: {error}") from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, "time": round(time.time(), 3)}
        self._file.write(json.dumps(row | {name: finite_number(value) for name, value in metrics.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files under ``directory``. ``resume=s`` tells TensorBoard to discard steps ≥ s."""

    def __init__(self, directory: str | Path, resume: int | None = None) -> None:
        self._writer: Any = None
        for module in ("tensorboardX", "torch.utils.tensorboard"):  # the first imports in a moment, and needs no torch
            with contextlib.suppress(ImportError):
                self._writer = importlib.import_module(module).SummaryWriter(
                    str(directory), purge_step=resume, max_queue=10_000
                )
                return
        warnings.warn("no TensorBoard files are written: install tensorboardX to get them", stacklevel=2)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        # tensorboardX writes in a thread, which a full disk ends without a word: its queue would fill, and the run wait for ever
        worker = getattr(self._writer.file_writer.event_writer, "_worker", None)
        if worker is not None and not worker.is_alive():
            self._writer = None
            raise OSError("the thread that writes TensorBoard files has ended; its disk may be full")
        for name, value in _finite(metrics).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


SERVICES = ("wandb", "mlflow", "trackio")


class Service:
    """A tracking service by the name of its library: ``Service("wandb", "turnwise", "first-try", {...})``."""

    def __init__(self, kind: str, project: str, name: str, settings: Mapping[str, Any]) -> None:
        if kind not in SERVICES:
            raise SettingError(f"there is no tracker {kind!r}: {nearest(kind, SERVICES)}")
        try:
            library = importlib.import_module(kind)
        except ImportError as error:
            raise SettingError(f"tracking with {kind} needs it installed: pip install 'turnwise-rl[{kind}]'") from error
        self.name, config = kind, dict(settings)
        self._log: Callable[..., object]
        self._close: Callable[[], object]
        if kind == "wandb":
            # the name is the id, so that a resumed run continues in the same place
            run = library.init(project=project, name=name, id=name, config=config, resume="allow")
            self._log, self._close = run.log, run.finish
        elif kind == "mlflow":
            library.set_experiment(project)
            library.start_run(run_name=name)
            library.log_params({key: str(value)[:500] for key, value in config.items()})  # it refuses longer texts
            self._log, self._close = library.log_metrics, library.end_run
        else:
            library.init(project=project, name=name, config=config, resume="allow")
            self._log, self._close = library.log, library.finish

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(_finite(metrics), step=step)

    def close(self) -> None:
        self._close()


class Trackers:
    """Several trackers as one. One that fails is reported once and then no longer used: it must not end a run."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._working = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self._working = []

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self._working):
            try:
                act(tracker)
            except Exception as error:
                self._working.remove(tracker)
                name = getattr(tracker, "name", type(tracker).__name__)
                warnings.warn(f"{name} failed and is no longer used: {error!r}", stacklevel=3)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    numbers = {name: finite_number(value) for name, value in metrics.items()}
    return {name: value for name, value in numbers.items() if value is not None}
