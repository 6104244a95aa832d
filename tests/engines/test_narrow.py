"""A learner whose layers round to fp8 as an fp8 sampler does: one precision on both sides."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from support.packed_models import FAMILY, RAGGED, alike, make, pulled, sequences

from turnwise.core.records import Sampling, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.kernels import fp8, reference
from turnwise.engines.learner import llama_layers, packed_forward
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.engines.learner.policy_check import same_policy
from turnwise.errors import PolicyMismatch, SettingError


def rounded_(model):
    """The same model with its layers' weights where fp8 has numbers. Fused products have a scale for each output, so nothing
    depends on what is fused with what."""
    for name, p in model.named_parameters():
        if name.endswith("_proj.weight"):
            p.data = reference.dequantise(*reference.quantise(p.data)).to(p.dtype)
    return model


@pytest.mark.parametrize("name", FAMILY)
def test_what_is_rounded_already_is_not_changed(kit, name):
    """Identity: states and gradients are those of the plain layers over rounded weights; gradients pass the rounding."""
    narrow, plain = packed_forward.prepare(make(kit, name)), packed_forward.prepare(rounded_(make(kit, name)))
    llama_layers.enable_fp8(narrow.get_decoder())
    s = sequences(RAGGED, kit.vocabulary, shared=5)
    found, expected = pulled(narrow, s), pulled(plain, s)
    alike(found, expected, 1e-6)
    other = pulled(packed_forward.prepare(make(kit, name)), s)
    assert (other[0] - found[0]).abs().max() > 1e-3  # the rounding is not nothing


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_product_of_a_gpu_is_the_samplers(kit, kind):
    """Inputs are rounded too there; the sampler's product says what that is."""
    h, weight = (
        torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) for shape in ((7, 32), (24, 32))
    )
    h, weight = h.to(kind), weight.to(kind)
    made = fp8.EmulatedFp8Weight.of(weight)
    expected = reference.fp8_matmul(h, *reference.quantise(weight))
    torch.testing.assert_close(made.matmul(h), expected, rtol=2e-2 if kind == torch.bfloat16 else 1e-5, atol=1e-5)
    exact = fp8.input_gradient(torch.eye(24, dtype=kind), made)
    torch.testing.assert_close(exact, reference.dequantise(*reference.quantise(weight)).to(kind))
    assert torch.equal(fp8.quantised_input(h, weight), h) and not torch.equal(fp8.quantised_input(h, made), h)


def test_products_with_rounded_inputs_have_gradients(kit, monkeypatch):
    """The way of a GPU, on a CPU: close to the way of a CPU, and what flows back to weights is of what was multiplied."""
    monkeypatch.setattr(llama_layers.LlamaLayers, "_rounded", staticmethod(fp8.EmulatedFp8Weight.of))
    model = packed_forward.prepare(make(kit, "llama"))
    plain = pulled(copy.deepcopy(model), s := sequences(RAGGED, kit.vocabulary))
    llama_layers.enable_fp8(model.get_decoder())
    found = pulled(model, s)
    for name, g in plain[1].items():
        away = (found[1][name] - g).norm() / g.norm()
        assert 0 < away < 0.2, (name, away)


def sample(model, dtype):
    """Some trajectories of a sampler in this precision."""
    generator = LocalGenerator(model, slots=4, context=64, stop_ids=(), dtype=dtype)

    async def run():
        ids = [5, 3, 8, 1]
        asks = [generator.open(seed).generate(ids, Sampling(max_tokens=24)) for seed in range(4)]
        return ids, await asyncio.gather(*asks)

    ids, found = asyncio.run(run())
    task = Task("t", 0)
    turns = [Turn(tuple(ids), tuple(c.tokens), tuple(c.logp), version=(0,) * len(c.tokens)) for c in found]
    return [Trajectory(str(k), task, (turn,)) for k, turn in enumerate(turns)]


def test_both_sides_in_fp8_are_one_policy(kit):
    model = make(kit, "llama")
    drawn = sample(model, torch.float8_e4m3fn)
    same = same_policy(LocalLearner(copy.deepcopy(model), LearnerSettings(dtype="fp8")), drawn)
    assert same.max < 1e-5
    with pytest.raises(PolicyMismatch):
        same_policy(LocalLearner(copy.deepcopy(model)), drawn)


def test_the_reference_rounds_as_the_policy_does(kit):
    learner = LocalLearner(make(kit, "llama"), LearnerSettings(dtype="fp8", lr=0.0))
    batch = kit.make_batch(3)
    found = learner.measure(batch, frozenset({Signal.LOGP, Signal.REFERENCE}))
    assert torch.equal(found[Signal.LOGP].x, found[Signal.REFERENCE].x)
    assert "fp8" in learner.describe()


def test_layers_that_cannot_round_are_refused(kit):
    with pytest.raises(SettingError, match="hand-written layers"):
        LocalLearner(kit.make_model("gpt2"), LearnerSettings(dtype="fp8"))
    with pytest.raises(SettingError, match="adapters"):
        LocalLearner(kit.make_model("llama"), LearnerSettings(dtype="fp8", lora_rank=2))


def test_it_learns_through_the_rounding(kit):
    """Master weights move by less than fp8 can show, and in the end it shows."""
    learner = LocalLearner(make(kit, "llama"), LearnerSettings(dtype="fp8", lr=1e-3))
    batch = kit.weighted(kit.make_batch(3))
    losses = [learner.update(batch, kit.Linear())["loss"] for _ in range(12)]
    assert losses[-1] < losses[0]
