"""Guidance on tasks that the cold-started model does not solve: success without help after the same number of steps.

    python experiments/guidance_when_stuck.py --seeds 0 1 2 --jobs 2
    python experiments/guidance_when_stuck.py --table

The model imitates demonstrations of the small grid of ``keydoor`` and then trains on the next size, with and without guidance.
A pool of few tasks comes back often. ``never`` counts the tasks of the pool that the cold-started model solves in none of 64
tries; ``solved`` is the success rate on those after training without help, and ``held out`` that on other grids of that size.
Rows go to ``experiments/results/guidance_when_stuck.jsonl``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from parallel_runs import RESULTS
from processes import Job, Row, read, schedule, subprocess_environment

from turnwise import train
from turnwise.config.settings import Settings
from turnwise.core.seeds import stable_seed
from turnwise.training import build, engines
from turnwise.training.plan import EnvSpec

POOL, TRIES, AFTER, HELD_OUT = 24, 64, 16, 64
COLD: dict[str, Any] = {
    "env": "keydoor",
    "difficulty": (1,),
    "cold_steps": 30,
    "steps": 1,
    "groups": 1,
    "group_size": 2,
}
RUN: dict[str, Any] = {
    "method": "dr_grpo", "env": "keydoor", "difficulty": (2,), "groups": 8, "group_size": 8, "steps": 150, "cold_steps": 0,
    "sampler": f"cycle,pool={POOL}", "schedule": "constant",
}  # fmt: skip
COMMON: dict[str, Any] = {"trackers": (), "eval_tasks": 0, "max_tokens": 24, "context": 256, "history": 1, "threads": 1}
GUIDANCE = ("none", "ipa", "prefix,prefixes=8,low=0.1,high=0.95", "adhint")


def success(settings: Settings, model_at: Path, split: str, count: int, tries: int) -> list[float]:
    """Success rate without help of the first ``count`` tasks."""
    env_spec = EnvSpec.from_settings(settings)
    renderer = build.make_renderer(settings, build.load_tokenizer(settings, env_spec, model_at))
    generator = engines.make_local_generator(settings, build.load_model(settings, 0, model_at), renderer)
    play, tasks = build.make_play(env_spec, renderer, build.sampling_settings(settings)), env_spec.tasks(split)
    drawn = [tasks.draw(n) for n in range(count)]

    async def run() -> list[Any]:
        plays = [(t, generator.open(stable_seed("try", t.key, i))) for t in drawn for i in range(tries)]
        return list(await asyncio.gather(*(play(f"{t.key}.{i}", t, s) for i, (t, s) in enumerate(plays))))

    played = asyncio.run(run())
    return [sum(bool(e.success) for e in played if e.task == t) / tries for t in drawn]


def one(guidance: str, seed: int, steps: int, out: Path, results: Path) -> None:
    """Cold-start, train, and append the row."""
    began, name = time.monotonic(), f"stuck-{guidance.split(',')[0]}-{seed}"
    settings = {**COMMON, **RUN, "steps": steps, "seed": seed, "out": str(out)}
    train(**COMMON, **COLD, seed=seed, out=str(out), name=f"{name}-cold", quiet=True)
    start = out / f"{name}-cold" / "initial"
    train(**settings, model=str(start), guidance=guidance, name=name, quiet=True)
    plain = Settings.of({**settings, "model": str(start)})
    before = success(plain, start, "train", POOL, TRIES)
    never = [n for n, rate in enumerate(before) if rate == 0]
    after = success(plain, out / name / "model", "train", POOL, AFTER)
    unseen = success(plain, out / name / "model", "held_out", HELD_OUT, 2)
    row = {
        "guidance": guidance, "seed": seed, "steps": steps, "never": len(never),
        "solved": round(statistics.mean(after[n] for n in never), 3) if never else None,
        "pool": round(statistics.mean(after), 3), "held_out": round(statistics.mean(unseen), 3),
        "before": round(statistics.mean(before), 4), "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    print(row, flush=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def table(rows: list[Row]) -> str:
    lines = [
        f"| guidance | seeds | never solved, of {POOL} | solved after, by seed | held out |",
        "|---|---|---|---|---|",
    ]
    for guidance in GUIDANCE:
        if found := sorted((r for r in rows if r["guidance"] == guidance), key=lambda r: r["seed"]):
            solved = ", ".join(f"{r['solved']:.0%}" for r in found)
            never, unseen = (
                ", ".join(map(str, (r["never"] for r in found))),
                statistics.mean(r["held_out"] for r in found),
            )
            lines.append(f"| `{guidance}` | {len(found)} | {never} | {solved} | {unseen:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--guidance", nargs="+", default=list(GUIDANCE))
    parser.add_argument("--steps", type=int, default=RUN["steps"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=7200.0, help="after this time nothing new starts")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path, default=RESULTS / "guidance_when_stuck.jsonl")
    parser.add_argument("--table", action="store_true", help="print the rows and run nothing")
    chosen = parser.parse_args()
    if chosen.table:
        print(table(read([chosen.results])))
        return
    if len(chosen.seeds) * len(chosen.guidance) == 1:
        one(chosen.guidance[0], chosen.seeds[0], chosen.steps, chosen.out, chosen.results)
        return
    made = {(row["guidance"], row["seed"]) for row in read([chosen.results]) if row["steps"] == chosen.steps}
    todo = [(g, s) for s, g in product(chosen.seeds, chosen.guidance) if (g, s) not in made]
    until = time.monotonic() + chosen.seconds
    schedule([Job(pair, lambda _, pair=pair: in_a_process(*pair, chosen)) for pair in todo], chosen.jobs, until)


def in_a_process(guidance: str, seed: int, chosen: argparse.Namespace) -> None:
    line = [sys.executable, __file__, "--guidance", guidance, "--seeds", str(seed), "--steps", str(chosen.steps)]
    line += ["--out", str(chosen.out), "--results", str(chosen.results)]
    subprocess.run(line, env=subprocess_environment(), check=True)


if __name__ == "__main__":
    main()
