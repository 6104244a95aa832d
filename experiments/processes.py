"""Runs as single-threaded subprocesses, their dependencies, and their result rows. Knows no method and no environment."""

from __future__ import annotations

import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
Row = dict[str, Any]


def subprocess_environment() -> dict[str, str]:
    """The environment variables of a run: one thread; the package and experiments/ are importable."""
    paths = (str(ROOT / "src"), str(ROOT / "experiments"), os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}


def call(line: list[str], seconds: float | None = None) -> Row:
    """The JSON that a run prints, or its error; empty if it exceeds ``seconds``."""
    try:
        done = subprocess.run(line, capture_output=True, text=True, env=subprocess_environment(), timeout=seconds)
    except subprocess.TimeoutExpired:
        return {}
    if done.returncode:
        return {"error": done.stderr.strip()[-400:]}
    return dict(json.loads(done.stdout))


def read(paths: list[Path]) -> list[Row]:
    return [json.loads(line) for path in paths if path.is_file() for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class Job:
    """A unit of work that runs once the jobs ``after`` are done; the most costly ready job starts first. ``work`` receives the
    results of finished jobs by key."""

    key: Hashable
    work: Callable[[dict[Hashable, Any]], Any]
    after: tuple[Hashable, ...] = ()
    cost: float = 0.0


def schedule(jobs: list[Job], workers: int, until: float) -> dict[Hashable, Any]:
    """Run all jobs, ``workers`` at a time, each as soon as its dependencies are done; dependencies of others first, then the
    most costly. Returns the results by key; None for a job that raised."""
    dependencies = {key for job in jobs for key in job.after}
    waiting = sorted(jobs, key=lambda job: (job.key not in dependencies, -job.cost))
    done: dict[Hashable, Any] = {}
    running: dict[Future[Any], Job] = {}
    with ThreadPoolExecutor(workers) as pool:
        while waiting or running:
            ready = [job for job in waiting if all(key in done for key in job.after)][: workers - len(running)]
            if time.monotonic() > until:
                waiting, ready = [], []
            for job in ready:
                waiting.remove(job)
                running[pool.submit(job.work, done)] = job
            if not running:
                break
            for one in wait(running, return_when=FIRST_COMPLETED).done:
                done[running.pop(one).key] = None if one.exception() else one.result()
                if one.exception():  # a failed job must not stop the others
                    traceback.print_exception(one.exception())
    return done
