"""Do sampler, budget, strategy, guidance and replay go together? Runs of two steps that cover every two names of different slots.

    python experiments/experience_pairs.py --jobs 2 --keep experiments/results/experience_pairs.jsonl     resumes
    python experiments/experience_pairs.py --keep experiments/results/experience_pairs.jsonl --write docs/matrix.md

Every run is `dr_grpo` on a game of chance (`coin:Coin`) that can be forked, hinted, demonstrated and worded in several ways, with
a tiny model: rewards vary from the first step. A run has a name in each slot, so it tries ten pairs at once; if it does not end
well, the pair it was made for is tried alone. A pair is *ok* if both steps were taken, every number is finite and no episode
failed; *refused* if the command says why before the run begins; else *FAILED*.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from turnwise.errors import TurnwiseError  # noqa: E402
from turnwise.recipes.experience import SLOTS  # noqa: E402

BEGIN = "<!-- Written by `python experiments/experience_pairs.py --write docs/matrix.md`. Do not edit. -->"
SMALL: dict[str, Any] = {
    "method": "dr_grpo", "env": "coin:Coin", "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 0, "steps": 2,
    "groups": 2, "group_size": 4, "max_tokens": 4, "context": 200, "eval_tasks": 0, "trackers": (), "warmup": 0, "lr": 1e-2,
    "device": "cpu",
}  # fmt: skip
ARGUMENTS = {  # small enough for groups of four and words of four tokens
    "sampler": {"spo": "pool=64"}
    | dict.fromkeys(("cycle", "unsolved", "vade", "mmr1", "prompt_gdro", "fg_expo", "pivot", "gain_rl"), "pool=8"),
    "budget": {"xrpo": "first=2", "turn_control": "calibrate=4"},
    "strategy": {
        "branch": "trunks=2", "arpo": "trunks=2", "spo_tree": "factors=2/2,segment=2", "latr": "look=2",
        "echo": "trunks=2,high=1", "vines": "states=1,vines=2",
    },
    "guidance": {"pope": "tries=2", "scaf": "warmup=0", "memento": "cases=1"},
    "replay": {"remix": "share=0.5,window=3", "swarm": "folder={folder}/pool"},
}  # fmt: skip
DEMONSTRATED = {"replay/bepa", "replay/dynaweb"}  # they mix in an expert's episodes
Pair = tuple[str, str]
Rows = dict[Pair, tuple[str, str]]


def all_pairs() -> list[Pair]:
    """Every two names of different slots, each as ``slot/name``."""
    names = {slot: [f"{slot}/{name}" for name in pieces if name != "none"] for slot, pieces in SLOTS.items()}
    return [pair for a, b in itertools.combinations(names, 2) for pair in itertools.product(names[a], names[b])]


def spec(name: str, folder: str) -> str:
    """The value of the setting: the name with its arguments."""
    slot, bare = name.split("/")
    arguments = ARGUMENTS[slot].get(bare, "").format(folder=folder)
    return f"{bare},{arguments}" if arguments else bare


def run_names(pair: tuple[str, ...]) -> tuple[str, str]:
    """(``ok``, ``refused`` or ``FAILED``, the reason) of a run with one name in each of some slots."""
    from turnwise.training import api

    with tempfile.TemporaryDirectory() as folder:
        named = {name.split("/")[0]: spec(name, folder) for name in pair}
        demos = {"demos": "oracle"} if DEMONSTRATED & set(pair) else {}
        try:
            summary = api.train(**SMALL, **named, **demos, out=folder, name="run", quiet=True)
        except TurnwiseError as reason:
            begun = (Path(folder) / "run" / "metrics.jsonl").is_file()
            return "FAILED" if begun else "refused", str(reason).replace(folder, "FOLDER")
        except Exception as fault:
            return "FAILED", f"{type(fault).__name__}: {str(fault)[:160]}"
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        return verdict([json.loads(line) for line in lines], str(summary.get("messages", "")))


def verdict(rows: list[dict[str, Any]], messages: str) -> tuple[str, str]:
    wrong = [
        k
        for row in rows
        for k, v in row.items()
        if isinstance(v, float) and not math.isfinite(v) and k != "policy_check"
    ]
    if "episodes failed" in messages:
        return "FAILED", messages[:160]
    if wrong or len(rows) != SMALL["steps"]:
        return "FAILED", f"{len(rows)} steps, not finite: {', '.join(wrong) or 'nothing'}"
    return "ok", ""


def read(path: Path | None) -> Rows:
    """Rows of an earlier run; the last of each pair counts."""
    lines = path.read_text().splitlines() if path is not None and path.is_file() else []
    return {(a, b): (result, why) for a, b, result, why in map(json.loads, lines)}


def cover(left: list[Pair], known: Rows, keep: Path, until: float) -> None:
    """Try these pairs, together with others that are left, and write a row for each."""
    waiting, names = dict.fromkeys(left), [name for pair in all_pairs() for name in pair]
    unfit = {pair for pair, (result, _) in known.items() if result != "ok"}
    while waiting and time.monotonic() < until:
        first = next(iter(waiting))
        chosen = fill(first, waiting, dict.fromkeys(names), unfit)
        fine = run_names(chosen)[0] == "ok"
        done = dict.fromkeys(pairs_of(chosen), ("ok", "")) if fine else {first: run_names(first)}
        with keep.open("a") as file:
            for pair in [pair for pair in done if waiting.pop(pair, 0) is None]:
                file.write(json.dumps([*pair, *done[pair]]) + "\n")
                unfit |= {pair} if done[pair][0] != "ok" else set()


def fill(pair: Pair, waiting: dict[Pair, None], names: dict[str, None], unfit: set[Pair]) -> tuple[str, ...]:
    """The pair, and in each other slot the name with the most waiting pairs among those that go together."""
    chosen = list(pair)
    for slot in (slot for slot in SLOTS if slot not in {name.split("/")[0] for name in pair}):
        fits = [n for n in names if n.startswith(f"{slot}/") and not unfit & set(pairs_of((*chosen, n)))]
        if fits:
            chosen.append(max(fits, key=lambda n: sum(pair in waiting for pair in pairs_of((*chosen, n)))))
    return tuple(chosen)


def pairs_of(names: tuple[str, ...]) -> list[Pair]:
    """Every two of them, in the order of the slots."""
    order = list(SLOTS)
    return list(itertools.combinations(sorted(names, key=lambda name: order.index(name.split("/")[0])), 2))


def run_all(pairs: list[Pair], keep: Path, jobs: int, until: float) -> None:
    """Each process covers every ``jobs``-th pair that is left or failed before."""
    known = read(keep)
    left = [pair for pair in pairs if known.get(pair, ("FAILED",))[0] == "FAILED"]
    workers = []
    for number in range(jobs):
        if worker := os.fork():
            workers.append(worker)
            continue
        cover(left[number::jobs], known, keep, until)
        os._exit(0)
    for worker in workers:
        os.waitpid(worker, 0)


def section(rows: Rows) -> str:
    """How many pairs were run, and those that did not, by reason."""
    counts = Counter(result for result, _ in rows.values())
    missing = [pair for pair in all_pairs() if pair not in rows]
    sizes = ", ".join(f"{len(pieces) - ('none' in pieces)} of `{slot}`" for slot, pieces in SLOTS.items())
    lines = [
        BEGIN,
        "",
        "## Pairs of experience",
        "",
        f"Every two names of different slots ({sizes}), in runs of two",
        "steps on a game of chance with a tiny model; most runs have a name in all five slots. A pair passes if both steps of",
        "its run were taken, every number stayed finite and no episode failed.",
        "",
        "| | pairs |",
        "|---|---|",
        f"| tried | {len(rows):,} |",
        f"| run | {counts['ok']:,} |",
        f"| refused before the run | {counts['refused']:,} |",
        f"| failed | {counts['FAILED']:,} |",
        *([f"| not tried yet | {len(missing):,} |"] if missing else []),
    ]
    reasons: dict[str, list[Pair]] = {}
    for pair, (result, why) in sorted(rows.items()):
        if result != "ok":
            reasons.setdefault(("" if result == "refused" else "FAILED: ") + why, []).append(pair)
    if reasons:
        lines += ["", "| reason | pairs |", "|---|---|"]
    for why, pairs in reasons.items():
        lines.append(f"| {why.replace('|', chr(92) + '|')} | {', '.join(f'`{a}` + `{b}`' for a, b in pairs)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="file of the result rows")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing after this time")
    parser.add_argument("--only", nargs="*", default=[], help="pairs that contain one of these slot/name")
    parser.add_argument("--write", type=Path, help="page whose last part is replaced; runs nothing")
    options = parser.parse_args()
    if options.write:
        before = options.write.read_text(encoding="utf-8").partition(BEGIN)[0].rstrip()
        options.write.write_text(f"{before}\n\n{section(read(options.keep))}", encoding="utf-8")
        return 0
    pairs = [pair for pair in all_pairs() if not options.only or set(options.only) & set(pair)]
    run_all(pairs, options.keep, options.jobs, time.monotonic() + 60 * options.minutes)
    rows = {pair: row for pair, row in read(options.keep).items() if pair in pairs}
    print(", ".join(f"{n} {result}" for result, n in Counter(result for result, _ in rows.values()).items()))
    return int(any(result == "FAILED" for result, _ in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
