"""The KV cache: one row of keys and values per dialogue, kept across turns; and which dialogue owns which row.

Rows [0, n) belong to the running requests, so a decode step reads ``K[:n, :, :T]`` as a view and never gathers. The rows after
them keep the KV of dialogues that wait for their environment, until a running request needs the row. Knows ids and rows;
neither models nor sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

HeadShape = tuple[int, int]
"""(kv heads, head size) of a key or value."""


@dataclass(eq=False, slots=True)
class CacheSlot:
    """One dialogue's claim on a cache row. ``order``: its number among all dialogues ever opened."""

    order: int
    row: int | None = None
    last_used: int = 0  # number of its last admission


@dataclass(frozen=True, slots=True)
class RowCopy:
    source: int
    target: int
    length: int


@dataclass(eq=False)
class KVCache:
    shapes: Sequence[tuple[HeadShape, HeadShape]]  # per layer: key, value
    rows: int
    context: int
    dtype: torch.dtype
    device: torch.device
    width: int = 0  # columns allocated so far
    keys: list[Tensor] = field(default_factory=list)  # per layer [rows, Hkv, width, D]
    values: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.owner: list[CacheSlot | None] = [None] * self.rows
        self.cached_ids: list[list[int]] = [[] for _ in range(self.rows)]  # ids whose KV each row holds
        self.uniform = len({shape for pair in self.shapes for shape in pair}) == 1
        self._blocks: list[Tensor] = []
        self.reserve(min(128, self.context))

    # ------------------------------------------------------------------ memory

    def reserve(self, width: int) -> None:
        """Allocate at least this many columns. Doubles, so that a long context costs memory only once it is used."""
        if width <= self.width:
            return
        width = min(self.context, max(width, 2 * self.width))
        old, flat = self._blocks, [shape for pair in self.shapes for shape in pair]
        plan = [(len(flat), flat[0])] if self.uniform else [(1, shape) for shape in flat]
        # zeros, not empty: a masked column is still multiplied by 0, and 0 * NaN is NaN
        self._blocks = [
            torch.zeros(count, self.rows, heads, width, size, dtype=self.dtype, device=self.device)
            for count, (heads, size) in plan
        ]
        for new, block in zip(self._blocks, old):
            new[:, :, :, : self.width] = block
        self.width = width
        tensors = [tensor for block in self._blocks for tensor in block.unbind(0)]
        self.keys, self.values = tensors[0::2], tensors[1::2]

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        """Copy rows; read every source before any target is written."""
        copies = [c for c in copies if c.length and c.source != c.target]
        if not copies:
            return
        length = max(c.length for c in copies)
        source = torch.tensor([c.source for c in copies], device=self.device)
        target = torch.tensor([c.target for c in copies], device=self.device)
        for block in self._blocks:
            part = block[:, :, :, :length]
            part.index_copy_(1, target, part.index_select(1, source))

    # ------------------------------------------------------------------ rows

    def assign_rows(
        self, active: Sequence[CacheSlot], prefix_sources: Mapping[CacheSlot, tuple[int, int]] | None = None
    ) -> None:
        """Give the ``active`` slots rows [0, n). A slot that already has one of them keeps it. Idle dialogues move out and keep
        their KV where there is room; the least recently used lose it. A new slot with a prefix source (row, length) starts from
        a copy of that prefix."""
        n, prefix_sources = len(active), prefix_sources or {}
        taken = {s.row for s in active if s.row is not None and s.row < n}
        free_rows = [row for row in range(n) if row not in taken]
        incoming = [s for s in active if s.row is None or s.row >= n]
        if not incoming:
            return
        displaced = self._evict(active, n, {s.row for s in incoming})
        copies, contents = [], []
        for slot, target in [*zip(incoming, free_rows), *displaced]:
            source, length = (slot.row, None) if slot.row is not None else prefix_sources.get(slot, (target, 0))
            ids = self.cached_ids[source] if length is None else self.cached_ids[source][:length]
            copies.append(RowCopy(source, target, len(ids)))
            contents.append((slot, target, ids))
        for slot, _, _ in contents:  # the rows they leave become free; their ids stay usable as prefix sources
            if slot.row is not None:
                self.owner[slot.row] = None
        for slot, target, ids in contents:
            slot.row, self.owner[target], self.cached_ids[target] = target, slot, ids
        self.copy_rows(copies)

    def _evict(self, active: Sequence[CacheSlot], n: int, vacated: set[int | None]) -> list[tuple[CacheSlot, int]]:
        """New rows for idle dialogues that own a row of [0, n); evicts the least recently used if there are too few rows."""
        running = set(active)
        idle = [s for s in self.owner if s is not None and s not in running]
        idle.sort(key=lambda s: (-s.last_used, s.order))
        for slot in idle[self.rows - n :]:
            self.release(slot)
        spare = [row for row in range(n, self.rows) if self.owner[row] is None or row in vacated]
        displaced = [s for s in idle[: self.rows - n] if s.row is not None and s.row < n]
        return list(zip(displaced, spare))

    def release(self, slot: CacheSlot) -> None:
        """Free a slot's row. Its ids stay usable as a prefix source until another slot takes the row."""
        if slot.row is not None:
            self.owner[slot.row] = None
            slot.row = None

    def invalidate(self) -> None:
        """Forget all cached ids: after a weight update the rows hold the KV of an older policy."""
        self.cached_ids = [[] for _ in range(self.rows)]
