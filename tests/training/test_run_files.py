"""What a run resumes from is there and unchanged, or it is refused in words."""

from __future__ import annotations

import pytest

from turnwise.errors import SettingError, StoreError
from turnwise.store.atomic import write_sealed
from turnwise.store.rundir import RunDir
from turnwise.training.resume import check_files, require_file


@pytest.fixture
def run_dir(tmp_path):
    return RunDir.create(tmp_path, "run")


def trained(run_dir, step=4):
    (run_dir.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    run_dir.ledger.write_bytes(b"x")


def test_a_first_start_needs_nothing(run_dir):
    check_files(run_dir, {"rows.jsonl": "abc"})
    require_file(run_dir, run_dir.path / "evaluation_before.json", "lost")
    with pytest.raises(SettingError, match=r"rows.jsonl has changed since this run began"):
        check_files(run_dir, {"rows.jsonl": "abd"})


def test_a_trained_run_without_its_ledger(run_dir):
    trained(run_dir)
    check_files(run_dir, {})
    run_dir.ledger.unlink()
    with pytest.raises(StoreError, match=r"ledger.sqlite is missing, and the run has a checkpoint of step 4"):
        check_files(run_dir, {})


def test_the_result_before_training_is_not_measured_after_it(run_dir):
    path = run_dir.path / "evaluation_before.json"
    trained(run_dir)
    with pytest.raises(StoreError, match=r"evaluation_before.json is missing.* step 4: it cannot be measured any more"):
        require_file(run_dir, path, "it cannot be measured any more")
    write_sealed(path, {"summary": {}})
    require_file(run_dir, path, "it cannot be measured any more")


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"summary": 3}'])
def test_a_damaged_result_is_refused_before_training(run_dir, content):
    (run_dir.path / "evaluation_before.json").write_text(content)
    with pytest.raises(StoreError, match=r"evaluation_before.json (is cut off|was changed)"):
        check_files(run_dir, {})
