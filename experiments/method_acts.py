"""Does every method act? Each method, and each named strategy, sampler, budget, guidance and replay, takes a few steps in every
built-in environment and on prompts of a file, and the meter (docs/concepts.md) says what its slots did that GRPO's would not have
done.

    python experiments/method_acts.py --jobs 16 --minutes 9          # all cells, or as many as that time allows; again: the rest
    python experiments/method_acts.py --shard 1/4 --jobs 16          # every fourth cell, beside three other machines
    python experiments/method_acts.py --only arpo,dapo --envs lookup # some of them
    python experiments/method_acts.py --table                        # the rows, a line for each method
    python experiments/method_acts.py --record                       # keep them in experiments/results, for the pages of methods

A cell's verdict: acted (the slots with their shares), plain (it differs from GRPO in nothing that is measured), warned (nothing
of it acted, and the run said so: at its start, or after the third step), refused (the run said why before it began), silent
(nothing acted, and nobody said so), or died. A row names commit and versions; a cell with a row of this commit is not run again.
Several processes each play cell after cell, with everything imported once; one that crashes or hangs is a row, and another takes
its place. Each environment has one cold-started tiny model, made first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "experiments" / "results" / "method_acts.jsonl"
PROMPTS = "prompts"
CELL_SECONDS = 180  # after which a process is ended and its cell has died
LAST_SECONDS = 20  # of --minutes: no cell begins in them
PROVIDED = {"demonstrations": {"demos": "oracle"}, "teacher": {"teacher": "MODEL"}, "pairs": {"data": "PAIRS"}}
SMALL: dict[str, Any] = {
    "steps": 3, "groups": 3, "eval_tasks": 0, "cold_steps": 0, "lr": 1e-3, "trackers": (), "keep_tokens": 0, "threads": 1,
}  # fmt: skip
START = {"method": "grpo", "steps": 1, "groups": 2, "eval_tasks": 0, "hidden": 128, "cold_steps": 100, "trackers": ()}
Cell = tuple[str, str, str]  # method or slot, name, environment


# ------------------------------------------------------------------ one cell


def start(env: str, folder: Path) -> Path:
    """The cold-started model of an environment; made once."""
    from turnwise.training import api

    run = folder / f"start-{env}"
    if not (run / "summary.json").is_file():
        shutil.rmtree(run, ignore_errors=True)
        where: dict[str, Any] = {"env": env} if env != PROMPTS else {**prompts(folder), "cold_steps": 0}
        api.train(lambda *_: None, **{**START, **where}, out=str(folder), name=run.name, threads=1)
    return run / "initial"


def prompts(folder: Path) -> dict[str, Any]:
    """Rows of one's own, for a model that knows nothing: an odd number of characters is paid, which half of its answers have."""
    path, scored, lot = folder / "letters.jsonl", folder / "scored.py", random.Random(0)
    if not path.is_file():
        scored.write_text("def odd(completion):\n    return float(len(completion) % 2)\n")
        rows = [lot.sample("abcd", 3) for _ in range(64)]
        lines = [{"prompt": " ".join(r), "answer": r[0], "hint": f"say {r[0]}", "solution": r[0] * 3} for r in rows]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"data": str(path), "reward": f"{scored}:odd", "max_tokens": 8}


def pairs(folder: Path) -> str:
    path = folder / "pairs.jsonl"
    rows = [
        {"prompt": f"{a} and {b}", "chosen": str(a + b), "rejected": str(a - b)} for a in range(8) for b in range(1, 8)
    ]
    if not path.is_file():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(kind: str, name: str, env: str, folder: Path) -> dict[str, Any]:
    """The settings of a cell: what its recipe requires from outside is provided, everything else is as a user would leave it."""
    from turnwise import recipes
    from turnwise.training.plan import required_by

    model = str(folder / f"start-{env}" / "initial")
    values: dict[str, Any] = {**SMALL, **({"env": env} if env != PROMPTS else prompts(folder)), "model": model}
    values |= {"method": name} if kind == "method" else {"method": "dr_grpo", kind: name}
    recipe = recipes.build(name) if kind == "method" else None
    for requirement in required_by(recipe) if recipe is not None else ():
        for key, value in PROVIDED.get(requirement, {}).items():
            values[key] = {"MODEL": model, "PAIRS": pairs(folder)}.get(value, value)
    return values


def play(kind: str, name: str, env: str, folder: Path, scratch: Path) -> dict[str, Any]:
    """One short run, and what became of it."""
    from turnwise.errors import TurnwiseError
    from turnwise.observe.mechanism import shares
    from turnwise.observe.trackers import read_rows
    from turnwise.recipes.catalogue import changed_slots
    from turnwise.training import api
    from turnwise.training.plan import RunPlan

    warnings: dict[str, list[str]] = {"at start": [], "later": []}
    steps, began, run = 0, time.process_time(), scratch / "cell"

    def listen(event: str, facts: Any) -> None:
        nonlocal steps
        steps += event == "step" and facts.get("stage") == "learn"
        if event == "message" and facts.get("level") == "warning":
            warnings["later" if steps else "at start"].append(str(facts["text"])[:200])

    shutil.rmtree(run, ignore_errors=True)
    row: dict[str, Any] = {}
    try:
        values = settings(kind, name, env, folder)
        slots = sorted(changed_slots(RunPlan.from_caller(values, "", None, None).recipe))
        api.train(listen, **values, out=str(scratch), name=run.name)
    except Exception as fault:
        refused = isinstance(fault, TurnwiseError) and not (run / "ledger.sqlite").is_file()
        words = str(fault) if isinstance(fault, TurnwiseError) else f"{type(fault).__name__}: {fault}"
        row = {"verdict": "refused" if refused else "died", "why": words.replace(f"{folder}/", "")[:300]}
    else:
        share = shares(read_rows(run / "metrics.jsonl"))
        own = [slot for slot in slots if kind in ("method", slot)]
        acted = {slot: round(share[slot], 4) for slot in own if share.get(slot)}
        told = next((f"warned {when}" for when, texts in warnings.items() if texts), "silent")
        row = {"verdict": "plain" if not own else "acted" if acted else told, "acted": acted}
        row["never"] = [slot for slot in own if slot not in acted]
    said = {when: texts for when, texts in warnings.items() if texts}
    return {**row, "warnings": said, "steps": steps, "seconds": round(time.process_time() - began, 1)}


# ------------------------------------------------------- processes and shards


def work(pipe: Connection, folder: Path, number: int) -> None:
    """Of a process: cell after cell, until there is none."""
    scratch = folder / f"process-{number}"
    scratch.mkdir(parents=True, exist_ok=True)
    os.chdir(scratch)  # a shared pool begins in the current folder
    while (cell := pipe.recv()) is not None:
        pipe.send({"made": str(start(cell[2], folder))} if cell[0] == "start" else play(*cell, folder, scratch))


class Process:
    """A process with the cell it plays."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number, self.cell, self.limit = folder, number, None, 0.0
        self.begin()

    def begin(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.child = spawn.Process(target=work, args=(theirs, self.folder, self.number), daemon=True)
        self.child.start()
        theirs.close()

    def give(self, cell: Cell | None) -> None:
        self.cell, self.limit = cell, time.monotonic() + CELL_SECONDS
        with contextlib.suppress(OSError):  # it has ended since: its result says so
            self.pipe.send(cell)

    def result(self) -> dict[str, Any] | None:
        """What became of the cell; None while it is played. A process that crashed or hangs is replaced."""
        if self.pipe.poll():
            try:
                return self.pipe.recv()
            except (EOFError, OSError):  # at rest, or in the middle of what was sent to it
                self.child.join()
                reason = f"the process ended with {self.child.exitcode}"
        elif time.monotonic() < self.limit:
            return None
        else:
            reason = f"not finished after {CELL_SECONDS} s"
        self.child.kill()
        self.begin()
        return {"verdict": "died", "why": reason}


def play_all(todo: list[Cell], folder: Path, jobs: int, until: float) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Cells with their results, as they finish; none begins in the last seconds before ``until``."""
    waiting = todo[::-1]
    processes = [Process(folder, n) for n in range(min(jobs, len(todo)))]
    while True:
        for process in processes:
            if process.cell is None and waiting and time.monotonic() < until - LAST_SECONDS:
                process.give(waiting.pop())
        busy = [process for process in processes if process.cell is not None]
        if not busy or time.monotonic() > until:
            break
        wait([process.pipe for process in busy], timeout=1.0)
        for process in busy:
            if (result := process.result()) is not None:
                cell, process.cell = process.cell, None
                yield cell, result
    for process in processes:
        process.child.kill()


def cells(kinds: set[str], only: set[str], envs: list[str]) -> list[Cell]:
    """Methods everywhere, then the named pieces everywhere."""
    from turnwise.recipes.experience import SLOTS
    from turnwise.recipes.registry import METHODS

    named = [("method", name) for name in METHODS] + [(slot, name) for slot, pieces in SLOTS.items() for name in pieces]
    wanted = [(kind, name) for kind, name in named if kind in (kinds or {kind}) and name in (only or {name})]
    return [(kind, name, env) for kind, name in wanted for env in envs]


def environments() -> list[str]:
    from turnwise import environments as built_in

    return [*built_in.BUILT_IN, PROMPTS]


def commit() -> str:
    """Of the source; with + where it was changed since."""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()  # noqa: E731
    return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain", "src")) or "unknown"


def recorded(*paths: Path) -> dict[Cell, dict[str, Any]]:
    """The newest row of each cell."""
    lines = [line for path in paths if path.is_file() for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["kind"], row["name"], row["env"]): row for row in map(json.loads, lines)}


def record(rows: dict[Cell, dict[str, Any]]) -> None:
    """Keep what the pages show: a line for each method or piece. Those without a new row stay as they are."""
    before = map(json.loads, RECORDED.read_text(encoding="utf-8").splitlines()) if RECORDED.is_file() else ()
    lines = {(m["kind"], m["name"]): m for m in before if "cells" in m}
    for kind, name in dict.fromkeys(cell[:2] for cell in rows):
        mine = {env: rows[kind, name, env] for env in environments() if (kind, name, env) in rows}
        newest = list(mine.values())[-1]
        shown = {e: {key: r[key] for key in ("verdict", "acted", "why") if r.get(key)} for e, r in mine.items()}
        same = {"kind": kind, "name": name, "commit": newest["commit"], "versions": newest["versions"]}
        lines[kind, name] = {**same, "cells": shown}
    compact = [json.dumps(line, separators=(",", ":")) + "\n" for _, line in sorted(lines.items())]
    RECORDED.write_text("".join(compact), encoding="utf-8")


def table(rows: dict[Cell, dict[str, Any]]) -> str:
    """A line for each method or piece: its verdict in every environment, and the largest share of each slot."""
    envs = list(dict.fromkeys(env for _, _, env in rows))
    lines = [f"| | {' | '.join(envs)} | largest shares |", "|---" * (len(envs) + 2) + "|"]
    for kind, name in dict.fromkeys(cell[:2] for cell in rows):
        mine = {env: rows[kind, name, env] for env in envs if (kind, name, env) in rows}
        best = Counter[str]()
        for row in mine.values():
            best |= Counter(row.get("acted", {}))
        words = [mine[env]["verdict"] if env in mine else "" for env in envs]
        largest = ", ".join(f"{slot} {share:.2g}" for slot, share in best.items())
        lines.append(f"| {kind} {name} | {' | '.join(words)} | {largest} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="every N-th cell from the I-th on")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--minutes", type=float, default=60 * 24, help="end after so many")
    parser.add_argument("--rows", type=Path, default=Path("runs") / "method_acts" / "rows", metavar="DIR")
    parser.add_argument("--folder", type=Path, default=Path("runs") / "method_acts", help="where runs are made")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--envs", default="", help="environments, separated by commas; prompts: those of a file")
    parser.add_argument("--kinds", default="", help="method, strategy, sampler, budget, guidance, replay; empty: all")
    parser.add_argument("--commit", default="", help="what the rows say, where git does not know")
    parser.add_argument("--table", action="store_true", help="print the rows as a table, and end")
    parser.add_argument("--record", action="store_true", help="keep the rows in experiments/results, and end")
    given = parser.parse_args()
    files = sorted(given.rows.glob("*.jsonl"))
    if given.table or given.record:
        print(table(recorded(*files))) if given.table else record(recorded(*files))
        return
    until = time.monotonic() + 60 * given.minutes
    os.environ["OMP_NUM_THREADS"] = "1"
    source = given.commit or commit()
    packages = ("torch", "transformers", "numpy", "tokenizers")
    versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}
    part, parts = map(int, given.shard.split("/"))
    if not 1 <= part <= parts:
        parser.error(f"--shard is {given.shard}; write a part from 1/{parts} to {parts}/{parts}")
    words = lambda text: [word for word in text.split(",") if word]  # noqa: E731
    envs = words(given.envs) or environments()
    mine = cells(set(words(given.kinds)), set(words(given.only)), envs)[part - 1 :: parts]
    done = {cell for cell, row in recorded(*files).items() if row["commit"] == source}
    todo = [cell for cell in mine if cell not in done]
    given.rows.mkdir(parents=True, exist_ok=True)
    given.folder.mkdir(parents=True, exist_ok=True)
    folder, file = given.folder.resolve(), given.rows / f"shard-{part}-of-{parts}.jsonl"
    starts = [("start", "", env) for env in envs if any(cell[2] == env for cell in todo)]
    for cell, result in play_all(starts, folder, given.jobs, until):
        print(cell[2], result.get("made") or result, file=sys.stderr, flush=True)
    count = Counter[str]()
    with file.open("a", encoding="utf-8") as rows:
        for (kind, name, env), result in play_all(todo, folder, given.jobs, until):
            head = {"commit": source, "versions": versions, "kind": kind, "name": name, "env": env}
            rows.write(json.dumps({**head, **result}) + "\n")
            rows.flush()
            count[result["verdict"]] += 1
            if result["verdict"] in ("silent", "died"):
                print(result["verdict"], kind, name, env, result.get("why", ""), file=sys.stderr, flush=True)
    print(f"{sum(count.values())} of {len(todo)} cells played, {len(done)} had a row: {dict(count)}")


if __name__ == "__main__":
    main()
