"""Chunked log-probabilities are the plain ones: values and gradients, edge sizes, every combination of arguments."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.engines.kernels import reference as reference_kernels
from turnwise.engines.learner import logprobs
from turnwise.engines.learner.logprobs import token_logprobs


def plain(h, w, b, y, t):
    t = torch.where(t == 0, torch.ones_like(t), t)
    logp = torch.log_softmax((h @ w.T + (0 if b is None else b)) / t[:, None], 1)
    return logp.gather(1, y[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)


def inputs(n, d, v, bias=True, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()  # noqa: E731
    y = torch.randint(v, (n,), generator=g)
    t = torch.tensor([1.0, 0.5, 0.0, 1.7], dtype=dtype).repeat(n)[:n]
    return make(n, d), make(v, d), make(v) if bias else None, y, t


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("entropy", [False, True])
def test_gradcheck(chunk, entropy):
    h, w, b, y, t = inputs(5, 3, 7)
    pick = lambda out: out if entropy else out[0]  # noqa: E731
    f = lambda h, w, b: pick(token_logprobs(h, w, b, y, t, want_entropy=entropy, chunk=chunk))  # noqa: E731
    assert torch.autograd.gradcheck(f, (h, w, b))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 9),
    d=st.integers(1, 5),
    v=st.integers(1, 11),
    chunk=st.sampled_from([None, 1, 2, 3, 100]),
    bias=st.booleans(),
)
def test_equals_plain(n, d, v, chunk, bias):
    h, w, b, y, t = inputs(n, d, v, bias)
    leaves = [x for x in (h, w, b) if x is not None]
    g = torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = plain(h, w, b, y, t)
    found = token_logprobs(h, w, b, y, t, want_entropy=True, chunk=chunk)
    grads = [torch.autograd.grad((g[0] * a + g[1] * e).sum(), leaves) for a, e in (expected, found)]
    for a, b_ in [*zip(expected, found), *zip(*grads)]:
        torch.testing.assert_close(a, b_, rtol=1e-10, atol=1e-10)


def test_entropy_only_and_twice():
    h, w, _, y, t = inputs(6, 4, 9)
    _, e = plain(h, w, None, y, t)
    _, f = token_logprobs(h, w, None, y, t, want_entropy=True)
    expected = torch.autograd.grad(e.sum(), (h, w))
    for _ in range(2):  # tensors kept for the backward pass survive it
        for a, b in zip(expected, torch.autograd.grad(f.sum(), (h, w), retain_graph=True)):
            torch.testing.assert_close(a, b)


def test_by_hand():
    """Two tokens with logits 0 and log 3: probabilities 1/4 and 3/4."""
    h, w = torch.ones(1, 1), torch.tensor([[0.0], [3.0]]).log().nan_to_num(neginf=0.0)
    logp, entropy = token_logprobs(h, w, None, torch.tensor([1]), want_entropy=True)
    assert logp.item() == pytest.approx(-0.2876821)
    assert entropy.item() == pytest.approx(0.5623351)
    greedy, _ = token_logprobs(h, w, None, torch.tensor([1]), 0.0)
    assert greedy.item() == logp.item()


def test_frozen_head_gets_no_gradient():
    h, w, _, y, t = inputs(4, 3, 5)
    token_logprobs(h, w.detach(), None, y, t)[0].sum().backward()
    assert w.grad is None and h.grad is not None


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_bfloat16_sums_in_float32():
    h, w, _, y, t = inputs(64, 32, 50, False, torch.bfloat16)
    found, entropy = token_logprobs(h, w, None, y, t, want_entropy=True, chunk=10)
    expected = plain(h.double(), w.double(), None, y, t.double())
    assert found.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected[0], rtol=0.02, atol=0.1)
    (found.sum() + entropy.sum()).backward()
    assert h.grad.dtype == w.grad.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_autocast_gives_one_function_in_both_passes():
    h, w, _, y, t = inputs(8, 16, 20, False, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        kept, _ = token_logprobs(h, w, None, y, t)
        again, _ = token_logprobs(h, w, None, y, t, chunk=3)
    a, b = (torch.autograd.grad(x.sum(), (h, w)) for x in (kept, again))
    torch.testing.assert_close(kept, again, rtol=0.02, atol=0.05)
    for x, z in zip(a, b):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, z, rtol=0.05, atol=0.1)


def test_only_small_distributions_are_kept(monkeypatch):
    h, w, _, y, t = inputs(6, 3, 8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):
        token_logprobs(h, w, None, y, t)
        assert (6, 8) in saved
        saved.clear()
        monkeypatch.setattr(logprobs, "KEEP_BYTES", 0)
        token_logprobs(h, w, None, y, t)
        assert (6, 8) not in saved


def test_wrong_shapes():
    with pytest.raises(AssertionError):
        token_logprobs(torch.ones(2, 3), torch.ones(4, 3), None, torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [None, 2])
def test_gradients_by_kernels_equal_plain_ones_kept_or_recomputed(monkeypatch, chunk, entropy):
    """The GPU path over the kernels' reference implementation: nothing is kept with an explicit chunk."""
    h, w, bias, y, t = inputs(7, 8, 12)
    h, w, bias = (x.detach().float().requires_grad_() for x in (h, w, bias))
    pull = torch.randn(7, generator=torch.Generator().manual_seed(3))

    def found(**more):
        with torch.autocast("cpu", torch.bfloat16):
            logp, also = token_logprobs(h, w, bias, y, t.float(), want_entropy=entropy, **more)
        both = [torch.autograd.grad(logp, (h, w, bias), pull, retain_graph=True)]
        if also is not None:
            both.append(torch.autograd.grad((logp * pull + also).sum(), (h, w, bias)))
        return [logp, *(g for grads in both for g in grads)]

    expected = found()
    saved = []
    monkeypatch.setattr(logprobs, "ops_for", lambda x: types.SimpleNamespace(**vars(reference_kernels)))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append((tuple(x.shape), x.dtype)) or x, lambda x: x):
        by_kernels = found(chunk=chunk)
    assert (((7, 12), torch.bfloat16) in saved) == (chunk is None)
    for a, b in zip(by_kernels, expected):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)
