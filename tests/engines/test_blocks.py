"""The learner's hand-written layers equal the stock model, forward and backward; their CUDA graphs equal both."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packed_models import FAMILY, RAGGED, alike, make, pulled, sequences

from turnwise.engines.kernels import reference
from turnwise.engines.learner import llama_layers, lora, packed_forward
from turnwise.engines.learner.cuda_graphs import DEDICATED_AFTER, MAX_ROW_RATIO, CapturedLayers, GraphBucket, _Graph
from turnwise.engines.learner.layouts import KeyCopies, PackedLayout, SharedPrefixes, VarlenAttention, _ExpandKeys

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def twins(kit, name, device="cpu"):
    """The same model twice: by hand-written layers, and by its stock forward."""
    fast, stock = (packed_forward.prepare(make(kit, name).to(device)) for _ in range(2))
    llama_layers.disable(stock.get_decoder(), "to compare with")
    assert llama_layers.fast_path(fast.get_decoder()) is not None
    return fast, stock


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("recompute", [False, True])
def test_states_and_gradients_are_the_stock_models(kit, name, recompute):
    fast, stock = twins(kit, name)
    llama_layers.fast_path(fast.get_decoder()).recompute = recompute
    s = sequences(RAGGED, kit.vocabulary, shared=6)
    alike(pulled(fast, s), pulled(stock, s), 1e-5)


@pytest.mark.parametrize("name", FAMILY)
def test_half_precision_rounds_where_autocast_rounds(kit, name):
    fast, stock = twins(kit, name)
    s = sequences(RAGGED, kit.vocabulary)
    exact = pulled(stock, s)
    by_hand, by_stock = (pulled(model, s, torch.bfloat16) for model in (fast, stock))
    alike(by_hand, by_stock, 2e-2)
    error = lambda got: sum(float((got[1][n] - g).square().sum()) for n, g in exact[1].items()) ** 0.5  # noqa: E731
    assert error(by_hand) <= 1.2 * error(by_stock)


def test_new_weights_take_effect_immediately(kit):
    fast, stock = twins(kit, "llama")
    s = sequences([9, 5], kit.vocabulary)
    pulled(fast, s)
    for model in (fast, stock):
        model.zero_grad()
        packed_forward.hidden_states(model, s).sum().backward()
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()  # does not move the weights' version
    alike(pulled(fast, s), pulled(stock, s), 1e-4)


def test_frozen_weights_get_no_gradient(kit):
    fast, _ = twins(kit, "llama")
    for name, p in fast.named_parameters():
        p.requires_grad_("q_proj" in name or "down_proj" in name)
    found = pulled(fast, sequences([9, 5], kit.vocabulary))[1]
    assert found and all("q_proj" in name or "down_proj" in name for name in found)


def test_unsupported_models_keep_their_stock_forward(kit):
    assert "gpt2" in llama_layers.describe(packed_forward.prepare(kit.make_model("gpt2")).get_decoder())
    assert "sliding" in llama_layers.describe(packed_forward.prepare(kit.make_model("mistral_window")).get_decoder())
    adapted = kit.make_model("llama")
    lora.inject(adapted, 2, None)
    assert "not plain" in llama_layers.describe(adapted.get_decoder())
    hooked = kit.make_model("llama")
    hooked.get_decoder().layers[0].register_forward_pre_hook(lambda *_: None)
    assert "forward hooks" in llama_layers.describe(hooked.get_decoder())


@pytest.mark.parametrize("broken", ["raises", "differs"])
def test_layers_that_fail_verification_are_not_used(kit, monkeypatch, broken, caplog):
    def other(self, ids, position, layout):
        if broken == "raises":
            raise RuntimeError("no compiler here")
        return torch.ones(len(ids), 32)

    monkeypatch.setattr(llama_layers.LlamaLayers, "__call__", other)
    model = packed_forward.prepare(kit.make_model("llama"))
    assert llama_layers.fast_path(model.get_decoder()) is None
    assert ("no compiler here" if broken == "raises" else "off by") in llama_layers.describe(model.get_decoder())
    assert "stock forward" in caplog.text


# ------------------------------------------------------------------ graphs


def slow_attention(q, k, v, layout, scale):
    """One sequence at a time; the last query aligns with the last key."""
    if layout.key_source is not None:
        k, v = k[layout.key_source], v[layout.key_source]
    out = torch.full_like(q, torch.nan)
    for i in range(len(layout.cu_seqlens_q) - 1):
        (a, b), (c, d) = (x[i : i + 2].tolist() for x in (layout.cu_seqlens_q, layout.cu_seqlens_k))
        if b > a:
            score = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * scale
            hidden = torch.arange(d - c)[None] > torch.arange(b - a)[:, None] + (d - c) - (b - a)
            out[a:b] = torch.einsum("hqk,khd->qhd", score.masked_fill(hidden, -torch.inf).softmax(-1), v[c:d])
    return out


@pytest.mark.parametrize("shared", [0, 6])
@pytest.mark.parametrize(
    ("rows", "keys", "ends", "longest"), [(256, 300, 64, 64), (256, 512, 64, 128), (320, 512, 256, 512)]
)
def test_padding_to_a_bucket_changes_no_real_row(shared, rows, keys, ends, longest):
    s = sequences(RAGGED, 61, shared=shared)
    layout = VarlenAttention.of(
        s.start, SharedPrefixes.of(s.ids, s.start) if shared else SharedPrefixes.unshared(s.ids)
    )
    n = int(layout.cu_seqlens_q[-1])
    bucket = GraphBucket(rows, keys if shared else 0, ends, (longest, longest), (torch.float32, False), False)
    graph = object.__new__(_Graph)
    graph.bucket, graph.input_buffer = bucket, torch.full((sum(bucket.input_sizes),), 99)
    graph.stage_inputs(s.ids[:n], s.positions()[:n], layout)
    ids, position, padded = graph.inputs()
    assert torch.equal(ids[:n], s.ids[:n]) and torch.equal(position[:n], s.positions()[:n]) and not ids[n:].any()
    assert padded.cu_seqlens_q.diff().min() >= 0 and padded.cu_seqlens_q[-1] == rows  # every row has a sequence
    assert padded.cu_seqlens_q.diff().max() <= longest and padded.cu_seqlens_k.diff().max() <= longest
    q, k, v = torch.randn(3, rows, 2, 4, generator=torch.Generator().manual_seed(0))
    found = slow_attention(q, k, v, padded, 0.5)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:n], slow_attention(q[:n], k[:n], v[:n], layout, 0.5))
    if shared:  # gradients: of every copy to its row, of padding to padding
        dk, dv = torch.randn(2, keys, 2, 4, generator=torch.Generator().manual_seed(1))
        summed, expected = (
            reference.sum_copies(dk[: len(c.source)], dv[: len(c.source)], c.first, c.members)
            for c in (padded.copies, layout.copies)
        )
        for a, b in zip(summed, expected):
            torch.testing.assert_close(a[:n], b)


class FakeGraphs(CapturedLayers):
    """Captures nothing; records buckets and staged inputs."""

    def __init__(self):
        super().__init__([])
        self.buckets, self.staged = [], []

    def _capture(self, bucket, forward, device):
        graph = object.__new__(_Graph)
        graph.forward, graph.out = SimpleNamespace(replay=lambda: None), torch.zeros(bucket.rows, 1)
        graph.stage_inputs = lambda ids, position, layout: self.staged.append((bucket, len(ids), layout))
        self.graphs[bucket] = graph
        self.buckets.append(bucket)
        return True

    def run(self, lengths, shared=0):
        s = sequences(lengths, 61, shared=shared)
        layout = VarlenAttention.of(
            s.start, SharedPrefixes.of(s.ids, s.start) if shared else SharedPrefixes.unshared(s.ids)
        )
        n = int(layout.cu_seqlens_q[-1])
        return self(None, torch.float32, s.ids[:n], s.ids[:n], layout) is not None


def test_the_first_graph_has_a_coarse_bucket_that_others_reuse():
    layers = FakeGraphs()
    assert all(layers.run(lengths) for lengths in ([200, 160], [200, 160], [200, 170], [300, 110]))
    assert [bucket.rows for bucket in layers.buckets] == [416]
    assert layers.run([200, 100]) and len(layers.buckets) == 2  # a reused graph would pad too much
    assert layers.run([600]) and layers.run([140] * 2 + [1] * 70) and len(layers.buckets) == 4  # too long, too many
    assert layers.run([200, 160], shared=40) and len(layers.buckets) == 5  # shared prefixes need a graph with keys


def test_a_frequent_bucket_gets_a_dedicated_graph():
    layers = FakeGraphs()
    assert all(layers.run([200, 160]) for _ in range(DEDICATED_AFTER + 2))
    assert [bucket.rows for bucket in layers.buckets] == [416, 384]


def test_after_a_capture_that_fails_the_layers_run_without_graphs(monkeypatch, caplog):
    layers = CapturedLayers([])

    def made(bucket, layers, forward, device):
        if bucket == second:
            raise RuntimeError("no room\nmore")

    monkeypatch.setattr("turnwise.engines.learner.cuda_graphs._Graph", made)
    first, second = (GraphBucket(rows, 0, 64, (512, 512), (torch.float32, False), True) for rows in (256, 320))
    assert layers._capture(first, None, None) and layers.enabled and not caplog.records
    assert not layers._capture(second, None, None) and "from now on: no room" in caplog.text and not layers.enabled


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.sampled_from([0, 5])), max_size=30)
)
def test_staged_inputs_fit_their_bucket(requests):
    """Law: rows, keys and sequence boundaries fit, padding included."""
    layers = FakeGraphs()
    for lengths, shared in requests * 2:
        layers.run(lengths, shared)
    for bucket, n, layout in layers.staged:
        keys = 0 if layout.copies is None else len(layout.copies.source) + bucket.rows - n
        assert (
            n <= bucket.rows <= MAX_ROW_RATIO * 9 / 8 * max(n, 256)
            and keys <= bucket.keys
            and bool(keys) == bool(bucket.keys)
        )
        assert len(layout.cu_seqlens_q) + -(-(bucket.rows - n) // bucket.max_seqlen[0]) <= bucket.sequences
        assert max(layout.max_seqlen) <= min(bucket.max_seqlen)


def test_gradients_of_copied_keys_equal_autograd():
    source = torch.tensor([0, 1, 2, 0, 1, 3, 0])
    k, v = torch.randn(2, 5, 2, 4, requires_grad=True)
    pull = torch.randn(2, 7, 2, 4)
    found, expected = [
        torch.autograd.grad(both, (k, v), tuple(pull))
        for both in (_ExpandKeys.apply(k, v, KeyCopies.of(source, 5)), (k[source], v[source]))
    ]
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


@GPU
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("shared", [0, 6])
def test_replayed_passes_equal_plain_ones(kit, name, shared):
    fast, stock = twins(kit, name, "cuda")
    layers = llama_layers.fast_path(fast.get_decoder()).captured
    for turn in range(3):  # captured, then replayed with other ids of other lengths
        s = sequences([n + turn for n in RAGGED], kit.vocabulary, "cuda", shared)
        alike(pulled(fast, s, torch.bfloat16), pulled(stock, s, torch.bfloat16), 3e-2)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            a, b = (packed_forward.hidden_states(model, s) for model in (fast, stock))
        torch.testing.assert_close(a.float(), b.float(), rtol=3e-2, atol=3e-2)
    assert layers.enabled and {bucket.grad for bucket in layers.graphs} == {False, True}


@GPU
def test_two_pending_passes_and_two_backward_passes_are_right(kit):
    fast, stock = twins(kit, "llama", "cuda")
    s = sequences(RAGGED, kit.vocabulary, "cuda")
    for _ in range(3):
        pulled(fast, s, torch.bfloat16)
    other = sequences([n + 1 for n in RAGGED], kit.vocabulary, "cuda")
    grads = []
    for model in (fast, stock):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            states = [packed_forward.hidden_states(model, x).float() for x in (s, other)]
        mix = lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x.device)  # noqa: E731
        first, second = ((x * mix(x)).sum() for x in states)  # not Σ x², which a norm makes nearly constant
        second.backward(retain_graph=True)
        second.backward()
        first.backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for name, g in grads[1].items():
        assert (grads[0][name] - g).norm() <= 3e-2 * g.norm(), name


@GPU
def test_graphs_accumulate_into_existing_gradients(kit):
    """As in a learner: over several passes and beside other gradients; autograd.grad in between disturbs nothing."""
    fast, stock = twins(kit, "llama", "cuda")
    batches = [sequences([n + k for n in RAGGED], kit.vocabulary, "cuda") for k in (0, 0, 0, 1)]
    mix = lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x.device)  # noqa: E731
    grads = []
    for model in (fast, stock):
        for _ in range(2):  # the second time into gradients that were set to None
            model.zero_grad(set_to_none=True)
            for s in batches:
                with torch.autocast("cuda", torch.bfloat16):
                    states = packed_forward.hidden_states(model, s).float()
                loss = (states * mix(states)).sum() + (packed_forward.lm_head(model).weight ** 2).sum()
                aside = torch.autograd.grad(loss, packed_forward.lm_head(model).weight, retain_graph=True)[0]
                with llama_layers.accumulating_gradients(model.get_decoder(), None):
                    loss.backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None} | {"aside": aside})
    layers = llama_layers.fast_path(fast.get_decoder()).captured
    assert any(bucket.grad for bucket in layers.graphs) and not layers.accumulates
    assert all(p.grad is buffer for p, buffer in zip(layers.parameters, layers.grads))
    for name, g in grads[1].items():
        assert (grads[0][name] - g).norm() <= 3e-2 * g.norm(), name


@GPU
def test_varlen_attention_equals_padded_attention(kit):
    s = sequences(RAGGED, 61, "cuda", 6)
    shared = SharedPrefixes.of(s.ids, s.start)
    g = torch.Generator("cuda").manual_seed(0)
    qkv = [torch.randn(len(shared.computed), h, 16, device="cuda", generator=g).requires_grad_() for h in (4, 2, 2)]
    weight = torch.randn(len(shared.computed), 4, 16, device="cuda", generator=g)
    shared_rows = VarlenAttention.of(s.start, shared).to("cuda").attend_rows(*(x.bfloat16() for x in qkv), 0.3).float()
    padded_rows = PackedLayout(s.start, shared).attend_rows(*qkv, 0.3)
    torch.testing.assert_close(shared_rows, padded_rows, rtol=3e-2, atol=3e-2)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), qkv) for x in (shared_rows, padded_rows))):
        assert (a - b).norm() <= 2e-2 * b.norm()


@GPU
def test_both_paths_train_alike(kit):
    from turnwise.engines.learner.learner import LearnerSettings, LocalLearner

    batch, moved = kit.weighted(kit.make_batch(3)), []
    for stock_forward in (False, True):
        learner = LocalLearner(
            copy.deepcopy(kit.make_model()), LearnerSettings(lr=1e-3, dtype="bfloat16"), device="cuda"
        )
        if stock_forward:
            llama_layers.disable(learner.model.get_decoder(), "to compare with")
        metrics = [learner.update(batch, kit.Linear()) for _ in range(4)]
        moved.append([row["loss"] for row in metrics])
    assert moved[0] == pytest.approx(moved[1], rel=3e-2, abs=1e-3)
