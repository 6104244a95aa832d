"""Runs with frozen weights in 4 bits: they learn, resume bit for bit, are estimated, and are refused where they cannot work."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from turnwise import recipes
from turnwise.config.settings import Settings
from turnwise.engines.memory import GIB, MemoryPlan, ModelShape
from turnwise.errors import SettingError
from turnwise.models.tiny import tiny_model
from turnwise.training import api, engines

SMALL = {
    "method": "grpo", "env": "guess", "reward": ("regex:pattern=[a-h]",), "model": "tiny", "hidden": 64, "layers": 1,
    "vocabulary": 320, "cold_steps": 4, "steps": 3, "groups": 2, "group_size": 4, "max_turns": 2, "max_tokens": 6,
    "context": 200, "eval_tasks": 0, "checkpoint_every": 1, "trackers": (), "schedule": "constant", "lr": 1e-2, "warmup": 0,
    "lora_rank": 4, "dtype": "nf4",
}  # fmt: skip
LLAMA_8B = ModelShape(8_030_000_000, 32, 4096, 14336, 2 * 1024, 2 * 128_256 * 4096, 4096, 128_256)


@pytest.mark.slow
def test_a_run_learns_and_resumes_bit_for_bit(tmp_path):
    pytest.importorskip("bitsandbytes", reason="4-bit weights need bitsandbytes: pip install 'turnwise-rl[quantized]'")
    summary = api.train(**SMALL, out=str(tmp_path), name="whole")
    api.train(**{**SMALL, "steps": 2}, out=str(tmp_path), name="half")
    api.resume(tmp_path / "half", steps=3, quiet=True)
    one, two = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("whole", "half"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert any("lora_B" in key and float(value.abs().max()) > 0 for key, value in one.items())
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["policy_check"] < 1e-4 for row in rows) and len(rows) == 3
    assert "frozen weights in 4 bits" in summary["engines"]["learner"]


@pytest.mark.slow
def test_a_run_on_ranks_is_continued_by_one_process(tmp_path):
    pytest.importorskip("bitsandbytes", reason="4-bit weights need bitsandbytes: pip install 'turnwise-rl[quantized]'")
    summary = api.train(**{**SMALL, "steps": 2, "ranks": 2}, out=str(tmp_path), name="run")
    assert "FSDP2 over 2 ranks" in summary["engines"]["learner"]
    assert "frozen weights in 4 bits" in summary["engines"]["learner"]
    api.resume(tmp_path / "run", steps=3, ranks=1, quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["policy_check"] < 1e-4 for row in rows) and len(rows) == 3
    adapters = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert any("lora_B" in key and float(value.abs().max()) > 0 for key, value in adapters.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 0}, "without adapters every weight is trained; write --lora-rank 16"),
        ({"dtype": "nf5"}, "nf4"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(changes, message, tmp_path):
    with pytest.raises(SettingError, match=message):
        api.train(**{**SMALL, **changes}, out=str(tmp_path), name="run")
    assert not (tmp_path / "run").exists()


def test_the_estimate_counts_half_a_byte_for_a_frozen_weight():
    lora = MemoryPlan(LLAMA_8B, 16384, 1, 1, lora_rank=16, shared_weights=True)
    packed = replace(lora, four_bit=True)
    adapters = 4 * LLAMA_8B.adapter_parameters(16) / GIB
    whole, small = (plan.parts()["weights"] / GIB - adapters for plan in (lora, packed))
    assert whole == pytest.approx(14.96, abs=0.05)
    layers, tables, one = (8.03e9 - LLAMA_8B.embeddings) * 0.516, LLAMA_8B.embeddings * 2, 4 * 4096 * 14336 * 2
    assert small == pytest.approx((layers + tables + one) / GIB, rel=0.01)
    with pytest.raises(SettingError, match="--dtype nf4"):
        engines.fit_memory(Settings(), lora, 12 * GIB)


def test_the_plan_of_a_run_knows_four_bits():
    model = tiny_model(512, 0, hidden=64, layers=2, context=128)
    settings = Settings(device="cpu", context=128, lora_rank=4)
    plain, packed = (
        engines.memory_plan(replace(settings, dtype=dtype), recipes.build("grpo"), model) for dtype in ("auto", "nf4")
    )
    assert packed.four_bit and not plain.four_bit and packed.total < plain.total


def test_ranks_divide_what_is_not_packed():
    alone = replace(MemoryPlan(LLAMA_8B, 16384, 1, 1, lora_rank=16, four_bit=True, recompute=True), shared_weights=True)
    packed = LLAMA_8B.packed() + LLAMA_8B.dequantised(2)
    for ranks in (2, 4):
        plan = replace(alone, ranks=ranks)
        assert plan.parts()["weights"] > packed + LLAMA_8B.embeddings * 2  # gathered for a pass
        for name in ("gradients", "optimizer moments"):
            assert plan.parts()[name] == pytest.approx(alone.parts()[name] / ranks, abs=1)
        assert plan.parts()["activations"] == alone.parts()["activations"]
        shared = replace(plan, one_memory=True)
        assert shared.parts()["weights"] > (ranks + 1) * packed
        assert shared.parts()["activations"] == ranks * alone.parts()["activations"]
        assert shared.parts()["optimizer moments"] == alone.parts()["optimizer moments"]
    full = MemoryPlan(LLAMA_8B, 16384, 1, 1, shared_weights=True)
    assert replace(full, ranks=8).total < full.total / 2


def test_a_mixture_with_packed_experts_fits_where_it_did_not():
    qwen_30b = ModelShape(30_530_000_000, 48, 2048, 8 * 768, 1024, 2 * 151_936 * 2048, 4096, 151_936, 128, 768)
    plain = MemoryPlan(qwen_30b, 16384, 0, 1, lora_rank=16, recompute=True, shared_weights=True)
    packed = replace(plain, four_bit=True)
    assert packed.total < 60 * GIB < 80 * GIB < plain.total
    assert packed.parts()["weights"] > 29.9e9 * 0.516 + 3 * 128 * 768 * 2048 * 2  # all experts of a layer, dequantised
