"""Rows or pages: which layout a KV cache has, and how many pages.

Rows need no block table, and a decode step reads them as a view, but every row has room for a whole context. Pages are chosen
where rows would not fit into the memory left for the cache. Knows shapes and bytes; no model and no setting of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from turnwise.engines.generator.kv_cache import HeadShape, KVCache
from turnwise.engines.generator.paged_cache import PAGE, PagedKVCache


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """``room``: bytes for the cache, None for any. ``page``: columns of a page; 0 for rows, None to choose by the room."""

    room: int | None = None
    page: int | None = None

    def make(
        self, shapes: Sequence[tuple[HeadShape, HeadShape]], rows: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:  # fmt: skip
        column = sum(heads * size for pair in shapes for heads, size in pair) * dtype.itemsize
        page = PAGE if self.page is None else self.page
        pages = 0 if self.room is None or not page else self.room // (page * column) - 1
        if self.page is None:
            fits = self.room is None or rows * context * column <= self.room
            too_few = pages <= -(-context // page)  # for one dialogue: an estimate of the room may be too low
            page = 0 if fits or too_few else page
        if not page:
            return KVCache(shapes, rows, context, dtype, device)
        return PagedKVCache(shapes, rows, context, dtype, device, pages=pages, page=page)
