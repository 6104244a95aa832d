"""Runs of a mixture of experts: routes are recorded, replayed, stored and resumed."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from support.mixtures import make_mixture

from turnwise.config.values import ModelName
from turnwise.errors import SettingError
from turnwise.models.tiny import tiny_tokenizer
from turnwise.store.ledger import SqliteLedger
from turnwise.training import api

SMALL = {
    "method": "grpo", "env": "guess", "reward": ("regex:pattern=[a-h]",), "cold_steps": 0, "steps": 3, "groups": 2,
    "group_size": 4, "max_turns": 2, "max_tokens": 6, "context": 200, "eval_tasks": 0, "checkpoint_every": 1,
    "trackers": (), "schedule": "constant", "lr": 1e-3, "warmup": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A mixture with a tokenizer, in Hugging Face format."""
    path = tmp_path_factory.mktemp("mixture")
    tokenizer = tiny_tokenizer(["guess the number between 0 and 9 higher lower user assistant tool"] * 9, 320)
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    model = make_mixture(vocab_size=len(tokenizer), num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, **ids)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def weights(run):
    return load_file(run / "model" / "model.safetensors")


@pytest.mark.slow
def test_a_run_replays_routes_and_resumes_bit_for_bit(folder, tmp_path):
    given = {**SMALL, "model": str(folder), "out": str(tmp_path)}
    summary = api.train(**given, name="whole")
    api.train(**{**given, "steps": 2}, name="half")
    api.resume(tmp_path / "half", steps=3, quiet=True)
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "half")
    assert all(torch.equal(one[key], two[key]) for key in one)
    start = load_file(tmp_path / "whole" / "initial" / "model.safetensors")
    assert any("gate.weight" in key and not torch.equal(one[key], start[key]) for key in one)
    assert "experts as recorded by the sampler" in summary["engines"]["learner"]
    with SqliteLedger(tmp_path / "whole" / "ledger.sqlite", readonly=True) as ledger:
        groups = [ledger.group(summary.group_id) for summary in ledger.groups()]
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns if turn.tokens]
    assert turns and all(len(turn.routes) >= len(turn.tokens) and len(turn.routes[0]) == 2 * 2 * 2 for turn in turns)


def test_an_option_of_the_model_frees_the_routers(folder, tmp_path):
    summary = api.train(**{**SMALL, "steps": 1, "model": f"{folder},routes=free"}, out=str(tmp_path), name="free")
    assert "experts as recorded" not in summary["engines"]["learner"]


@pytest.mark.parametrize(
    ("model", "message"),
    [("x/y,route=free", "'route' is no option of a model"), ("x/y,routes=off", "write recorded or free")],
)
def test_unknown_options_are_refused(model, message):
    with pytest.raises(SettingError, match=message):
        ModelName.parse(model)


def test_options_are_split_from_names_and_not_from_folders(tmp_path, monkeypatch):
    assert ModelName.parse("a/b") == ModelName("a/b")
    assert ModelName.parse("a/b,routes=free") == ModelName("a/b", routes="free")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd,name=1").mkdir()
    assert ModelName.parse("odd,name=1") == ModelName("odd,name=1")
