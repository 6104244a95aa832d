"""One small finished run and one stopped run, made once: what broken copies are made from."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from trials.commands import run_command

FLAGS = """--env guess --difficulty 1 --hidden 32 --layers 1 --vocabulary 320 --cold-steps 4 --cold-batch 8 --steps 4 --groups 2
    --group-size 4 --max-tokens 12 --context 160 --eval-tasks 6 --checkpoint-every 2 --threads 1 --trackers="""
LIMIT = 300.0  # seconds that the run may take


@cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="turnwise-trial-"))
    argv = ["train", "grpo", *FLAGS.split(), "--out", str(root), "--name", "finished"]
    status, _, err, _ = run_command(argv, root, LIMIT)
    assert status == 0, f"the run that broken copies are made from failed: {status}, {err[-300:]}"
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
