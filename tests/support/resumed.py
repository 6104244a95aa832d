"""A run without a stop, and one that is stopped halfway and resumed: the same in all that counts, on a game that pays."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from turnwise.training import api

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))  # its game coin:Coin

STEPS, STOP = 4, 2
SMALL = {
    "env": "coin:Coin", "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 0, "steps": STEPS, "groups": 2,
    "group_size": 4, "max_tokens": 4, "context": 200, "eval_tasks": 0, "checkpoint_every": 1, "schedule": "constant",
    "trackers": (), "warmup": 0, "lr": 1e-2,
}  # fmt: skip


def rows_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_whole_and_halves(out: Path, settings: dict, folder: Path | None = None) -> list[list[dict[str, float]]]:
    """The metrics of both; ``folder`` is shared with other runs, and each of the two begins with a copy of it."""
    for name, steps in (("whole", STEPS), ("half", STOP)):
        given = {**SMALL, **settings, "steps": steps}
        if folder is not None:
            shutil.copytree(folder, out / f"{name}-folder")
            given["method_options"] = {**given.get("method_options", {}), "folder": str(out / f"{name}-folder")}
        api.train(**given, out=str(out), name=name)
    api.resume(out / "half", steps=STEPS)
    return [rows_of(out / name) for name in ("whole", "half")]


def assert_same(out: Path, prefixes: tuple[str, ...]) -> None:
    """Weights bit for bit; rewards, gradients and the listed metrics in every step."""
    one, two = (load_file(out / name / "model" / "model.safetensors") for name in ("whole", "half"))
    assert all(torch.equal(one[key], two[key]) for key in one)

    def own(row):
        names = ("tokens", "turns", "reward", "grad_norm")
        return {name: value for name, value in row.items() if name.startswith(prefixes) or name in names}

    whole, half = rows_of(out / "whole"), rows_of(out / "half")
    assert [own(row) for row in whole] == [own(row) for row in half] and len(whole) == STEPS


def assert_pays(rows: list[dict[str, float]]) -> None:
    """Rewards vary and the policy moves before the stop and after it: else equal weights would show nothing."""
    rewards, norms = ([row[name] for row in rows] for name in ("reward", "grad_norm"))
    for part in (slice(STOP), slice(STOP, None)):
        assert any(0 < reward < 1 for reward in rewards[part]) and any(norms[part]), (rewards, norms)
    assert len(set(rewards)) > 1, rewards
