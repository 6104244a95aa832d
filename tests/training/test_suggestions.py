"""Settings that fit the model: learning rate, tokens per turn and context, each with its reason; the user's values win."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.settings import Settings
from turnwise.environments import load
from turnwise.errors import SettingError
from turnwise.models.facts import ModelFacts, read_model_facts
from turnwise.training.plan import resolve_settings, suggest

LOOKUP = load("lookup")
SMOLLM2 = ModelFacts(134_515_008, 2048)


def suggested(values=None, model=SMOLLM2, env=LOOKUP):
    values = {"device": "cpu", **(values or {})}
    return {s.name: s.value for s in suggest(Settings.of(values), values, model, env)}


@pytest.fixture
def folder(tmp_path):
    """A model folder with a config and the header of a safetensors file, and no weights."""

    def write(parameters, positions=2048, **config):
        header = json.dumps({"__metadata__": {}, "w": {"dtype": "BF16", "shape": [parameters // 1000, 1000]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": positions, **config}))
        return str(tmp_path)

    return write


def test_a_real_model_on_a_task_whose_suggestions_are_for_the_tiny_one(folder):
    settings = resolve_settings({"env": "lookup", "model": folder(135_000_000), "device": "cpu"})
    assert settings.lr == 1e-5 and settings.max_tokens == 128 and settings.micro_batch_tokens == 2048
    assert settings.context >= 256 + LOOKUP.max_turns * 128 and settings.context <= 2048
    assert settings.difficulty == (1, 2), "what does not depend on the model is still the environment's"
    tiny = resolve_settings({"env": "lookup"})
    assert (tiny.lr, tiny.max_tokens, tiny.context) == (3e-4, 12, 192)


def test_a_trained_copy_of_the_tiny_model_keeps_its_settings(folder):
    settings = resolve_settings({"env": "lookup", "model": folder(1_000_000)})
    assert (settings.lr, settings.max_tokens, settings.context) == (3e-4, 12, 192)


@pytest.mark.parametrize(
    ("parameters", "lora", "rate"),
    [
        (50e6, 0, 5e-5),
        (135e6, 0, 1e-5),
        (600e6, 8, 1e-4),
        (7e9, 0, 2e-6),
        (70e9, 0, 1e-6),
        (70e9, 16, 1e-5),
        (0, 0, 1e-5),
    ],
)
def test_the_learning_rate_follows_the_size(parameters, lora, rate):
    found = suggest(Settings(lora_rank=lora), (), ModelFacts(int(parameters)), LOOKUP)[0]
    assert (found.name, found.value) == ("lr", rate) and ("LoRA" in found.reason) == bool(lora)


def test_a_single_answer_gets_more_tokens_than_one_turn_of_many():
    assert suggested(env=load("countdown"))["max_tokens"] == 512 and suggested()["max_tokens"] == 128
    assert suggested({"max_turns": 1})["max_tokens"] == 512


def test_settings_of_the_user_are_kept_and_others_follow_them():
    found = suggested({"lr": 1.0, "max_tokens": 400})
    assert "lr" not in found and "max_tokens" not in found
    assert found["context"] == 2048, "as many as the model reads"
    assert suggested({"context": 64})["max_tokens"] == 32


def test_an_environment_suggests_for_real_models_by_another_name():
    class Chatty(LOOKUP):
        suggests_for_models = {"max_tokens": 300}  # noqa: RUF012

    found = suggest(Settings(), (), SMOLLM2, Chatty)
    assert (found[0].name, found[0].value, found[0].reason) == ("max_tokens", 300, "suggested by Chatty")
    assert [s.name for s in found].count("max_tokens") == 1


def test_facts_are_read_without_the_weights(folder, tmp_path):
    path = folder(2_000_000_000, 4096)
    assert read_model_facts(path) == ModelFacts(2_000_000_000, 4096) and read_model_facts(path).size == "2.0 B"
    folder(1_000, text_config={"max_position_embeddings": 99})
    assert read_model_facts(path).max_positions == 99
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "config.json").write_text("[")
    assert read_model_facts(path) == ModelFacts(0, 0)
    assert read_model_facts("owner/Some-1.7B-Chat").parameters == 1_700_000_000
    assert read_model_facts("no/such-model").size.startswith("an unknown")


@given(
    parameters=st.integers(0, 10**12),
    positions=st.integers(0, 10**6),
    given_values=st.fixed_dictionaries(
        {},
        optional={
            "context": st.integers(1, 10**5),
            "max_tokens": st.integers(1, 10**5),
            "lora_rank": st.integers(0, 64),
        },
    ),
)
def test_what_is_suggested_is_valid_and_fits_the_model(parameters, positions, given_values):
    found = suggested(given_values, ModelFacts(parameters, positions))
    Settings.of({**found, **given_values})
    assert not found.keys() & given_values.keys()
    assert not positions or found.get("context", 0) <= positions


@pytest.mark.parametrize("turns", ["many", 0, -1, None, 2.5, True, [3]])
def test_a_class_whose_turns_are_no_number_is_refused_at_once(turns):
    env = type("Env", (), {"max_turns": turns})
    with pytest.raises(SettingError, match=r"max_turns of Env is .*; write a whole number of at least 1"):
        resolve_settings({}, env)
