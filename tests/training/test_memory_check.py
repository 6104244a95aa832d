"""A model that does not fit is refused before it is loaded and before anything is written."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from turnwise import recipes
from turnwise.config.settings import Settings
from turnwise.engines.memory import ModelShape
from turnwise.errors import SettingError, StoreError
from turnwise.models import loading
from turnwise.models.facts import stored_parameters
from turnwise.store.checkpoint import save_model
from turnwise.store.rundir import RunDir
from turnwise.training import api, engines
from turnwise.training.engines import check_memory, parameters_of

GIB = 1 << 30
EIGHT_B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128_256,
}  # fmt: skip
PARAMETERS = 8_030_261_248


def machine(monkeypatch, host, gpu=0):
    """A machine with so many bytes; with a GPU if ``gpu`` is given."""
    device = torch.device("cuda" if gpu else "cpu")
    monkeypatch.setattr(engines, "device_memory", lambda asked: gpu if asked.type == "cuda" else host)
    monkeypatch.setattr(engines, "select_device", lambda settings: device)


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
    monkeypatch.setattr(engines, "parameters_of", lambda config: pytest.fail("the header says it"))
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


def test_the_learner_of_a_cluster_is_checked_without_the_generators_that_are_elsewhere(tmp_path, monkeypatch):
    model, grpo = model_folder(tmp_path / "m"), recipes.build("grpo")
    machine(monkeypatch, host=500 * GIB, gpu=24 * GIB)
    far = Settings(model=model, cluster="10.0.0.5:6379,generators=4,gpus=1", dtype="bfloat16", micro_batch_tokens=4096)
    with pytest.raises(SettingError, match=r"this model does not fit: .* the device has 24\.0"):
        check_memory(far, grpo, LlamaConfig(**EIGHT_B))
    assert engines.memory_plan(far, grpo, ModelShape.of(LlamaConfig(**EIGHT_B), PARAMETERS)).samplers == 0
    served = Settings(model=model, generator=("http://127.0.0.1:1",), dtype="bfloat16", micro_batch_tokens=4096)
    assert engines.memory_plan(served, grpo, ModelShape.of(LlamaConfig(**EIGHT_B), PARAMETERS)).samplers == 0
    assert (
        engines.cache_room(engines.memory_plan(served, grpo, ModelShape.of(LlamaConfig(**EIGHT_B), PARAMETERS)), 0) == 0
    )
    machine(monkeypatch, host=200 * GIB)
    check_memory(Settings(model=model, cluster="10.0.0.5:6379,generators=4", context=512), grpo, LlamaConfig(**EIGHT_B))
    near = Settings(model=model, cluster="local,generators=4", context=512)
    assert engines.memory_plan(near, grpo, ModelShape.of(LlamaConfig(**EIGHT_B), PARAMETERS)).samplers == 4
    with pytest.raises(SettingError, match=r"generator's weights 119\.7"):
        check_memory(near, grpo, LlamaConfig(**EIGHT_B))


def test_a_cluster_without_gpus_learns_on_the_cpu_of_a_machine_that_has_one(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engines, "device_memory", lambda asked: (24 if asked.type == "cuda" else 500) * GIB)
    settings = Settings(model=model_folder(tmp_path / "m"), cluster="10.0.0.5:6379", context=512)
    check_memory(settings, recipes.build("grpo"), LlamaConfig(**EIGHT_B))


def small_model(folder):
    from turnwise.environments.builtin.guess import Guess
    from turnwise.models.tiny import tiny_model
    from turnwise.training import build
    from turnwise.training.plan import EnvSpec

    settings = Settings(env="guess", vocabulary=320)
    tokenizer = build.load_tokenizer(settings, EnvSpec.from_settings(settings, Guess, None))
    tiny_model(len(tokenizer), 0, hidden=32, layers=1, context=128).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("started", [False, True])
def test_a_resumed_run_is_refused_before_it_loads_or_records_anything(tmp_path, monkeypatch, started):
    model = small_model(tmp_path / "model")
    settings = Settings(env="guess", model=model, device="cpu", steps=2)
    run_dir = RunDir.create(tmp_path, "run", settings.as_dict(), repr(recipes.build("grpo")), 0)
    if started:
        (tmp_path / "model").rename(run_dir.path / "initial")
    before = run_dir.settings.read_bytes()
    monkeypatch.setattr(engines, "TOLD_FROM", 1)
    monkeypatch.setattr(engines, "device_memory", lambda device: 1 << 16)
    monkeypatch.setattr(loading, "load_causal_lm", lambda source: pytest.fail("the model was loaded"))
    with pytest.raises(SettingError, match="this model does not fit"):
        api.resume(run_dir.path, quiet=True, steps=4)
    assert run_dir.settings.read_bytes() == before


def test_a_damaged_first_model_is_refused_before_new_steps_are_recorded(tmp_path):
    model = small_model(tmp_path / "model")
    settings = Settings(env="guess", model=model, device="cpu", steps=2)
    run_dir = RunDir.create(tmp_path, "run", settings.as_dict(), repr(recipes.build("grpo")), 0)
    save_model(run_dir.path / "initial", lambda path: shutil.copytree(model, path, dirs_exist_ok=True))
    run_dir.summary.write_text("{}")
    weights = run_dir.path / "initial" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    before = run_dir.settings.read_bytes()
    with pytest.raises(StoreError, match=r"model\.safetensors"):
        api.resume(run_dir.path, quiet=True, steps=4)
    assert run_dir.settings.read_bytes() == before and run_dir.summary.is_file()


def test_a_run_whose_model_moved_before_it_began_says_where_it_looked(tmp_path):
    model = small_model(tmp_path / "model")
    settings = Settings(env="guess", model=model, device="cpu", steps=2)
    run_dir = RunDir.create(tmp_path, "run", settings.as_dict(), repr(recipes.build("grpo")), 0)
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(SettingError, match=r"has not copied its model yet, .* is gone: .*model; put it back there"):
        api.resume(run_dir.path, quiet=True)


def test_a_run_is_refused_before_it_loads_or_writes_anything(tmp_path, monkeypatch):
    folder = small_model(tmp_path / "model")
    monkeypatch.setattr(engines, "TOLD_FROM", 1)
    monkeypatch.setattr(engines, "device_memory", lambda device: 1 << 16)
    monkeypatch.setattr(loading, "load_causal_lm", lambda source: pytest.fail("the model was loaded"))
    with pytest.raises(SettingError, match="this model does not fit"):
        api.train(env="guess", model=folder, out=str(tmp_path / "runs"), quiet=True, device="cpu")
    assert not (tmp_path / "runs").exists()
