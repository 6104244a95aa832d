"""The experts of a mixture in 4 bits: read as before by every implementation, and kept for the backward pass by their place."""

from __future__ import annotations

import asyncio
import copy
import gc
import io
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.families import make_family
from support.mixtures import batch_of, make_generator, make_mixture, play
from support.small_models import Linear, weighted
from torch.utils.checkpoint import checkpoint

from turnwise.core.signals import Signal
from turnwise.engines.kernels import four_bit
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner

pytest.importorskip("bitsandbytes", reason="4-bit weights need bitsandbytes: pip install 'turnwise-rl[quantized]'")
pytest.importorskip("peft", reason="adapters need PEFT")

FOUR_BIT = LearnerSettings(dtype="nf4", lora_rank=4, lr=1e-2)
PROXIMAL = frozenset({Signal.PROXIMAL})
CPU = torch.device("cpu")
IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]


def packed_and_plain(**changes):
    """A mixture with packed experts, and one that holds the same numbers in plain weights; only embeddings are trained."""
    packed = make_mixture(**changes)
    plain = copy.deepcopy(packed)
    assert four_bit.pack_experts(packed, torch.float32, CPU) == 2 * packed.config.num_hidden_layers
    for name, stack in four_bit.packed_experts(packed).items():
        plain.get_parameter(name).data = stack.dequantised(torch.float32)
    for model in (packed, plain):
        model.requires_grad_(False).get_input_embeddings().requires_grad_(True)
    return packed, plain


def logits_and_gradient(model, ids):
    embedding = model.get_input_embeddings().weight
    logits = model(input_ids=ids[None], use_cache=False).logits
    (gradient,) = torch.autograd.grad(logits.square().mean(), embedding)
    return logits.detach(), gradient


def logp_of(learner, batch):
    return learner.measure(batch, PROXIMAL)[Signal.PROXIMAL].x


# ------------------------------------------------------------------ stacks


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 5), st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**20))
def test_an_expert_is_packed_as_if_it_were_alone(experts, rows, columns, seed):
    weight = torch.randn(experts, rows, columns, generator=torch.Generator().manual_seed(seed))
    weight[1:] *= 0.3  # a block across experts would give these fewer codes
    stack = four_bit.FourBitStack(weight)
    whole = stack.dequantised(torch.float32)
    for n in range(experts):
        for first, last in ((n, n + 1), (0, n + 1)):
            assert torch.equal(stack.dequantised(torch.float32, first, last), whole[first:last])
        alone = four_bit.FourBitStack(weight[n : n + 1]).dequantised(torch.float32)[0]
        torch.testing.assert_close(codes(whole[n]), codes(alone), rtol=0, atol=1e-3)


def codes(expert):
    """The numbers of a matrix by the largest of their block: scales are rounded together with those of the neighbours."""
    return torch.cat([block / block.abs().max() for block in expert.flatten().split(64)])


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_every_implementation_computes_as_with_plain_weights(how):
    packed, plain = packed_and_plain()
    ids = torch.arange(20)
    for model in (packed, plain):
        model.config._experts_implementation = how
    expected, gradient = logits_and_gradient(plain, ids)
    saved = io.BytesIO()
    torch.save(packed, saved)
    saved.seek(0)
    for model in (packed, copy.deepcopy(packed), torch.load(saved, weights_only=False)):
        logits, found = logits_and_gradient(model, ids)
        assert torch.equal(logits, expected) and torch.equal(found, gradient)


def test_a_module_keeps_its_class_and_reads_its_weights_outside_of_a_pass():
    packed, plain = packed_and_plain()
    experts = packed.model.layers[0].mlp.experts
    assert isinstance(experts, type(plain.model.layers[0].mlp.experts))
    assert not list(experts.parameters()) and not experts.state_dict()
    assert torch.equal(experts.down_proj, plain.model.layers[0].mlp.experts.down_proj)
    with torch.autocast("cpu", torch.bfloat16):
        assert experts.gate_up_proj.dtype == torch.bfloat16


# ------------------------------------------------------------------ what autograd keeps


def kept_bytes(model, ids):
    """Bytes of distinct tensors that a forward pass keeps for its backward pass, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    logits = model(input_ids=ids[None], use_cache=False).logits
    seen, found, stack = set(), {}, [logits.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [parent for parent, _ in node.next_functions]
        for name in dir(node):
            raw = name.startswith("_raw_saved_") and getattr(node, name)
            for saved in raw if isinstance(raw, tuple | list) else [raw] if raw else []:
                data = saved.data
                if isinstance(data, torch.Tensor):
                    found[data.untyped_storage().data_ptr()] = data.untyped_storage().nbytes()
    return sum(size for place, size in found.items() if place not in own)


@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
def test_autograd_keeps_no_dequantised_weight(how, monkeypatch):
    made = []
    real = four_bit.FourBitStack.dequantised

    def counted(self, *args):
        found = real(self, *args)
        made.append((weakref.ref(found.untyped_storage()), found.untyped_storage().nbytes()))
        return found

    monkeypatch.setattr(four_bit.FourBitStack, "dequantised", counted)
    packed, plain = packed_and_plain()
    for model in (packed, plain):
        model.config._experts_implementation = how
    ids = torch.arange(12)
    made.clear()
    logits = packed(input_ids=ids[None], use_cache=False).logits
    gc.collect()
    assert len(made) == 6 and not [size for alive, size in made if alive() is not None]  # two of each layer, and gone
    made.clear()
    logits.square().mean().backward()
    gc.collect()
    assert made and not [size for alive, size in made if alive() is not None]
    if how == "eager":  # an expert at a time
        experts = packed.model.layers[0].mlp.experts
        assert max(size for _, size in made) <= 4 * experts.packed_experts["gate_up_proj"].matrix.shape[1]


def test_the_graph_is_as_small_as_that_of_plain_weights():
    packed, plain = packed_and_plain()
    ids = torch.arange(12)
    dequantised = sum(4 * s.shape.numel() for s in four_bit.packed_experts(packed).values())
    assert dequantised > 10 * kept_bytes(plain, ids)
    assert kept_bytes(packed, ids) <= kept_bytes(plain, ids)


def test_inside_a_checkpoint_the_layer_still_keeps_nothing():
    packed, plain = packed_and_plain()
    ids = torch.arange(12)
    for model in (packed, plain):
        for layer in model.model.layers:
            layer.forward = lambda *a, own=layer.forward, **k: checkpoint(own, *a, use_reentrant=False, **k)
    assert kept_bytes(packed, ids) <= kept_bytes(plain, ids)
    for mine, theirs in zip(logits_and_gradient(packed, ids), logits_and_gradient(plain, ids)):
        assert torch.equal(mine, theirs)


# ------------------------------------------------------------------ learner and sampler


def dequantised_twin(learner, model):
    """The model with the numbers that the learner dequantises."""
    twin = copy.deepcopy(model)
    twin.load_state_dict({n: w.clone() for n, w in learner.weights().base.items()}, strict=False)
    return twin


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_learner_trains_adapters_beside_packed_experts(family, recompute):
    model = make_mixture() if family == "Qwen3Moe" else make_family(family)
    batch = weighted(batch_of(play(make_generator(model), dialogues=3, size=8)))
    own = replace(FOUR_BIT, recompute=recompute)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        packed = LocalLearner(copy.deepcopy(model), own)
    assert four_bit.packed_experts(packed.model)
    assert not any("experts" in name for name in packed.trained) and any("q_proj" in n for n in packed.trained)
    plain = LocalLearner(dequantised_twin(packed, model), replace(own, dtype="float32"))
    assert packed.parameter_count - sum(p.numel() for p in packed.trained.values()) == sum(
        p.numel() for p in model.parameters()
    )
    for name, p in plain.model.named_parameters():  # an adapter of an expert starts at 0 and stays there
        p.requires_grad_(f"model/{name}" in packed.trained)
        if p.requires_grad:
            p.data.copy_(packed.trained[f"model/{name}"])
    plain._make_optimizers()
    assert packed.trained.keys() == plain.trained.keys()
    for _ in range(2):
        torch.testing.assert_close(logp_of(packed, batch), logp_of(plain, batch), rtol=1e-4, atol=1e-5)
        for learner in (packed, plain):
            learner.update(batch, Linear())
    for name, p in packed.trained.items():
        torch.testing.assert_close(p, plain.trained[name], rtol=1e-2, atol=1e-4, msg=name)


def test_the_sampler_gets_the_policy_and_an_export_loads_without_bitsandbytes(tmp_path):
    from transformers import AutoModelForCausalLM

    model = make_mixture()
    generator, learner = make_generator(model), LocalLearner(copy.deepcopy(model), FOUR_BIT)
    batch = weighted(batch_of(play(generator, dialogues=3, size=8)))
    learner.update(batch, Linear())
    weights = learner.weights()
    assert {n: w.shape for n, w in weights.items()} == {n: p.shape for n, p in model.named_parameters()}
    asyncio.run(generator.publish(weights, 1))
    new = batch_of(play(generator, dialogues=3, size=8))
    assert float((logp_of(learner, new) - new.behaviour.x).abs().max()) < 1e-4
    learner.export(tmp_path)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    for name, w in learner.weights().items():
        torch.testing.assert_close(loaded[name], w, msg=name)
