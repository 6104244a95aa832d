"""A resumed run tells what is not as it was: settings, threads, device, packages."""

from __future__ import annotations

import json

import pytest

from turnwise.store.rundir import RunDir
from turnwise.training import resume
from turnwise.training.resume import STARTED, changes_since_start

MACHINE = {"device": "cpu", "threads": 2}


@pytest.fixture
def run_dir(tmp_path):
    run_dir = RunDir.create(tmp_path, "run", {"lr": 3e-4, "difficulty": (1, 2), "steps": 10})
    assert changes_since_start(run_dir, MACHINE) == [], "a first start"
    return run_dir


def edit(run_dir, **settings):
    metadata = run_dir.metadata()
    metadata["settings"] |= settings
    run_dir.settings.write_text(json.dumps(metadata))


def test_an_unchanged_run_tells_nothing(run_dir):
    assert changes_since_start(run_dir, MACHINE) == []


def test_an_edited_setting_is_told_once_with_both_values(run_dir):
    edit(run_dir, lr=1e-4)
    assert changes_since_start(run_dir, MACHINE) == [
        "lr was edited in run.json: it was 0.0003, and the run continues with 0.0001"
    ]
    assert changes_since_start(run_dir, MACHINE) == []


def test_threads_device_and_packages_are_told(run_dir, monkeypatch):
    versions = resume.installed_versions()
    monkeypatch.setattr(resume, "installed_versions", lambda: {**versions, "torch": "9.9"})
    told = changes_since_start(run_dir, {"device": "cuda", "threads": 1})
    assert [text.split(" was ")[0] for text in told] == ["device", "threads", "torch"]
    assert "threads was 2 when the run was last started and is 1 now" in told[1]


def test_an_announced_extension_is_not_told_again(run_dir):
    metadata = run_dir.metadata()
    metadata |= {"settings": {**metadata["settings"], "steps": 20}, "changes": [{"after_step": 10, "steps": [10, 20]}]}
    run_dir.settings.write_text(json.dumps(metadata))
    assert changes_since_start(run_dir, MACHINE) == []


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_broken_record_is_written_again(run_dir, content):
    (run_dir.path / STARTED).write_text(content)
    assert changes_since_start(run_dir, MACHINE) == []
    edit(run_dir, lr=1.0)
    assert len(changes_since_start(run_dir, MACHINE)) == 1
