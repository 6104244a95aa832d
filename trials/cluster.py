"""``python -m trials.cluster [--kills 200] [--minutes 25]``: SIGKILL of random processes of runs on a local Ray cluster.

A kill hits a generator, the learner, an actor that plays environments, or the driver (the ``turnwise`` command), also during the
final evaluation. A killed driver is started again with ``turnwise resume``; Ray starts the others again. When a run has ended,
its ledger must prove that nothing was lost and nothing was trained twice, and that no token was older than the staleness allows;
no episode of the final evaluation may have failed, and its success must agree with that of the same run without a cluster and
without kills. Rows of earlier calls count: a stopped trial continues.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}

from trials import finished_runs
from trials.finished_runs import COMMAND, agree, success
from trials.outcome import Outcome, Results
from trials.report import table

ROWS = Path(__file__).parent / "results" / "cluster.jsonl"
STALENESS, STEPS, GROUPS = 2, 30, 4
TASKS = {"env": "guess", "difficulty": "1", "threads": "1", "trackers": ""}
SETTINGS = {
    **TASKS, "steps": STEPS, "groups": GROUPS, "group-size": "4", "max-tokens": "16", "context": "96", "eval-tasks": "100",
    "checkpoint-every": "1", "staleness": STALENESS, "keep-tokens": "0",
}  # fmt: skip
WEIGHTS = {"generator": 8, "environment": 8, "learner": 3, "driver": 2}  # how often each kind is chosen
KIND = "kills on a Ray cluster with environment actors"
ACTORS = "generators=2,environments=2,restarts=100000"
SPARED = 40.0  # seconds without a new step in which only environments are killed
UNDISTURBED = 600.0  # seconds for the run without kills
STUCK = 240.0  # seconds without a new step, with all kills paused, after which a run counts as hung


# ------------------------------------------------------------------------ kills


@dataclass
class KilledRun:
    """One run on the cluster at ``address``, and what was killed in it."""

    out: Path
    model: Path
    address: str
    seed: int
    rng: random.Random
    gap: float = 5.0  # the most seconds between two kills
    kills: Counter[str] = field(default_factory=Counter)
    driver: subprocess.Popen[bytes] | None = None
    last: tuple[int, float] = (-1, 0.0)  # step and time of the last kill that stops the training

    @property
    def path(self) -> Path:
        return self.out / "run"

    def start(self) -> None:
        """Start the driver, or start it again."""
        cluster = f"{self.address},{ACTORS}"
        words = ["resume", str(self.path)]
        if not (self.path / "run.json").is_file():
            words = ["train", "grpo", *flags(self.model, self.seed, self.out), "--cluster", cluster]
        with (self.out / "driver.log").open("ab") as log:
            self.driver = subprocess.Popen([*COMMAND, *words], stdout=log, stderr=log, cwd=self.out)

    def to_the_end(self, most: int, until: float) -> str:
        """Kill at most ``most`` processes, none after ``until``; then let the run end. Returns what went wrong."""
        self.start()
        step, moved = -1, time.monotonic()
        while True:
            time.sleep(self.rng.uniform(self.gap / 10, self.gap))
            assert self.driver is not None
            status = self.driver.poll()
            if status == 0:
                return ""
            if status is not None:
                return f"the driver ended with status {status}: {_tail(self.out / 'driver.log')}"
            if (now := steps_done(self.path)) != step:
                step, moved = now, time.monotonic()
            if time.monotonic() - moved > STUCK:
                return f"no step for {STUCK:g} s after step {step}: {_tail(self.out / 'driver.log')}"
            if sum(self.kills.values()) < most and time.monotonic() < until:
                self.kill_one()

    def kill_one(self) -> None:
        kind = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        now = steps_done(self.path)
        if kind != "environment" and now == self.last[0] and time.monotonic() - self.last[1] < SPARED:
            kind = "environment"  # a run in which nothing ever starts proves nothing
        pids = self.processes(kind)
        if not pids:
            return
        if kind != "environment":
            self.last = (now, time.monotonic())
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.rng.choice(pids), signal.SIGKILL)
            self.kills[kind] += 1
        if kind == "driver" and self.driver is not None:
            self.driver.wait()
            self.start()

    def processes(self, kind: str) -> list[int]:
        """The living processes of a kind."""
        if kind == "driver":
            living = self.driver is not None and self.driver.poll() is None and (self.path / "run.json").is_file()
            return [self.driver.pid] if living and self.driver else []
        return self._actors(kind)

    def _actors(self, kind: str) -> list[int]:
        import ray

        from turnwise.training.cluster import run_key
        from turnwise.training.cluster.directory import find_actors

        pids = []
        for actor in find_actors(kind, run_key(self.path)).values():
            with contextlib.suppress(ray.exceptions.RayError):
                pids.append(ray.get(actor.process.remote(), timeout=1.0))
        return pids


def remove_actors(run: Path) -> None:
    """End what a run left that did not end by itself."""
    import ray

    from turnwise.training.cluster import LEARNER, run_key
    from turnwise.training.cluster.actors import remove_helpers
    from turnwise.training.cluster.directory import find_actors

    for learner in find_actors(LEARNER, run_key(run)).values():
        ray.kill(learner, no_restart=True)
    remove_helpers(run_key(run))


def flags(model: Path, seed: int, out: Path) -> list[str]:
    values = {**SETTINGS, "model": model, "seed": seed, "out": out, "name": "run"}
    return [f"--{name}={value}" for name, value in values.items()]


def make_model(out: Path) -> Path:
    """The model that all runs begin with: tiny, after its supervised cold start."""
    values = {**TASKS, "steps": 1, "eval-tasks": 0, "out": out, "name": "model"}
    run_to_end(["train", "grpo", *(f"--{name}={value}" for name, value in values.items())], out)
    return out / "model" / "initial"


def run_to_end(words: list[str], folder: Path) -> None:
    subprocess.run([*COMMAND, *words], cwd=folder, check=True, capture_output=True)


def steps_done(run: Path) -> int:
    with contextlib.suppress(OSError):
        return len((run / "metrics.jsonl").read_text().splitlines())
    return 0


def _tail(path: Path) -> str:
    return " ".join(path.read_text(errors="replace").split())[-400:] if path.is_file() else ""


# ------------------------------------------------------------------------ proof


def audit(run: Path) -> tuple[str, dict[str, int]]:
    """What is wrong with the accounts of a finished run (empty: nothing), and its counts."""
    return finished_runs.audit(run, dict.fromkeys(range(STEPS), GROUPS), STALENESS)


# ------------------------------------------------------------------------ trial


def trial(kills: int, minutes: float, results: Results, progress: Any, gap: float = 5.0, first: int = 0) -> None:
    """Runs until ``kills`` processes were killed in all rows. Seeds begin at ``first``, or after those of the rows."""
    import ray

    ray.init(
        "local", num_cpus=8, num_gpus=0, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False,
        namespace="turnwise", configure_logging=False,
    )  # fmt: skip
    address, until = ray.get_runtime_context().gcs_address, time.monotonic() + 60 * minutes
    mine = [outcome for outcome in results.outcomes.values() if outcome.kind == KIND]
    done, seed = sum(outcome.count for outcome in mine), first or len(mine)
    try:
        with tempfile.TemporaryDirectory(prefix="tw") as kept:
            model = make_model(Path(kept))
            while done < kills and time.monotonic() < until:
                folder = Path(tempfile.mkdtemp(prefix="tw"))
                outcome = one_run(
                    KilledRun(folder, model, address, seed, random.Random(seed), gap), kills - done, until, progress
                )
                if outcome.fault:
                    progress(f"the run is kept in {folder}")
                else:
                    shutil.rmtree(folder)
                results.add(outcome)
                done, seed = done + outcome.count, seed + 1
                progress(f"{done} kills; {outcome.name}: {outcome.result} {outcome.fault}")
    finally:
        ray.shutdown()


def one_run(run: KilledRun, most: int, until: float, progress: Any) -> Outcome:
    """One run with kills, and beside it the same one without."""
    began = time.monotonic()
    whole = run.out / "whole"
    whole.mkdir()
    command = [*COMMAND, "train", "grpo", *flags(run.model, run.seed, whole)]
    undisturbed = subprocess.Popen(command, cwd=whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        fault = run.to_the_end(most, until)
        facts: dict[str, int] = {}
        if not fault:
            fault, facts = audit(run.path)
        progress(f"{dict(run.kills)}; {facts} {fault}")
        status = undisturbed.wait(UNDISTURBED)
        fault = fault or (f"the undisturbed run ended with status {status}" if status else "")
    finally:
        undisturbed.kill()
        if run.driver is not None and run.driver.poll() is None:
            run.driver.kill()
        remove_actors(run.path)
    ends = ""
    if not fault:
        ours, theirs = success(run.path), success(whole / "run")
        ends = f"success {ours} against {theirs}"
        fault = "" if agree(ours, theirs) else f"final success {ours}, undisturbed {theirs}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(run.kills.items()))
    name = f"seed {run.seed}: {kinds}; {json.dumps(facts)}; {ends}"
    seconds, count = time.monotonic() - began, sum(run.kills.values())
    return Outcome("cluster", name, "failed" if fault else "accounted", fault, seconds, count, KIND)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trials.cluster", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=25.0, help="no kill and no new run after so many minutes")
    parser.add_argument("--gap", type=float, default=5.0, help="the most seconds between two kills")
    parser.add_argument("--first", type=int, default=0, help="the first seed; 0: after those of the rows")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the result rows; /dev/null keeps none")
    arguments = parser.parse_args()
    began = time.monotonic()
    results = Results(arguments.rows)
    trial(
        arguments.kills,
        arguments.minutes,
        results,
        lambda text: print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr, flush=True),
        arguments.gap,
        arguments.first,
    )
    outcomes = [outcome for outcome in results.outcomes.values() if outcome.kind == KIND]
    print(table(outcomes))
    return 1 if any(outcome.fault for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
