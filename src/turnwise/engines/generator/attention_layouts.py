"""Attention over the KV cache: packed prompt tokens (``PrefillLayout``) or one token of every running row (``DecodeLayout``).

Both write their keys and values into the cache first and attend to them there. Neither knows about ids or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from turnwise.core.transfer import to_device_packed
from turnwise.engines.generator.kv_cache import KVCache, PrefillChunk
from turnwise.maths.numbers import tensor_of

BUCKET = 16  # attention widths are multiples of this: few distinct shapes, little padding


class PackedTokens(NamedTuple):
    """N tokens of J chunks, packed one chunk after another."""

    tokens: Tensor  # [N] ids
    position: Tensor  # [N] column of its row that each token takes
    row: Tensor  # [N] cache row of each token
    block: Tensor  # [N] its row, or in a cache of pages its page: the first index into the cache's tensors
    chunk: Tensor  # [N] chunk of each token
    offset: Tensor  # [N] from the start of its chunk
    chunk_rows: Tensor  # [J] cache row of each chunk
    start: Tensor  # [J] columns that the row already holds
    boundaries: Tensor  # [J + 1] cumulative chunk lengths


class PrefillLayout:
    """Packed tokens of several rows; each chunk follows what its row already holds."""

    def __init__(self, kv_cache: KVCache, chunks: Sequence[PrefillChunk]) -> None:
        sizes = [len(chunk.ids) for chunk in chunks]
        longest = max(chunk.start + size for chunk, size in zip(chunks, sizes))
        kv_cache.reserve(longest)
        self.width = min(kv_cache.width, -(-longest // BUCKET) * BUCKET)
        self.kv_cache, self.longest_chunk = kv_cache, max(sizes)
        rows, start = torch.tensor([c.row for c in chunks]), torch.tensor([c.start for c in chunks])
        boundaries = torch.tensor([0, *sizes]).cumsum(0)
        tokens = tensor_of([token for chunk in chunks for token in chunk.ids], torch.int64)
        chunk = torch.repeat_interleave(torch.arange(len(chunks)), boundaries.diff())
        offset = torch.arange(len(tokens)) - boundaries[chunk]
        self.host = PackedTokens(
            tokens, start[chunk] + offset, rows[chunk], kv_cache.places(rows[chunk], start[chunk] + offset)[0], chunk, offset,
            rows, start, boundaries,
        )  # fmt: skip
        self.masks: dict[int | None, Tensor] = {}

    @cached_property
    def on_device(self) -> PackedTokens:
        """``host``, copied to the device of the cache."""
        return PackedTokens(*to_device_packed(self.host, self.kv_cache.device))

    def mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            start = self.on_device.start
            query = start[:, None] + torch.arange(self.longest_chunk, device=start.device)  # [J, longest chunk]
            # [J, longest chunk, width]; negative: a later token
            age = query[:, :, None] - torch.arange(self.width, device=query.device)
            self.masks[window] = (age >= 0 if window is None else (age >= 0) & (age < window))[:, None]
        return self.masks[window]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k and v [N, Hkv, D] in their rows."""
        block, offset = self.on_device.block, self.on_device.position % self.kv_cache.keys[layer].shape[2]
        self.kv_cache.keys[layer][block, :, offset] = k
        self.kv_cache.values[layer][block, :, offset] = v

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        """q [N, H, D] over the columns of their rows -> [N, H, D]."""
        packed = self.on_device
        keys, values = self.kv_cache.columns(layer, packed.chunk_rows, self.width)
        padded = q.new_zeros(len(packed.chunk_rows), self.longest_chunk, *q.shape[1:])
        padded[packed.chunk, packed.offset] = q
        grouped, mask = q.shape[1] != keys.shape[1], self.mask(window)
        out = F.scaled_dot_product_attention(
            padded.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)[packed.chunk, packed.offset]

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """The call of stock layers: q [1, H, N, D], k and v [1, Hkv, N, D] -> [1, N, H, D]."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        self.write(layer, k, v)
        return self.attend(layer, q, scale, window)[None]


class DecodeLayout:
    """One token of each row [0, n) per decode step; call ``advance`` between two steps."""

    def __init__(self, kv_cache: KVCache, lengths: Sequence[int], steps: int) -> None:
        """``lengths``: columns that each row holds. Reserves room for ``steps`` more."""
        self.longest = max(lengths)
        kv_cache.reserve(min(kv_cache.context, self.longest + steps))
        self.kv_cache, self.n = kv_cache, len(lengths)
        self.position = torch.tensor(lengths, device=kv_cache.device)
        self.column = torch.arange(kv_cache.width, device=kv_cache.device)
        self.row = torch.arange(self.n, device=kv_cache.device)
        self._prepare()

    def _prepare(self) -> None:
        longest = min(self.longest + 1, self.kv_cache.context)
        self.width = min(self.kv_cache.width, -(-longest // BUCKET) * BUCKET)
        self.indices: dict[int, Tensor] = {}
        self.masks: dict[int | None, Tensor] = {}

    def advance(self) -> None:
        """Move every row on by one column. Finished rows stay in the batch until the next compaction: clamped, they overwrite
        their own last column."""
        self.position = (self.position + 1).clamp_(max=self.kv_cache.context - 1)
        self.longest += 1
        self._prepare()

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive [n, 1, 1, width]."""
        if window not in self.masks:
            age = self.position[:, None] - self.column[: self.width]
            visible = age >= 0 if window is None else (age >= 0) & (age < window)
            zero = torch.zeros((), dtype=dtype, device=age.device)
            self.masks[window] = torch.where(visible, zero, float("-inf"))[:, None, None]
        return self.masks[window]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k and v [n, Hkv, D] in this step's column of every row."""
        heads = k.shape[1]
        if heads not in self.indices:
            # flat indices into [blocks * heads * columns], the same for all layers of a step: one kernel stores all rows
            head = torch.arange(heads, device=self.position.device)
            block, offset = self.kv_cache.places(self.row, self.position)
            base = (block[:, None] * heads + head) * self.kv_cache.block_width
            self.indices[heads] = (base + offset[:, None]).flatten()
        index = self.indices[heads]
        self.kv_cache.keys[layer].view(-1, k.shape[2]).index_copy_(0, index, k.reshape(-1, k.shape[2]))
        self.kv_cache.values[layer].view(-1, v.shape[2]).index_copy_(0, index, v.reshape(-1, v.shape[2]))

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        """q [n, H, D] over the cached columns -> [n, H, D]. The query heads that share a key head become queries of that key
        head, so no key is repeated and K stays a view."""
        n, H, D = q.shape
        keys, values = self.kv_cache.columns(layer, n, self.width)
        grouped = q.reshape(n, keys.shape[1], -1, D)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask(window, q.dtype), scale=scale)
        return out.reshape(n, H, values.shape[-1])

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """The call of stock layers: q [n, H, 1, D], k and v [n, Hkv, 1, D] -> [n, 1, H, D]."""
        self.write(layer, k[:, :, 0], v[:, :, 0])
        return self.attend(layer, q[:, :, 0], scale, window)[:, None]
