"""SIGKILL at random moments: every run resumes, loses nothing, and ends with the same weights as one that was never killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from trials.commands import FORKS
from trials.outcome import Outcome, Results

SMALL: dict[str, Any] = {
    "env": "guess", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 4, "cold_batch": 8,
    "steps": 8, "groups": 2, "group_size": 4, "max_tokens": 12, "context": 160, "eval_tasks": 6, "checkpoint_every": 2,
    "trackers": (), "threads": 1,
}  # fmt: skip
LIMIT = 300.0  # seconds that a child may take: only a hang reaches it

RUNS: dict[str, dict[str, Any]] = {  # what a run keeps between steps, and a method that has it
    "plain groups": {"method": "grpo"},
    "critic": {"method": "ppo"},
    "separate critic": {"method": "ppo", "critic": "separate"},
    "value tracker": {"method": "spo_single"},
    "replay": {"method": "spear_replay"},
    "demonstration cache": {"method": "bepa", "demos": "oracle"},
    "credit of another method": {"method": "sapo", "credit": "gigpo"},
    "LoRA": {"method": "grpo", "lora_rank": 4},
    "several passes": {"method": "dapo", "epochs": 2, "minibatches": 2},
}
STALE = {"staleness 1": {"method": "rloo", "staleness": 1}, "staleness 2": {"method": "grpo", "staleness": 2}}


def trial(kills: int, results: Results, progress: Callable[[str], None]) -> Iterator[Outcome]:
    """``kills`` kills, spread over all kinds of runs. Weights of a stale run depend on timing: only its accounts are checked."""
    kinds = {**RUNS, **STALE, "preferences": _preferences()}
    share = -(-kills // len(kinds))
    for kind, settings in kinds.items():
        if results.count("kills", kind) >= share:
            continue
        with tempfile.TemporaryDirectory() as folder:
            progress(f"kills: {kind}, {results.count('kills', kind)} of {share}")
            yield from _kind(kind, settings, share, results, Path(folder))


def _preferences() -> dict[str, Any]:
    return {"method": "dpo", "data": "PAIRS", "steps": 8}


def _kind(kind: str, settings: dict[str, Any], kills: int, results: Results, folder: Path) -> Iterator[Outcome]:
    settings = {**SMALL, **settings}
    if settings.get("data") == "PAIRS":
        settings["data"] = str(_write_pairs(folder / "pairs.jsonl"))
    whole = folder / "whole"
    began = time.monotonic()
    fault = _finish(_start(settings, whole))
    seconds = time.monotonic() - began
    if fault is not None:
        yield Outcome(
            "kills", f"{kind}, without kills", "failed", f"the run without kills failed: {fault}", seconds, 0, kind
        )
        return
    for attempt in range(1, 10 * kills):
        left, name = kills - results.count("kills", kind), f"{kind}, run {attempt}"
        if left <= 0:
            return
        if results.done("kills", name):
            continue
        out, rng = folder / f"killed-{attempt}", random.Random(name)
        number, fault = _killed(settings, out, seconds, rng, min(3, left))
        fault = fault or _difference(out / "run", whole / "run", settings)
        yield Outcome("kills", name, "failed" if fault else "resumed", fault, seconds, number, kind)
        shutil.rmtree(out, ignore_errors=True)


def _killed(settings: dict[str, Any], out: Path, seconds: float, rng: random.Random, most: int) -> tuple[int, str]:
    """One run to its end, killed at most ``most`` times: how often, and what went wrong."""
    run, kills, process = out / "run", 0, _start(settings, out)
    while kills < most:
        process.join(rng.uniform(0.05, 0.7) * seconds)
        if not process.is_alive():
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        process = _resume(run) if (run / "run.json").is_file() else _start(settings, out)
    return kills, _finish(process) or ""


def _difference(run: Path, whole: Path, settings: dict[str, Any]) -> str:
    """In what a killed run differs from one that was not; empty if in nothing."""
    from turnwise.store.ledger import SqliteLedger

    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        counts = ledger.group_counts()
    if counts.issued != counts.in_flight + counts.finished + counts.trained + counts.dropped:
        return f"the ledger does not balance: {counts}"
    logged = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    if logged != list(range(1, settings["steps"] + 1)):
        return f"steps logged: {logged}"
    if settings.get("staleness"):
        return ""
    mine, theirs = (load_file(path / "model" / "model.safetensors") for path in (run, whole))
    differing = [key for key in theirs if key not in mine or not (mine[key] == theirs[key]).all()]
    return f"weights differ: {differing[:3]}" if differing else ""


def _start(settings: dict[str, Any], out: Path) -> Any:
    return _child(_train, {**settings, "out": str(out), "name": "run"})


def _resume(run: Path) -> Any:
    return _child(_continue, str(run))


def _child(function: Callable[[Any], None], argument: Any) -> Any:
    process = FORKS.Process(target=function, args=(argument,))
    process.start()
    return process


def _train(settings: dict[str, Any]) -> None:
    from turnwise.training import api

    api.train(**settings)


def _continue(run: str) -> None:
    from turnwise.training import api

    api.resume(run)


def _finish(process: Any) -> str | None:
    process.join(LIMIT)
    if process.is_alive():
        process.kill()
        return f"still running after {LIMIT:g} s"
    return None if process.exitcode == 0 else f"exit status {process.exitcode}"


def _write_pairs(path: Path) -> Path:
    rng = random.Random(0)
    rows = [(rng.randint(1, 50), rng.randint(1, 50)) for _ in range(60)]
    lines = [
        json.dumps({"prompt": f"guess {a} or {b}?", "chosen": f"{max(a, b)}", "rejected": f"{min(a, b)} {n}"})
        for n, (a, b) in enumerate(rows)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return path
