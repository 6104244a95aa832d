"""Plays the runs that claims still miss: each in a process with one thread, several at a time, from shared cold starts.

A row is written as soon as its run ends, so a call may be stopped at any time and repeated. Knows claims and rows, no verdict.

    python -m experiments.evidence.play '{"settings": ..., "out": ...}'        one run; its row to standard output
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.evidence.claims import Run
from experiments.evidence.rows import Row, append, described, difference, identity, measured, provenance
from turnwise.config.named_object import load_object
from turnwise.workers.child import end_with_parent

COMMON: dict[str, Any] = {
    "device": "cpu", "threads": 1, "trackers": (), "keep_tokens": 0, "remeasure_tokens": 0, "checkpoint_every": 100_000,
    "quiet": True,
}  # fmt: skip
START: dict[str, Any] = {"method": "reinforce", "steps": 1, "groups": 1, "group_size": 2, "eval_tasks": 0}
LOOK = 0.25  # seconds between two looks at a process
LATE = 1.3  # a run is begun if so many times what it usually takes is left


class Stopped(Exception):
    """Time is up, or the user has interrupted."""


class Player:
    """``jobs`` processes at a time until ``end`` (of ``time.monotonic``). ``out``: cold starts, and runs while they go on."""

    def __init__(self, out: Path, jobs: int, end: float, say: Callable[[str], object] = print) -> None:
        self.out, self.jobs, self.end, self.say = out, jobs, end, say
        self.stop, self.lock, self.speed = threading.Event(), threading.Lock(), 1.0

    def play(self, runs: Sequence[Run], target: Path) -> list[Row]:
        """Append a row for each run to ``target``. Ctrl-C ends the processes; rows that were written stay."""
        rows: list[Row] = []
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                starts = {key: pool.submit(self._start, run) for key, run in {_start_of(r): r for r in runs}.items()}
                waiting = [pool.submit(self._row, run, starts[_start_of(run)], target, rows) for run in runs]
                for job in waiting:
                    with contextlib.suppress(Stopped):
                        job.result()
            finally:
                self.stop.set()
        return rows

    def _row(self, run: Run, start: Future[Path], target: Path, rows: list[Row]) -> None:
        if self.end - time.monotonic() < LATE * self.speed * run.seconds:
            raise Stopped
        began = time.monotonic()
        try:
            result = self.one(run, start.result())
        except Stopped:
            raise
        except Exception as fault:  # one run, or a cold start, that fails must not end the others
            result = {"error": str(fault)}
        row = append(target, {"run": run.name, "bed": run.bed, **run.asked, **result, **provenance()})
        with self.lock:
            rows.append(row)
            if "error" not in row:  # what runs take here, beside what the file of claims says
                self.speed += ((time.monotonic() - began) / run.seconds - self.speed) / min(len(rows), 20)
        name, seconds = row["measured"]["measure"] if "measured" in row else "", time.monotonic() - began
        outcome = f"{name} {row['measured']['after'].get(name)}" if name else row["error"]
        settings = run.settings
        self.say(f"{run.name} {run.bed} {settings['method']} seed {settings['seed']}: {outcome}, {seconds:.0f} s")

    def one(self, run: Run, model: Path | None = None) -> Row:
        """What a run measures: its ``method``, ``measured`` and ``cost``, or its ``error``."""
        model = model or self._start(run)
        name, out = f"{run.name}-{os.getpid()}-{time.monotonic_ns()}", self.out / "runs"
        values = {**run.settings, "model": str(model), "cold_steps": 0}
        try:
            return self._child({"settings": values, "asked": run.settings, "trainer": run.trainer,
                                "arguments": run.arguments, "out": str(out), "name": name})  # fmt: skip
        finally:
            shutil.rmtree(out / name, ignore_errors=True)

    def _start(self, run: Run) -> Path:
        """The cold-started model of a run, made once."""
        folder = self.out / f"start-{_start_of(run)}"
        if not (folder / "summary.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            done = self._child({"settings": {**START, **run.start}, "out": str(self.out), "name": folder.name})
            if "error" in done:
                raise RuntimeError(f"no cold start for {run.bed}: {done['error']}")
        return folder / "initial"

    def _child(self, task: Mapping[str, Any]) -> Row:
        """One process of this module; ended with all that it started when time is up."""
        if self.stop.is_set():
            raise Stopped
        paths = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        line = [sys.executable, "-m", "experiments.evidence.play", json.dumps(task)]
        process = subprocess.Popen(
            line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        reader = threading.Thread(target=lambda: told.append(process.communicate()), daemon=True)
        told: list[tuple[str, str]] = []
        reader.start()
        while reader.is_alive():
            reader.join(LOOK)
            if reader.is_alive() and (self.stop.is_set() or time.monotonic() > self.end):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                reader.join()
                raise Stopped
        out, err = told[0]
        return json.loads(out) if process.returncode == 0 else {"error": err.strip()[-400:] or f"exit {process.returncode}"}


def _start_of(run: Run) -> str:
    return identity(run.start)


def run_of(row: Row) -> Run:
    return Run(row["settings"], row["start"], row["trainer"], row["arguments"], row["bed"])


def repeated(row: Row, player: Player) -> str:
    """Run a row again: where the two differ first, or empty if they are equal to the last bit."""
    again = player.one(run_of(row))
    return again["error"] if "error" in again else difference(row["measured"], again["measured"])


def main() -> None:
    """One run in this process. Its settings come as JSON, what it measures goes to standard output as JSON."""
    end_with_parent()
    task = json.loads(sys.argv[1])
    reserved = os.dup(1)
    os.dup2(2, 1)  # what an environment prints is no part of the row
    from turnwise.training import api

    train = load_object(task["trainer"], "trainer", callable, "function") if task.get("trainer") else api.train
    began = time.perf_counter()
    place = {"out": task["out"], "name": task["name"]}
    train(**{**COMMON, **task["settings"], **place}, **task.get("arguments", {}))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(each.ru_utime + each.ru_stime for each in used)
    result: Row = {"started": True}
    if "asked" in task:
        found = measured(Path(task["out"]) / task["name"])
        _, episodes, tokens, _ = found["curve"][-1]
        cost = {"cpu_seconds": round(cpu, 1), "seconds": round(time.perf_counter() - began, 1)}
        cost |= {"tokens": tokens, "episodes": episodes}
        result = {"method": described(task["asked"]), "measured": found, "cost": cost}
    os.write(reserved, (json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main()
