"""How far ``--dry-run`` is off: its estimate and the same run, for three loads on a CPU with the tiny model.

    python benchmarks/dry_run.py [--load instant|slow|local] [--steps 24]

instant   tools answer at once, synchronous
slow      every reply of the environment takes 2 s, ``--staleness 4``
local     ``--generator local``: the policy is sampled in a process of its own
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from turnwise.environments.builtin.guess import Guess
from turnwise.training import api

COMMON = {
    "method": "grpo", "difficulty": (1,), "cold_steps": 20, "groups": 2, "group_size": 4, "max_tokens": 12, "context": 320,
    "eval_tasks": 40, "threads": 1, "trackers": (),
}  # fmt: skip
DELAY = 2.0


class SlowGuess(Guess):
    """Guess with a tool that takes its time, except while demonstrations are played."""

    slow = False

    async def step(self, action: Any) -> Any:
        if self.slow:
            await asyncio.sleep(DELAY)
        return super().step(action)


LOADS: dict[str, dict[str, Any]] = {
    "instant": {"env": "guess"},
    "slow": {"env": SlowGuess, "staleness": 4},
    "local": {"env": "guess", "generator": ("local",)},
}


def listen(event: str, facts: Mapping[str, Any]) -> None:
    if event == "stage":
        SlowGuess.slow = facts["name"] == "learn" or facts["name"].startswith("evaluate")


def measure(load: str, steps: int) -> dict[str, Any]:
    settings = {**COMMON, **LOADS[load], "steps": steps}
    began = time.perf_counter()
    expected = api.dry_run(listen, **settings)["estimate"]
    dry_seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        summary = api.train(listen, out=folder, name="run", **settings)
    stages = summary["seconds"]
    evaluations = stages["evaluate before"] + stages["evaluate after"]
    took = stages["learn"] + evaluations
    return {
        "load": load,
        "steps": steps,
        "estimate": round(expected["seconds_of_run"], 1),
        "took": round(took, 1),
        "off": round(expected["seconds_of_run"] / took - 1, 3),
        "estimate_per_step": round(expected["seconds_per_step"], 3),
        "took_per_step": round(stages["learn"] / steps, 3),
        "estimate_evaluations": round(expected["seconds_of_evaluations"], 1),
        "took_evaluations": round(evaluations, 1),
        "peak_memory_gib": round(expected["peak_memory_gib"], 2),
        "child_memory_gib": round(expected["child_memory_gib"], 2),
        "dry_run_took": round(dry_seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=LOADS, action="append")
    parser.add_argument("--steps", type=int, default=24)
    namespace = parser.parse_args()
    for load in namespace.load or LOADS:
        print(json.dumps(measure(load, namespace.steps)), flush=True)


if __name__ == "__main__":
    main()
