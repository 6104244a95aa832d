"""The number of CPU threads: measured, set for a run, recorded and used again."""

from __future__ import annotations

import json

import pytest
import torch

from turnwise.config.settings import Settings
from turnwise.engines.kernels import dispatch
from turnwise.training import api, engines


@pytest.mark.parametrize(("slow", "expected"), [(0, 4), (4, 1)], ids=["a quiet machine", "a busy machine"])
def test_all_cores_unless_fewer_are_clearly_faster(monkeypatch, slow, expected):
    monkeypatch.setattr(dispatch, "available_cores", lambda: 4)
    monkeypatch.setattr(dispatch, "_time_products", lambda: 1.0 if torch.get_num_threads() >= 2 and slow else 0.5)
    before = torch.get_num_threads()
    assert dispatch.measured_threads() == expected
    assert torch.get_num_threads() == before


def test_the_setting_comes_first_then_the_environment(monkeypatch):
    assert engines.select_threads(Settings(device="cpu", threads=3)) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert engines.select_threads(Settings(device="cpu")) == torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(engines, "measured_threads", lambda: 7)
    assert engines.select_threads(Settings(device="cpu")) == 7


def test_a_run_records_its_threads(monkeypatch, tmp_path):
    small = {
        "env": "guess", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 1, "cold_batch": 2,
        "steps": 1, "groups": 1, "group_size": 2, "max_tokens": 4, "context": 160, "eval_tasks": 1, "trackers": (),
    }  # fmt: skip
    messages = []
    api.train(
        lambda event, facts: messages.append(facts.get("text")), out=str(tmp_path), name="run", threads=1, **small
    )
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["threads"] == 1
    assert "CPU threads: 1" in messages
