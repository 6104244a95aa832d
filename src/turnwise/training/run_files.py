"""Files that a run resumes from: refuses to continue without them, or on files whose content has changed. Knows no engine."""

from __future__ import annotations

from pathlib import Path

from turnwise.errors import SettingError, StoreError
from turnwise.observe.trackers import read_rows
from turnwise.store.checkpoint import latest_step
from turnwise.store.rundir import RunDir
from turnwise.store.sealed import read_sealed, write_sealed


def check_files(run_dir: RunDir, digests: dict[str, str]) -> None:
    """``digests``: those of the data files that the run reads; recorded at its start."""
    _require(run_dir, run_dir.ledger, "which groups were trained on is unknown")
    path = run_dir.path / "sources.json"
    for result in (*run_dir.path.glob("evaluation_*.json"), *run_dir.path.glob("ranking_*.json")):
        read_sealed(result)  # refuses a damaged one now, not after hours of training
    recorded = read_sealed(path) if path.is_file() else digests
    changed = [name for name in recorded if recorded[name] != digests.get(name)]
    if changed:
        raise SettingError(f"{changed[0]} has changed since this run began; restore the old file, or start a new run")
    if digests and not path.is_file():
        write_sealed(path, digests)


def require_first_result(run_dir: RunDir, path: Path) -> None:
    """Refuse a trained run without the result of its untrained model: what is measured now would be taken for it."""
    _require(run_dir, path, "what the model achieved before training cannot be measured any more")


def is_evaluated(run_dir: RunDir, step: int) -> bool:
    """Whether the metrics hold an evaluation after ``step``."""
    rows = [row for row in read_rows(run_dir.metrics) if row["step"] == step]
    return any(name.startswith(("eval/", "ranking/")) for row in rows for name in row)


def _require(run_dir: RunDir, path: Path, consequence: str) -> None:
    step = latest_step(run_dir.checkpoints)
    if step and not path.is_file():
        raise StoreError(
            f"{path} is missing, and the run has a checkpoint of step {step}: {consequence}; restore the file, or start a new run"
        )
