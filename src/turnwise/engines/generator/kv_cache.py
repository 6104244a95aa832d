"""The KV cache in rows: one row of keys and values per dialogue, kept across turns; and which dialogue owns which row.

Rows [0, n) belong to the running requests, so a decode step reads ``K[:n, :, :T]`` as a view and never gathers. The rows after
them keep the KV of dialogues that wait for their environment, until a running request needs the row. Every row has the width of
the longest dialogue: ``paged_cache.PagedKVCache`` has the same interface and takes memory by real lengths. Knows ids and rows;
neither models nor sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MIN_SHARED_PREFIX = 8  # shorter prefixes of other rows are not copied

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


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens ``ids`` to prefill into cache row ``row``, starting at column ``start``."""

    row: int
    start: int
    ids: list[int]


@dataclass(slots=True)
class AdmissionPlan:
    """How admitted dialogues get their KV: prefill one round after another, then copy rows."""

    admitted: int  # of the dialogues that asked, the first so many
    rounds: list[list[PrefillChunk]] = field(default_factory=list)
    copies: list[RowCopy] = field(default_factory=list)
    cached: int = 0  # ids whose KV was there
    shared: int = 0  # ids whose KV another dialogue of this admission computes


Admission = tuple[CacheSlot, list[int]]
"""A dialogue, and the ids whose KV it needs."""


@dataclass(frozen=True, slots=True)
class RowGrowth:
    """A running row holds ``length`` columns and writes ``more`` next."""

    length: int
    more: int


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
    why: str = ""  # this layout and no other
    table: Tensor | None = field(
        default=None, init=False
    )  # [rows, pages] the pages of every row, where there are pages

    def __post_init__(self) -> None:
        self.owner: list[CacheSlot | None] = [None] * self.rows
        self.cached_ids: list[list[int]] = [[] for _ in range(self.rows)]  # ids whose KV each row holds
        self.uniform = len({shape for pair in self.shapes for shape in pair}) == 1
        self._blocks: list[Tensor] = []
        self.reserve(min(128, self.context))

    def describe(self) -> str:
        return f"KV cache in {self.rows:,} rows of {self.context:,} ids{self.why}"

    # ------------------------------------------------------------------ memory

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(block.nbytes for block in self._blocks)

    def allocate_all(self) -> None:
        """Allocate what the cache may ever need, at addresses that stay."""
        self.reserve(self.context)

    def hold(self, growths: Sequence[RowGrowth], evict: bool = True) -> bool:
        """Make room for the next columns of rows [0, n), if need be and ``evict`` at the expense of idle dialogues. False: there
        is none."""
        self.reserve(min(self.context, max(g.length + g.more for g in growths)))
        return True

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

    @property
    def block_width(self) -> int:
        """Columns of a row, or of a page."""
        return self.width

    def places(self, row: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Where columns ``position`` of rows ``row`` are: the first and the third index into ``keys[layer]``."""
        return row, position

    def columns(self, layer: int, rows: int | Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, Hkv, width, D] of these rows, or of the first so many (a view)."""
        which = slice(rows) if isinstance(rows, int) else rows
        return self.keys[layer][which, :, :width], self.values[layer][which, :, :width]

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

    def admit(self, running: Sequence[CacheSlot], admissions: Sequence[Admission]) -> AdmissionPlan:
        """Give waiting dialogues rows beside the running ones; say what must be computed for them."""
        new = [(slot, ids) for slot, ids in admissions if slot.row is None]
        self.assign_rows([*running, *(slot for slot, _ in admissions)], self._prefix_sources(new))
        plan, leaders = AdmissionPlan(len(admissions)), dict[tuple[int, ...], int]()
        chunks: list[PrefillChunk] = []
        for slot, ids in admissions:
            assert slot.row is not None
            cached = common_prefix_length(self.cached_ids[slot.row], ids)
            self.cached_ids[slot.row] = ids
            plan.cached += cached
            if cached == len(ids):
                continue
            leader = leaders.setdefault(tuple(ids), slot.row)
            if leader == slot.row:
                chunks.append(PrefillChunk(slot.row, cached, ids[cached:]))
            else:
                plan.copies.append(RowCopy(leader, slot.row, len(ids)))
                plan.shared += len(ids) - cached
        plan.rounds = [chunks] if chunks else []
        return plan

    def _prefix_sources(self, admissions: Sequence[Admission]) -> dict[CacheSlot, tuple[int, int]]:
        """For each new dialogue the row with the longest prefix of its ids; rows of others and free rows count too."""
        rows_by_head: dict[tuple[int, ...], list[int]] = {}
        for row, cached in enumerate(self.cached_ids):
            if len(cached) >= MIN_SHARED_PREFIX:
                rows_by_head.setdefault(tuple(cached[:MIN_SHARED_PREFIX]), []).append(row)
        sources: dict[CacheSlot, tuple[int, int]] = {}
        for slot, ids in admissions:
            rows = rows_by_head.get(tuple(ids[:MIN_SHARED_PREFIX]), ())
            lengths = ((common_prefix_length(self.cached_ids[row], ids), -row) for row in rows)
            best = max(lengths, default=(0, 0))
            if best[0]:
                sources[slot] = (-best[1], best[0])
        return sources

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


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:  # bisect: slices compare faster than a loop
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
