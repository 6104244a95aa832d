"""Attention of ragged sequences, forward and backward, against its PyTorch reference under autograd.

On a GPU where there is one; with TRITON_INTERPRET=1 and Triton installed also on a CPU, in small blocks so that every kind of
block comes up: above, on and below the diagonal, and cut off by the end of a sequence.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import DEVICE, GPU, KINDS, needs_triton
from transformers import LlamaConfig, LlamaForCausalLM

from turnwise.core.batch import Sequences
from turnwise.engines.kernels import reference
from turnwise.engines.learner import layouts, llama_layers, packed_forward
from turnwise.engines.learner.layouts import SharedPrefixes, VarlenAttention

LENGTHS = [1, 3, 17, 63, 64, 65, 130]


@pytest.fixture(scope="module")
def kernels():
    return importlib.import_module("turnwise.engines.kernels.triton.attention")


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)


def make(*shape, kind=torch.float32, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, kind)


def cut(H, K, D, rows, key_rows, kind, seed=0):
    """q, k and v as parts of one product; k and v of one of their own where they have other rows."""
    q, k, v = make(rows, (H + 2 * K) * D, kind=kind, seed=seed).view(rows, -1, D).split([H, K, K], 1)
    if key_rows != rows:
        k, v = make(key_rows, 2 * K * D, kind=kind, seed=seed + 1).view(key_rows, -1, D).split([K, K], 1)
    return q, k, v


def close(found, expected, kind, what):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    limit = {"rtol": 2e-2, "atol": 3e-2} if kind == torch.bfloat16 else {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(found.float(), expected.float(), **limit, msg=lambda m: f"{what}: {m}")


def compare(kernels, q, k, v, queries, keys, source, longest, scale):
    """Forward and gradients of the kernels and of the twin; where keys are copies, the twin's gradients are of the copies."""
    kind = q.dtype
    own = (k, v) if source is None else (k[source], v[source])
    leaves = [x.float().clone().requires_grad_() for x in (q, *own)]
    expected, sums = reference.varlen_attention(*leaves, queries, keys, None, scale)
    d = make(*q.shape, kind=kind, seed=9)
    grads = torch.autograd.grad(expected, leaves, d.float())
    out, stats = kernels.forward(q, k, v, queries, keys, source, longest, scale)
    close(out, expected.detach().to(kind), kind, "out")
    read = slice(int(queries[0]), int(queries[-1]))
    torch.testing.assert_close(
        stats[:, read, 0], sums[:, read], rtol=1e-3, atol=1e-2 if kind == torch.bfloat16 else 1e-4
    )
    found = kernels.backward(d, q, k, v, out, stats, queries, keys, source, longest, scale)
    for name, ours, theirs in zip(("dq", "dk", "dv"), found, grads, strict=True):
        close(ours, theirs.to(kind), kind, name)


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("H", "K", "D"), [(1, 1, 16), (4, 2, 32), (3, 1, 64)])
def test_every_length(kernels, kind, H, K, D):
    n = starts(LENGTHS)
    q, k, v = cut(H, K, D, sum(LENGTHS), sum(LENGTHS), kind)
    compare(kernels, q, k, v, n, n, None, (max(LENGTHS),) * 2, D**-0.5)


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D", [16, 32, 64, 128])
def test_in_the_blocks_of_the_plan(kernels, kind, D, monkeypatch):
    if not GPU:
        monkeypatch.setattr(kernels, "EXACT", kernels.PLANS[D])
    lengths = [130, 1, 200]
    n = starts(lengths)
    q, k, v = cut(2, 1, D, sum(lengths), sum(lengths), kind)
    compare(kernels, q, k, v, n, n, None, (256, 256), D**-0.5)


pairs = st.tuples(st.sampled_from([0, 1, 3, 17, 31, 33, 65]), st.sampled_from([0, 0, 1, 5, 16, 40]))
sides = st.sampled_from([32] if GPU else [16, 32])  # every block and head size is compiled anew


@needs_triton
@settings(max_examples=10, deadline=None)
@given(
    st.lists(pairs, min_size=1, max_size=5), st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2), (6, 2)]),
    st.sampled_from([16] if GPU else [16, 32]), st.booleans(), st.tuples(sides, sides), st.integers(0, 2**31),
)  # fmt: skip
def test_any_layout(kernels, sequences, heads, D, shared, blocks, seed):
    """Queries fewer than keys; sequences that ask nothing, or have nothing; bounds that are larger than need be."""
    asked, held = [n for n, _ in sequences], [n + more for n, more in sequences]
    rows, places = max(sum(asked), 1), max(sum(held), 1)
    source = torch.randint(9, (places,), generator=torch.Generator().manual_seed(seed)).to(DEVICE) if shared else None
    q, k, v = cut(*heads, D, rows, 9 if shared else places, torch.float32, seed)
    whole = kernels.EXACT
    kernels.EXACT = kernels.Plan(*[kernels.TileShape(*blocks, 4, 1)] * 3)
    try:
        bounds = (max(asked) + seed % 50 + 1, max(held) + seed % 30 + 1)
        compare(kernels, q, k, v, starts(asked), starts(held), source, bounds, 0.3)
    finally:
        kernels.EXACT = whole


@needs_triton
@pytest.mark.parametrize("shared", [False, True])
def test_what_is_of_no_sequence_gets_zeros(kernels, shared, monkeypatch):
    """Far more of it than the last sequence has blocks; and nothing of it is read."""
    monkeypatch.setattr(torch, "empty_like", lambda x, **kw: torch.full_like(x, 7.0, **kw))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape, **kw: x.new_full(shape, 7.0, **kw))
    n, rows = starts([5, 3]), 150
    q, k, v = (x.clone() for x in cut(2, 1, 16, rows, rows, torch.float32))
    d = make(*q.shape, seed=3)
    for x in (q, k, v, d):
        x[8:] = torch.nan
    source = torch.arange(rows, device=DEVICE) if shared else None
    out, stats = kernels.forward(q, k, v, n, n, source, (5, 5), 0.25)
    grads = kernels.backward(d, q, k, v, out, stats, n, n, source, (5, 5), 0.25)
    for x in (out, *grads):
        assert x[:8].isfinite().all() and x[:8].abs().sum() > 0 and not x[8:].any()


@needs_triton
def test_a_query_without_keys_gets_zeros(kernels):
    q, k, v = cut(2, 1, 16, 40, 3, torch.float32)
    compare(kernels, q, k, v, starts([40]), starts([3]), None, (40, 3), 0.25)


@needs_triton
def test_heads_may_lie_apart(kernels):
    """As stock layers hand them over: [H, L, D]."""
    n = starts([20, 7])
    q, k, v = (make(h, 27, 16, seed=h).transpose(0, 1) for h in (2, 1, 1))
    compare(kernels, q, k, v, n, n, None, (20, 20), 0.25)


@pytest.fixture
def siblings(kernels, monkeypatch):
    """A layout of 35 rows that asks the kernels: one prompt of 20 rows, asked by the first of three; and its sources."""
    from turnwise.engines.kernels.triton import layers as training

    monkeypatch.setattr(layouts, "attention_for", lambda x, size: kernels)
    monkeypatch.setattr(layouts, "ops_for", lambda x: training)

    def layout(shared):
        asked, held = [25, 7, 3], [25, 27, 23] if shared else [25, 7, 3]
        source = torch.tensor([*range(25), *range(20), *range(25, 32), *range(20), *range(32, 35)], device=DEVICE)
        source = source if shared else None
        return VarlenAttention(starts(asked), starts(held), (25, 27), source, 35), source

    return layout


@needs_triton
@pytest.mark.parametrize("shared", [False, True])
def test_a_layout_sums_what_flows_back_to_a_row(siblings, shared):
    layout, source = siblings(shared)
    leaves = [make(35, h, 16, seed=h).requires_grad_() for h in (4, 2, 2)]
    d = make(35, 4, 16, seed=5)
    found = layout.attend_rows(*leaves, 0.25)
    expected = reference.varlen_attention(*leaves, layout.cu_seqlens_q, layout.cu_seqlens_k, source, 0.25)[0]
    close(found, expected, torch.float32, "out")
    for ours, theirs in zip(torch.autograd.grad(found, leaves, d), torch.autograd.grad(expected, leaves, d)):
        close(ours, theirs, torch.float32, "gradient")


@needs_triton
@pytest.mark.parametrize("shared", [False, True])
def test_a_product_is_turned_and_its_gradient_turned_back(siblings, shared):
    layout, source = siblings(shared)
    product, d, angle = make(35, 8, 16).requires_grad_(), make(35, 4, 16, seed=5), make(35, 8, seed=6)
    cos, sin = angle.cos(), angle.sin()
    turned = reference._rotate(product[:, :6], cos[:, None], sin[:, None])
    q, k, v = turned[:, :4], turned[:, 4:], product[:, 6:]
    expected = reference.varlen_attention(q, k, v, layout.cu_seqlens_q, layout.cu_seqlens_k, source, 0.25)[0]
    theirs = torch.autograd.grad(expected, product, d)[0]
    own = product.detach().clone().requires_grad_()
    found = layout.attend_fused_qkv(own, 2, cos, sin, 0.25)
    close(found, expected, torch.float32, "out")
    close(torch.autograd.grad(found, own, d)[0], theirs, torch.float32, "gradient")


@needs_triton
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_decoder_over_these_kernels_is_itself(siblings, shared, recompute):
    """Its states and all its gradients, against its layers over padded sequences."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).to(DEVICE).eval()
    decoder = packed_forward.prepare(model).get_decoder()
    ids, start = torch.arange(40) % 7, torch.tensor([0, 9, 10, 22, 40])
    ids[10:22] = torch.arange(12) % 7  # begins as the first sequence does
    position = torch.cat([torch.arange(n) for n in start.diff().tolist()])
    prefixes = SharedPrefixes.of(ids, start) if shared else SharedPrefixes.unshared(ids)
    rows = prefixes.computed
    assert (len(rows) < 40) == shared
    d = make(len(rows), 32, seed=3)

    def pulled(states):
        (states * d).sum().backward()
        grads = [p.grad.clone() for p in decoder.parameters()]
        decoder.zero_grad()
        return states.detach(), *grads

    whole = Sequences(ids.to(DEVICE), start.to(DEVICE), torch.arange(4, device=DEVICE), start[:0].to(DEVICE))
    expected = pulled(packed_forward.hidden_states(model, whole)[rows.to(DEVICE)])
    layers = llama_layers.fast_path(decoder)
    assert VarlenAttention.fuses_rotary(d, 16)
    layers.recompute = recompute
    found = pulled(layers(ids[rows], position[rows], VarlenAttention.of(start, prefixes)))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_the_twin_is_softmax_over_what_may_be_seen(kind):
    q, k, v = (torch.randn(7, h, 4, generator=torch.Generator().manual_seed(h), dtype=kind) for h in (2, 1, 1))
    ends = torch.tensor([0, 4, 4, 6]), torch.tensor([0, 4, 4, 7])  # the second asks nothing, the third has a key more
    out, lse = reference.varlen_attention(q, k, v, *ends, None, 0.5)
    for row, first, last in [(0, 0, 0), (3, 0, 3), (4, 4, 5), (5, 4, 6)]:
        z = 0.5 * k[first : last + 1, 0] @ q[row].mT  # [keys, H]
        torch.testing.assert_close(out[row], z.softmax(0).mT @ v[first : last + 1, 0])
        torch.testing.assert_close(lse[:, row], z.logsumexp(0) / torch.log(torch.tensor(2.0, dtype=kind)))
    assert not out[6].any() and lse[:, 6].isinf().all()


@needs_triton
@pytest.mark.parametrize("size", [16, 64])
def test_it_is_proven_before_it_is_used(kernels, size):
    limit = kernels.TOLERANCE / 2 if GPU else 1e-5
    assert kernels.relative_error(size, torch.device(DEVICE), torch.bfloat16 if GPU else torch.float32) < limit


@needs_triton
@pytest.mark.parametrize("broken", ["raises", "differs"])
def test_one_that_fails_its_proof_is_not_used(kernels, monkeypatch, caplog, broken):
    def relative_error(*args):
        if broken == "raises":
            raise RuntimeError("out of resource: shared memory")
        return 0.7

    monkeypatch.setattr(kernels, "relative_error", relative_error)
    kernels.fits.cache_clear()
    assert not kernels.fits(64, torch.device(DEVICE)) and not kernels.fits(64, torch.device(DEVICE))
    assert len(caplog.records) == 1 and ("shared memory" if broken == "raises" else "0.7") in caplog.text
    assert not kernels.fits(80, torch.device(DEVICE)) and len(caplog.records) == 1  # no such heads: nothing to warn of
    kernels.fits.cache_clear()
