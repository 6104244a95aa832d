"""Every kernel against its PyTorch reference, on random inputs of awkward sizes. On a GPU if there is one, else under Triton's
interpreter, if Triton is there and TRITON_INTERPRET=1 says so.

The reference of ``sample`` uses the same random numbers and is compared token by token."""

from __future__ import annotations

import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import DEVICE, FOUND, GPU, needs_triton
from torch import Tensor

from turnwise.engines.kernels import reference
from turnwise.engines.kernels.sampling import uniforms

some = settings(max_examples=25 if GPU else 8, deadline=None)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
multiplied = dtypes if GPU else st.just(torch.float32)  # the interpreter multiplies the bits of bfloat16 as integers
seeds = st.integers(0, 2**31)


@pytest.fixture(scope="module")
def kernels() -> Any:
    return importlib.import_module("turnwise.engines.kernels.triton.decode")


@pytest.fixture(scope="module")
def layers() -> Any:
    return importlib.import_module("turnwise.engines.kernels.triton.layers")


class Dice:
    """Random tensors of one seed, on the device."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
        return (size * torch.randn(*shape, generator=self.generator)).to(DEVICE, dtype)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(DEVICE)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, steps: float = 1.0) -> None:
    """To rounding: of a few float32 sums, or to ``steps`` steps of bfloat16."""
    limit = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": steps / 128, "atol": steps * 4e-3}
    torch.testing.assert_close(found.float(), expected.float(), **limit)


# ---------------------------------------------------------------------- rows


@needs_triton
@some
@given(seeds, st.sampled_from([1, 2, 7]), st.sampled_from([1, 3, 64, 100, 577, 2050]), dtypes, st.booleans())
def test_add_norm(layers, seed, rows, width, dtype, add):
    dice = Dice(seed)
    x, weight = dice.normal(rows, width, size=3.0), dice.normal(width)
    delta = dice.normal(rows, width, dtype=dtype) if add else None
    both = []
    for module in (layers, reference):
        both.append(module.add_norm(x, delta, weight, 1e-5, dtype))
    close(both[0][0], both[1][0], torch.float32)
    close(both[0][1], both[1][1], dtype)


@needs_triton
@some
@given(seeds, st.sampled_from([1, 5]), st.sampled_from([1, 48, 100, 1024, 1537]), dtypes)
def test_swiglu(layers, seed, rows, width, dtype):
    both = Dice(seed).normal(rows, 2 * width, dtype=dtype, size=4.0)
    found, expected = (m.swiglu(both) for m in (layers, reference))
    close(found, expected, dtype, steps=2)


@needs_triton
@some
@given(seeds, st.sampled_from([1, 4]), st.sampled_from([1, 16, 100, 1537]), dtypes, st.booleans())
def test_quantise(kernels, seed, rows, width, dtype, huge):
    x = Dice(seed).normal(rows, width, dtype=dtype, size=1e4 if huge else 0.1)
    x[0] = 0  # a row of nothing stays nothing
    (data, scale), (expected, unit) = kernels.quantise(x), reference.quantise(x)
    torch.testing.assert_close(scale, unit, rtol=1e-6, atol=0)
    same = data.float() == expected.float()
    if GPU:
        step = expected.float().abs() / 8 + 2**-9
        assert same.float().mean() > 0.99 and ((data.float() - expected.float()).abs() <= step).all()
    else:
        assert same.float().mean() > 0.9  # the interpreter loses a carry when it rounds to fp8: 124.7 becomes 64
    assert (reference.dequantise(data, scale)[0] == 0).all()


# ---------------------------------------------------------------------- attention


def rotary(width: int, size: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(width)[:, None] * 1e4 ** (-torch.arange(size // 2) / (size // 2))
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), 1).to(DEVICE), torch.cat((-sin, sin), 1).to(DEVICE)


HEADS = st.sampled_from([(1, 1), (2, 2), (6, 2), (9, 3), (8, 1)])


@needs_triton
@some
@given(
    seed=seeds,
    lanes=st.sampled_from([1, 3, 5]),
    heads=HEADS,
    size=st.sampled_from([16, 64]),
    width=st.sampled_from([1, 17, 64, 130]),
    dtype=multiplied,
    normed=st.booleans(),
    rests=st.booleans(),
)
def test_attend(kernels, seed, lanes, heads, size, width, dtype, normed, rests):
    check_attend(kernels, seed, lanes, heads, size, width, dtype, normed, rests)


@needs_triton
@some
@given(
    seed=seeds, lanes=st.sampled_from([1, 3, 5]), heads=HEADS, size=st.sampled_from([16, 64]),
    width=st.sampled_from([129, 192, 700]), dtype=multiplied, normed=st.booleans(), rests=st.booleans(),
)  # fmt: skip
def test_attend_in_parts(kernels, seed, lanes, heads, size, width, dtype, normed, rests):
    """Few long rows are split among programs."""
    with (
        mock.patch.object(kernels, "PART", 64),
        mock.patch.object(kernels, "_in_parts", wraps=kernels._in_parts) as split,
    ):
        check_attend(kernels, seed, lanes, heads, size, width, dtype, normed, rests)
        split.assert_called_once()
        with mock.patch.object(kernels, "FULL", lanes * heads[1]):
            check_attend(kernels, seed, lanes, heads, size, width, dtype, normed, rests)
        split.assert_called_once()


def check_attend(kernels, seed, lanes, heads, size, width, dtype, normed, rests):
    dice, (H, K) = Dice(seed), heads
    rows = lanes + 1
    qkv = dice.normal(lanes, (H + 2 * K) * size, dtype=dtype)
    keys, values = (dice.normal(rows, K, width, size, dtype=dtype) for _ in range(2))
    cos, sin = rotary(width, size)
    norm = 1 + 0.1 * dice.normal(H + K, size) if normed else None
    place = dice.whole(0, width, lanes)
    place[0], place[-1] = width - 1, 0 if lanes > 1 else width - 1  # a full row, an empty one
    if rests and lanes > 2:
        place[1], place[2] = -1, width  # at rest, and beyond the context
    both = []
    for module in (kernels, reference):
        k, v, out = keys.clone(), values.clone(), torch.full((lanes, H * size), 7.0, dtype=dtype, device=DEVICE)
        module.decode_attention(qkv, k, v, None, width, cos, sin, norm, place, out, size**-0.5, 1e-6)
        both.append((k, v, out))
    close(both[0][0], both[1][0], dtype)
    assert torch.equal(both[0][1], both[1][1])
    close(both[0][2], both[1][2], dtype, steps=2)
    for lane in [i for i, p in enumerate(place.tolist()) if not 0 <= p < width]:
        assert (both[0][2][lane] == 7).all()
        assert torch.equal(both[0][0][lane], keys[lane]) and torch.equal(both[0][1][lane], values[lane])
    assert torch.equal(both[0][0][lanes], keys[lanes])  # a row that is nobody's lane


@needs_triton
@some
@given(
    seed=seeds,
    lanes=st.sampled_from([1, 2, 4, 7, 12]),
    heads=HEADS,
    size=st.sampled_from([16, 64]),
    most=st.sampled_from([0, 1, 63, 64, 90]),
    dtype=multiplied,
    normed=st.booleans(),
    rests=st.booleans(),
)
def test_attend_together(kernels, seed, lanes, heads, size, most, dtype, normed, rests):
    """Four lanes a program read what they share where they are told to: their own copies hold something else here."""
    dice, (H, K), width = Dice(seed), heads, 170
    qkv = dice.normal(lanes, (H + 2 * K) * size, dtype=dtype)
    keys, values = (dice.normal(lanes, K, width, size, dtype=dtype) for _ in range(2))
    cos, sin = rotary(width, size)
    norm = 1 + 0.1 * dice.normal(H + K, size) if normed else None
    fours = -(-lanes // reference.LANES_PER_PROGRAM)
    common = dice.whole(0, most + 1, fours)
    leader = torch.arange(fours, device=DEVICE) * reference.LANES_PER_PROGRAM
    leader += dice.whole(0, reference.LANES_PER_PROGRAM, fours)
    shared = torch.stack((common, leader.clamp(max=lanes - 1)))
    place = common.repeat_interleave(reference.LANES_PER_PROGRAM)[:lanes] + dice.whole(0, 170 - most, lanes)
    if rests:
        place[0] = -1
    both = []
    for module in (kernels, reference):
        k, v, out = keys.clone(), values.clone(), torch.full((lanes, H * size), 7.0, dtype=dtype, device=DEVICE)
        module.decode_attention(qkv, k, v, None, width, cos, sin, norm, place, out, size**-0.5, 1e-6, shared)
        both.append((k, v, out))
    close(both[0][0], both[1][0], dtype)
    assert torch.equal(both[0][1], both[1][1])
    close(both[0][2], both[1][2], dtype, steps=2)
    assert not rests or (both[0][2][0] == 7).all()


@needs_triton
def test_attend_forgets_what_lies_behind_its_position(kernels):
    """Columns behind a lane's position may hold anything, even what is no number."""
    dice, H, K, size, width = Dice(0), 6, 2, 16, 80
    qkv, (cos, sin) = dice.normal(2, (H + 2 * K) * size), rotary(width, size)
    keys, values = (dice.normal(2, K, width, size) for _ in range(2))
    place = torch.tensor([5, 70], device=DEVICE)
    outs = []
    for rubbish in (0.0, float("nan")):
        k, v = keys.clone(), values.clone()
        for t in (k, v):
            t[0, :, 6:], t[1, :, 71:] = rubbish, rubbish
        out = torch.zeros(2, H * size, device=DEVICE)
        outs.append(kernels.decode_attention(qkv, k, v, None, width, cos, sin, None, place, out, size**-0.5, 1e-6))
    assert torch.equal(*outs)


@needs_triton
@some
@given(
    seed=seeds,
    tokens=st.sampled_from([1, 6, 11]),
    heads=HEADS,
    size=st.sampled_from([16, 64]),
    dtype=dtypes,
    normed=st.booleans(),
)
def test_settle(kernels, seed, tokens, heads, size, dtype, normed):
    dice, (H, K), width, rows = Dice(seed), heads, 23, 4
    qkv = dice.normal(tokens, (H + 2 * K) * size, dtype=dtype)
    keys, values = (dice.normal(rows, K, width, size, dtype=dtype) for _ in range(2))
    cos, sin = rotary(width, size)
    norm = 1 + 0.1 * dice.normal(H + K, size) if normed else None
    cells = torch.randperm(rows * width, generator=dice.generator)[:tokens].to(DEVICE)  # no two tokens in one place
    place, none = cells % width, torch.rand(tokens, generator=dice.generator).to(DEVICE) < 0.2
    place[none] = -1
    both = []
    for module in (kernels, reference):
        k, v, q = keys.clone(), values.clone(), torch.zeros(tokens, H * size, dtype=dtype, device=DEVICE)
        module.rope_and_cache(qkv, k, v, cos, sin, norm, place, cells // width, q, 1e-6)
        both.append((k, v, q))
    for found, expected in zip(*both):
        close(found, expected, dtype)


@needs_triton
@some
@given(
    seed=seeds,
    jobs=st.lists(st.tuples(st.integers(0, 150), st.sampled_from([0, 1, 2, 31, 70])), min_size=1, max_size=4),
    heads=HEADS,
    size=st.sampled_from([16, 64, 128, 256]),
    dtype=multiplied,
)
def test_look_back(kernels, seed, jobs, heads, size, dtype):
    """Jobs of any size behind any number of columns, in any rows; what lies behind them, or between, does not matter."""
    dice, (H, K), width, rows = Dice(seed), heads, 233, 5
    ends = torch.tensor([0, *(n for _, n in jobs)]).cumsum(0).to(DEVICE)
    start = torch.tensor([before for before, _ in jobs], device=DEVICE)
    row = torch.randperm(rows, generator=dice.generator)[: len(jobs)].to(DEVICE)
    q = dice.normal(int(ends[-1]) + 3, H * size, dtype=dtype)
    keys, values = (dice.normal(rows, K, width, size, dtype=dtype) for _ in range(2))
    for at, (before, n) in zip(row.tolist(), jobs):
        keys[at, :, before + n :] = values[at, :, before + n :] = torch.inf
    free = [at for at in range(rows) if at not in row.tolist()]
    keys[free] = values[free] = torch.nan
    both = [torch.full_like(q, 7.0) for _ in range(2)]
    for module, out in zip((kernels, reference), both):
        module.prefill_attention(q, keys, values, None, ends, start, row, 128, out, size**-0.5)
    close(*both, dtype, steps=2)


# ---------------------------------------------------------------------- drawing


def drawn(module: Any, logits: Tensor, cold: Tensor, seed: Tensor, position: Tensor, begin: Tensor) -> list[Tensor]:
    lanes = len(logits)
    tokens = torch.full((lanes,), -7, device=DEVICE)
    place = position.clone()
    history, logp = torch.full((8, lanes + 2), -7, device=DEVICE), torch.zeros(8, lanes + 2, device=DEVICE)
    module.sample(logits, cold, seed, tokens, place, begin, history, logp)
    return [tokens, place, history, logp]


@needs_triton
@some
@given(
    seed=seeds,
    lanes=st.sampled_from([1, 3, 6]),
    size=st.sampled_from([1, 61, 256, 1024, 4096, 5001]),
    spread=st.sampled_from([0.0, 1.0, 50.0, 1e4]),
)
def test_draw(kernels, seed, lanes, size, spread):
    dice = Dice(seed)
    logits = dice.normal(lanes, size, size=spread)
    logits[0, dice.whole(0, size, 1)] = 3e4  # one that leaves no doubt
    cold = torch.tensor([1.0, 0.0, 2.0, 1 / 0.7, 1e12, 1e-3], device=DEVICE)[:lanes]
    mine = dice.whole(-(2**62), 2**62, lanes)
    position, begin = dice.whole(4, 300, lanes), torch.zeros(lanes, dtype=torch.int64, device=DEVICE)
    begin += position - dice.whole(0, 8, lanes)
    if lanes > 3:
        position[3] = -1
    found, expected = (drawn(m, logits, cold, mine, position, begin) for m in (kernels, reference))
    ties = _tied(logits, cold, mine, position, found[0], expected[0])
    same = (found[0] == expected[0]) | (position < 0)
    assert (same | ties).all()
    assert torch.equal(found[1], expected[1])
    if bool(same.all()):
        assert torch.equal(found[2], expected[2])
        torch.testing.assert_close(found[3], expected[3], rtol=1e-5, atol=1e-4)
    rest = position < 0
    assert (found[0][rest] == -7).all() and (found[2][:, lanes:] == -7).all()


def _tied(logits: Tensor, cold: Tensor, seed: Tensor, position: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Lanes whose random number falls, to rounding, on the border between the two tokens; greedy ones: equal logits."""
    z = (logits * torch.where(cold == 0, 1.0, cold)[:, None]).clamp(min=reference.LOWEST)
    below = z.double().softmax(1).cumsum(1).gather(1, torch.minimum(a, b).clamp(min=0)[:, None])[:, 0]
    above = z.double().softmax(1).cumsum(1).gather(1, (torch.maximum(a, b) - 1).clamp(min=0)[:, None])[:, 0]
    u = uniforms(seed, position + 1)
    return (cold != 0) & (below <= u + 1e-6) & (u - 1e-6 <= above) & (above - below < 1e-6)


@needs_triton
def test_greedy_takes_the_first_of_the_best(kernels):
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, [17, 4500, 8999]] = 3.0
    logits[1, [8999]] = 1e-3
    zero = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    tokens, _, _, logp = drawn(kernels, logits, torch.zeros(2, device=DEVICE), zero, zero, zero)
    assert tokens.tolist() == [17, 8999]
    expected = logits.log_softmax(1)[[0, 1], [17, 8999]]
    torch.testing.assert_close(logp[0, :2], expected, rtol=1e-5, atol=1e-5)


@needs_triton
def test_numbers_that_are_none_crash_nothing(kernels):
    """Weights that have blown up must be told as such by whoever reads the log-probabilities; not by a fault of the device."""
    logits = torch.full((2, 70), float("nan"), device=DEVICE)
    logits[1] = float("-inf")
    zero = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    tokens, *_ = drawn(kernels, logits, torch.ones(2, device=DEVICE), zero, zero, zero)
    assert ((tokens >= 0) & (tokens < 70)).all()


# ---------------------------------------------------------------------- the references themselves


def test_the_twin_draws_from_the_distribution():
    n = 30_000
    logits = 1.5 * torch.randn(1, 24, generator=torch.Generator().manual_seed(0))
    tokens, place = torch.zeros(2, n, dtype=torch.int64)
    history, logp = torch.zeros(1, n, dtype=torch.int64), torch.zeros(1, n)
    cold = torch.full((n,), 1 / 0.7)
    reference.sample(logits.expand(n, -1), cold, torch.arange(n), tokens, place, torch.zeros_like(place), history, logp)
    p = (logits / 0.7).softmax(-1)[0]
    assert ((torch.bincount(tokens, minlength=24) - n * p) ** 2 / (n * p)).sum() < 60  # 23 degrees of freedom
    torch.testing.assert_close(logp[0], p.log()[tokens])
    assert place.eq(1).all() and torch.equal(history[0], tokens)


@pytest.mark.parametrize("shape", [(1, 16, 8), (5, 48, 33), (64, 576, 960)])
def test_eight_bits_are_off_by_a_sixteenth_at_most(shape: tuple[int, int, int]):
    dice = Dice(0)
    rows, inner, outer = shape
    h, weight = dice.normal(rows, inner), dice.normal(outer, inner, size=0.02)
    weight[0] *= 1e-4  # a small output must not vanish beside a large one
    data, scale = reference.quantise(weight)
    wide = reference.dequantise(data, scale)
    largest = weight.abs().amax(1, keepdim=True)
    assert ((wide - weight).abs() <= weight.abs() / 16 + largest * 2**-9 / 448).all()
    found, exact = reference.fp8_matmul(h, data, scale), h @ weight.t()
    scale = h.norm() / inner**0.5
    assert (found - exact)[:, 1:].norm() < 0.06 * scale * weight[1:].norm()
    assert (found - exact)[:, 0].norm() < 0.2 * scale * weight[0].norm()


@pytest.mark.skipif(not (GPU and FOUND), reason="no GPU")
@pytest.mark.parametrize("shape", [(1, 64, 96), (5, 48, 32), (17, 576, 960), (256, 1536, 576), (300, 576, 3072)])
def test_narrow_product(kernels, shape: tuple[int, int, int]):
    rows, inner, outer = shape
    dice = Dice(0)
    h = dice.normal(rows, inner, dtype=torch.bfloat16)
    data, scale = reference.quantise(dice.normal(outer, inner, size=0.05))
    found, expected = (m.fp8_matmul(h, data, scale) for m in (kernels, reference))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
