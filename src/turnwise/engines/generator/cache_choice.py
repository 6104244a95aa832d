"""Rows or pages: which layout a KV cache has, how many pages, and why.

Rows need no block table, and a decode step reads them as a view, but every row has room for a whole context. Pages are chosen
where rows would not fit into the memory left for the cache, or where they are asked for. Knows shapes and bytes; no model and no
setting of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from turnwise.engines.generator.kv_cache import HeadShape, KVCache
from turnwise.engines.generator.paged_cache import PAGE, PagedKVCache

GIB = 1 << 30
LAYOUTS = {"rows": 0, "pages": PAGE}  # columns of a page by the name of the layout


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """``room``: bytes for the cache, None for any. ``page``: columns of a page; 0 for rows, None to choose by the room."""

    room: int | None = None
    page: int | None = None

    @property
    def layout(self) -> str:
        """What was asked for: rows or pages; empty where the room decides."""
        return "" if self.page is None else "pages" if self.page else "rows"

    def make(
        self, shapes: Sequence[tuple[HeadShape, HeadShape]], rows: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:  # fmt: skip
        column = sum(heads * size for pair in shapes for heads, size in pair) * dtype.itemsize
        page = PAGE if self.page is None else self.page
        pages = 0 if self.room is None or not page else max(1, self.room // (page * column) - 1)
        fits = self.room is None or rows * context * column <= self.room
        if self.page is None:
            too_few = pages <= -(-context // page)  # for one dialogue: an estimate of the room may be too low
            page = 0 if fits or too_few else page
        why = "" if fits or self.page else self._excess(rows, context, column)
        if not page:
            return KVCache(shapes, rows, context, dtype, device, why=why and f", which may not fit: {why}")
        why = why and f", because {why}"
        return PagedKVCache(shapes, rows, context, dtype, device, pages=pages, page=page, why=why)

    def _excess(self, rows: int, context: int, column: int) -> str:
        assert self.room is not None
        return f"{rows} rows of {context} ids would take {_size(rows * context * column)} of {_size(self.room)}"


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"
