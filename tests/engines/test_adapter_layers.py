"""Adapters inside the hand-written layers and beside the generator's weights, with frozen weights in half precision."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace

import pytest
import torch
from support.packed_models import FAMILY, RAGGED, alike, make, pulled, sequences

from turnwise.core.records import Sampling
from turnwise.core.signals import Signal
from turnwise.engines.adapters import AdaptedWeights, Adapter, fuse_down, fuse_up
from turnwise.engines.generator import model_runner
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.kernels import reference
from turnwise.engines.learner import layouts, llama_layers, lora, packed_forward
from turnwise.engines.learner.layouts import SharedPrefixes, VarlenAttention
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner

pytest.importorskip("peft")
LOGP = frozenset({Signal.LOGP})


def adapted(kit, name, by_hand: bool, recompute: bool = False):
    """A prepared model with random adapters."""
    model = packed_forward.prepare(make(kit, name))
    lora.inject(model, 3, None)
    if recompute:
        packed_forward.enable_checkpointing(model)
    if by_hand:
        packed_forward.run_adapters_by_hand(model)
        assert llama_layers.fast_path(model.get_decoder()) is not None
    else:
        llama_layers.disable(model.get_decoder(), "to compare with")
    rng = torch.Generator().manual_seed(5)
    for n, p in model.named_parameters():
        if "lora_B" in n:
            p.data.copy_(torch.randn(p.shape, generator=rng) * 0.3)
    return model


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("recompute", [False, True])
def test_states_and_gradients_of_adapters_are_pefts(kit, name, recompute):
    by_hand, stock = adapted(kit, name, True, recompute), adapted(kit, name, False)
    s = sequences(RAGGED, kit.vocabulary, shared=6)
    found, expected = pulled(by_hand, s), pulled(stock, s)
    assert expected[1] and all("lora_" in n for n in found[1]), "only adapters have gradients"
    assert any(g.abs().max() > 1e-4 for g in expected[1].values())
    alike(found, expected, 1e-4)


def test_adapters_switched_off_are_the_base_model(kit):
    model = adapted(kit, "llama", True)
    base = packed_forward.prepare(make(kit, "llama"))
    s = sequences([9, 5], kit.vocabulary)
    with torch.no_grad(), lora.disabled(model):
        assert lora.adapter_of(model.get_decoder().layers[0].self_attn.q_proj) is None
        off = packed_forward.hidden_states(model, s)
    torch.testing.assert_close(off, packed_forward.hidden_states(base, s), rtol=1e-5, atol=1e-6)
    assert lora.adapter_of(model.get_decoder().layers[0].self_attn.q_proj) is not None
    assert not torch.allclose(packed_forward.hidden_states(model, s), off, atol=1e-3)


def test_layers_that_apply_adapters_wrongly_are_not_used(kit, monkeypatch):
    right = lora.adapter_of
    monkeypatch.setattr(
        lora, "adapter_of", lambda *a: None if (made := right(*a)) is None else Adapter(made.down, made.up, 0.1)
    )
    model = packed_forward.prepare(make(kit, "llama"))
    lora.inject(model, 2, None)
    packed_forward.run_adapters_by_hand(model)
    assert "off by" in llama_layers.describe(model.get_decoder())


# ------------------------------------------------------------------ half precision


def bf16_learner(kit, **options) -> LocalLearner:
    return LocalLearner(kit.make_model("llama"), LearnerSettings(dtype="bfloat16", lora_rank=2, lr=0.05, **options))


def test_frozen_matrices_are_kept_in_half_precision(kit, batch):
    learner = bf16_learner(kit)
    assert "hand-written layers" in learner.describe()
    for name, p in learner.model.named_parameters():
        matrix = p.dim() > 1 and "lora_" not in name and "embed" not in name
        assert p.dtype == (torch.bfloat16 if matrix else torch.float32), name
        assert p.requires_grad == ("lora_" in name)
    before = {n: p.detach().clone() for n, p in learner.model.named_parameters()}
    assert not learner.update(batch, kit.Linear())["skipped"]
    changed = {n for n, p in learner.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all("lora_" in n for n in changed)


def test_embeddings_are_narrowed_only_where_nothing_is_lost(kit):
    model = kit.make_model("llama")
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    exact = LocalLearner(model, LearnerSettings(dtype="bfloat16", lora_rank=2))
    assert exact.model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert bf16_learner(kit).model.get_input_embeddings().weight.dtype == torch.float32


def test_half_precision_learns_what_float32_learns(kit, batch):
    exact = LocalLearner(kit.make_model("llama"), LearnerSettings(lora_rank=2, lr=0.05))
    assert "stock forward (adapters)" in exact.describe(), "runs in float32 stay as they were"
    narrow = bf16_learner(kit)
    for _ in range(4):
        for learner in (exact, narrow):
            learner.update(batch, kit.Linear())
    a, b = (learner.measure(batch, LOGP)[Signal.LOGP].x for learner in (exact, narrow))
    start = LocalLearner(kit.make_model("llama")).measure(batch, LOGP)[Signal.LOGP].x
    assert (a - b).abs().mean() < 0.2 * (a - start).abs().mean()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_resumed_learner_continues_bit_for_bit(kit, batch, recompute):
    straight, stopped = bf16_learner(kit, recompute=recompute), bf16_learner(kit, recompute=recompute)
    for learner in (straight, stopped):
        learner.update(batch, kit.Linear())
    resumed = bf16_learner(kit, recompute=recompute)
    resumed.load_state_dict(stopped.state_dict())
    for learner in (straight, resumed):
        learner.update(batch, kit.Linear())
    for (n, a), (_, b) in zip(straight.model.named_parameters(), resumed.model.named_parameters()):
        assert torch.equal(a, b), n


def test_a_critic_of_its_own_and_the_reference_work_in_half_precision(kit, batch):
    learner = LocalLearner(
        kit.make_model("llama"), LearnerSettings(dtype="bfloat16", lora_rank=2, lr=0.05), critic=1, separate_critic=True
    )
    wanted = frozenset({Signal.REFERENCE, Signal.LOGP, Signal.VALUE})
    first = learner.measure(batch, wanted)
    learner.update(batch, kit.Linear())
    second = learner.measure(batch, wanted)
    assert torch.equal(first[Signal.REFERENCE].x, second[Signal.REFERENCE].x)
    assert not torch.equal(first[Signal.LOGP].x, second[Signal.LOGP].x)
    assert second[Signal.VALUE].x.dtype == torch.float32


def test_the_exported_model_is_the_trained_policy(kit, batch, tmp_path):
    from transformers import AutoModelForCausalLM

    learner = bf16_learner(kit)
    learner.update(batch, kit.Linear())
    learner.export(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    again = LocalLearner(loaded, LearnerSettings(dtype="bfloat16"))
    a, b = (each.measure(batch, LOGP)[Signal.LOGP].x for each in (learner, again))
    torch.testing.assert_close(a, b, atol=0.05, rtol=0.02)


# ------------------------------------------------------------------ recomputation beside fused attention


def slow_kernels() -> SimpleNamespace:
    """The attention kernels of a GPU by the reference, in the same calls."""

    def run(q, k, v, queries, keys, source, longest, scale):
        return reference.varlen_attention(q, k, v, queries, keys, source, scale)

    def gradients(d_out, q, k, v, queries, keys, source, scale):
        with torch.enable_grad():
            parts = [x.detach().requires_grad_() for x in (q, k, v)]
            out = reference.varlen_attention(*parts, queries, keys, source, scale)[0]
            return torch.autograd.grad(out, parts, d_out)

    def unrotated(x, angles):
        cos, sin = (t[:, None] for t in angles)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)

    def d_queries(d_out, q, k, v, out, stats, queries, keys, source, longest, scale, dq, angles):
        dq.copy_(unrotated(gradients(d_out, q, k, v, queries, keys, source, scale)[0], angles))

    def d_keys(d_out, q, k, v, stats, queries, keys, source, longest, scale, dk, dv, angles):
        _, gk, gv = gradients(d_out, q, k, v, queries, keys, source, scale)
        dk.copy_(unrotated(gk, angles)), dv.copy_(gv)

    return SimpleNamespace(forward=run, d_queries=d_queries, d_keys=d_keys)


def fused_states(model, lengths, vocabulary, recompute):
    """States and gradients over fused qkv, as on a GPU; and how many numbers the backward pass keeps."""
    layers = llama_layers.fast_path(model.get_decoder())
    layers.captured.enabled, layers.recompute = False, recompute
    ids = torch.randint(vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(2))
    start = torch.tensor([0, *lengths]).cumsum(0)
    position = torch.cat([torch.arange(n) for n in lengths])
    layout = VarlenAttention.of(start, SharedPrefixes.unshared(ids))
    kept: dict[int, int] = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.update({x.data_ptr(): x.numel()}) or x, lambda x: x)
    model.zero_grad()
    with hooks:
        states = layers(ids, position, layout)
    weight = torch.randn(states.shape, generator=torch.Generator().manual_seed(3))
    (states * weight).sum().backward()
    return states.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, kept


@pytest.mark.parametrize("adapters", [False, True])
def test_recomputed_products_give_the_same_bits_and_keep_less(kit, monkeypatch, adapters):
    monkeypatch.setattr(layouts, "attention_for", lambda x, size: slow_kernels())
    monkeypatch.setattr(llama_layers, "attention_for", lambda x, size: slow_kernels())
    model = adapted(kit, "llama", True) if adapters else packed_forward.prepare(make(kit, "llama"))
    plain, again = (fused_states(model, [9, 5, 7], kit.vocabulary, flag) for flag in (False, True))
    assert torch.equal(plain[0], again[0]) and plain[1].keys() == again[1].keys()
    for n, g in plain[1].items():
        assert torch.equal(g, again[1][n]), n
    assert sum(again[2].values()) < 0.75 * sum(plain[2].values())


# ------------------------------------------------------------------ generator


def test_fused_factors_are_the_sum_of_their_parts():
    g = torch.Generator().manual_seed(0)
    make_ = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    parts = [Adapter(make_(2, 6), make_(4, 2), 0.5), None, Adapter(make_(3, 6), make_(5, 3), 2.0)]
    h = make_(7, 6)
    out = h @ fuse_down(parts, torch.float32).t() @ fuse_up(parts, [4, 3, 5], torch.float32).t()
    a, b = parts[0], parts[2]
    expected = [h @ a.down.t() @ a.up.t() * 0.5, torch.zeros(7, 3), h @ b.down.t() @ b.up.t() * 2.0]
    torch.testing.assert_close(out, torch.cat(expected, 1))
    assert fuse_down([None], torch.float32) is None and fuse_up([None], [3], torch.float32) is None


def test_merged_weights_are_made_when_read():
    made = []
    weights = AdaptedWeights({"a": torch.ones(2), "b": torch.ones(2)}, {"a": lambda: made.append(1) or torch.ones(2)})
    assert list(weights) == ["a", "b"] and len(weights) == 2 and not made
    assert torch.equal(weights["a"], torch.full((2,), 2.0)) and torch.equal(weights["b"], torch.ones(2)) and made == [1]
    assert not weights.mergeless


@pytest.mark.parametrize("kind", ["graphs", "decoder"])
def test_a_generator_with_adapters_samples_the_learners_policy(kit, batch, monkeypatch, kind):
    """Beside the weights on a GPU's decoder (here over the reference kernels), merged elsewhere."""
    if kind == "graphs":
        monkeypatch.setattr(model_runner, "decode_ops", lambda device: (reference, ""))
    model = make(kit, "llama")
    generator = LocalGenerator(copy.deepcopy(model), slots=4, context=64, stop_ids=())
    if kind == "graphs" and generator.model_runner.graphs is None:
        pytest.skip(generator.describe())
    learner = LocalLearner(model, LearnerSettings(lora_rank=2, lr=0.05))

    def logits() -> torch.Tensor:
        async def greedy():
            session = generator.open(0)
            done = await session.generate([3, 5, 7, 9], Sampling(temperature=0, max_tokens=6))
            session.close()
            return done

        done = asyncio.run(greedy())
        with torch.no_grad():
            ids = torch.tensor([[3, 5, 7, 9, *done.tokens]])
            plain = copy.deepcopy(base)
            plain.load_state_dict(dict(learner.weights()), strict=False)
            logp = plain(input_ids=ids).logits[0, 3:-1].log_softmax(-1)
        expected = logp.gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logp), expected, atol=2e-4, rtol=0)
        return expected

    base = make(kit, "llama")
    seen = []
    for version in range(3):
        asyncio.run(generator.publish(learner.weights(), version))
        seen.append(logits())
        learner.update(batch, kit.Linear())
    assert ("adapters beside the weights" in generator.describe()) == (kind == "graphs")
    assert not torch.allclose(seen[0][:1], seen[2][:1], atol=1e-4), "the adapters took effect"
    asyncio.run(generator.publish({n: p.detach() for n, p in base.named_parameters()}, 9))
    assert "adapters" not in generator.describe()
