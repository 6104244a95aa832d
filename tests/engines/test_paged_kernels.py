"""The kernels over pages against their PyTorch reference, and the reference against the one over rows. On a GPU if there is one,
else under Triton's interpreter, if Triton is there and TRITON_INTERPRET=1 says so."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import DEVICE, GPU, needs_triton
from torch import Tensor

from turnwise.engines.kernels import reference

some = settings(max_examples=25 if GPU else 8, deadline=None)
multiplied = st.sampled_from([torch.float32, torch.bfloat16]) if GPU else st.just(torch.float32)
seeds = st.integers(0, 2**31)
HEADS = st.sampled_from([(1, 1), (6, 2), (9, 3), (8, 1)])
PAGES = st.sampled_from([16, 64])


@pytest.fixture(scope="module")
def kernels() -> Any:
    return importlib.import_module("turnwise.engines.kernels.triton.decode")


def rotary(width: int, size: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(width)[:, None] * 1e4 ** (-torch.arange(size // 2) / (size // 2))
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), 1).to(DEVICE), torch.cat((-sin, sin), 1).to(DEVICE)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    limit = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2 / 128, "atol": 8e-3}
    torch.testing.assert_close(found.float(), expected.float(), **limit)


class Cache:
    """Rows of random keys and values, once as rows and once as pages in any order."""

    def __init__(self, seed: int, rows: int, K: int, context: int, size: int, page: int, dtype: torch.dtype) -> None:
        self.random = torch.Generator().manual_seed(seed)
        per_row = -(-context // page)
        order = 1 + torch.randperm(rows * per_row, generator=self.random)
        self.table = order.view(rows, per_row).int().to(DEVICE)
        self.keys, self.values = self.normal(2, rows * per_row + 1, K, page, size, dtype=dtype)
        self.context = context

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(DEVICE, dtype)

    def rows(self) -> tuple[Tensor, Tensor]:
        pages = self.table.long()
        keys, values = (t[pages].transpose(1, 2).flatten(2, 3)[:, :, : self.context] for t in (self.keys, self.values))
        return keys.contiguous(), values.contiguous()


def decode(module: Any, cache: Cache, qkv: Tensor, norm: Tensor | None, position: Tensor, H: int) -> tuple[Tensor, ...]:
    keys, values = cache.keys.clone(), cache.values.clone()
    size = keys.shape[3]
    out = torch.full((len(qkv), H * size), 7.0, dtype=keys.dtype, device=DEVICE)
    cos, sin = rotary(cache.context, size)
    module.decode_attention(
        qkv, keys, values, cache.table, cache.context, cos, sin, norm, position, out, size**-0.5, 1e-6
    )
    return keys, values, out


def positions(cache: Cache, lanes: int, context: int) -> Tensor:
    place = torch.randint(0, context, (lanes,), generator=cache.random)
    place[0] = context - 1
    if lanes > 3:
        place[1], place[2], place[3] = 0, -1, context  # empty, inactive, beyond the context
    return place.to(DEVICE)


@needs_triton
@some
@given(seeds, st.sampled_from([1, 5]), HEADS, st.sampled_from([16, 64]), PAGES, multiplied, st.booleans())
@pytest.mark.parametrize("context", [5, 130, 1300])
def test_decode(kernels, context, seed, lanes, heads, size, page, dtype, normed):
    """A row of 1,300 columns is split among programs."""
    H, K = heads if GPU or context < 1000 else (2, 1)  # the interpreter takes seconds for a long row
    cache = Cache(seed, lanes, K, context, size, page, dtype)
    qkv, place = cache.normal(lanes, (H + 2 * K) * size, dtype=dtype), positions(cache, lanes, context)
    norm = 1 + 0.1 * cache.normal(H + K, size) if normed else None
    found, expected = (decode(module, cache, qkv, norm, place, H) for module in (kernels, reference))
    for a, b in zip(found, expected):
        close(a, b, dtype)
    assert (found[2][(place < 0) | (place >= context)] == 7).all()


@some
@given(seeds, st.sampled_from([1, 5]), HEADS, PAGES, st.sampled_from([5, 130]))
def test_the_reference_reads_what_rows_would_hold(seed, lanes, heads, page, context):
    (H, K), size = heads, 16
    cache = Cache(seed, lanes, K, context, size, page, torch.float32)
    qkv, place = cache.normal(lanes, (H + 2 * K) * size), positions(cache, lanes, context)
    keys, values = cache.rows()
    cos, sin = rotary(context, size)
    expected = torch.full((lanes, H * size), 7.0, device=DEVICE)
    reference.decode_attention(qkv, keys, values, None, context, cos, sin, None, place, expected, size**-0.5, 1e-6)
    cache.keys, cache.values, out = decode(reference, cache, qkv, None, place, H)
    torch.testing.assert_close(out, expected)
    for paged, row in zip(cache.rows(), (keys, values)):
        assert torch.equal(paged, row)


def prefill(module: Any, cache: Cache, q: Tensor, chunks: list[tuple[int, int]], row: Tensor) -> Tensor:
    ends = torch.tensor([0, *(n for _, n in chunks)]).cumsum(0).to(DEVICE)
    start = torch.tensor([before for before, _ in chunks], device=DEVICE)
    out = torch.full_like(q, 7.0)
    size = cache.keys.shape[3]
    module.prefill_attention(q, cache.keys, cache.values, cache.table, ends, start, row, 128, out, size**-0.5)
    return out


chunk_lists = st.lists(st.tuples(st.integers(0, 150), st.sampled_from([0, 1, 2, 31, 70])), min_size=1, max_size=4)


@needs_triton
@some
@given(seeds, chunk_lists, HEADS, st.sampled_from([16, 64, 128]), PAGES, multiplied)
def test_prefill(kernels, seed, chunks, heads, size, page, dtype):
    H, K = heads
    cache = Cache(seed, 5, K, 233, size, page, dtype)
    row = torch.randperm(5, generator=cache.random)[: len(chunks)].to(DEVICE)
    q = cache.normal(sum(n for _, n in chunks) + 3, H * size, dtype=dtype)
    close(*(prefill(module, cache, q, chunks, row) for module in (kernels, reference)), dtype)


@some
@given(seeds, chunk_lists, HEADS, PAGES)
def test_the_reference_of_prefill_reads_what_rows_would_hold(seed, chunks, heads, page):
    (H, K), size = heads, 16
    cache = Cache(seed, 5, K, 233, size, page, torch.float32)
    row = torch.randperm(5, generator=cache.random)[: len(chunks)].to(DEVICE)
    q = cache.normal(sum(n for _, n in chunks) + 3, H * size)
    ends = torch.tensor([0, *(n for _, n in chunks)]).cumsum(0).to(DEVICE)
    start = torch.tensor([before for before, _ in chunks], device=DEVICE)
    expected = torch.full_like(q, 7.0)
    reference.prefill_attention(q, *cache.rows(), None, ends, start, row, 128, expected, size**-0.5)
    torch.testing.assert_close(prefill(reference, cache, q, chunks, row), expected)
