"""Training runs side by side, each in a process with one thread, and the rows that they leave. Knows no environment.

    python experiments/parallel_runs.py '{"env": "service", "steps": 40, ...}'        one run

A row holds the settings, the evaluations before and after, and the curve of those between, over steps and sampled tokens. A run
that is stopped when time is up leaves its curve so far, and the row says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from processes import ROOT, Job, Row, read, schedule, subprocess_environment

RESULTS = Path(__file__).parent / "results"
COMMON: dict[str, Any] = {"trackers": (), "threads": 1, "keep_tokens": 0, "quiet": True}
KEPT = ("success", "interval", "exact", "tasks")  # of an evaluation


def evaluation(run: Path, when: str) -> Row:
    """What is kept of an evaluation; empty if there is none."""
    path = run / f"evaluation_{when}.json"
    found = json.loads(path.read_text())["summary"] if path.is_file() else {}
    return {key: found[key] for key in KEPT if key in found}


def curve(run: Path, metric: str) -> list[list[float]]:
    """[step, sampled tokens, value] of each evaluation during a run."""
    rows = [row for row in read([run / "metrics.jsonl"]) if "step" in row]
    steps = [row for row in rows if "tokens" in row]
    tokens = dict(zip((row["step"] for row in steps), accumulate(row["tokens"] for row in steps)))
    return [[row["step"], tokens.get(row["step"], 0.0), row[metric]] for row in rows if metric in row]


def finished(
    settings: dict[str, Any], name: str, out: str, seconds: float, metric: str = "eval/success", program: str = __file__
) -> Row:
    """Run in a subprocess for at most ``seconds``; what it has measured. ``program`` trains with the settings of its argument."""
    line = [sys.executable, program, json.dumps({**COMMON, **settings, "out": out, "name": name})]
    began, error = time.monotonic(), ""
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, env=subprocess_environment(), timeout=max(1.0, seconds)
        )
        error = done.stderr.strip()[-300:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        error = "out of time"
    run = Path(out) / name
    measured = {when: evaluation(run, when) for when in ("before", "after")}
    kept = json.loads(json.dumps(settings).replace(f"{ROOT.resolve()}/", ""))  # files by their place in the repository
    found = {"settings": kept, **measured, "curve": curve(run, metric), "seconds": round(time.monotonic() - began)}
    return {**found, "error": error} if error else found


def side_by_side(
    runs: Sequence[tuple[Row, dict[str, Any], str]],
    results: Path,
    out: str,
    jobs: int,
    seconds: float,
    metric: str = "eval/success",
) -> None:
    """Each of ``runs`` (what its row says beside the measurements, its settings, its name), ``jobs`` at a time; rows are appended
    to ``results``."""
    until = time.monotonic() + seconds

    def work(about: Row, settings: dict[str, Any], name: str) -> None:
        row = {**about, **finished(settings, name, out, until - time.monotonic(), metric)}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(name, row["before"], row["after"] or row["curve"][-1:], row.get("error", ""), flush=True)

    schedule([Job(run[2], lambda _, run=run: work(*run)) for run in runs], jobs, until)


if __name__ == "__main__":
    from turnwise.training import api

    api.train(**json.loads(sys.argv[1]))
