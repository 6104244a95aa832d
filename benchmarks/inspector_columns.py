"""What keeping a run's token columns costs: CPU time of recording, encoding and writing them, as a share of a step's.

    python benchmarks/inspector_columns.py [--env lookup] [--method grpo] [--steps 12] [--groups 8] [--group-size 8]

Trains the built-in model on one thread and times the calls that keeping adds: ``token_values`` after each micro-batch, the ledger
method ``keep_tokens`` (copy, compress, write), and the wrapper around the objective. CPU time, so that other jobs on the machine
do not matter. The first two steps are left out. On a GPU the ledger writes while the device computes, and this share is an upper
bound.
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import turnwise
from turnwise.store.ledger import SqliteLedger
from turnwise.store.rundir import RunDir
from turnwise.training import step_records

WARM_UP = 2


class CallTimer:
    """Sums the CPU time of the calls of some functions, which it replaces."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - start

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="lookup")
    parser.add_argument("--method", default="grpo")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    timer, marks = CallTimer(), list[tuple[float, dict[str, float]]]()
    timer.wrap(step_records, "token_values")
    timer.wrap(step_records.TokenRecorder, "watch")
    timer.wrap(SqliteLedger, "keep_tokens")

    def on_event(event: str, facts: Any) -> None:
        if event == "step":
            marks.append((time.process_time(), dict(timer.seconds)))

    with tempfile.TemporaryDirectory() as folder:
        turnwise.train(
            on_event, method=options.method, env=options.env, out=folder, name="run", steps=options.steps, threads=1,
            groups=options.groups, group_size=options.group_size, cold_steps=20, eval_tasks=0, trackers=(),
        )  # fmt: skip
        report(marks, RunDir(Path(folder) / "run").ledger)


def report(marks: list[tuple[float, dict[str, float]]], ledger: Path) -> None:
    (begin, first), (end, last) = marks[WARM_UP - 1], marks[-1]
    steps = len(marks) - WARM_UP
    step = (end - begin) / steps
    parts = {name: (last[name] - first.get(name, 0.0)) / steps for name in last}
    with sqlite3.connect(ledger) as db:
        rows, stored = db.execute("SELECT count(*), sum(length(head) + length(data)) FROM token_columns").fetchone()
    from turnwise.inspector.queries import RunReader

    with RunReader(ledger.parent) as run:
        tokens = sum(sum(update.sizes) for kept in run.kept_steps() for update in run.token_columns(kept))
    print(f"{tokens:,} tokens in {rows} updates: {stored / tokens:.1f} bytes per token")
    for name, seconds in parts.items():
        print(f"{name:<14} {1000 * seconds:8.2f} ms a step, {100 * seconds / step:.2f} %")
    total = sum(parts.values())
    print(f"{'all of them':<14} {1000 * total:8.2f} ms of {1000 * step:.0f} ms, {100 * total / step:.2f} %")


if __name__ == "__main__":
    main()
