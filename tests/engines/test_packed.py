"""A packed forward pass equals the stock model on one sequence at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from turnwise.core.batch import Sequences
from turnwise.engines.learner import packed_forward
from turnwise.engines.learner.layouts import PackedLayout

MODELS = ["llama", "llama_tied", "qwen3", "gpt2", "mistral_window"]


def sequences(lengths, vocabulary, seed=0):
    ids = torch.randint(vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    start = torch.tensor([0, *lengths]).cumsum(0)
    return Sequences(ids, start, torch.arange(len(lengths)), start[:0])


@pytest.mark.parametrize("name", MODELS)
def test_equals_stock_model(kit, name):
    stock = kit.make_model(name).double()
    model = packed_forward.prepare(copy.deepcopy(stock))
    lengths = [40, 3, 17, 1, 64, 40, 9]  # several buckets, out of order, longer than the window
    s = sequences(lengths, kit.vocabulary)
    with torch.no_grad():
        found = packed_forward.lm_head(model)(packed_forward.hidden_states(model, s))
        expected = torch.cat([stock(input_ids=part[None]).logits[0] for part in s.ids.split(lengths)])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12), window=st.sampled_from([None, 1, 7]))
def test_layout_values_and_gradients(lengths, window):
    g = torch.Generator().manual_seed(0)
    make = lambda h: torch.randn(1, h, sum(lengths), 4, generator=g, dtype=torch.float64, requires_grad=True)  # noqa: E731
    q, k, v = make(4), make(2), make(2)
    out = PackedLayout(torch.tensor([0, *lengths]).cumsum(0)).attention(0, q, k, v, 0.3, window)
    parts = []
    for a, b, c in zip(*(x[0].split(lengths, 1) for x in (q, k, v))):
        back = torch.arange(a.shape[1])[:, None] - torch.arange(a.shape[1])
        hidden = (back < 0) | (back >= (window or 10**6))
        score = (a @ b.repeat_interleave(2, 0).transpose(1, 2) * 0.3).masked_fill(hidden, -torch.inf)
        parts.append((score.softmax(-1) @ c.repeat_interleave(2, 0)).transpose(0, 1))
    expected = torch.cat(parts)[None]
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    weight = torch.randn(out.shape, generator=g, dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (out, expected))):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_equal_lengths_need_no_padding():
    layout = PackedLayout(torch.tensor([0, 8, 16, 24]))
    assert layout.slot is None and layout.buckets == [(3, 8)]


def test_buckets_bound_the_padding():
    lengths = [100, 90, 80, 20, 10, 300]
    layout = PackedLayout(torch.tensor([0, *lengths]).cumsum(0))
    assert layout.buckets == [(2, 20), (3, 100), (1, 300)]


SMALL = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def test_soft_capped_logits_come_from_the_models_own_head():
    """A cap of 30 does not change the small logits of random weights, so a comparison of those would miss it."""
    model = packed_forward.prepare(Gemma2ForCausalLM(Gemma2Config(**SMALL, **HEADS)))
    states = 1000 * torch.randn(4, 16)
    with torch.no_grad():
        assert float(packed_forward.logits_of(model, states).abs().max()) <= 30
        assert float(packed_forward.lm_head(model)(states).abs().max()) > 30


def test_scaled_logits_come_from_the_models_own_head():
    small = {k: v for k, v in SMALL.items() if k != "head_dim"}
    model = packed_forward.prepare(GraniteForCausalLM(GraniteConfig(**small, **HEADS, logits_scaling=8.0)))
    states = torch.randn(4, 16)
    expected = packed_forward.lm_head(model)(states) / 8
    torch.testing.assert_close(packed_forward.logits_of(model, states), expected)


def test_preparing_twice_is_harmless(kit):
    packed_forward.prepare(packed_forward.prepare(kit.make_model()))
