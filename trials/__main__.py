"""``python -m trials [--parts kills inputs fuzz sandbox servers starvation tests] [--short] [--write docs/trial.md]``

Each part appends its results to ``trials/results``; an interrupted trial continues with what is left."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # bit-identical runs need one number of threads

from trials import (
    bad_environments,
    bad_files,
    bad_models,
    bad_runs,
    bad_settings,
    cases,
    fixtures,
    fuzz,
    kills,
    sandbox,
    servers,
    starvation,
    suites,
)
from trials.outcome import Outcome, Results, faults
from trials.report import page, table

ROWS = Path(__file__).parent / "results"
KILLS, EPISODES, STARVED = 200, 10_000, 20
SHORT_KILLS, SHORT_EPISODES, SHORT_EVERY, SHORT_STARVED = 12, 200, 5, 3
WANTED = {"kills": 200, "inputs": 200, "fuzz": 60_000, "sandbox": 6_000, "servers": 1_000, "starvation": 20, "tests": 200}
BAD_INPUTS = (bad_settings, bad_files, bad_environments, bad_models, bad_runs)
Progress = Callable[[str], None]


def inputs(short: bool, results: Results, progress: Progress, only: str = "") -> Iterator[Outcome]:
    every = [case for module in BAD_INPUTS for case in module.cases() if only in f"{case.part}: {case.name}"]
    yield from cases.trial(every[::SHORT_EVERY] if short else every, results, progress)


PARTS: dict[str, Callable[..., Iterator[Outcome]]] = {
    "kills": lambda short, *rest, **only: kills.trial(SHORT_KILLS if short else KILLS, *rest, **only),
    "inputs": inputs,
    "fuzz": lambda short, *rest: fuzz.trial(SHORT_EPISODES if short else EPISODES, *rest),
    "sandbox": sandbox.trial,
    "servers": servers.trial,
    "starvation": lambda short, *rest: starvation.trial(SHORT_STARVED if short else STARVED, *rest),
    "tests": lambda short, *rest: suites.trial(*rest),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trials", description="Adversarial trials of Turnwise.")
    parser.add_argument(
        "--parts", nargs="*", choices=tuple(PARTS), default=tuple(PARTS), help="none: only write the page"
    )
    parser.add_argument("--short", action="store_true", help="a selection, in a few minutes; keeps no rows")
    parser.add_argument("--fresh", action="store_true", help="try again what came out well before, too")
    parser.add_argument("--only", default="", metavar="TEXT", help="kills and bad inputs whose name contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="kills at a time; each needs a core or two")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="kills that are left then are given up")
    parser.add_argument("--rows", type=Path, default=ROWS, help="folder of the result rows")
    parser.add_argument("--write", type=Path, help="write the page to this file, from all rows")
    arguments = parser.parse_args()
    began = time.monotonic()

    def progress(text: str) -> None:
        print(f"[{time.monotonic() - began:6.0f} s] {text}", file=sys.stderr, flush=True)

    results = {part: _results(part, arguments) for part in PARTS}
    chosen = {**PARTS, "inputs": functools.partial(inputs, only=arguments.only)}
    chosen["kills"] = functools.partial(
        PARTS["kills"], only=arguments.only, jobs=arguments.jobs, seconds=60 * arguments.minutes
    )
    try:
        for part in arguments.parts:
            for outcome in chosen[part](arguments.short, results[part], progress):
                results[part].add(outcome)
                if outcome.fault:
                    progress(f"FAULT {outcome.part}, {outcome.name}: {outcome.fault}")
    finally:
        fixtures.remove()
    for part in arguments.parts:
        print(table(list(results[part].outcomes.values())))
    if arguments.write:
        rows = {part: list(result.outcomes.values()) for part, result in results.items()}
        tried = {when for result in results.values() for when in result.tried}
        arguments.write.write_text(page(rows, WANTED, tried), encoding="utf-8")
    return 1 if any(faults(results[part].outcomes.values()) for part in arguments.parts) else 0


def _results(part: str, arguments: argparse.Namespace) -> Results:
    path = arguments.rows / f"{part}.jsonl"
    if arguments.fresh and part in arguments.parts and not arguments.short:
        path.unlink(missing_ok=True)
    return Results(None if arguments.short else path)


if __name__ == "__main__":
    sys.exit(main())
