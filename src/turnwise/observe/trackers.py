"""Trackers: a JSON-lines file, TensorBoard, and several trackers as one.

Does not know what the numbers mean. Services that need an account are in ``tracker_services``.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.core.protocols import Tracker
from turnwise.errors import StoreError
from turnwise.observe.metric_names import finite_number


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
        row = {
            "step": step,
            "time": round(time.time(), 3),
            **{name: finite_number(value) for name, value in metrics.items()},
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without a last line cut off by a kill; no rows for a missing file."""
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


def drop_rows_from(path: Path, resume: int | None) -> None:
    """Rewrite the file without incomplete lines and without steps ≥ ``resume``; atomically, so that a kill loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    rows = read_rows(path)
    earlier = [row for row in rows if resume is None or row["step"] < resume]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in earlier), encoding="utf-8")
    os.replace(temporary, path)


class TensorBoard:
    """Event files under ``directory``. ``resume=s`` tells TensorBoard to discard steps ≥ s."""

    def __init__(self, directory: str | Path, resume: int | None = None) -> None:
        self._writer = _writer(str(directory), resume)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        for name, value in metrics.items():
            finite = finite_number(value)
            if finite is not None:
                self._writer.add_scalar(name, finite, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _writer(directory: str, resume: int | None) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            warnings.warn("no TensorBoard files are written: install tensorboardX to get them", stacklevel=3)
            return None
    return SummaryWriter(directory, purge_step=resume)


class Trackers:
    """Several trackers as one. One that fails is reported once and then no longer used: it must not end a run."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._working = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in list(self._working):
            try:
                tracker.log(step, metrics)
            except Exception as error:
                self._working.remove(tracker)
                _report(tracker, error)

    def close(self) -> None:
        for tracker in self._working:
            try:
                tracker.close()
            except Exception as error:
                _report(tracker, error)
        self._working = []


def _report(tracker: Tracker, error: Exception) -> None:
    warnings.warn(f"{type(tracker).__name__} failed and is no longer used: {error!r}", stacklevel=3)
