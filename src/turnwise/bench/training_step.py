"""Seconds and peak memory of one whole training step: Turnwise beside TRL's GRPOTrainer on the same model.

    python -m turnwise.bench.training_step [--steps 12] [--threads 2] [--json] [--tasks single tools] [--trl-python PATH]

single  8 prompts x 8 completions of exactly 32 tokens (the end-of-turn id is outside the vocabulary: no early stop),
        random weights, a reward computed from the text; on a GPU 64 x 8 of 256 tokens by a model of 135 M parameters
tools   8 prompts x 8 episodes of two turns: one call of a trivial tool, then an answer. TRL's tool loop
        (``GRPOTrainer(tools=[add])``) against our environment. Random weights make no calls, so both sides start from
        one model that was briefly fine-tuned on scripted episodes; the output says how often it calls

A step is everything from the end of one optimizer step to the end of the next: tasks, sampling, tools, rewards, loss,
optimizer, weight sync to the generator, records. Ours is a plain ``turnwise.train`` (method grpo, beta 0, with the policy check
and a real ledger); TRL has its defaults except for the batch, the generations, beta 0, the length, the precision, and no reports.
A third row is TRL without gradient checkpointing, which is on by default, saves memory and costs time.

Each side is a fresh process. They alternate step by step, so that a slow second of the machine affects all of them. The first
steps are a warm-up and are dropped (on a GPU, where a TRL step takes most of a minute, one of its steps and three of ours); the
result is the median of the others. TRL may run in another interpreter. Knows both sides only as processes.
The model on a CPU: Llama, 4 layers of 128 (ff 384, 4 heads, 2 for keys), vocabulary 512, about 0.85 M parameters.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.bench import step_worker
from turnwise.bench.report import BenchRow, with_ratio_to
from turnwise.errors import StoreError

BAR = 2.0  # on `single`, ours must be this many times as fast as TRL
WARM_UP = 3  # first steps, dropped: ours compiles and captures graphs in them
WARM_UP_SLOW = 1  # of a side whose step takes most of a minute: its warm-up is negligible
LENGTH = {"single": 32, "tools": 64}  # tokens per turn here, per whole completion in TRL
SIDES = {"turnwise": "turnwise", "TRL": "trl", "TRL, no checkpointing": "trl"}
Results = dict[str, dict[str, float]]


def interpreter_with_trl() -> str | None:
    """The path of this interpreter if it has TRL, else None."""
    return sys.executable if importlib.util.find_spec("trl") else None


def work(task: str, device: str = "cpu", size: tuple[int, int, int] | None = None) -> dict[str, Any]:
    """The work of one step, for both sides."""
    groups, siblings, length = size or (8, 8, LENGTH[task])
    parts = 8 if device == "cuda" else 1  # TRL keeps all logits of a micro-batch: 512 x 256 x 49152 do not fit
    return {"task": task, "device": device, "groups": groups, "size": siblings, "length": length, "parts": parts}


def start(python: str, kind: str, job: dict[str, Any], threads: int, log: Path) -> subprocess.Popen[str]:
    command = [python, str(Path(step_worker.__file__)), kind, json.dumps(job)]
    # nothing may be downloaded, and no warning of a forked tokenizer may fill the log
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), **quiet}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log.open("w"), text=True, env=env)


def read_result(side: subprocess.Popen[str], log: Path) -> dict[str, float]:
    line = side.stdout.readline()  # type: ignore[union-attr]
    if not line:
        raise StoreError(f"a benchmark process ended early: {log.read_text()[-3000:]}")
    return dict(json.loads(line))


def measure(job: dict[str, Any], pythons: Mapping[str, str], steps: int, threads: int, folder: Path) -> Results:
    """Measure all sides of one task, alternating step by step."""
    job = {**job, "model": str(folder / "model"), "out": str(folder), "steps": steps + WARM_UP}
    warm_up = {name: WARM_UP_SLOW if job["device"] == "cuda" and SIDES[name] == "trl" else WARM_UP for name in pythons}
    logs = {name: folder / f"{name}.log" for name in (*pythons, "prepare")}
    if start(sys.executable, "prepare", job, threads, logs["prepare"]).wait():
        raise StoreError(logs["prepare"].read_text()[-3000:])
    sides = {n: start(p, SIDES[n], {**job, "side": n}, threads, logs[n]) for n, p in pythons.items()}
    try:
        for name, side in sides.items():
            read_result(side, logs[name])  # its model is loaded
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for remaining in range(steps + WARM_UP, 0, -1):
            for name, side in sides.items():
                if remaining <= steps + warm_up[name]:
                    print("go", file=side.stdin, flush=True)
                    rounds[name].append(read_result(side, logs[name]))
        return {name: summary(steps_of[warm_up[name] :]) for name, steps_of in rounds.items()}
    finally:
        for side in sides.values():
            side.kill()
            side.wait()


def summary(measured: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the measured steps, and the peak memory."""
    keys = ("seconds", "tokens", "turns", "tool_calls")
    medians = {key: statistics.median(row[key] for row in measured) for key in keys}
    times = sorted(row["seconds"] for row in measured)
    peaks = {key: max(row[key] for row in measured) for key in ("peak_mb", "device_gb")}
    return {**medians, "fastest": times[0], "slowest": times[-1], **peaks}


def compare(
    task: str, device: str, trl: str | None, steps: int, threads: int, size: tuple[int, int, int] | None = None
) -> Results:
    """Measure all installed sides in a temporary folder."""
    pythons = {n: sys.executable if kind == "turnwise" else trl for n, kind in SIDES.items()}
    with tempfile.TemporaryDirectory() as folder:
        installed = {name: python for name, python in pythons.items() if python}
        return measure(work(task, device, size), installed, steps, threads, Path(folder))


def rows(task: str, device: str, size: tuple[int, int, int] | None, steps: int, threads: int) -> list[BenchRow]:
    groups, siblings, length = size or (8, 8, LENGTH[task])
    load = (
        f"{groups} x {siblings} episodes of {length} tokens"
        if task == "single"
        else f"{groups} x {siblings} with a tool"
    )
    results = compare(task, device, interpreter_with_trl(), steps, threads, size)
    speed, memory = [], []
    for name in SIDES:
        r = results.get(name)
        why = "" if r else "not installed"
        speed.append(BenchRow("whole step", load, name, r["seconds"] if r else None, "s", note=why or _note(r)))
        used = None if r is None else r["device_gb"] * 1024 if device == "cuda" else r["peak_mb"]
        memory.append(BenchRow("memory", f"whole step, {load}", name, used, "MB", note=why))
    return with_ratio_to(speed, "TRL") + with_ratio_to(memory, "TRL")


def _note(r: Mapping[str, float] | None) -> str:
    return f"{r['fastest']:.3f}-{r['slowest']:.3f} s, {r['tokens']:.0f} tokens" if r else ""


def show(table: Mapping[str, Results], options: argparse.Namespace) -> None:
    print(f"one step, 64 episodes, {options.threads} threads; median of {options.steps} (fastest-slowest)")
    for task, results in table.items():
        for name in SIDES:
            if name not in results:
                print(f"{task:7s} {name:23s} not installed")
                continue
            r = results[name]
            times = f"{r['seconds']:.3f} s ({r['fastest']:.3f}-{r['slowest']:.3f})"
            ratio = f"{results['TRL']['seconds'] / r['seconds']:5.2f}x" if "TRL" in results else ""
            work = f"{r['tokens']:5.0f} tokens, {r['turns']:.2f} turns, {r['tool_calls']:.2f} calls"
            print(f"{task:7s} {name:23s} {times:27s} {ratio:7s} {r['peak_mb']:5.0f} MB   {work}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help=f"measured steps, after {WARM_UP} warm-up steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tasks", nargs="+", choices=list(LENGTH), default=list(LENGTH))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trl-python", default=interpreter_with_trl(), help="an interpreter that can import trl")
    options = parser.parse_args()
    table = {t: compare(t, "cpu", options.trl_python, options.steps, options.threads) for t in options.tasks}
    single = table.get("single", {})
    ratio = single["TRL"]["seconds"] / single["turnwise"]["seconds"] if "TRL" in single else None
    if options.json:
        print(json.dumps({"bar": BAR, "single_ratio": ratio, "threads": options.threads, "tasks": table}))
    else:
        show(table, options)
        if ratio is not None:
            print(f"single: {ratio:.2f} times as fast as TRL; bar {BAR} {'ok' if ratio >= BAR else 'FAIL'}")
    return 0 if ratio is None or ratio >= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
