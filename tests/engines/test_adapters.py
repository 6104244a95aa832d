"""LoRA adapters: on mixtures of experts and state-space models too, merged as they compute, and as folders that PEFT reads."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from support.families import make_family
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from turnwise.core.signals import Signal
from turnwise.engines.learner import lora
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.errors import SettingError

pytest.importorskip("peft")
IDS = torch.tensor([[3, 5, 7, 11, 13, 17]])


def trained(name: str, kit, batch) -> LocalLearner:
    learner = LocalLearner(make_family(name), LearnerSettings(lora_rank=2, lr=0.05))
    for _ in range(2):
        assert not learner.update(batch, kit.Linear())["skipped"]
    return learner


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss", "Mamba", "GPT2", "Gemma2"])
def test_merged_weights_compute_what_the_adapters_do(name, kit, batch, tmp_path):
    if name == "DeepseekV3" and "self.gate.e_score_correction_bias" in inspect.getsource(modeling_deepseek_v3):
        pytest.skip("this Transformers reads the router's bias through PEFT's wrapper, which does not pass it on")
    learner = trained(name, kit, batch)
    plain = make_family(name)
    unknown = set(learner.weights()) - set(plain.state_dict())
    assert not unknown
    plain.load_state_dict(dict(learner.weights()), strict=False)
    fresh = LocalLearner(plain, LearnerSettings())
    wanted = frozenset({Signal.LOGP})
    mine, theirs = (each.measure(batch, wanted)[Signal.LOGP].x for each in (learner, fresh))
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    learner.export(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[n], t) for n, t in learner.weights().items() if n in saved)


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "GPT2"])
def test_peft_reads_the_adapter_folder(name, kit, batch, tmp_path):
    from peft import PeftModel

    learner = trained(name, kit, batch)
    base = make_family(name)
    base.save_pretrained(tmp_path / "base")
    assert learner.export_adapter(tmp_path / "adapter", str(tmp_path / "base"))
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
    merged = make_family(name)
    merged.load_state_dict(dict(learner.weights()), strict=False)
    with torch.no_grad():
        expected, changed = merged(IDS).logits, base(IDS).logits
        torch.testing.assert_close(loaded(input_ids=IDS).logits, expected, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(expected, changed, atol=1e-3)
    assert loaded.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")


def test_without_adapters_there_is_no_folder(kit, tmp_path):
    assert not LocalLearner(kit.make_model()).export_adapter(tmp_path / "adapter", "base")
    assert not (tmp_path / "adapter").exists()


def test_a_model_without_a_layer_for_adapters_is_refused(monkeypatch):
    model = make_family("Llama")
    injected = lambda settings, model, adapter_name: model.requires_grad_(False)  # noqa: E731
    monkeypatch.setattr("peft.inject_adapter_in_model", injected)
    with pytest.raises(SettingError, match="no layer that adapters fit"):
        lora.inject(model, 2, None)
