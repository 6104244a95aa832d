"""Frozen weights in 4 bits: what is dequantised is the policy, for learner and sampler alike, and adapters train beside it."""

from __future__ import annotations

import asyncio
import copy
import sys
from dataclasses import replace

import pytest
import torch
from support.families import make_family
from support.mixtures import batch_of, make_generator, play
from support.small_models import Linear, make_model, weighted
from torch import nn

from turnwise.core.signals import Signal
from turnwise.engines.kernels import four_bit
from turnwise.engines.learner import lora
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.errors import SettingError

pytest.importorskip("bitsandbytes", reason="4-bit weights need bitsandbytes: pip install 'turnwise-rl[quantized]'")
pytest.importorskip("peft", reason="adapters need PEFT")

# The 16 numbers of NormalFloat4, from the appendix of its paper.
CODES = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FOUR_BIT = LearnerSettings(dtype="nf4", lora_rank=4, lr=1e-2)
PROXIMAL = frozenset({Signal.PROXIMAL})


def dequantised_twin(model):
    """The model with every linear layer of its decoder rounded to 4 bits and back, in plain weights."""
    twin = copy.deepcopy(model)
    for name, layer in twin.get_decoder().named_modules():
        if type(layer) is nn.Linear and not name.endswith("gate"):
            matrix = four_bit.FourBitMatrix(layer.weight.detach())
            layer.weight.data = matrix.dequantised(torch.float32)
    return twin


def logp_of(learner, batch):
    return learner.measure(batch, PROXIMAL)[Signal.PROXIMAL].x


def sampled(model):
    return batch_of(play(make_generator(model), dialogues=3, size=8))


# ------------------------------------------------------------------ matrices


def test_numbers_are_the_nearest_codes_times_the_scale_of_their_block():
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    matrix = four_bit.FourBitMatrix(weight)
    found = matrix.dequantised(torch.float32).view(-1, 64)
    blocks = weight.view(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    codes = torch.tensor(CODES)
    nearest = codes[(blocks[..., None] / scale[..., None] - codes).abs().argmin(-1)]
    used = found.abs().amax(1, keepdim=True)  # every block holds a number of code 1 or -1
    torch.testing.assert_close(used, scale, rtol=0.03, atol=0)  # scales are quantised again, to a byte
    assert float(((found / used - nearest).abs() > 1e-4).float().mean()) < 1e-3


def test_a_matrix_is_small_and_survives_copies_and_casts():
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrix = four_bit.FourBitMatrix(weight)
    size = sum(b.nbytes for b in matrix.buffers())
    tables = matrix.code.nbytes + matrix.scale_code.nbytes + matrix.offset.nbytes
    assert size - tables == pytest.approx(four_bit.BYTES_EACH * weight.numel(), rel=0.01)
    values = matrix.dequantised(torch.float32)
    assert torch.equal(values, values.bfloat16().float())  # rounded as the products round them
    twin = copy.deepcopy(matrix).to(torch.float32)
    assert torch.equal(twin.dequantised(torch.float32), values) and not matrix.state_dict()
    assert torch.equal(four_bit.FourBitMatrix(weight).dequantised(torch.float32), values)


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_computes_as_the_layer_it_stands_for(bias):
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=bias)
    packed = four_bit.FourBitLinear(layer, torch.float32, torch.device("cpu"))
    layer.weight.data = packed.weight
    x = torch.randn(2, 5, 64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(packed(a), layer(b))
    packed(a).square().sum().backward()
    layer(b).square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    assert len(packed.sizes()) == 96 and packed.sizes().numel() == 0


# ------------------------------------------------------------------ learner


def test_without_adapters_it_is_refused():
    with pytest.raises(SettingError, match="without adapters every weight is trained; write --lora-rank 16"):
        LocalLearner(make_model(), replace(FOUR_BIT, lora_rank=0))


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(SettingError, match="no linear layers to keep in 4 bits"):
        LocalLearner(make_model("gpt2"), FOUR_BIT)


def test_without_the_library_it_is_refused_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(SettingError, match=r"install `turnwise-rl\[quantized\]`"):
        LocalLearner(make_model(), FOUR_BIT)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma2"])
def test_it_learns_as_adapters_beside_the_dequantised_weights(family):
    model = make_family(family)
    batch = weighted(sampled(model))
    packed = LocalLearner(copy.deepcopy(model), FOUR_BIT)
    plain = LocalLearner(dequantised_twin(model), replace(FOUR_BIT, dtype="float32"))
    assert "frozen weights in 4 bits" in packed.describe() and packed.parameter_count == plain.parameter_count
    for _ in range(2):
        torch.testing.assert_close(logp_of(packed, batch), logp_of(plain, batch), rtol=1e-4, atol=1e-5)
        for learner in (packed, plain):
            learner.update(batch, Linear())
    assert packed.trained.keys() == plain.trained.keys() and all(".lora_" in name for name in packed.trained)
    for name, p in packed.trained.items():
        torch.testing.assert_close(p, plain.trained[name], rtol=1e-2, atol=1e-4, msg=name)
    untouched = LocalLearner(copy.deepcopy(model), replace(FOUR_BIT, dtype="float32"))
    assert float((logp_of(packed, batch) - logp_of(untouched, batch)).abs().max()) > 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_hand_written_layers_dequantise_for_each_product(name, monkeypatch):
    """As on a GPU: products in bfloat16, adapters by hand."""
    half = lambda self, device: torch.bfloat16  # noqa: E731
    monkeypatch.setattr(LearnerSettings, "compute_dtype", half)
    model = make_model(name)
    batch = weighted(sampled(make_model(name)))
    packed = LocalLearner(copy.deepcopy(model), FOUR_BIT)
    assert "hand-written layers" in packed.describe()
    twin = copy.deepcopy(model)
    for layer in twin.model.modules():
        if type(layer) is nn.Linear:
            layer.weight.data = four_bit.FourBitMatrix(layer.weight.detach().bfloat16()).dequantised(torch.float32)
    plain = LocalLearner(twin, replace(FOUR_BIT, dtype="bfloat16"))
    assert torch.equal(logp_of(packed, batch), logp_of(plain, batch))
    for learner in (packed, plain):
        learner.update(batch, Linear())
    for key, p in packed.trained.items():
        torch.testing.assert_close(p, plain.trained[key], rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.parametrize("family", ["Llama", "Mixtral", "Gemma2"])
def test_the_sampler_gets_the_learners_policy(family):
    model = make_family(family)
    generator, learner = make_generator(model), LocalLearner(copy.deepcopy(model), FOUR_BIT)
    batch = weighted(sampled(model))
    for step in range(2):
        asyncio.run(generator.publish(learner.weights(), step))
        new = batch_of(play(generator, dialogues=3, size=8))
        assert float((logp_of(learner, new) - new.behaviour.x).abs().max()) < 1e-4
        learner.update(batch, Linear())
    asyncio.run(generator.publish(learner.weights(), 3))
    assert learner.weights().base is learner.weights().base  # loaded once by a generator that applies adapters itself


def test_a_resumed_learner_repeats_bit_for_bit():
    batch, model = weighted(sampled(make_model())), make_model()
    straight, before, resumed = (LocalLearner(copy.deepcopy(model), FOUR_BIT) for _ in range(3))
    for _ in range(3):
        straight.update(batch, Linear())
    before.update(batch, Linear())
    state = before.state_dict()
    assert not any("matrix" in name or "base_layer" in name for name in state["tensors"])
    resumed.load_state_dict(state)
    for _ in range(2):
        resumed.update(batch, Linear())
    for name, p in straight.trained.items():
        assert torch.equal(p, resumed.trained[name]), name
    with pytest.raises(SettingError, match="another base model"):
        LocalLearner(make_model(seed=1), FOUR_BIT).load_state_dict(state)


def test_exports_load_without_bitsandbytes(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = make_model()
    learner, batch = LocalLearner(copy.deepcopy(model), FOUR_BIT), weighted(sampled(make_model()))
    learner.update(batch, Linear())
    learner.export(tmp_path / "model")
    learner.export_adapter(tmp_path / "adapter", str(tmp_path / "base"))
    ids = torch.arange(9)[None]
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(dequantised_twin(model), tmp_path / "adapter").eval()(input_ids=ids).logits
        bare = model(input_ids=ids).logits
    torch.testing.assert_close(whole, adapted, rtol=1e-4, atol=1e-4)
    assert float((whole - bare).abs().max()) > 1e-3


def test_the_merged_weights_have_the_names_and_shapes_of_the_base():
    model = make_model()
    learner = LocalLearner(copy.deepcopy(model), FOUR_BIT)
    weights = learner.weights()
    assert {n: w.shape for n, w in weights.items()} == {n: p.shape for n, p in model.named_parameters()}
    assert lora.merged(learner.model).adapters.keys() <= set(weights)
