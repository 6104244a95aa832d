"""Implementations of a mixture's experts compute the same logits and gradients; the learner's rounds as autocast does."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.families import make_family
from support.mixtures import batch_of, make_generator, make_mixture, play
from support.small_models import Linear, weighted

from turnwise.core.signals import Signal
from turnwise.engines import experts
from turnwise.engines.experts import (
    BATCHED,
    COMPUTE_DTYPE,
    EAGER,
    GATHERED_BYTES,
    GROUPED,
    ExpertChoice,
    attach_routing,
    expert_configs,
    expert_modules,
    forced_routes,
    use,
    using,
)
from turnwise.engines.learner import lora, packed_forward
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner

FAMILIES = ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss", "DeepseekV3"]
IDS = torch.arange(14).view(2, 7)


def logits_and_gradients(model, implementation, routes=None, dtype=None):
    model = copy.deepcopy(model)
    attach_routing(model)
    use(model, implementation)
    with forced_routes(model.get_decoder(), routes), torch.autocast("cpu", dtype, enabled=dtype is not None):
        logits = model(input_ids=IDS, use_cache=False).logits.float()
    logits.log_softmax(-1)[..., 3].sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def off_by(found, expected):
    return float((found - expected).abs().max() / (1e-9 + expected.abs().max()))


def routes_of(model):
    routing = attach_routing(copy.deepcopy(model))
    return torch.stack([torch.randperm(routing.experts)[: routing.k] for _ in range(14 * routing.routers)]).view(14, -1)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_implementations_compute_the_same_logits_and_gradients(family, forced):
    torch.manual_seed(0)
    model = make_family(family)
    routes = routes_of(model) if forced else None
    expected, gradients = logits_and_gradients(model, EAGER, routes)
    assert any("experts" in name for name in gradients)
    for implementation in (GROUPED, BATCHED, COMPUTE_DTYPE):
        logits, found = logits_and_gradients(model, implementation, routes)
        assert off_by(logits, expected) < 1e-5
        assert found.keys() == gradients.keys()
        assert max(off_by(found[name], gradients[name]) for name in gradients) < 1e-4


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "Olmoe"])
def test_half_precision_gives_the_loss_and_gradients_of_float32_up_to_rounding(family):
    """With the same experts forced: a router near a tie would choose others, which is not rounding."""
    torch.manual_seed(0)
    model = make_family(family)
    routes = routes_of(model)
    expected, gradients = logits_and_gradients(model, EAGER, routes)
    logits, found = logits_and_gradients(model, COMPUTE_DTYPE, routes, torch.bfloat16)
    assert 1e-5 < off_by(logits, expected) < 0.02, "rounded, and only rounded"
    for name, gradient in gradients.items():
        assert found[name].dtype == torch.float32
        assert float((found[name] - gradient).norm() / gradient.norm()) < 0.04, name


def products_of(monkeypatch, run):
    """The dtypes of both operands of all grouped products."""
    seen, product = set(), torch.nn.functional.grouped_mm

    def watched(a, b, **options):
        seen.add((a.dtype, b.dtype))
        return product(a, b, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    run()
    monkeypatch.undo()
    return seen


def test_under_autocast_experts_multiply_in_half_precision_and_stock_ones_in_float32(monkeypatch):
    model, half, whole = make_family("Qwen3Moe"), torch.bfloat16, torch.float32
    attach_routing(model)  # by a pass of its own
    products = lambda name, dtype: products_of(monkeypatch, lambda: logits_and_gradients(model, name, None, dtype))  # noqa: E731
    assert products(COMPUTE_DTYPE, half) == {(half, half)}
    assert products(COMPUTE_DTYPE, None) == products(GROUPED, half) == {(whole, whole)}


def test_a_family_with_experts_of_its_own_kind_stays_as_it_is():
    model = make_family("Dbrx")
    assert not expert_modules(model) and ExpertChoice.of(model, 2) is None
    before = model.config._experts_implementation
    packed_forward.prepare_experts(model, IDS[0])
    assert model.config._experts_implementation == before


def test_inside_a_context_and_no_longer():
    model = make_family("Mixtral")
    before, configs = model.config._experts_implementation, expert_configs(model)
    with pytest.raises(KeyError), using(configs, EAGER):
        assert model.config._experts_implementation == EAGER
        raise KeyError
    assert model.config._experts_implementation == before


# ------------------------------------------------------------------ a choice by rows


@given(st.integers(1, 4096), st.integers(1, 8), st.integers(1, 1 << 26))
def test_few_rows_gather_and_many_do_not(rows, k, size):
    choice = ExpertChoice(size, k)
    assert choice.for_rows(rows) == (BATCHED if rows * k * size <= GATHERED_BYTES else GROUPED)
    assert choice.only(GROUPED).for_rows(rows) == choice.without(BATCHED, "x").for_rows(rows) == GROUPED
    assert choice.without(GROUPED, "x").for_rows(rows) == BATCHED


def test_the_choice_knows_the_bytes_of_an_expert_and_says_what_was_refused():
    model = make_mixture()
    choice = ExpertChoice.of(model, 4)
    assert choice.expert_bytes == 3 * 64 * 32 * 4  # gate, up and down in float32
    assert choice.describe() == "experts by grouped_mm and batched_mm"
    assert choice.without(GROUPED, "it asks").describe() == "experts by batched_mm, not grouped_mm: it asks"


# ------------------------------------------------------------------ the learner


def test_the_learner_takes_the_compute_dtype_where_it_proves_itself(monkeypatch, caplog):
    learner = LocalLearner(make_mixture(), LearnerSettings(dtype="float32"))
    assert learner.model.config._experts_implementation == COMPUTE_DTYPE
    assert copy.deepcopy(learner.model).config._experts_implementation == COMPUTE_DTYPE
    wrong = lambda module, rows, index, weights: rows * 2  # noqa: E731
    monkeypatch.setitem(experts.ALL_EXPERTS_FUNCTIONS._local_mapping, COMPUTE_DTYPE, wrong)
    model = packed_forward.prepare(make_mixture())
    assert model.config._experts_implementation == GROUPED
    assert "logits were off by" in caplog.text


def test_a_fault_in_half_precision_alone_is_found(monkeypatch):
    model = make_mixture()
    attach_routing(model)
    use(model, COMPUTE_DTYPE)
    assert not packed_forward.expert_fault(model, IDS[0], half=True)

    def wrong(module, rows, index, weights):
        right = experts._in_compute_dtype(module, rows, index, weights)
        return right * 2 if torch.is_autocast_enabled("cpu") else right

    monkeypatch.setitem(experts.ALL_EXPERTS_FUNCTIONS._local_mapping, COMPUTE_DTYPE, wrong)
    assert not packed_forward.expert_fault(model, IDS[0], half=False)
    assert "half precision" in packed_forward.expert_fault(model, IDS[0], half=True)


def test_half_precision_of_sampler_and_learner_agree_more_than_with_experts_in_float32():
    model = make_mixture()
    batch = batch_of(play(make_generator(model, dtype=torch.bfloat16)))
    differences = {}
    for implementation in (COMPUTE_DTYPE, GROUPED):
        learner = LocalLearner(copy.deepcopy(model), LearnerSettings(dtype="bfloat16"))
        use(learner.model, implementation)
        logp = learner.measure(batch, frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL].x
        differences[implementation] = float((logp - batch.behaviour.x).abs().mean())
    assert differences[COMPUTE_DTYPE] < 1.2 * differences[GROUPED]
    assert differences[COMPUTE_DTYPE] < 0.05


@pytest.mark.parametrize("rank", [0, 2])
def test_a_step_in_half_precision_changes_experts_as_in_float32(rank):
    model = make_mixture()
    batch = weighted(batch_of(play(make_generator(model))))
    moved = {}
    for dtype in ("float32", "bfloat16"):
        settings = replace(LearnerSettings(dtype=dtype, lr=1e-3), lora_rank=rank)
        learner = LocalLearner(copy.deepcopy(model), settings)
        kept = {}
        for name, p in learner.trained.items():
            p.register_post_accumulate_grad_hook(lambda p, n=name, kept=kept: kept.update({n: p.grad.clone()}))
        assert not learner.update(batch, Linear())["skipped"]
        moved[dtype] = kept
    assert moved["float32"].keys() == moved["bfloat16"].keys()
    experts = [name for name in moved["float32"] if "experts" in name]
    assert experts
    for name in experts:
        found, expected = moved["bfloat16"][name], moved["float32"][name]
        if float(expected.norm()) > 1e-6:
            assert float((found - expected).norm() / expected.norm()) < 0.1, name


def test_frozen_experts_beside_adapters_are_kept_in_half_precision():
    learner = LocalLearner(make_mixture(), LearnerSettings(dtype="bfloat16", lora_rank=2))
    frozen = [p for m in expert_modules(learner.model) for p in m.parameters(recurse=False)]
    assert frozen and {p.dtype for p in frozen} == {torch.bfloat16}
    assert {p.dtype for p in learner.trained.values()} == {torch.float32}
    assert {t.dtype for t in lora.merged(learner.model).values()} <= {torch.float32, torch.bfloat16}
