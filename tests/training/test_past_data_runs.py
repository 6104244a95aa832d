"""Whole small runs with buffers of past batches, a reset reference, replayed turns for critics and a memory of cases: stopped and
resumed, they end with the same weights as without a stop."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from turnwise.training import api

SMALL = {
    "env": "guess", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 3, "cold_batch": 4,
    "steps": 4, "groups": 2, "group_size": 3, "max_turns": 3, "context": 320, "eval_tasks": 0, "checkpoint_every": 1,
    "schedule": "constant", "trackers": (), "warmup": 0,
}  # fmt: skip
RUNS = {
    "remix": {"method": "remix", "method_options": {"reset": 3, "weight": 0.1}},
    "memory": {"method": "dr_grpo", "replay": "remix,share=0.5,window=3", "guidance": "memento,cases=1"},
    "critics": {"method": "archer", "method_options": {"warm": 1, "passes": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, name):
    api.train(**SMALL, **RUNS[name], out=str(tmp_path), name="whole")
    api.train(**{**SMALL, "steps": 2}, **RUNS[name], out=str(tmp_path), name="half")
    api.resume(tmp_path / "half", steps=4)
    one, two = (load_file(tmp_path / n / "model" / "model.safetensors") for n in ("whole", "half"))
    assert all(torch.equal(one[k], two[k]) for k in one)
    last = [json.loads((tmp_path / n / "metrics.jsonl").read_text().splitlines()[-1]) for n in ("whole", "half")]
    kept = [{k: v for k, v in row.items() if k.startswith(("replay/", "guidance/", "dropped/")) or k == "reward"} for row in last]
    assert kept[0] == kept[1]
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    mixed = [row.get("mixed/replay", 0.0) for row in rows]
    assert mixed[0] == 0 and mixed[1] > 0 and (mixed[3] == 0) == (name == "remix")  # its replay ends with the reset
