"""Every kernel of a training step against its PyTorch reference, at awkward sizes.

On a GPU where there is one; with TRITON_INTERPRET=1 and Triton installed also on a CPU.
"""

from __future__ import annotations

import pytest
import torch
from support.devices import DEVICE, GPU, KINDS, needs_triton

from turnwise.engines.kernels import reference
from turnwise.engines.learner.layouts import KeyCopies

pytestmark = needs_triton
SHAPES = [(1, 3), (5, 32), (37, 100), (1030, 576)] if GPU else [(1, 3), (5, 32), (7, 100)]


@pytest.fixture
def kernels():
    from turnwise.engines.kernels.triton import layers

    return layers


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
    close(found, reference.add_norm(x, delta, weight, 1e-5, kind), kind)
    dh, beside = make(rows, width, kind=kind, seed=3), make(rows, width, seed=4) if added else None
    given = (dh, found[0], weight, 1e-5, beside)
    close(kernels.norm_backward(*given), reference.norm_backward(*given), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("H", "K", "D"), [(1, 1, 4), (3, 1, 64), (9, 3, 64), (4, 4, 24)])
def test_turns_there_and_back(kernels, kind, H, K, D):
    rows = 13
    angle = make(rows, D // 2, seed=5)
    qkv = make(rows, (H + 2 * K) * D, kind=kind)
    both = [qkv.clone(), qkv.clone()]
    for ops, x in zip((kernels, reference), both):
        ops.rotate_(x, angle.cos(), angle.sin(), H + K, D)
    close(both[:1], both[1:], kind)
    cut = both[0].view(rows, -1, D).split([H, K, K], 1)  # strided, as attention may hand gradients back
    back = kernels.rotate_backward(*cut, angle.cos(), angle.sin())
    close([back], [reference.rotate_backward(*cut, angle.cos(), angle.sin())], kind)
    close([back], [qkv], kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_swiglu(kernels, kind, rows, width):
    both, d = make(rows, 2 * width, kind=kind, scale=3.0), make(rows, width, kind=kind, seed=1)
    close([kernels.swiglu(both)], [reference.swiglu(both)], kind)
    close(kernels.swiglu_backward(both, d), reference.swiglu_backward(both, d), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "heads", "size"), [(1, 1, 4), (7, 3, 64), (300 if GPU else 9, 3, 24)])
def test_copies_there_and_back(kernels, kind, rows, heads, size):
    """Some rows have no copy, some many; places beyond ``first[-1]`` are nobody's."""
    wide = make(rows, 3 * heads * size, kind=kind).view(rows, -1, size)
    x, y = wide[:, heads : 2 * heads], wide[:, 2 * heads :]  # strided, as parts of a product
    source = torch.randint(rows, (2 * rows + 3,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    source[-rows:] = 0
    close(kernels.gather_copies(x, y, source), reference.gather_copies(x, y, source), kind)
    copies = KeyCopies.of(source, rows)
    dx, dy = (
        make(len(source) + 2, heads, size, kind=kind, seed=2),
        make(len(source) + 2, heads, size, kind=kind, seed=3),
    )
    found = kernels.sum_copies(dx, dy, copies.first, copies.members)
    close(found, reference.sum_copies(dx, dy, copies.first, copies.members), kind)
    close([found[0][0]], [dx[: len(source)][source == 0].float().sum(0).to(kind)], kind)
    angle, rows = make(len(copies.first) - 1, size // 2, seed=4), len(copies.first) - 1
    wide = [torch.full((rows, 3 * heads, size), 7.0, dtype=kind, device=DEVICE) for _ in range(2)]
    for ops, out in zip((kernels, reference), wide):  # into parts of wider rows, turned back
        into = (out[:, :heads], out[:, heads : 2 * heads])
        ops.sum_copies(dx, dy, copies.first, copies.members, into, (angle.cos(), angle.sin()))
    close(wide[:1], wide[1:], kind)
    assert (wide[0][:, 2 * heads :] == 7).all() and torch.equal(wide[0][:, heads : 2 * heads], found[1])


@pytest.mark.parametrize("vocabulary", [2, 61, 4096, 4099] if not GPU else [2, 61, 4096, 4099, 49152])
@pytest.mark.parametrize("want_entropy", [False, True])
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_scores_and_their_pull(kernels, vocabulary, want_entropy, size):
    rows = 5
    logits, heat = make(rows, vocabulary, scale=size), make(rows, seed=1).exp()
    targets = torch.arange(rows, device=DEVICE) % vocabulary
    found = kernels.log_probs(logits, targets, heat, want_entropy)
    expected = reference.log_probs(logits, targets, heat, want_entropy)
    close(found, expected, atol=1e-6 * 60 * size)  # logits this large have that few digits
    kept = [torch.empty_like(logits) for _ in range(2)]
    for ops, keep in zip((kernels, reference), kept):
        close(ops.log_probs(logits, targets, heat, want_entropy, keep), found, atol=1e-6 * 60 * size)
    close(kept[:1], kept[1:], atol=1e-6 * 60 * size)
    g, g2 = make(rows, seed=2), make(rows, seed=3) if want_entropy else None
    for given in ((g, g2), (None, g2), (g, None)):
        if given == (None, None):
            continue
        args = (logits, targets, heat, found[1], *given, found[2])
        expected = reference.log_probs_backward(*args, torch.float32)
        close([kernels.log_probs_backward(*args, torch.float32)], [expected], atol=2e-6 * 60 * size)
