"""``turnwise status``: what a run is doing, from another process. The watch of the run writes ``status.json`` once a second;
with the lock file and the newest checkpoint it tells whether the run goes on, ended, or was killed.

A run that ended by itself has written how. One whose lock file names a process that no longer holds it was killed. A process
that lives and has written nothing for a while is stopped, or one call lets none of its threads run. Loads no engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.observe.numbers import format_duration
from turnwise.observe.trackers import MESSAGES, read_rows
from turnwise.store.lock import lock_holder
from turnwise.store.rundir import RunDir

STATUS = "status.json"
STATUS_FORMAT = 1
SILENT_SECONDS = 10.0  # without a new status, a living process is called silent
ENDED = ("finished", "stopped", "failed", "killed")
HEADS = {"silent": "running, but silent", "failed": "ended by an error"}  # of other states: their name
PROCESS_STATES = {
    "R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped", "t": "stopped", "Z": "ended",
}  # fmt: skip


def write_status(path: Path, status: Mapping[str, Any]) -> None:
    """Replace the file in one rename. It is never flushed to the disk: after a power failure nobody asks what the run was doing.
    A full disk or a removed folder is no reason to stop a run: nothing is written then."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(status) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read_status(path: Path) -> dict[str, Any] | None:
    """What the run wrote last; None if there is no such file, or one of another format."""
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return status if isinstance(status, dict) and status.get("format") == STATUS_FORMAT else None


def process_state(process: int) -> tuple[str, float]:
    """What the system says of a process, and its CPU seconds so far. Nothing where the system has no ``/proc``."""
    if not Path("/proc/self/stat").exists():
        return "", 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return PROCESS_STATES.get(fields[0], "running"), seconds
    return "ended", 0.0


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
        written = {name: value for name, value in self.status.items() if name not in ("state", "reason", "process")}
        names = ("run", "state", "explanation", "process", "alive", "step", "steps", "checkpoint", "alarm")
        age = None if self.age is None else round(self.age, 1)
        return {**written, **{name: getattr(self, name) for name in names}, "age_seconds": age}


def read_state(path: str | Path) -> RunState:
    """Raises ``StoreError`` where there is no run."""
    run_dir, here = RunDir.open(path), socket.gethostname()
    settings = run_dir.metadata().get("settings", {})
    status = read_status(run_dir.path / STATUS) or {}
    process, locked = lock_holder(run_dir.lock)
    if locked and status.get("host") == here and status.get("process") != process:
        status = {}  # of the process that worked on the run before
    age = time.time() - float(status["written"]) if status else None
    state, explanation = _state(run_dir, status, process, locked, age, status.get("host", here))
    rows = [] if status else [row for row in read_rows(run_dir.metrics) if isinstance(row["step"], int)]
    checkpoint = run_dir.step
    return RunState(
        run=str(path),
        state=state,
        explanation=explanation,
        process=process or int(status.get("process", 0)),
        alive=state in ("running", "silent"),
        age=age,
        # a status is up to two seconds old, and a checkpoint may be newer
        step=max(int(status.get("step", rows[-1]["step"] if rows else 0)), checkpoint),
        steps=int(settings.get("steps", status.get("steps", 0))),
        checkpoint=checkpoint,
        status=status,
    )


def _state(
    run_dir: RunDir, status: dict[str, Any], process: int, locked: bool, age: float | None, host: str
) -> tuple[str, str]:
    written, reason = status.get("state", ""), str(status.get("reason", ""))
    if host != socket.gethostname() and written == "running" and age is not None:
        if age < SILENT_SECONDS:
            return "running", f"on {host}"
        return "unknown", f"it ran on {host} and last wrote {age:.0f} s ago; ask there whether process {process} lives"
    if locked and (age is None or age < SILENT_SECONDS):
        return "running", "" if status else "it has not written a status yet"
    if locked and process_state(process)[0] == "stopped":
        return "silent", (
            f"its process {process} is stopped (SIGSTOP) and has written nothing for {age:.0f} s; "
            f"kill -CONT {process} continues it"
        )
    if locked:
        return "silent", (
            f"its process {process} lives and has written nothing for {age:.0f} s: one call lets none of its threads run, or "
            "the machine is overloaded"
        )
    if process:
        last = f"; it last wrote {age:.0f} s ago, in the phase {status.get('phase')}" if age is not None else ""
        return "killed", f"its process {process} is dead and has not said why (killed, or out of memory){last}"
    if run_dir.summary.is_file():
        return "finished", ""
    return (str(written), reason) if written in ENDED else ("stopped", "no process works on it")


def newest_messages(path: str | Path, count: int = 3) -> list[str]:
    """The last warnings of a run."""
    rows = read_rows(Path(path) / MESSAGES)
    return [str(row.get("text", "")) for row in rows if row.get("level", "info") != "info"][-count:]


# ------------------------------------------------------------------------------ text


def status_text(state: RunState, warnings: list[str]) -> str:
    """All that is known as lines for a terminal, the state first."""
    return "\n".join([*_head(state), *_body(state), *(f"warning   {text}" for text in warnings)])


def _head(state: RunState) -> Iterator[str]:
    process = f", process {state.process}" if state.process and state.alive else ""
    yield f"{state.run}: {HEADS.get(state.state, state.state)}{process}"
    if state.explanation:
        yield f"          {state.explanation}"
    checkpoint = f", newest checkpoint at step {state.checkpoint}" if state.checkpoint else ", no checkpoint yet"
    phase = f", phase {state.status['phase']}" if state.alive and state.status else ""
    yield f"step      {state.step} of {state.steps}{phase}{checkpoint}"
    if state.state in ("stopped", "failed", "killed"):
        yield f"next      turnwise resume {state.run}"


def _body(state: RunState) -> Iterator[str]:
    status = state.status
    if not status or state.ended:
        return
    stage, age = status["stage"], state.age or 0.0
    counted = f"{stage['step']} of {stage['total']}" if stage["step"] else f"{stage['total']}"
    counted = f", {counted} {stage['of']}" if stage["total"] else ""
    yield f"stage     {stage['name']}{counted}, for {format_duration(stage['seconds'] + age)}"
    yield f"age       started {format_duration(time.time() - status['started'])} ago, this was written {age:.0f} s ago"
    yield f"moved     {status['still_seconds'] + (age if state.state == 'silent' else 0):.0f} s ago"
    if state.alarm:
        yield f"STUCK     {state.alarm}"
    rates, queues, versions = status["throughput"], status["queues"], status["versions"]
    yield (
        f"rates     {rates['sampled_tokens_per_second']:,.0f} tokens/s sampled, {rates['learned_tokens_per_second']:,.0f} "
        f"tokens/s learned, {rates['episodes_per_minute']:,.0f} episodes/min (of the last {rates['window_seconds']:.0f} s)"
    )
    if any(component["name"] == "generator" for component in status["components"]):
        yield (
            f"groups    {queues['groups_running']} in rollout, {queues['groups_ready']} ready, {queues['groups_training']} in "
            f"training; {status['episodes']['in_flight']} episodes in flight, {status['episodes']['ended']} ended"
        )
        yield (
            f"queues    {queues['requests_running']} requests running, {queues['requests_waiting']} waiting, "
            f"{queues['environment_calls']} calls in environments, {queues['ledger_writes']} writes of the ledger"
        )
        yield (
            f"versions  {versions['oldest_in_flight']} to {versions['newest']} in flight, {versions['published']} published"
        )
    yield ""
    width = max([13, *(len(component["name"]) for component in status["components"])])
    yield f"{'component':<{width}} {'':<8} {'waits for':<13} {'progress':>9}  doing"
    yield from (component_row(component, width) for component in status["components"])


def component_row(component: Mapping[str, Any], width: int) -> str:
    since = component["since_progress"]
    ago = "" if since is None else f"{since:.0f} s ago"
    name, waits_for = f"{component['name']:<{width}}", component["waits_for"] or "-"
    return f"{name} {component['state']:<8} {waits_for:<13} {ago:>9}  {component['doing']}"
