"""Ranks beyond the processor cores, and adapters beyond the width of a weight, are refused with what to write."""

from __future__ import annotations

import os

import pytest
from transformers import LlamaConfig

from turnwise.config.settings import Settings
from turnwise.errors import SettingError
from turnwise.models.tiny import tiny_config, tiny_model
from turnwise.training.plan import RunPlan
from turnwise.training.refusals import RANKS_PER_CORE, adapter_width, rank_places, refuse

LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=8,
    num_key_value_heads=2,
    num_hidden_layers=1,
)


def check_rank_cores(**settings):
    refuse(RunPlan(Settings(device="cpu", **settings)), [rank_places])


def check_adapter_rank(settings, config=None):
    refuse(RunPlan(settings), [lambda plan: adapter_width(plan.settings, config)])


def test_more_ranks_than_cores_can_serve_are_refused(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    check_rank_cores(ranks=2 * RANKS_PER_CORE)
    with pytest.raises(
        SettingError, match=r"ranks is 64, and this machine has 2 processor cores.*write --ranks 2 or fewer"
    ):
        check_rank_cores(ranks=64)
    check_rank_cores(ranks=64, cluster="local")


def test_an_adapter_is_no_wider_than_the_narrowest_weight():
    check_adapter_rank(Settings(lora_rank=16), LLAMA)  # two heads of 8 keys
    with pytest.raises(
        SettingError, match=r"lora_rank is 17, and the narrowest weights .* are 16 wide.*--lora-rank 16"
    ):
        check_adapter_rank(Settings(lora_rank=17), LLAMA)
    with pytest.raises(SettingError, match=r"are 96 wide.*write --lora-rank 16"):
        check_adapter_rank(Settings(lora_rank=99999, hidden=192))
    check_adapter_rank(Settings(lora_rank=0), LLAMA)


@pytest.mark.parametrize("hidden", [32, 64, 192])
def test_the_narrowest_weight_is_that_of_the_real_model(hidden):
    layer = tiny_model(64, 0, hidden=hidden, layers=1).model.layers[0]
    narrowest = min(min(p.shape) for name, p in layer.named_parameters() if name.endswith("proj.weight"))
    check_adapter_rank(Settings(lora_rank=narrowest), tiny_config(64, hidden=hidden, layers=1))
    with pytest.raises(SettingError, match=f"are {narrowest} wide"):
        check_adapter_rank(Settings(lora_rank=narrowest + 1), tiny_config(64, hidden=hidden, layers=1))
