"""The C kernels for CPUs compute what the PyTorch references compute, whatever the sizes and the number of threads."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turnwise.engines.generator import llama_decoder
from turnwise.engines.generator.attention_layouts import PrefillChunk
from turnwise.engines.generator.model_runner import ModelRunner
from turnwise.engines.kernels import cpu, reference
from turnwise.engines.learner.layouts import PackedLayout, SharedPrefixes

needs_compiler = pytest.mark.skipif(cpu.library()[0] is None, reason=f"no kernels: {cpu.library()[1]}")
KIND = torch.float32
SHAPE = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(found, expected):
    for a, b in zip(found, expected):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-5)


@needs_compiler
def test_kernels_that_cannot_be_built_are_missed_loudly(monkeypatch, caplog):
    def full(compiler):
        raise OSError("no space left")

    monkeypatch.setattr(cpu, "_built", full)
    monkeypatch.delenv("TURNWISE_NATIVE", raising=False)
    assert cpu.library.__wrapped__() == (None, "no space left")
    assert caplog.records[-1].levelname == "WARNING" and "OSError: no space left" in caplog.text


@needs_compiler
@pytest.mark.parametrize("length,width", [(1, 8), (33, 24), (64, 128), (257, 36)])
def test_norms(length, width):
    x, delta, weight, beside = (
        rows(length, width),
        rows(length, width, seed=1),
        rows(width),
        rows(length, width, seed=2),
    )
    for added in (None, delta):
        close(cpu.add_norm(x, added, weight, 1e-6, KIND), reference.add_norm(x, added, weight, 1e-6, KIND))
    for more in (None, beside):
        close(cpu.norm_backward(x, delta, weight, 1e-6, more), reference.norm_backward(x, delta, weight, 1e-6, more))


@needs_compiler
@pytest.mark.parametrize("length,size", [(1, 8), (19, 16), (40, 64)])
def test_turning(length, size):
    angle = rows(length, size // 2)
    cos, sin = angle.cos(), angle.sin()
    mine, theirs = (rows(length, 8 * size) for _ in range(2))
    cpu.rotate_(mine, cos, sin, 6, size)
    reference.rotate_(theirs, cos, sin, 6, size)
    close([mine], [theirs])
    for parts in (rows(length, 8, size).split([4, 2, 2], 1), [rows(length, n, size) for n in (4, 2, 2)]):
        expected = reference.rotate_backward(*parts, cos, sin)
        close([cpu.rotate_backward(*parts, cos, sin)], [expected])


@needs_compiler
@pytest.mark.parametrize("length,width", [(1, 3), (50, 48), (65, 384)])
def test_activation(length, width):
    both, d = 6 * rows(length, 2 * width), rows(length, width)
    both[0, 0], both[0, 1] = 200.0, -200.0
    close([cpu.swiglu(both)], [reference.swiglu(both)])
    close(cpu.swiglu_backward(both, d), reference.swiglu_backward(both, d))


@needs_compiler
@pytest.mark.parametrize("n,vocabulary", [(1, 5), (70, 61), (40, 512)])
@pytest.mark.parametrize("entropies", [True, False])
def test_scores_and_their_gradient(n, vocabulary, entropies):
    logits, targets, inverse = 5 * rows(n, vocabulary), torch.arange(n) % vocabulary, rows(n).abs() + 0.5
    kept = [torch.empty_like(logits) for _ in range(2)]
    found = cpu.log_probs(logits, targets, inverse, entropies, kept[0])
    close(found, reference.log_probs(logits, targets, inverse, entropies, kept[1]))
    close(kept[:1], kept[1:])
    given = (rows(n, seed=1), rows(n, seed=2) if entropies else None, found[2])
    expected = reference.log_probs_backward(logits, targets, inverse, found[1], *given, KIND)
    close([cpu.log_probs_backward(logits.clone(), targets, inverse, found[1], *given, KIND)], [expected])


def stepped(model_runner, held):
    """Logits of two steps of three rows."""
    layout, out = llama_decoder.DecodeLayout(model_runner.kv_cache, held, 4), []
    for tokens in ([10, 11, 12], [13, 14, 15]):
        out.append(model_runner.decode_step(torch.tensor(tokens), layout).clone())
        layout.advance()
    return out


@needs_compiler
@pytest.mark.parametrize("length", [1, 5, 6, 7, 13, 64])
@pytest.mark.parametrize("inner,outer", [(3, 16), (128, 48), (200, 256)])
def test_products_of_few_rows(length, inner, outer):
    x, weight, add = rows(length, inner), rows(inner, outer), rows(length, outer)
    panels = cpu.to_panels(weight)
    found = cpu.panel_matmul(x, panels)
    close([found], [x @ weight])
    for i in range(length):  # nor does a row depend on the others
        assert torch.equal(cpu.panel_matmul(x[i : i + 1], panels)[0], found[i])
    for more, apart in ((add, outer), (add[:1], 0)):
        out, lib = torch.empty(length, outer), cpu.library()[0]
        sizes = (length, inner, outer)
        lib.panel_matmul(x.data_ptr(), panels.data_ptr(), more.data_ptr(), apart, out.data_ptr(), *sizes)
        close([out], [x @ weight + more])


@needs_compiler
@pytest.mark.parametrize("kind", ["llama", "llama_tied", "biased", "odd"])
def test_few_rows_go_another_way_to_the_same_logits(kind, monkeypatch):
    """One call for all layers, with the products in it, beside PyTorch's products."""
    shape = {**SHAPE, "attention_bias": kind == "biased", "vocab_size": 61 if kind == "odd" else 64}
    made = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=kind == "llama_tied")).eval()
    generator = torch.Generator().manual_seed(0)
    for name, p in made.named_parameters():
        torch.nn.init.normal_(p, mean=float("norm" in name), std=0.2, generator=generator)

    def logits(most):
        monkeypatch.setattr(cpu, "MAX_ROWS", most)
        monkeypatch.setattr(cpu, "panels_pay", lambda: True)
        model_runner = ModelRunner(made, 4, 64, torch.device("cpu"))
        assert model_runner.decoder.fused is not None and "C kernels and products" in model_runner.describe()
        with torch.inference_mode():
            model_runner.prefill(
                [PrefillChunk(0, 0, [3, 4, 5, 6, 7]), PrefillChunk(2, 0, [9, 8]), PrefillChunk(1, 0, [1])]
            )
            out = stepped(model_runner, [5, 1, 2])
            model_runner.load_weights({})  # nothing new changes nothing
            model_runner.load_weights({name: p + 0.01 for name, p in made.named_parameters()})
            model_runner.prefill([PrefillChunk(0, 0, [3, 4])])
            return [
                *out,
                model_runner.decode_step(torch.tensor([5]), llama_decoder.DecodeLayout(model_runner.kv_cache, [2], 4)),
            ]

    few_way, many_way = logits(64), logits(0)
    torch.testing.assert_close(few_way, many_way, rtol=1e-4, atol=1e-4)
    assert (few_way[-1] - few_way[0][:1]).abs().max() > 1e-2  # other weights


def test_widths_that_make_no_panels_are_left_alone(monkeypatch):
    monkeypatch.setattr(cpu, "panels_pay", lambda: True)
    assert cpu.panels_fit([rows(8, 32)]) and not cpu.panels_fit([rows(8, 32), rows(8, 40)])
    monkeypatch.setattr(cpu, "MAX_BYTES", 1000)
    assert not cpu.panels_fit([rows(8, 32)])


@needs_compiler
def test_what_is_not_finite_stays_so():
    bad = rows(3, 8)
    bad[1, 2] = torch.nan
    assert cpu.add_norm(bad, None, torch.ones(8), 1e-6, KIND)[1][1].isnan().all()
    assert cpu.swiglu(bad)[1].isnan().any()
    assert cpu.log_probs(bad, torch.zeros(3, dtype=torch.int64), torch.ones(3), True)[0].isnan().tolist() == [
        False,
        True,
        False,
    ]
    endless = torch.full((1, 8), torch.inf)
    assert not cpu.swiglu(endless).isfinite().any()


def attention_of(ids, start, heads, size, native, scale=0.3):
    """Output and gradient of one attention call over what is read."""
    shared = SharedPrefixes.of(ids, start)
    layout = PackedLayout(start, shared)
    layout.packing = layout.packing if native else None
    qkv = rows(len(shared.computed), sum(heads), size).requires_grad_()
    out = layout.attend_rows(*qkv.split(heads, 1), scale)
    (out * rows(*out.shape, seed=3)).sum().backward()
    return out, qkv.grad


@needs_compiler
@pytest.mark.parametrize(
    "heads,size", [([4, 2, 2], 8), ([3, 1, 1], 16), ([6, 3, 3], 64), ([2, 2, 2], 24), ([4, 4, 4], 128)]
)
def test_attention_over_shared_beginnings(heads, size):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([1, 30, 7, 30, 64, 2])
    start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(2, (int(start[-1]),), generator=generator)  # few ids: long common beginnings
    close(attention_of(ids, start, heads, size, True), attention_of(ids, start, heads, size, False))


@needs_compiler
def test_threads_change_nothing():
    start = torch.tensor([0, 40, 90, 130])
    ids = torch.arange(130) % 3
    before, found = torch.get_num_threads(), []
    both, x = rows(300, 96), rows(300, 48)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made = (*attention_of(ids, start, [4, 2, 2], 16, True), *cpu.swiglu_backward(both, x))
            found.append([*made, *cpu.norm_backward(x, x, x[0], 1e-6, None)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


@needs_compiler
@pytest.mark.parametrize("name,compiled", [("llama_tied", True), ("mistral_window", False), ("qwen3", True)])
def test_the_decoder_by_kernels_gives_the_same_logits(kit, name, compiled, monkeypatch):
    def logits():
        model_runner = ModelRunner(kit.make_model(name), 4, 64, torch.device("cpu"))
        if model_runner.decoder is not None:
            assert model_runner.decoder.c_kernels == (compiled and not off)
            assert ("C kernels" in model_runner.describe()) == (compiled and not off)
        with torch.inference_mode():
            model_runner.prefill(
                [PrefillChunk(0, 0, [3, 4, 5, 6, 7]), PrefillChunk(2, 0, [9, 8]), PrefillChunk(1, 0, [1])]
            )
            model_runner.prefill([PrefillChunk(2, 2, [5, 5, 5])])  # behind what the row holds
            return stepped(model_runner, [5, 1, 5])

    off = False
    mine = logits()
    off = True
    monkeypatch.setattr(cpu, "library", lambda: (None, "off"))
    torch.testing.assert_close(mine, logits(), rtol=1e-4, atol=1e-4)


def test_without_a_compiler_there_are_none(monkeypatch):
    cpu.library.cache_clear()
    monkeypatch.delenv("TURNWISE_NATIVE", raising=False)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert cpu.library() == (None, "no C compiler")
    cpu.library.cache_clear()
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    assert cpu.library()[0] is None
    cpu.library.cache_clear()
    monkeypatch.setenv("TURNWISE_NATIVE", "0")
    assert cpu.library() == (None, "TURNWISE_NATIVE is 0")
    assert not cpu.fits(torch.zeros(2))
    cpu.library.cache_clear()


@pytest.mark.slow
@needs_compiler
def test_no_home_is_no_hindrance(monkeypatch, tmp_path):
    """A cache that cannot be written to: the kernels are loaded from elsewhere."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    cpu.library.cache_clear()
    try:
        assert cpu.library()[0] is not None
    finally:
        cpu.library.cache_clear()


def test_heads_of_odd_sizes_are_not_for_the_kernel():
    packing = cpu.Packing.of(torch.arange(3), torch.arange(3), torch.tensor([0, 3]))
    assert not cpu.attention_fits(rows(3, 2, 12), rows(3, 2, 12), rows(3, 2, 12), packing)
    assert not cpu.attention_fits(rows(3, 2, 16).double(), rows(3, 2, 16), rows(3, 2, 16), packing)
