"""The memory estimate of a mixture, against what autograd keeps of its layers and what adapters it gets."""

from __future__ import annotations

import pytest
import torch
from support.mixtures import SHAPE, make_mixture
from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from turnwise.core.batch import Sequences
from turnwise.engines.experts import COMPUTE_DTYPE, GROUPED, use
from turnwise.engines.learner import packed_forward
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.engines.memory import GIB, MemoryPlan, ModelShape

WIDE = {"hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 8, "num_attention_heads": 8}


def shape_of(model):
    return ModelShape.of(model.config, sum(p.numel() for p in model.parameters()))


def kept_bytes(model, length=251, seed=0):
    """Bytes of activations that autograd keeps in a pass under autocast, and the ids that were computed."""
    weights = {p.shape for p in model.parameters()}
    weights |= {torch.Size((q[0], q[2], q[1])) for q in weights if len(q) == 3} | {q[::-1] for q in weights}
    # drawn alike every time: an expert that gets as many ids as a weight has rows would be taken for a weight
    ids = torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed))
    start = torch.tensor([0, length // 2, length])
    kept: dict[int, int] = {}

    def keep(t):
        if t.shape not in weights:  # rounded weights are counted by themselves
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        out = packed_forward.packed_states(model, Sequences(ids, start, torch.arange(2), torch.arange(1, length // 2)))
    return sum(kept.values()), len(out.values)


@pytest.mark.parametrize("changes", [{}, {"num_experts_per_tok": 8}, {**WIDE, "num_experts_per_tok": 2}])
def test_the_estimate_counts_what_autograd_keeps(changes):
    kept = {}
    for layers in (1, 3):
        model = packed_forward.prepare(make_mixture(num_hidden_layers=layers, **changes))
        kept[layers], ids = kept_bytes(model)
    one_layer = (kept[3] - kept[1]) / 2
    estimate = shape_of(model).kept(ids, 2, False) / 3
    assert 0.85 * one_layer < estimate < 1.15 * one_layer


def test_stock_experts_under_autocast_keep_twice_as_much_of_each_choice():
    kept = {}
    for name in (COMPUTE_DTYPE, GROUPED):
        for layers in (1, 3):
            model = packed_forward.prepare(make_mixture(num_hidden_layers=layers))
            use(model, name)
            kept[name, layers], ids = kept_bytes(model)
    of_a_layer = {name: (kept[name, 3] - kept[name, 1]) / 2 / ids / 2 for name in (COMPUTE_DTYPE, GROUPED)}
    shape = shape_of(model)
    more = 4 * shape.mlp + 2 * shape.chosen * shape.hidden
    assert of_a_layer[GROUPED] - of_a_layer[COMPUTE_DTYPE] == pytest.approx(more, rel=0.02)


def test_recomputed_layers_keep_their_input_alone():
    shape = shape_of(make_mixture())
    assert shape.kept(1000, 2, True) == 1000 * 3 * 64 * 4
    assert shape.of_one_layer(1000, 2, True) > shape.of_one_layer(1000, 2, False)


MIXTURE_3B = ModelShape(
    3_010_000_000, 24, 1536, 8 * 384, 2 * 4 * 128, 2 * 32_768 * 1536, 16 * 128, 32_768, experts=64, expert=384, chosen=8
)  # fmt: skip


def test_the_estimate_is_near_the_measured_peak_of_a_step_of_one_micro_batch():
    """91 GiB were allocated on one H200 (benchmarks/mixtures.py), fragments not counted."""
    parts = MemoryPlan(MIXTURE_3B, 16384, 0, 0, shared_weights=True, one_micro_batch=True).parts()
    assert (sum(parts.values()) - parts["fragments"]) / GIB == pytest.approx(91, rel=0.1)
    several = MemoryPlan(MIXTURE_3B, 16384, 0, 0, shared_weights=True).parts()
    assert several["activations"] - parts["activations"] == several["gradients"], "they wait for the next micro-batch"
    few = MemoryPlan(MIXTURE_3B, 64, 0, 0, shared_weights=True, one_micro_batch=True).parts()
    assert few["activations"] >= MIXTURE_3B.of_one_layer(64, 2, False), "gradients outweigh what is kept"


@pytest.mark.filterwarnings("ignore:The following")
def test_every_expert_has_adapters():
    model = make_mixture()
    shape = shape_of(model)
    learner = LocalLearner(model, LearnerSettings(dtype="float32", lora_rank=2))
    trained = sum(p.numel() for p in learner.trained.values())
    assert 0.9 * trained < shape.adapter_parameters(2) < 1.1 * trained
    packed = MemoryPlan(shape, 0, 0, 0, lora_rank=2, four_bit=True)
    assert packed.parts()["gradients"] < 0.2 * MemoryPlan(shape, 0, 0, 0, lora_rank=2).parts()["gradients"]


@pytest.mark.parametrize(
    "config, expert, chosen, experts",
    [
        (MixtralConfig(hidden_size=64, intermediate_size=48, num_local_experts=8, num_experts_per_tok=2), 48, 2, 8),
        (OlmoeConfig(hidden_size=64, intermediate_size=48, num_experts=16, num_experts_per_tok=4), 48, 4, 16),
        (Qwen3MoeConfig(**SHAPE), 32, 4, 32),
    ],
)
def test_the_width_of_experts_is_found_under_either_name(config, expert, chosen, experts):
    shape = ModelShape.of(config, 10**7)
    assert (shape.expert, shape.chosen, shape.experts, shape.mlp) == (expert, chosen, experts, chosen * expert)
