"""One small finished run and one stopped run, made once: what broken copies are made from."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from trials.kills import SMALL, _child, _finish, _train


@cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="turnwise-trial-"))
    settings = {**SMALL, "method": "grpo", "out": str(root), "name": "finished", "steps": 4}
    fault = _finish(_child(_train, settings))
    assert fault is None, f"the run that broken copies are made from failed: {fault}"
    return root


def model() -> Path:
    """A model folder: the tiny model of the run."""
    return _root() / "finished" / "initial"


def copy_run(folder: Path, finished: bool = False) -> Path:
    """A copy of the run at ``folder/run``; unless ``finished``, as it was killed after its last checkpoint."""
    run = folder / "run"
    shutil.copytree(_root() / "finished", run)
    if not finished:
        for name in ("summary.json", "evaluation_after.json", "transcripts.md"):
            (run / name).unlink(missing_ok=True)
        shutil.rmtree(run / "model", ignore_errors=True)
    return run


def remove() -> None:
    if _root.cache_info().currsize:
        shutil.rmtree(_root(), ignore_errors=True)
        _root.cache_clear()
