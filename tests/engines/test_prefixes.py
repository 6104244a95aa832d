"""Shared prefixes are computed once, with unchanged results."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.core.batch import Sequences
from turnwise.engines.learner import packed_forward
from turnwise.engines.learner.layouts import PackedLayout, SharedPrefixes

SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=8)


def pack(parts):
    start = torch.tensor([0, *map(len, parts)]).cumsum(0)
    return torch.tensor([i for part in parts for i in part]), start


@settings(max_examples=200, deadline=None)
@given(SEQUENCES)
def test_computed_positions_are_the_distinct_prefixes(parts):
    shared = SharedPrefixes.of(*pack(parts))
    prefixes = [tuple(part[: i + 1]) for part in parts for i in range(len(part))]
    assert sorted(prefixes[i] for i in shared.computed) == sorted(set(prefixes))
    assert [prefixes[shared.computed[row]] for row in shared.row_of] == prefixes


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(0, 9))
def test_attention_and_gradients_equal_those_of_copies(parts, seed):
    ids, start = pack(parts)
    shared = SharedPrefixes.of(ids, start)
    torch.manual_seed(seed)
    qkv = [torch.randn(len(shared.computed), heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(len(shared.computed), 4, 4, dtype=torch.float64)

    def attend(layout, whole):
        return layout.attention(0, *(x.transpose(0, 1)[None] for x in whole), 0.3, None)[0]

    shared_rows = attend(PackedLayout(start, shared), qkv)
    all_rows = attend(PackedLayout(start), [x[shared.row_of] for x in qkv])[shared.computed]
    torch.testing.assert_close(shared_rows, all_rows, rtol=1e-9, atol=1e-9)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), qkv) for x in (shared_rows, all_rows))):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "gpt2", "mistral_window"])
def test_states_and_gradients_before_sampled_tokens_are_the_stock_models(kit, name):
    stock, model = kit.make_model(name), packed_forward.prepare(kit.make_model(name))
    rng = torch.Generator().manual_seed(0)
    prompt = torch.randint(kit.vocabulary, (7,), generator=rng).tolist()
    parts = [prompt + torch.randint(kit.vocabulary, (n,), generator=rng).tolist() for n in (5, 5, 3, 9)]
    ids, start = pack(parts)
    at = torch.cat([torch.arange(int(a) + 7, int(b)) for a, b in pairwise(start)])
    found = packed_forward.lm_head(model)(
        packed_forward.hidden_states(model, Sequences(ids, start, torch.arange(4), at))[at - 1]
    )
    expected = torch.cat([stock(input_ids=torch.tensor([part])).logits[0, 6:-1] for part in parts])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weight = torch.randn(found.shape, generator=rng)
    for logits in (found, expected):
        (logits * weight).sum().backward()
    for (named, p), q in zip(model.named_parameters(), stock.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3 * float(q.grad.abs().max()), msg=named)
