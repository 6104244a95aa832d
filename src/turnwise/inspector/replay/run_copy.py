"""A copy of a run that begins at an earlier step: what a replay continues, while the original stays untouched.

Hard links instead of copies where the disk allows it: weights and checkpoints are replaced by renaming, never written in place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import SettingError, StoreError
from turnwise.store.atomic import write_json
from turnwise.store.checkpoint import checkpoints, verify
from turnwise.store.rundir import CHECKPOINT_NAME, RunDir

KEPT_FILES = ("metrics.jsonl", "messages.jsonl", "sources.json", "evaluation_before.json", "ranking_before.json")
KEPT_FOLDERS = ("initial",)
QUIET = {"trackers": [], "eval_every": 0, "profile": False}  # settings that change nothing in the steps themselves


def nearest_checkpoint(run: RunDir, step: int) -> tuple[int, Path | None]:
    """The newest valid checkpoint that contains at most ``step`` steps; (0, None) if the run must begin at its start."""
    for path in checkpoints(run.checkpoints):
        match = CHECKPOINT_NAME.fullmatch(path.name)
        if match is None or int(match[1]) > step:
            continue
        with contextlib.suppress(StoreError):  # a damaged one: an older one serves
            return verify(path), path
    return 0, None


def copy_run(run: RunDir, target: Path, checkpoint: Path | None, changes: Mapping[str, Any]) -> RunDir:
    """Copy what a resume needs into ``target``. ``changes`` replace settings."""
    if target.exists() and any(target.iterdir()):
        raise SettingError(f"{target} is not empty; give a new folder")
    target.mkdir(parents=True, exist_ok=True)
    metadata = run.metadata()
    write_json(target / "run.json", {**metadata, "settings": {**metadata["settings"], **QUIET, **changes}})
    for name in KEPT_FILES:
        if (run.path / name).is_file():
            shutil.copy2(run.path / name, target / name)
    for name in KEPT_FOLDERS:
        if (run.path / name).is_dir():
            shutil.copytree(run.path / name, target / name, copy_function=_link)
    copy = RunDir(target)
    if checkpoint is not None:
        shutil.copytree(checkpoint, copy.checkpoints / checkpoint.name, copy_function=_link)
    if run.ledger.is_file():
        _copy_database(run.ledger, copy.ledger)
    return copy


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
    return target


def _copy_database(source: Path, target: Path) -> None:
    """A consistent copy, also while the run is writing."""
    with (
        contextlib.closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as old,
        contextlib.closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)
