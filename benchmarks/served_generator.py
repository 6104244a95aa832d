"""What it costs to sample elsewhere: the same synchronous run with the generator in its own process, in a second process
(``--generator local``) and behind HTTP (``turnwise serve``), one after the other.

    python benchmarks/served_generator.py [--groups 8] [--group-size 8] [--steps 12] [--rounds 2]

All sample the same tokens, so the ratio of the seconds is that of the ways. The peer is the generator in the run's own process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

TURNWISE = [sys.executable, "-m", "turnwise"]
WAYS = ("own process", "second process", "HTTP")
PARTS = ("rollout", "learn", "publish")
WARM_UP = 3  # steps that are not counted


@contextlib.contextmanager
def generator_flags(way: str, shared: list[str]) -> Iterator[list[str]]:
    """The flags that choose where a run samples."""
    if way != "HTTP":
        yield ["--generator=local"] if way == "second process" else []
        return
    command = [*TURNWISE, "serve", "tiny", "--address=127.0.0.1:0", *shared]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            while " at " not in (first := Path(log.name).read_text(encoding="utf-8").partition("\n")[0]):
                if server.poll() is not None:
                    raise SystemExit(f"the server did not start: {Path(log.name).read_text(encoding='utf-8')}")
                time.sleep(0.1)
            yield [f"--generator={first.split(' at ')[1].split()[0]}"]
        finally:
            server.terminate()


def measure(way: str, shared: list[str], own: list[str], folder: Path) -> dict[str, Any]:
    """Seconds of a step by its parts: medians over the steps after the first. ``tokens`` and ``reward``: of all these steps."""
    with generator_flags(way, shared) as where:
        command = [*TURNWISE, "train", "grpo", *shared, *own, *where, f"--out={folder}", f"--name={way.split()[0]}"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stdout}{done.stderr}")
    lines = (folder / way.split()[0] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines][WARM_UP:]
    found = {part: median(row[f"seconds/{part}"] for row in rows) for part in PARTS}
    same = {name: tuple(row[name] for row in rows) for name in ("tokens", "reward")}
    return {**found, **same, "step": median(row["seconds"] for row in rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the places where a run can sample.")
    parser.add_argument("--env", default="calculator")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2, help="the fastest counts")
    asked = parser.parse_args()
    if asked.steps <= WARM_UP:
        parser.error(f"--steps is {asked.steps}; write more than {WARM_UP}: the first ones are not counted")
    shared = [f"--env={asked.env}"]
    own = [f"--groups={asked.groups}", f"--group-size={asked.group_size}", f"--steps={asked.steps}", "--cold-steps=100"]
    own += ["--eval-tasks=0", "--trackers=", "--checkpoint-every=1000"]
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(asked.rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                found[way].append(measure(way, shared, own, Path(folder)))
    best = {way: min(rows, key=lambda row: row["step"]) for way, rows in found.items()}
    print(f"{'':16}" + "".join(f"{part + ' s':>11}" for part in (*PARTS, "step")) + f"{'of own':>9}")
    for way, row in best.items():
        print(f"{way:16}" + "".join(f"{row[part]:11.4f}" for part in (*PARTS, "step")), end="")
        print(f"{best[WAYS[0]]['step'] / row['step']:8.2f}x")
    assert len({(row["tokens"], row["reward"]) for row in best.values()}) == 1, "the ways sampled different tokens"
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
