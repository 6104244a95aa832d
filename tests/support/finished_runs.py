"""Small runs that many tests only read: each is trained once in a test session, whichever process asks for it first.

Ask for the fixture ``finished`` (tests/conftest.py): ``finished("grpo")`` is the folder of a run. Who changes a run changes a
copy (``shutil.copytree``). Who needs another setting than these trains his own.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "env": "guess", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 4, "cold_batch": 8,
    "steps": 3, "groups": 2, "group_size": 4, "max_tokens": 12, "context": 160, "eval_tasks": 4, "checkpoint_every": 1,
    "keep_checkpoints": 3, "trackers": (), "threads": 1, "keep_tokens": 5, "quiet": True,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"method": "grpo"},
    "grpo1": {"method": "grpo", "seed": 1},
    "dr_grpo": {"method": "dr_grpo"},
    "dr_grpo1": {"method": "dr_grpo", "seed": 1},
    "tree": {"method": "dr_grpo", "strategy": "spo_tree,factors=2/2,segment=2"},
    "pairs": {"method": "dpo"},  # rows of a file, no rollouts
}


def finished_run(folder: Path, name: str) -> Path:
    """The run of this name below ``folder``, trained now unless a process has done so. The others wait for it."""
    run = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (run / "summary.json").exists():
            _train(folder, name)
    return run


def _train(folder: Path, name: str) -> None:
    import turnwise  # late: most test processes need no run
    from turnwise.cli import sharing

    settings = {**SMALL, **RUNS[name], "out": str(folder), "name": name}
    if name == "pairs":
        settings["data"] = str(folder / "pairs.jsonl")
        sharing.export("guess", "pairs", settings["data"], tasks=12)
    turnwise.train(**settings)


Finished = Callable[[str], Path]
