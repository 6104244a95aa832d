"""Does every method act? Each method, and each named strategy, sampler, budget, guidance and replay, takes a few steps in an
environment, and the meter (docs/concepts.md) says what its slots did that GRPO's would not have done.

    python experiments/method_acts.py                          # each where it should act
    python experiments/method_acts.py --everywhere             # and in all built-in environments and on prompts of a file
    python experiments/method_acts.py --only arpo,dapo --again # some of them, anew
    python experiments/method_acts.py --table                  # what is recorded, as a table

A cell is refused (the run says why before it begins), acted (the slots with their shares, and those that never did), plain (it
differs from GRPO in nothing that is measured), warned (nothing of it acted, and the run said so), SILENT (nothing acted, and
nobody said so) or died. Rows go to ``experiments/results/method_acts.jsonl``; a cell that is recorded there is not run again.
Everything runs in one process, from one cold-started tiny model for each environment, which is kept in ``--folder``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise import environments, recipes
from turnwise.errors import TurnwiseError
from turnwise.observe.mechanism import shares
from turnwise.observe.trackers import read_rows
from turnwise.recipes.catalogue import changed_slots
from turnwise.recipes.experience import SLOTS as NAMED
from turnwise.training import api
from turnwise.training.plan import RunPlan, required_by
from turnwise.training.refusals import refuse, requirements

ROWS = Path(__file__).resolve().parent / "results" / "method_acts.jsonl"
PROMPTS = "prompts"
ENVIRONMENTS = (*environments.BUILT_IN, PROMPTS)
PLACES = {  # what a method or named piece requires: the environment that should let it act
    "state": "keydoor", "answer": "lookup", "feedback": "guess", "forks": "guess", "hints": "lookup", "help": "lookup",
    "solutions": "lookup",
}  # fmt: skip
USUAL = "lookup"  # several turns, tools, hints, a gold answer
PROVIDED = {"demonstrations": {"demos": "oracle"}, "teacher": {"teacher": "MODEL"}, "pairs": {"data": "PAIRS"}}
SMALL: dict[str, Any] = {
    "steps": 3, "groups": 3, "eval_tasks": 0, "cold_steps": 0, "lr": 1e-3, "trackers": (), "keep_tokens": 0,
    "quiet": True,
}  # fmt: skip
START = {"method": "grpo", "steps": 1, "groups": 2, "eval_tasks": 0, "hidden": 128, "cold_steps": 100, "trackers": ()}
KINDS = ("method", *NAMED)


def start(env: str, folder: Path) -> Path:
    """The cold-started model of an environment; made once."""
    run = folder / f"start-{env}"
    if not (run / "summary.json").is_file():
        shutil.rmtree(run, ignore_errors=True)
        where: dict[str, Any] = {"env": env} if env != PROMPTS else {**prompts(folder), "cold_steps": 0}
        api.train(lambda *_: None, **{**START, **where}, out=str(folder), name=run.name)
    return run / "initial"


def prompts(folder: Path) -> dict[str, Any]:
    """Rows of one's own, for a model that knows nothing: an odd number of characters is paid, which half of its answers have."""
    path, scored, lot = folder / "letters.jsonl", folder / "scored.py", random.Random(0)
    if not path.is_file():
        scored.write_text("def odd(completion):\n    return float(len(completion) % 2)\n")
        rows = [lot.sample("abcd", 3) for _ in range(64)]
        path.write_text("".join(json.dumps({"prompt": " ".join(row), "answer": row[0]}) + "\n" for row in rows))
    return {"data": str(path), "reward": f"{scored}:odd", "max_tokens": 8}


def pairs(folder: Path) -> str:
    path = folder / "pairs.jsonl"
    rows = [
        {"prompt": f"{a} and {b}", "chosen": str(a + b), "rejected": str(a - b)} for a in range(8) for b in range(1, 8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(kind: str, name: str, env: str, folder: Path) -> dict[str, Any]:
    """The settings of a cell: what its recipe requires from outside is provided, everything else is as a user would leave it."""
    model = str(start(env, folder))
    values: dict[str, Any] = {**SMALL, **({"env": env} if env != PROMPTS else prompts(folder)), "model": model}
    values |= {"method": name} if kind == "method" else {"method": "dr_grpo", kind: name}
    recipe = recipes.build(name) if kind == "method" else None
    for requirement in required_by(recipe) if recipe is not None else ():
        for key, value in PROVIDED.get(requirement, {}).items():
            values[key] = {"MODEL": model, "PAIRS": pairs(folder)}.get(value, value)
    return values


def best_place(kind: str, name: str) -> str:
    """The environment whose offer the cell's pieces require, and that does not refuse them."""
    values: dict[str, Any] = {"method": name} if kind == "method" else {"method": "dr_grpo", kind: name}
    recipe = RunPlan.from_caller(values, "", None, None).recipe
    required = required_by(recipe)
    for requirement in required & PROVIDED.keys():
        values |= PROVIDED[requirement]
    preferred = [env for requirement, env in PLACES.items() if requirement in required]
    for env in dict.fromkeys([*preferred, USUAL, *environments.BUILT_IN]):
        with contextlib.suppress(TurnwiseError):
            refuse(RunPlan.from_caller({**values, "env": env}, "", None, None), (requirements,))
            return env
    return (preferred or [USUAL])[0]


def cell(kind: str, name: str, env: str, folder: Path) -> dict[str, Any]:
    """One short run, and what became of it."""
    row: dict[str, Any] = {"kind": kind, "name": name, "env": env}
    warnings: list[str] = []
    began = time.process_time()

    def listen(event: str, facts: Any) -> None:
        if event == "message" and facts.get("level") == "warning":
            warnings.append(str(facts["text"])[:300])

    run = folder / f"cell-{os.getpid()}"
    shutil.rmtree(run, ignore_errors=True)
    steps = 0
    try:
        values = settings(kind, name, env, folder)
        plan = RunPlan.from_caller({k: v for k, v in values.items() if k != "quiet"}, "", None, None)
        slots = sorted(changed_slots(plan.recipe))
        api.train(listen, **values, out=str(folder), name=run.name)
    except TurnwiseError as reason:
        steps = len(read_rows(run / "metrics.jsonl")) if (run / "metrics.jsonl").is_file() else 0
        began_steps = (run / "ledger.sqlite").is_file()
        return {**row, "became": "died" if began_steps else "refused", "why": str(reason)[:300], "steps": steps}
    except Exception as fault:
        return {**row, "became": "died", "why": f"{type(fault).__name__}: {fault}"[:300]}
    acted = {slot: round(share, 4) for slot, share in shares(read_rows(run / "metrics.jsonl")).items()}
    own = {slot for slot in slots if kind == "method" or slot == kind}
    acted = {slot: share for slot, share in acted.items() if slot in own}
    became = "plain" if not own else "acted" if any(acted.values()) else "warned" if warnings else "SILENT"
    row |= {"became": became, "acted": acted, "never": sorted(s for s in own if not acted.get(s)), "warnings": warnings}
    return row | {"seconds": round(time.process_time() - began, 1)}


def cells(everywhere: bool) -> Iterator[tuple[str, str, str]]:
    """Where each should act first, then everywhere else."""
    named = [(kind, name) for kind in KINDS for name in (recipes.METHODS if kind == "method" else NAMED[kind])]
    best = [(kind, name, best_place(kind, name)) for kind, name in named]
    yield from best
    for env in ENVIRONMENTS if everywhere else ():
        yield from ((kind, name, env) for kind, name, place in best if place != env)


def recorded() -> dict[tuple[str, str, str], dict[str, Any]]:
    """The newest row of each cell."""
    lines = ROWS.read_text(encoding="utf-8").splitlines() if ROWS.is_file() else []
    return {(row["kind"], row["name"], row["env"]): row for row in map(json.loads, lines)}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| cell | environment | became | shares, or why | never |", "|---|---|---|---|---|"]
    for row in rows:
        told = row.get("why") or ", ".join(
            f"{slot} {share:.2g}" for slot, share in row.get("acted", {}).items() if share
        )
        cells = (f"{row['kind']} {row['name']}", row["env"], row["became"], told, ", ".join(row.get("never", ())))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--everywhere", action="store_true")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--again", action="store_true", help="also cells that are recorded")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th cell from the K-th on, beside other processes")
    parser.add_argument("--folder", type=Path, default=Path("runs") / "method_acts")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print(table(list(recorded().values())))
        return
    part, parts = map(int, given.part.split("/"))
    only, done = set(filter(None, given.only.split(","))), recorded()
    given.folder.mkdir(parents=True, exist_ok=True)
    given.folder = given.folder.resolve()
    os.chdir(given.folder)  # a shared pool begins in the current folder
    ROWS.parent.mkdir(exist_ok=True)
    for number, one in enumerate(cells(given.everywhere)):
        wanted = one[0] in given.kinds.split(",") and (not only or one[1] in only) and number % parts == part - 1
        if not wanted or (one in done and not given.again):
            continue
        row = cell(*one, given.folder)
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row["became"], *one, row.get("why", ""), row.get("acted", ""), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
