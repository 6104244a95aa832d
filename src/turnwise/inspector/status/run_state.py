"""The state of a run from its directory: what its process wrote last, and whether that process still lives. Loads no engine.

A run that ended by itself has written how. One whose lock file names a process that no longer holds it was killed. A process
that lives and has written nothing for a while is stopped, or one call lets none of its threads run.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.observe.run_status import STATUS, read_status
from turnwise.observe.trackers import read_rows
from turnwise.store.lock import lock_holder
from turnwise.store.rundir import RunDir
from turnwise.training.run_facts import process_state

LOCK = "run.lock"
SILENT_SECONDS = 10.0  # without a new status, a living process is called silent
ENDED = ("finished", "stopped", "failed", "killed")


@dataclass(frozen=True)
class RunState:
    """One look at a run directory. ``state``: running, silent, finished, stopped, failed, killed or unknown."""

    run: str
    state: str
    explanation: str  # in words, empty where the state says it all
    process: int  # of the run; 0 where none is known
    alive: bool
    age: float | None  # seconds since its status was written
    step: int
    steps: int
    checkpoint: int  # the step of the newest one, 0: none
    status: dict[str, Any] = field(default_factory=dict)  # as written by the run; empty where there is none

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def ok(self) -> bool:
        """Neither dead before its end nor stuck."""
        return self.state in ("running", "finished", "stopped") and not self.alarm

    @property
    def alarm(self) -> str:
        return str(self.status.get("alarm", "")) if self.state == "running" else ""

    def as_dict(self) -> dict[str, Any]:
        known = {name: value for name, value in self.status.items() if name not in ("state", "reason", "process")}
        own = {
            "run": self.run, "state": self.state, "explanation": self.explanation, "process": self.process,
            "alive": self.alive, "age_seconds": None if self.age is None else round(self.age, 1), "step": self.step,
            "steps": self.steps, "checkpoint": self.checkpoint,
        }  # fmt: skip
        return {**known, **own, "alarm": self.alarm}


def read_state(path: str | Path) -> RunState:
    """Raises ``StoreError`` where there is no run."""
    run_dir = RunDir.open(path)
    settings = run_dir.metadata().get("settings", {})
    status = read_status(run_dir.path / STATUS) or {}
    process, locked = lock_holder(run_dir.path / LOCK)
    if locked and status.get("host") == socket.gethostname() and status.get("process") != process:
        status = {}  # of the process that worked on the run before
    age = time.time() - float(status["written"]) if status else None
    elsewhere = bool(status) and status.get("host") != socket.gethostname()
    state, explanation = _state(run_dir, status, process, locked, age, elsewhere)
    rows = [] if status else [row for row in read_rows(run_dir.metrics) if isinstance(row["step"], int)]
    checkpoint = _newest_checkpoint(run_dir.checkpoints)
    known = int(status.get("step", rows[-1]["step"] if rows else 0))
    return RunState(
        run=str(path),
        state=state,
        explanation=explanation,
        process=process or int(status.get("process", 0)),
        alive=state in ("running", "silent"),
        age=age,
        step=max(known, checkpoint),  # a status is up to two seconds old
        steps=int(settings.get("steps", status.get("steps", 0))),
        checkpoint=checkpoint,
        status=status,
    )


def _state(
    run_dir: RunDir, status: dict[str, Any], process: int, locked: bool, age: float | None, elsewhere: bool
) -> tuple[str, str]:
    written, reason = status.get("state", ""), str(status.get("reason", ""))
    if elsewhere and written == "running" and age is not None:
        host = status.get("host")
        if age < SILENT_SECONDS:
            return "running", f"on {host}"
        return "unknown", f"it ran on {host} and last wrote {age:.0f} s ago; ask there whether process {process} lives"
    if locked:
        if age is None or age < SILENT_SECONDS:
            return "running", "" if status else "it has not written a status yet"
        return "silent", _why_silent(process, age)
    if process:
        last = f"; it last wrote {age:.0f} s ago, in the phase {status.get('phase')}" if age is not None else ""
        return "killed", f"its process {process} is dead and has not said why (killed, or out of memory){last}"
    if run_dir.summary.is_file():
        return "finished", ""
    if written in ENDED:
        return str(written), reason
    return "stopped", "no process works on it"


def _newest_checkpoint(folder: Path) -> int:
    """The step of the newest checkpoint; ``store.checkpoint`` would load torch."""
    names = [path.name.removeprefix("step-").partition(".")[0] for path in folder.glob("step-*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def _why_silent(process: int, age: float) -> str:
    found, _ = process_state(process)
    if found == "stopped":
        return (
            f"its process {process} is stopped (SIGSTOP) and has written nothing for {age:.0f} s; "
            f"kill -CONT {process} continues it"
        )
    return (
        f"its process {process} lives and has written nothing for {age:.0f} s: one call lets none of its threads run, or "
        "the machine is overloaded"
    )


def newest_messages(path: str | Path, count: int = 3) -> list[str]:
    """The last warnings of a run."""
    rows = []
    for line in _lines(Path(path) / "messages.jsonl"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    texts = [str(row.get("text", "")) for row in rows if isinstance(row, dict) and row.get("level", "info") != "info"]
    return texts[-count:]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
