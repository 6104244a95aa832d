"""Runs with ``ranks``: what is refused before anything is written, and a whole run that equals the run of one process."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import turnwise
from turnwise.config.settings import Settings
from turnwise.errors import SettingError, StoreError
from turnwise.store.checkpoint import checkpoints
from turnwise.training.plan import RunPlan
from turnwise.training.refusals import rank_places, ranks, refuse

SMALL = {
    "method": "grpo", "env": "calculator", "difficulty": (1,), "groups": 2, "group_size": 3, "steps": 2, "eval_tasks": 2,
    "cold_steps": 2, "cold_batch": 4, "hidden": 32, "vocabulary": 300, "max_turns": 2, "max_tokens": 12, "trackers": (),
    "checkpoint_every": 1, "dtype": "float64", "quiet": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks is 0; write a number >= 1"),
        ({"ranks": 7}, r"ranks is 7, and a step has 6 trajectories \(2 groups of 3\).*write --ranks 6 or fewer"),
        ({"ranks": 2, "method": "vcpo"}, "vcpo cannot learn on 2 ranks: it needs the gradient norm.*write --ranks 1"),
        ({"ranks": 2, "method": "alp"}, "alp cannot learn on 2 ranks: it adds noise"),
        ({"ranks": 2, "method": "jet_rl", "dtype": "auto"}, "jet_rl cannot learn on 2 ranks: it learns in fp8"),
        ({"ranks": 2, "offload": True}, "already divided among the ranks"),
        ({"nproc_per_node": 2}, "it is called ranks here"),
    ],
)
def test_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(SettingError, match=message):
        turnwise.train(**{**SMALL, "out": str(tmp_path), **changes})
    assert list(tmp_path.iterdir()) == []


def test_one_rank_asks_nothing_of_a_method():
    refuse(RunPlan(Settings(method="vcpo")), [ranks])


@pytest.mark.parametrize(("cards", "instead"), [(1, "--ranks 1"), (3, "--ranks 3")])
def test_every_rank_needs_a_gpu_of_its_own(monkeypatch, cards, instead):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    with pytest.raises(SettingError, match=f"ranks is 4 and every rank needs a GPU of its own.*has {cards}.*{instead}"):
        refuse(RunPlan(Settings(ranks=4, device="cuda")), [rank_places])


def refused_without_a_shard(run):
    """The error names the file and says what to do; nothing is removed, and the file can be copied back."""
    copy = run.with_name("damaged")
    shutil.copytree(run, copy)
    (path,) = checkpoints(copy / "checkpoints")
    (path / "shard-00002-of-00002.safetensors").unlink()
    with (
        pytest.warns(UserWarning, match="skipping a damaged checkpoint"),
        pytest.raises(StoreError, match=r"no file shard-00002-of-00002\.safetensors.*; copy the file back, or remove"),
    ):
        turnwise.resume(copy, steps=3, ranks=1, quiet=True)
    assert (path / "shard-00001-of-00002.safetensors").is_file()


@pytest.mark.slow
def test_a_run_with_ranks_equals_the_run_of_one_process(tmp_path):
    """Same tokens sampled, same weights up to rounding; either continues with the other's number of ranks."""
    one = turnwise.train(**SMALL, out=str(tmp_path), name="one")
    two = turnwise.train(**SMALL, out=str(tmp_path), name="two", ranks=2)
    assert "FSDP2 over 2 ranks" in two["engines"]["learner"] and "FSDP2" not in one["engines"]["learner"]
    written = {name: checkpoints(tmp_path / name / "checkpoints")[0] for name in ("one", "two")}
    assert [len(list(written[name].glob("shard-*"))) for name in ("one", "two")] == [0, 2]
    refused_without_a_shard(tmp_path / "two")
    turnwise.resume(tmp_path / "one", steps=3, ranks=2, quiet=True)
    turnwise.resume(tmp_path / "two", steps=3, ranks=1, quiet=True)
    metrics = [[json.loads(line) for line in (tmp_path / n / "metrics.jsonl").open()] for n in ("one", "two")]
    for a, b in zip(*metrics, strict=True):
        for name in ("loss", "grad_norm", "reward", "tokens"):
            assert a.get(name) == pytest.approx(b.get(name), rel=1e-6, abs=1e-9, nan_ok=True), name
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two")]
    for name, w in weights[0].items():
        torch.testing.assert_close(w, weights[1][name], rtol=0, atol=1e-6)
