"""The experts that the routers of a mixture chose, as one more layer of the KV cache.

So they follow whatever happens to a row: a prefix that another dialogue computed, a copy, a move, an eviction, a recomputation
after a weight update. Knows rows and columns; neither requests nor what the experts are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from turnwise.engines.expert_routing import ExpertRouting, as_cache_entries, as_rows, from_cache_entries
from turnwise.engines.generator.attention_layouts import DecodeLayout, PrefillLayout
from turnwise.engines.generator.kv_cache import HeadShape, KVCache

Span = tuple[int, int, int]
"""A cache row and the columns [begin, end)."""


class RouteCache:
    """``layer``: the number of the cache layer that holds the routes, after those of the model."""

    def __init__(self, routing: ExpertRouting, layer: int) -> None:
        self.routing, self.layer = routing, layer

    @property
    def shape(self) -> tuple[HeadShape, HeadShape]:
        """The shape of its keys and values, which hold high and low bytes of each expert's number."""
        return (1, self.routing.width), (1, self.routing.width)

    @contextmanager
    def recording(self, layout: PrefillLayout | DecodeLayout) -> Iterator[None]:
        """Store what the routers choose in a forward pass of this layout."""
        with self.routing.recording() as chosen:
            yield
        entries = as_cache_entries(chosen(), layout.kv_cache.dtype)
        if isinstance(layout, PrefillLayout):
            high, low = (x[None, None] for x in entries)  # [1, 1, N, W]
        else:
            high, low = (x[:, None] for x in entries)  # [n, 1, W]
        layout.write(self.layer, high, low)

    def store(self, kv_cache: KVCache, chosen: Tensor, block: Tensor, position: Tensor) -> None:
        """Store choices [N, R, k] in columns ``position`` of blocks ``block`` [N], without asking the device anything: part of a
        captured graph. Rows outside [0, context) are padding and inactive lanes, whose blocks may belong to others. They repeat
        the write of the first row that counts; if none does, all write back what is there."""
        counts = (position >= 0) & (position < kv_cache.context)
        row = torch.arange(len(position), device=position.device)
        source = torch.where(counts, row, counts.int().argmax())
        block, offset = block[source], position[source].clamp(min=0) % kv_cache.block_width
        entries = as_cache_entries(chosen.flatten(1)[source], kv_cache.dtype)
        for cached, new in zip((kv_cache.keys[self.layer], kv_cache.values[self.layer]), entries):
            cached[block, 0, offset] = torch.where(counts.any(), new, cached[block, 0, offset])

    def read(self, kv_cache: KVCache, spans: Sequence[Span]) -> list[list[bytes]]:
        """The routes of these columns. One copy from the device for all of them."""
        parts = []
        for row, begin, end in spans:
            keys, values = kv_cache.columns(self.layer, torch.tensor([row], device=kv_cache.device), end)
            parts.append(from_cache_entries(keys[0, 0, begin:end], values[0, 0, begin:end]))
        rows = iter(as_rows(torch.cat(parts)))
        return [[next(rows) for _ in range(end - begin)] for _, begin, end in spans]
