"""Every kernel of a training step against its plain twin, at awkward sizes.

On a GPU where there is one; with TRITON_INTERPRET=1 and Triton installed also on a CPU.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from turnwise.engines import plain

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (GPU or INTERPRETED),
    reason="needs Triton and a GPU, or its interpreter",
)
DEVICE = "cuda" if GPU else "cpu"
KINDS = [torch.float32, torch.bfloat16] if GPU else [torch.float32]  # NumPy, which interprets, has no bfloat16
SHAPES = [(1, 3), (5, 32), (37, 100), (1030, 576)] if GPU else [(1, 3), (5, 32), (7, 100)]


@pytest.fixture
def kernels():
    from turnwise.engines.cuda import training

    return training


def make(*shape, kind=torch.float32, seed=0, scale=1.0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.to(DEVICE, kind)


def close(found, expected, kind=torch.float32, atol=1e-5):
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if kind == torch.bfloat16 else {"rtol": 1e-4, "atol": atol}
    for a, b in zip(found, expected, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a.float(), b.float(), **tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("added", [False, True])
def test_norms(kernels, kind, rows, width, added):
    x, delta, weight = make(rows, width), make(rows, width, kind=kind, seed=1) if added else None, make(width, seed=2)
    found = kernels.add_norm(x, delta, weight, 1e-5, kind)
    close(found, plain.add_norm(x, delta, weight, 1e-5, kind), kind)
    dh, beside = make(rows, width, kind=kind, seed=3), make(rows, width, seed=4) if added else None
    given = (dh, found[0], weight, 1e-5, beside)
    close(kernels.norm_backward(*given), plain.norm_backward(*given), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("H", "K", "D"), [(1, 1, 4), (3, 1, 64), (9, 3, 64), (4, 4, 24)])
def test_turns_there_and_back(kernels, kind, H, K, D):
    rows = 13
    angle = make(rows, D // 2, seed=5)
    qkv = make(rows, (H + 2 * K) * D, kind=kind)
    both = [qkv.clone(), qkv.clone()]
    for ops, x in zip((kernels, plain), both):
        ops.rotate_(x, angle.cos(), angle.sin(), H + K, D)
    close(both[:1], both[1:], kind)
    cut = both[0].view(rows, -1, D).split([H, K, K], 1)  # strided, as attention may hand gradients back
    back = kernels.unrotate(*cut, angle.cos(), angle.sin())
    close([back], [plain.unrotate(*cut, angle.cos(), angle.sin())], kind)
    close([back], [qkv], kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_swiglu(kernels, kind, rows, width):
    both, d = make(rows, 2 * width, kind=kind, scale=3.0), make(rows, width, kind=kind, seed=1)
    close([kernels.swiglu(both)], [plain.swiglu(both)], kind)
    close(kernels.swiglu_backward(both, d), plain.swiglu_backward(both, d), kind)


@pytest.mark.parametrize("vocabulary", [2, 61, 4096, 4099] if not GPU else [2, 61, 4096, 4099, 49152])
@pytest.mark.parametrize("want_entropy", [False, True])
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_scores_and_their_pull(kernels, vocabulary, want_entropy, size):
    rows = 5
    logits, heat = make(rows, vocabulary, scale=size), make(rows, seed=1).exp()
    targets = torch.arange(rows, device=DEVICE) % vocabulary
    found = kernels.scores(logits, targets, heat, want_entropy)
    expected = plain.scores(logits, targets, heat, want_entropy)
    close(found, expected, atol=1e-6 * 60 * size)  # logits this large have that few digits
    g, g2 = make(rows, seed=2), make(rows, seed=3) if want_entropy else None
    for given in ((g, g2), (None, g2), (g, None)):
        if given == (None, None):
            continue
        args = (logits, targets, heat, found[1], *given, found[2])
        close([kernels.pull(*args, torch.float32)], [plain.pull(*args, torch.float32)], atol=2e-6 * 60 * size)
