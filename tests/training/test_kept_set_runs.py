"""Runs under top-p: the kept ids are recorded, stored and resumed; policy and sampler agree."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from turnwise.store.ledger import SqliteLedger
from turnwise.training import api

SMALL = {
    "method": "grpo", "model": "tiny", "env": "guess", "reward": ("regex:pattern=[a-h]",), "cold_steps": 0, "steps": 3,
    "groups": 2, "group_size": 4, "max_turns": 2, "max_tokens": 6, "context": 200, "eval_tasks": 0, "checkpoint_every": 1,
    "trackers": (), "schedule": "constant", "lr": 1e-3, "warmup": 0, "top_p": 0.3,
}  # fmt: skip


def weights(run):
    return load_file(run / "model" / "model.safetensors")


def turns_of(run):
    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        groups = [ledger.group(summary.group_id) for summary in ledger.groups()]
    return [turn for group in groups for t in group.trajectories for turn in t.turns if turn.tokens]


@pytest.mark.slow
def test_a_run_under_top_p_records_its_sets_and_resumes_bit_for_bit(tmp_path):
    given = {**SMALL, "out": str(tmp_path)}
    api.train(**given, name="whole")
    api.train(**{**given, "steps": 2}, name="half")
    api.resume(tmp_path / "half", steps=3, quiet=True)
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "half")
    assert all(torch.equal(one[key], two[key]) for key in one)
    turns = turns_of(tmp_path / "whole")
    assert [(t.tokens, t.kept) for t in turns] == [(t.tokens, t.kept) for t in turns_of(tmp_path / "half")]
    sizes = [len(row) // 4 for turn in turns for row in turn.kept]
    assert len(sizes) == sum(len(turn.tokens) for turn in turns) and 1 < max(sizes) <= 256
    for turn in turns:
        for token, row in zip(turn.tokens, turn.kept):
            assert not row or token in torch.frombuffer(bytearray(row), dtype=torch.int32).tolist()
