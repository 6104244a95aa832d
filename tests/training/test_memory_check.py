"""A model that does not fit is refused before it is loaded and before anything is written."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from turnwise import recipes
from turnwise.config.settings import Settings
from turnwise.errors import SettingError
from turnwise.models import loading
from turnwise.models.facts import stored_parameters
from turnwise.training import api, memory, memory_check
from turnwise.training.memory_check import check_memory, parameters_of

GIB = 1 << 30
EIGHT_B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128_256,
}  # fmt: skip
PARAMETERS = 8_030_261_248


def machine(monkeypatch, host, gpu=0):
    """A machine with so many bytes; with a GPU if ``gpu`` is given."""
    device = torch.device("cuda" if gpu else "cpu")
    monkeypatch.setattr(memory, "device_memory", lambda asked: gpu if asked.type == "cuda" else host)
    monkeypatch.setattr(memory.engines, "select_device", lambda settings: device)


def model_folder(folder, shape=(PARAMETERS,)):
    """A checkpoint of which only the header exists."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **EIGHT_B}))
    header = json.dumps({"weight": {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return str(folder)


def test_the_parameters_of_a_configuration_are_counted_without_their_memory():
    assert parameters_of(LlamaConfig(**EIGHT_B)) == PARAMETERS
    assert parameters_of(SimpleNamespace()) == 0, "of no model that is known"


def test_the_files_of_a_model_say_more_than_its_configuration(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "m", (60_000_000,))
    assert stored_parameters(folder) == 60_000_000
    assert stored_parameters("someone/unknown-8B") == 0, "a name is no measurement"
    monkeypatch.setattr(memory_check, "parameters_of", lambda config: pytest.fail("the header says it"))
    machine(monkeypatch, host=24 * GIB)
    check_memory(Settings(model=folder, context=128, eval_tasks=0), recipes.build("grpo"), LlamaConfig(**EIGHT_B))


def test_a_host_without_room_for_training_refuses_with_what_to_write(tmp_path, monkeypatch):
    machine(monkeypatch, host=24 * GIB)
    settings = Settings(model=model_folder(tmp_path / "m"))
    with pytest.raises(SettingError, match=r"this model does not fit: .* the device has 24.0; write --lora-rank 16"):
        check_memory(settings, recipes.build("grpo"), LlamaConfig(**EIGHT_B))


def test_a_gpu_with_room_beside_a_host_that_cannot_read_the_model(tmp_path, monkeypatch):
    settings = Settings(model=model_folder(tmp_path / "m"), lora_rank=16, dtype="bfloat16", micro_batch_tokens=4096)
    machine(monkeypatch, host=24 * GIB, gpu=140 * GIB)
    with pytest.raises(SettingError, match=r"its 8.0 B parameters take 29.9 GiB of memory on the host, which has 24.0"):
        check_memory(settings, recipes.build("grpo"), LlamaConfig(**EIGHT_B))
    machine(monkeypatch, host=64 * GIB, gpu=140 * GIB)
    check_memory(settings, recipes.build("grpo"), LlamaConfig(**EIGHT_B))
    machine(monkeypatch, host=64 * GIB, gpu=8 * GIB)
    with pytest.raises(SettingError, match=r"the device has 8\.0"):
        check_memory(settings, recipes.build("grpo"), LlamaConfig(**EIGHT_B))


def test_a_run_is_refused_before_it_loads_or_writes_anything(tmp_path, monkeypatch):
    from turnwise.environments.builtin.guess import Guess
    from turnwise.models.tiny import tiny_model
    from turnwise.training import build
    from turnwise.training.env_spec import EnvSpec

    folder = tmp_path / "model"
    settings = Settings(env="guess", vocabulary=320)
    tokenizer = build.load_tokenizer(settings, EnvSpec.from_settings(settings, Guess, None))
    tiny_model(len(tokenizer), 0, hidden=32, layers=1, context=128).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(memory, "TOLD_FROM", 1)
    monkeypatch.setattr(memory, "device_memory", lambda device: 1 << 16)
    monkeypatch.setattr(loading, "load_causal_lm", lambda source: pytest.fail("the model was loaded"))
    with pytest.raises(SettingError, match="this model does not fit"):
        api.train(env="guess", model=str(folder), out=str(tmp_path / "runs"), quiet=True, device="cpu")
    assert not (tmp_path / "runs").exists()
