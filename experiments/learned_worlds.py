"""Worlds that a small model learns: `service`, a BabyAI level, TextWorld, BFCL, `lookup`; several seeds side by side, and curves.

    python experiments/learned_worlds.py service babyai --seeds 0 1 2 --jobs 2
    python experiments/learned_worlds.py --table

Each run begins with its own cold start from the environment's demonstrator. `bfcl_...` and `lookup_...` are SmolLM2 on a GPU;
`lookup_full` trains all weights, `lookup_lora` adapters of rank 16. Rows go to
``experiments/results/learned_worlds.jsonl``.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

from parallel_runs import RESULTS, side_by_side
from processes import Row, read

SETTINGS: dict[str, Any] = {
    "method": "dr_grpo", "groups": 16, "group_size": 8, "eval_every": 10, "eval_tasks": 200, "schedule": "constant",
}  # fmt: skip
LOOKUP: dict[str, Any] = {
    "env": "lookup", "method": "grpo", "model": "smollm2", "steps": 60, "cold_steps": 30, "cold_batch": 32, "cold_lr": 1e-4,
    "context": 512, "max_tokens": 64, "slots": 192, "eval_tasks": 100,
}  # fmt: skip
WORLDS: dict[str, dict[str, Any]] = {
    "lookup_full": {**LOOKUP, "lr": 1e-5},
    "lookup_lora": {**LOOKUP, "lr": 1e-4, "lora_rank": 16, "steps": 100},
    "service": {"env": "service", "difficulty": (1,), "steps": 120},
    "babyai": {
        "env": "minigrid:BabyAI-GoToLocal-v0", "steps": 100, "cold_steps": 40, "max_turns": 24, "eval_every": 20,
    },
    "textworld": {
        "env": "textworld:custom,rooms=2,objects=4,quest=2,games=40", "steps": 40, "hidden": 128, "copying": True,
        "cold_steps": 200, "cold_batch": 24, "context": 768, "history": 2, "eval_tasks": 64,
    },
    "bfcl_simple": {
        "env": "bfcl:simple_python", "model": "smollm2", "steps": 40, "cold_steps": 30, "cold_batch": 32, "cold_lr": 1e-4,
        "cold_demos": 960, "lr": 1e-5, "context": 1024, "max_tokens": 96, "eval_tasks": 49, "eval_samples": 4,
    },
    "bfcl_multi_turn": {
        "env": "bfcl:multi_turn_base", "model": "smollm2", "steps": 12, "groups": 8, "cold_steps": 120, "cold_batch": 8,
        "cold_lr": 1e-4, "cold_demos": 480, "lr": 1e-5, "context": 8192, "max_tokens": 96, "eval_every": 4, "eval_tasks": 21,
        "eval_samples": 4, "slots": 64,
    },
}  # fmt: skip


def table(rows: list[Row]) -> str:
    """Held-out success by world, with what its seeds were."""
    heads = ("world", "settings", "seed", "steps", "before", "after", "curve", "seconds")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in sorted(rows, key=lambda row: (row["world"], json.dumps(row["settings"]))):
        if row["before"]:
            own = {
                k: v for k, v in row["settings"].items() if k not in ("seed", "steps", "env") and SETTINGS.get(k) != v
            }
            settings = " ".join([f"`{row['settings']['env']}`", *(f"{key} {value}" for key, value in own.items())])
            before, after = (shown(row[when]) for when in ("before", "after"))
            steps = row["settings"]["steps"] if row["after"] else max([0, *(point[0] for point in row["curve"])])
            way = " ".join(f"{point[2]:.0%}" for point in row["curve"])
            cells = (row["world"], settings, row["settings"]["seed"], steps, before, after, way, row["seconds"])
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def shown(found: Row) -> str:
    if not found:
        return "stopped"
    low, high = found["interval"]
    return f"{found['success']:.1%} [{low:.0%}, {high:.0%}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worlds", nargs="*", choices=[[], *WORLDS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-4])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings, values as JSON")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=7200.0, help="runs are stopped after this time")
    parser.add_argument("--out", default="runs")
    parser.add_argument("--results", type=Path, default=RESULTS / "learned_worlds.jsonl")
    parser.add_argument("--table", action="store_true", help="print the rows and run nothing")
    chosen = parser.parse_args()
    more = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in chosen.set)}
    runs: list[tuple[Row, dict[str, Any], str]] = [
        (
            {"world": world},
            {**SETTINGS, "lr": lr, **WORLDS[world], **more, "seed": seed},
            f"world-{world}-{lr:g}-{seed}",
        )
        for world, lr, seed in product(chosen.worlds, chosen.lr, chosen.seeds)
    ]
    if not chosen.table:
        side_by_side(runs, chosen.results, chosen.out, chosen.jobs, chosen.seconds)
    print(table(read([chosen.results])))


if __name__ == "__main__":
    main()
