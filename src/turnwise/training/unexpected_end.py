"""Tells on resume that the process of a run died without a word (SIGKILL, out of memory, power), and what is rolled back.

A process that ends by itself, also by an error or a signal that it handles, empties the lock file of the run. Knows the
files of a run directory; no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from turnwise.observe.trackers import read_rows
from turnwise.store.lock import ProcessLock
from turnwise.store.resume import ResumePlan
from turnwise.store.rundir import RunDir

LOCK = "run.lock"


def lock_run(run_dir: RunDir) -> ProcessLock:
    """Refuses a run that another process is working on, before anything is loaded."""
    return ProcessLock(run_dir.path / LOCK)


def resume_messages(run_dir: RunDir, died: str, start: int, owed: ResumePlan) -> Iterator[str]:
    """``died``: the id of the process, if it died. ``start``: the step of the checkpoint, 0 without one. Call it before the
    metrics of later steps are removed."""
    rows = [row for row in read_rows(run_dir.metrics) if isinstance(row["step"], int)]
    last = rows[-1] if rows else None
    if died:
        yield (
            f"the run did not end by itself: its process {died} was killed, ran out of memory, or the machine stopped; "
            f"{_last_step(last)}"
        )
    lost = max(last["step"] - start, 0) if last else 0
    groups = len(owed.to_reissue) + len(owed.rolled_back)
    if died or lost:
        yield f"{_start(start)}; {_steps(start, lost)}, and {_groups(groups)}"


def _last_step(last: Mapping[str, Any] | None) -> str:
    if last is None:
        return "it had not finished a step"
    moment = last.get("time")
    when = f", at {datetime.fromtimestamp(moment).astimezone():%Y-%m-%d %H:%M:%S %Z}" if moment else ""
    return f"its last step was {last['step']}{when}"


def _start(start: int) -> str:
    return f"it continues from the checkpoint of step {start}" if start else "it begins again: it has no checkpoint"


def _steps(start: int, lost: int) -> str:
    if not lost:
        return "no step is lost"
    return f"step {start + 1} is taken again" if lost == 1 else f"steps {start + 1} to {start + lost} are taken again"


def _groups(count: int) -> str:
    if not count:
        return "no group of rollouts is rolled back"
    return "1 group of rollouts is rolled back" if count == 1 else f"{count} groups of rollouts are rolled back"
