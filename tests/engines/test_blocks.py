"""The learner's hand-written layers equal the stock model, forward and backward; their graphs equal both."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from turnwise.core.batch import Sequences
from turnwise.engines.kernels import reference
from turnwise.engines.learner import llama_layers, lora, packed_forward
from turnwise.engines.learner.cuda_graphs import OFTEN, SLACK, Body, Key, _Graph
from turnwise.engines.learner.shared_prefix import Shared
from turnwise.engines.learner.varlen_attention import Copies, Ragged, _Copied

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FAMILY = ["llama", "llama_tied", "qwen3", "qwen2"]
RAGGED = [40, 3, 17, 1, 64, 40, 9]


def make(kit, name):
    if name != "qwen2":
        return kit.make_model(name)
    torch.manual_seed(0)
    sizes = {"vocab_size": kit.vocabulary, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    for p in model.parameters():
        p.data.normal_(0, 0.2)  # biases begin at 0, where an error would not show
    return model


def twins(kit, name, device="cpu"):
    """The same model twice: by hand-written layers, and by its stock forward."""
    fast, stock = (packed_forward.adopt(make(kit, name).to(device)) for _ in range(2))
    llama_layers.forbid(stock.get_decoder(), "to compare with")
    assert llama_layers.of(fast.get_decoder()) is not None
    return fast, stock


def sequences(lengths, vocabulary, device="cpu", shared=0):
    ids = torch.randint(vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    start = torch.tensor([0, *lengths]).cumsum(0)
    for a, b in zip(start[:-1].tolist(), start[1:].tolist()):
        ids[a : min(b, a + shared)] = torch.arange(shared)[: b - a]
    return Sequences(ids.to(device), start.to(device), torch.arange(len(lengths), device=device), start[:0].to(device))


def pulled(model, s, kind=None, seed=1):
    """States, and the gradient of a random projection of them by every weight."""
    device = s.ids.device.type
    with torch.autocast(device, kind, enabled=kind is not None):
        states = packed_forward.hidden_states(model, s)
    weight = torch.randn(states.shape, generator=torch.Generator().manual_seed(seed)).to(device)
    model.zero_grad()
    (states.float() * weight).sum().backward()
    return states.detach().float(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def alike(found, expected, tolerance):
    assert found[1].keys() == expected[1].keys()
    assert (found[0] - expected[0]).norm() <= tolerance * expected[0].norm()
    for name, grad in expected[1].items():
        assert (found[1][name] - grad).norm() <= tolerance * grad.norm() + 1e-6, name


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("recompute", [False, True])
def test_states_and_gradients_are_the_stock_models(kit, name, recompute):
    fast, stock = twins(kit, name)
    llama_layers.of(fast.get_decoder()).recompute = recompute
    s = sequences(RAGGED, kit.vocabulary, shared=6)
    alike(pulled(fast, s), pulled(stock, s), 1e-5)


@pytest.mark.parametrize("name", FAMILY)
def test_in_half_precision_they_round_where_autocast_rounds(kit, name):
    fast, stock = twins(kit, name)
    s = sequences(RAGGED, kit.vocabulary)
    exact = pulled(stock, s)
    by_hand, by_stock = (pulled(model, s, torch.bfloat16) for model in (fast, stock))
    alike(by_hand, by_stock, 2e-2)
    error = lambda got: sum(float((got[1][n] - g).square().sum()) for n, g in exact[1].items()) ** 0.5  # noqa: E731
    assert error(by_hand) <= 1.2 * error(by_stock)


def test_new_weights_are_read_at_once(kit):
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


def test_what_does_not_fit_keeps_its_stock_forward(kit):
    assert "gpt2" in llama_layers.describe(packed_forward.adopt(kit.make_model("gpt2")).get_decoder())
    assert "sliding" in llama_layers.describe(packed_forward.adopt(kit.make_model("mistral_window")).get_decoder())
    adapted = kit.make_model("llama")
    lora.inject(adapted, 2, None)
    assert "not plain" in llama_layers.describe(adapted.get_decoder())
    heard = kit.make_model("llama")
    heard.get_decoder().layers[0].register_forward_pre_hook(lambda *_: None)
    assert "listens" in llama_layers.describe(heard.get_decoder())


@pytest.mark.parametrize("broken", ["raises", "differs"])
def test_layers_that_fail_their_proof_are_not_used(kit, monkeypatch, broken, caplog):
    def other(self, ids, position, layout):
        if broken == "raises":
            raise RuntimeError("no compiler here")
        return torch.ones(len(ids), 32)

    monkeypatch.setattr(llama_layers.Blocks, "__call__", other)
    model = packed_forward.adopt(kit.make_model("llama"))
    assert llama_layers.of(model.get_decoder()) is None
    assert ("no compiler here" if broken == "raises" else "off by") in llama_layers.describe(model.get_decoder())
    assert "stock forward" in caplog.text


# ------------------------------------------------------------------ graphs


def slow_attention(q, k, v, layout, scale):
    """One sequence at a time; the last query stands over the last key."""
    if layout.source is not None:
        k, v = k[layout.source], v[layout.source]
    out = torch.full_like(q, torch.nan)
    for i in range(len(layout.queries) - 1):
        (a, b), (c, d) = (x[i : i + 2].tolist() for x in (layout.queries, layout.keys))
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
    layout = Ragged.of(s.start, Shared.of(s.ids, s.start) if shared else Shared.none(s.ids))
    n = int(layout.queries[-1])
    key = Key(rows, keys if shared else 0, ends, (longest, longest), torch.float32, False)
    graph = object.__new__(_Graph)
    graph.key, graph.flat = key, torch.full((sum(key.sizes),), 99)
    graph.fill(s.ids[:n], s.positions()[:n], layout)
    ids, position, padded = graph.given()
    assert torch.equal(ids[:n], s.ids[:n]) and torch.equal(position[:n], s.positions()[:n]) and not ids[n:].any()
    assert padded.queries.diff().min() >= 0 and padded.queries[-1] == rows  # every row has a sequence
    assert padded.queries.diff().max() <= longest and padded.keys.diff().max() <= longest
    q, k, v = torch.randn(3, rows, 2, 4, generator=torch.Generator().manual_seed(0))
    found = slow_attention(q, k, v, padded, 0.5)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:n], slow_attention(q[:n], k[:n], v[:n], layout, 0.5))
    if shared:  # what flows back: every copy to its row, padding to padding
        dk, dv = torch.randn(2, keys, 2, 4, generator=torch.Generator().manual_seed(1))
        summed, plainly = (
            reference.collect(dk[: len(c.source)], dv[: len(c.source)], c.first, c.members)
            for c in (padded.copies, layout.copies)
        )
        for a, b in zip(summed, plainly):
            torch.testing.assert_close(a[:n], b)


class Passes(Body):
    """Makes graphs of nothing, and remembers."""

    def __init__(self):
        super().__init__([])
        self.captured, self.filled = [], []

    def _capture(self, key, read, device):
        graph = object.__new__(_Graph)
        graph.forward, graph.out = SimpleNamespace(replay=lambda: None), torch.zeros(key.rows, 1)
        graph.fill = lambda ids, position, layout: self.filled.append((key, len(ids), layout))
        self.graphs[key] = graph
        self.captured.append(key)
        return True

    def ask(self, lengths, shared=0):
        s = sequences(lengths, 61, shared=shared)
        layout = Ragged.of(s.start, Shared.of(s.ids, s.start) if shared else Shared.none(s.ids))
        n = int(layout.queries[-1])
        return self(None, torch.float32, s.ids[:n], s.ids[:n], layout) is not None


def test_the_first_graph_is_of_a_coarse_size_and_others_borrow_it():
    body = Passes()
    assert all(body.ask(lengths) for lengths in ([200, 160], [200, 160], [200, 170], [300, 110]))
    assert [key.rows for key in body.captured] == [416]
    assert body.ask([200, 100]) and len(body.captured) == 2  # too much would be padding
    assert body.ask([600]) and body.ask([140] * 2 + [1] * 70) and len(body.captured) == 4  # too long, too many
    assert body.ask([200, 160], shared=40) and len(body.captured) == 5  # looks up copies


def test_what_comes_often_has_a_graph_of_its_own():
    body = Passes()
    assert all(body.ask([200, 160]) for _ in range(OFTEN + 2))
    assert [key.rows for key in body.captured] == [416, 384]


def test_a_capture_that_fails_unrehearsed_is_rehearsed(monkeypatch, caplog):
    tried, body = [], Body([])

    def made(key, body, read, device, rehearse):
        tried.append((key, rehearse))
        if (key, rehearse) in faults:
            raise RuntimeError("no room\nmore")

    monkeypatch.setattr("turnwise.engines.learner.cuda_graphs._Graph", made)
    first, second, third = (Key(rows, 0, 64, (512, 512), torch.float32, True) for rows in (256, 320, 416))
    faults = {(second, False), (third, False), (third, True)}
    assert body._capture(first, None, None) and body._capture(second, None, None) and not caplog.records
    assert not body._capture(third, None, None) and "from now on: no room" in caplog.text and not body.works
    assert tried == [(first, True), (second, False), (second, True), (third, False), (third, True)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.sampled_from([0, 5])), max_size=30)
)
def test_whatever_a_graph_is_given_has_room_in_it(asked):
    """Law: rows, keys and ends of sequences with all their padding fit."""
    body = Passes()
    for lengths, shared in asked * 2:
        body.ask(lengths, shared)
    for key, n, layout in body.filled:
        keys = 0 if layout.copies is None else len(layout.copies.source) + key.rows - n
        assert n <= key.rows <= SLACK * 9 / 8 * max(n, 256) and keys <= key.keys and bool(keys) == bool(key.keys)
        assert len(layout.queries) + -(-(key.rows - n) // key.longest[0]) <= key.sequences
        assert max(layout.longest) <= min(key.longest)


def test_copies_send_back_what_ordinary_autograd_would():
    source = torch.tensor([0, 1, 2, 0, 1, 3, 0])
    k, v = torch.randn(2, 5, 2, 4, requires_grad=True)
    pull = torch.randn(2, 7, 2, 4)
    found, expected = [
        torch.autograd.grad(both, (k, v), tuple(pull))
        for both in (_Copied.apply(k, v, Copies.of(source, 5)), (k[source], v[source]))
    ]
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


@GPU
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("shared", [0, 6])
def test_replayed_passes_equal_plain_ones(kit, name, shared):
    fast, stock = twins(kit, name, "cuda")
    body = llama_layers.of(fast.get_decoder()).body
    for turn in range(3):  # captured, then replayed with other ids of other lengths
        s = sequences([n + turn for n in RAGGED], kit.vocabulary, "cuda", shared)
        alike(pulled(fast, s, torch.bfloat16), pulled(stock, s, torch.bfloat16), 3e-2)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            a, b = (packed_forward.hidden_states(model, s) for model in (fast, stock))
        torch.testing.assert_close(a.float(), b.float(), rtol=3e-2, atol=3e-2)
    assert body.works and {key.grad for key in body.graphs} == {False, True}


@GPU
def test_two_open_passes_and_two_backward_passes_are_right(kit):
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
def test_graphs_add_to_the_gradients_that_are_there(kit):
    """As a learner asks, over several passes and beside gradients from elsewhere; what autograd.grad asks disturbs nothing."""
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
                loss = (states * mix(states)).sum() + (packed_forward.head(model).weight ** 2).sum()
                aside = torch.autograd.grad(loss, packed_forward.head(model).weight, retain_graph=True)[0]
                with llama_layers.adding(model.get_decoder(), None):
                    loss.backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None} | {"aside": aside})
    body = llama_layers.of(fast.get_decoder()).body
    assert any(key.grad for key in body.graphs) and not body.adds
    assert all(p.grad is own for p, own in zip(body.parameters, body.grads))
    for name, g in grads[1].items():
        assert (grads[0][name] - g).norm() <= 3e-2 * g.norm(), name


@GPU
def test_ragged_attention_equals_padded_attention(kit):
    s = sequences(RAGGED, 61, "cuda", 6)
    shared = Shared.of(s.ids, s.start)
    g = torch.Generator("cuda").manual_seed(0)
    read = [torch.randn(len(shared.first), h, 16, device="cuda", generator=g).requires_grad_() for h in (4, 2, 2)]
    weight = torch.randn(len(shared.first), 4, 16, device="cuda", generator=g)
    few = Ragged.of(s.start, shared).to("cuda").attend_rows(*(x.bfloat16() for x in read), 0.3).float()
    all_of_them = packed_forward.PackedLayout(s.start, shared).attend_rows(*read, 0.3)
    torch.testing.assert_close(few, all_of_them, rtol=3e-2, atol=3e-2)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), read) for x in (few, all_of_them))):
        assert (a - b).norm() <= 2e-2 * b.norm()


@GPU
def test_the_learner_moves_alike_by_both_paths(kit):
    from turnwise.engines.learner.learner import LearnerSettings, LocalLearner

    batch, moved = kit.weighted(kit.make_batch(3)), []
    for forbidden in (False, True):
        learner = LocalLearner(
            copy.deepcopy(kit.make_model()), LearnerSettings(lr=1e-3, dtype="bfloat16"), device="cuda"
        )
        if forbidden:
            llama_layers.forbid(learner.model.get_decoder(), "to compare with")
        seen = [learner.update(batch, kit.Linear()) for _ in range(4)]
        moved.append([row["loss"] for row in seen])
    assert moved[0] == pytest.approx(moved[1], rel=3e-2, abs=1e-3)
