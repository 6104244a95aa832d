"""Estimates of memory: measured peaks, what makes a run fit, what is said where it cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from turnwise import recipes
from turnwise.config.settings import Settings
from turnwise.engines.generator.kv_cache import CacheChoice
from turnwise.engines.memory import GIB, MemoryPlan, ModelShape
from turnwise.errors import SettingError
from turnwise.models.tiny import tiny_model
from turnwise.training import engines

LLAMA_8B = ModelShape(8_030_000_000, 32, 4096, 14336, 2 * 1024, 2 * 128_256 * 4096, 4096, 128_256)
QWEN_1B = ModelShape(1_540_000_000, 28, 1536, 8960, 2 * 256, 151_936 * 1536, 1536, 151_936)
LORA = MemoryPlan(LLAMA_8B, 8192, 1, 1, lora_rank=16, shared_weights=True)
FULL = MemoryPlan(QWEN_1B, 16384, 1, 1, shared_weights=True)


@pytest.mark.parametrize(
    ("plan", "measured"),  # peaks of benchmarks/large_models.py on one H200, of a learner alone
    [
        (LORA, 47),
        (replace(LORA, ids=16384, recompute=True), 42),
        (FULL, 56),
        (replace(FULL, recompute=True), 42),
        (replace(LORA, ids=16384, recompute=True, four_bit=True), 29.2),
    ],
)
def test_the_estimate_is_within_six_percent_of_measured_peaks(plan, measured):
    assert plan.total / GIB == pytest.approx(measured, rel=0.06)


def test_a_run_that_does_not_fit_gets_smaller_micro_batches_and_then_recomputes():
    plan, settings = replace(LORA, ids=24576, shared_weights=False), Settings()
    assert engines.fit_memory(settings, plan, 141 * GIB) == (settings, "")
    fitted, text = engines.fit_memory(settings, plan, 80 * GIB)
    assert (fitted.micro_batch_tokens, fitted.recompute) == (6144, False) and "24576 would take 116" in text
    fitted, text = engines.fit_memory(settings, plan, 48 * GIB)
    assert fitted.recompute and "recompute is true" in text
    with pytest.raises(SettingError, match=r"does not fit: .*weights 15.1.*the device has 24.0"):
        engines.fit_memory(settings, plan, 24 * GIB)


def test_what_the_user_gave_is_kept_and_the_advice_names_the_largest_part():
    given = Settings(micro_batch_tokens=24576)
    kept, text = engines.fit_memory(given, replace(LORA, ids=24576), 80 * GIB)
    assert kept is given and "--recompute" in text
    with pytest.raises(SettingError, match="write --lora-rank 16"):
        engines.fit_memory(Settings(), FULL, 16 * GIB)


def test_a_cache_that_does_not_fit_in_rows_gets_the_room_left_in_pages():
    plan = replace(LORA, ids=4096, dialogues=512, context=16384)
    rows = plan.parts()["KV cache"]
    kept, text = engines.fit_memory(Settings(micro_batch_tokens=4096), plan, 141 * GIB)
    left = int(0.9 * 141 * GIB) - (plan.total - rows)
    assert kept.micro_batch_tokens == 4096 and rows > 141 * GIB
    assert text == ""  # what the generator tells names the layout
    assert engines.cache_room(plan, int(0.9 * 141 * GIB)) == left
    assert not engines.in_pages(plan, plan.total - rows + 1, "")  # not two dialogues fit: the advice is given
    _, text = engines.fit_memory(Settings(micro_batch_tokens=4096), plan, int((plan.total - rows + GIB) / 0.9))
    assert "a smaller --context or fewer --slots" in text


def test_an_asked_layout_decides_what_must_fit():
    plan = replace(LORA, ids=4096, dialogues=512, context=16384)
    rows = Settings(micro_batch_tokens=4096, model="tiny,cache=rows")
    assert "write no cache=rows, a smaller --context" in engines.fit_memory(rows, plan, 141 * GIB)[1]
    chosen, pages = Settings(), Settings(model="tiny,cache=pages")
    assert engines.fit_memory(chosen, replace(plan, ids=8192), 80 * GIB)[0].micro_batch_tokens < 8192
    assert engines.fit_memory(pages, replace(plan, ids=8192), 80 * GIB) == (pages, "")  # pages take what is left


def test_a_second_generator_halves_the_room():
    alone = replace(LORA, dialogues=64, context=1024, shared_weights=False)
    both, room = replace(alone, samplers=2), 141 * GIB
    assert both.parts()["KV cache"] == 2 * alone.parts()["KV cache"]
    assert both.total - alone.total == alone.parts()["KV cache"] + alone.parts()["generator's weights"]
    assert engines.cache_room(both, room) == (engines.cache_room(alone, room) - alone.parts()["generator's weights"]) // 2


def test_small_models_keep_rows_and_large_ones_choose_by_the_room(monkeypatch):
    model, recipe = tiny_model(512, 0, hidden=64, layers=2, context=128), recipes.build("grpo")
    settings = Settings(device="cpu", context=128)
    assert engines.cache_choice(settings, recipe, model) == CacheChoice()
    monkeypatch.setattr(engines, "TOLD_FROM", 0)
    monkeypatch.setattr(engines, "device_memory", lambda device: 1 << 30)
    plan = engines.memory_plan(settings, recipe, model)
    choice = engines.cache_choice(settings, recipe, model)
    assert choice.page is None and choice.room == int(0.9 * (1 << 30)) - plan.total + plan.parts()["KV cache"]


def test_the_shape_and_the_plan_come_from_model_and_settings():
    model = tiny_model(512, 0, hidden=64, layers=2, context=128)
    recipe = recipes.build("grpo")
    plan = engines.memory_plan(Settings(device="cpu", context=128), recipe, model)
    assert (plan.shape.layers, plan.shape.hidden, plan.compute, plan.shared_weights) == (2, 64, 4, True)
    assert plan.parts()["weights"] == 4 * sum(p.numel() for p in model.parameters())
    assert not engines.memory_plan(Settings(device="cpu", context=128, staleness=1), recipe, model).shared_weights
    assert engines.report(Settings(device="cpu"), recipe, model)[1] == []  # a small model needs no words


def test_a_larger_model_tells_its_estimate_once(monkeypatch):
    monkeypatch.setattr(engines, "TOLD_FROM", 1)
    model = tiny_model(512, 0, hidden=64, layers=2, context=128)
    _, told = engines.report(Settings(device="cpu", context=128), recipes.build("grpo"), model)
    assert len(told) == 1 and told[0].startswith("memory: about 0.") and "the device has" in told[0]
