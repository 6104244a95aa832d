"""The KV cache: keys and values of dialogues, kept across turns; which dialogue owns which row, and which ids each row holds.

Rows [0, n) belong to the running requests. The rows after them keep the KV of dialogues that wait for their environment, until
others need the place. ``CacheBlocks`` is what is not addressing: tensors in blocks, owners, ids. Where the columns of a row are,
and who gives way when there is no room, are two layouts:

- ``RowCache``: a row is one block as wide as the longest dialogue, so a decode step reads ``K[:n, :, :T]`` as a view and never
  gathers; a row that moves is copied.
- ``PagedCache``: a row is a list of pages, a line of the block table. Memory follows the lengths that dialogues have, rows share
  pages, and moving one copies nothing; but attention must go through the table, or gather.

``CacheChoice`` takes rows where they fit. Knows ids, rows and pages; neither models nor sampling.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from turnwise.core.transfer import to_device
from turnwise.errors import SettingError

GIB = 1 << 30
MIN_SHARED_PREFIX = 8  # shorter prefixes of other rows are not copied
PAGE = 64  # columns of a page: the attention kernels read so many at once
FIRST_PAGES = 32  # allocated at first where the pool may grow
LAYOUTS = {"rows": 0, "pages": PAGE}  # columns of a page by the name of the layout

HeadShape = tuple[int, int]
"""(kv heads, head size) of a key or value."""
PageKey = tuple[int, tuple[int, ...]]
"""The page before (0 for none) and the ids of a full page: the same key means the same keys and values."""


class CacheTooSmall(SettingError):
    """Not one dialogue fits: no other way to decode would help."""


@dataclass(eq=False, slots=True)
class CacheSlot:
    """One dialogue's claim on a cache row. ``order``: its number among all dialogues ever opened."""

    order: int
    row: int | None = None
    last_used: int = 0  # number of its last admission


class BlockCopy(NamedTuple):
    """The first ``length`` columns of a block, which is a row or a page."""

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
    """How admitted dialogues get their KV: prefill one round after another, then copy blocks."""

    admitted: int  # of the dialogues that asked, the first so many
    rounds: list[list[PrefillChunk]] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    cached: int = 0  # ids whose KV was there
    shared: int = 0  # ids whose KV another dialogue of this admission computes


Admission = tuple[CacheSlot, list[int]]
"""A dialogue, and the ids whose KV it needs."""
Growth = tuple[int, int]
"""Columns that a running row holds, and how many it writes next."""


@dataclass(eq=False)
class CacheBlocks:
    """Blocks of columns on a device, and rows of ids. Layouts say which block holds which column of a row."""

    shapes: Sequence[tuple[HeadShape, HeadShape]]  # per layer: key, value
    rows: int
    context: int
    dtype: torch.dtype
    device: torch.device
    why: str = ""  # this layout and no other

    def __post_init__(self) -> None:
        self.owner: list[CacheSlot | None] = [None] * self.rows
        self.cached_ids: list[list[int]] = [[] for _ in range(self.rows)]  # ids whose KV each row holds
        self.uniform = len({shape for pair in self.shapes for shape in pair}) == 1
        self.width = self.block_width = 0  # columns that a row may have now, and that a block has
        self.keys: list[Tensor] = []  # per layer [blocks, Hkv, block width, D]
        self.values: list[Tensor] = []
        self.table: Tensor | None = None  # [rows, pages] the blocks of every row; None where block r is row r
        self.host_table: Tensor | None = None
        self._blocks: list[Tensor] = []

    # ------------------------------------------------------------------ memory

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(block.nbytes for block in self._blocks)

    def _allocate(self, blocks: int, width: int) -> None:
        """Allocate so many blocks of ``width`` columns. What is there moves along."""
        flat, old = [shape for pair in self.shapes for shape in pair], self._blocks
        plan = [(len(flat), flat[0])] if self.uniform else [(1, shape) for shape in flat]
        # zeros, not empty: a masked column is still multiplied by 0, and 0 * NaN is NaN
        self._blocks = [
            torch.zeros(count, blocks, heads, width, size, dtype=self.dtype, device=self.device)
            for count, (heads, size) in plan
        ]
        for new, block in zip(self._blocks, old):
            new[:, : block.shape[1], :, : block.shape[3]] = block
        self.block_width = width
        tensors = [tensor for block in self._blocks for tensor in block.unbind(0)]
        self.keys, self.values = tensors[0::2], tensors[1::2]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy columns of blocks; read every source before any target is written."""
        copies = [c for c in copies if c.length and c.source != c.target]
        if not copies:
            return
        length = max(c.length for c in copies)
        source, target = torch.tensor([c[:2] for c in copies], device=self.device).T
        for block in self._blocks:
            part = block[:, :, :, :length]
            part.index_copy_(1, target, part.index_select(1, source))

    def places(self, row: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Where columns ``position`` of rows ``row`` are: the first and the third index into ``keys[layer]``."""
        table = self.host_table if row.device.type == "cpu" else self.table
        if table is None:
            return row, position
        return table[row, position // self.block_width].long(), position % self.block_width

    def columns(self, layer: int, rows: int | Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, Hkv, width, D] of these rows, or of the first so many: a view of rows, a copy of pages."""
        which, tensors = slice(rows) if isinstance(rows, int) else rows, (self.keys[layer], self.values[layer])
        if self.table is None:
            keys, values = (t[which, :, :width] for t in tensors)
            return keys, values
        pages = self.table[which, : -(-width // self.block_width)].long()[:, None]  # [n, 1, pages]

        def gathered(t: Tensor) -> Tensor:
            _, heads, page, size = t.shape
            index = pages * heads + torch.arange(heads, device=t.device)[:, None]  # [n, Hkv, pages]
            # one copy, in pieces of a page of one head
            pieces = t.view(-1, page * size).index_select(0, index.flatten())
            return pieces.view(len(index), heads, -1, size)[:, :, :width]

        return gathered(tensors[0]), gathered(tensors[1])

    # ------------------------------------------------------------------ rows

    def release(self, slot: CacheSlot | None) -> None:
        """Free a slot's row. Its ids stay usable as a prefix of others until another slot takes the row."""
        if slot is not None and slot.row is not None:
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


# ---------------------------------------------------------------------- rows


class RowCache(CacheBlocks):
    """Block r is row r. Every row has the width of the longest dialogue so far."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reserve(min(128, self.context))

    def describe(self) -> str:
        return f"KV cache in {self.rows:,} rows of {self.context:,} ids{self.why}"

    def allocate_all(self) -> None:
        """Allocate what the cache may ever need, at addresses that stay."""
        self.reserve(self.context)

    def reserve(self, width: int) -> None:
        """Make room for so many columns of every row."""
        if width > self.width:  # doubles, so that a long context costs memory only once it is used
            self.width = min(self.context, max(width, 2 * self.width))
            self._allocate(self.rows, self.width)

    def hold(self, growths: Sequence[Growth], evict: bool = True) -> bool:
        """Make room for the next columns of rows [0, n). There always is."""
        self.reserve(min(self.context, max(length + more for length, more in growths)))
        return True

    def admit(self, running: Sequence[CacheSlot], admissions: Sequence[Admission]) -> AdmissionPlan:
        """Give waiting dialogues rows beside the running ones; say what must be computed for them."""
        # a new dialogue starts from the row with the longest prefix of its ids; rows of others and free rows count too
        rows_by_head: dict[tuple[int, ...], list[int]] = {}
        for row, ids in enumerate(self.cached_ids):
            if len(ids) >= MIN_SHARED_PREFIX:
                rows_by_head.setdefault(tuple(ids[:MIN_SHARED_PREFIX]), []).append(row)
        sources: dict[CacheSlot, tuple[int, int]] = {}
        for slot, ids in admissions:
            if slot.row is None:
                rows = rows_by_head.get(tuple(ids[:MIN_SHARED_PREFIX]), ())
                length, row = max(((common_prefix_length(self.cached_ids[r], ids), -r) for r in rows), default=(0, 0))
                sources |= {slot: (-row, length)} if length else {}
        self.assign_rows([*running, *(slot for slot, _ in admissions)], sources)
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
                plan.copies.append(BlockCopy(leader, slot.row, len(ids)))  # once the leader is read
                plan.shared += len(ids) - cached
        plan.rounds = [chunks] if chunks else []
        return plan

    def assign_rows(
        self, active: Sequence[CacheSlot], prefix_sources: Mapping[CacheSlot, tuple[int, int]] | None = None
    ) -> None:
        """Give the ``active`` slots rows [0, n). A slot that has one of them keeps it. Idle dialogues move out and keep their KV
        where there is room; the least recently used lose it. A new slot with a prefix source (row, length) starts from a copy."""
        n = len(active)
        taken = {s.row for s in active if s.row is not None and s.row < n}
        free_rows = [row for row in range(n) if row not in taken]
        incoming = [s for s in active if s.row is None or s.row >= n]
        if not incoming:
            return
        vacated, running = {s.row for s in incoming}, set(active)
        idle = [s for s in self.owner if s is not None and s not in running]
        idle.sort(key=lambda s: (-s.last_used, s.order))
        for slot in idle[self.rows - n :]:
            self.release(slot)
        spare = [row for row in range(n, self.rows) if self.owner[row] is None or row in vacated]
        displaced = [s for s in idle[: self.rows - n] if s.row is not None and s.row < n]
        copies, contents = [], []
        for slot, target in [*zip(incoming, free_rows), *zip(displaced, spare)]:
            source, length = (slot.row, None) if slot.row is not None else (prefix_sources or {}).get(slot, (target, 0))
            ids = self.cached_ids[source] if length is None else self.cached_ids[source][:length]
            copies.append(BlockCopy(source, target, len(ids)))
            contents.append((slot, target, ids))
        for slot, _, _ in contents:  # the rows they leave become free; their ids stay usable as prefix sources
            if slot.row is not None:
                self.owner[slot.row] = None
        for slot, target, ids in contents:
            slot.row, self.owner[target], self.cached_ids[target] = target, slot, ids
        self.copy_blocks(copies)


# ---------------------------------------------------------------------- pages


class PageAllocator:
    """Which pages of a pool are free, how many rows hold each of the others, and which full page follows which with which ids.

    A page may be held by several rows: a fork, a group with one prompt and a dialogue that continues another hold the same pages
    of their common prefix. Page 0 belongs to nobody: a column without a page is written there. ``pages``: of the pool, with 0."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.holders = [0] * pages  # rows that hold each page
        self.used = 1  # pages ever handed out: a pool that grows needs no more
        self._returned: list[int] = []
        self._page_of: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}

    @property
    def free(self) -> int:
        return len(self._returned) + self.pages - self.used

    def take(self, count: int) -> list[int]:
        """Pages for one holder. Returned ones first, so that a pool grows as late as possible."""
        assert count <= self.free, f"{count} pages wanted, {self.free} free"
        returned = [self._returned.pop() for _ in range(min(count, len(self._returned)))]
        new = range(self.used, self.used + count - len(returned))
        self.used = new.stop
        pages = [*returned, *new]
        for page in pages:
            self.holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more row holds each of these different pages."""
        for page in pages:
            self.holders[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """One row fewer holds each of these different pages; those that nobody holds become free."""
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.forget(page)
                self._returned.append(page)

    # ------------------------------------------------------------------ full pages by their ids

    def remember(self, before: int, ids: Sequence[int], page: int) -> None:
        """A page is full and follows ``before``. The first of several equal ones is found later."""
        key = (before, tuple(ids))
        if page not in self._key_of and key not in self._page_of:
            self._page_of[key], self._key_of[page] = page, key

    def forget(self, page: int) -> None:
        """A page is free, or about to be written again."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]

    def prefix(self, ids: Sequence[int], size: int) -> list[int]:
        """The longest chain of full pages of ``size`` ids that holds a prefix of these ids."""
        chain, before = list[int](), 0
        for start in range(0, len(ids) - size + 1, size):
            page = self._page_of.get((before, tuple(ids[start : start + size])))
            if page is None:
                break
            chain.append(page)
            before = page
        return chain


@dataclass(eq=False, slots=True)
class PagedRow:
    """The pages of a row. It keeps this object when rows are exchanged."""

    row: int
    pages: list[int] = field(default_factory=list)
    indexed: int = 0  # of its pages, those that the allocator knows by their ids
    used_at: int = 0  # admission in which it last ran

    def page(self, index: int) -> int:
        """0 where it holds none."""
        return self.pages[index] if index < len(self.pages) else 0


@dataclass(eq=False)
class PagedCache(CacheBlocks):
    """``pages``: most pages of the pool, at least those of one full context. ``page``: columns of a page.

    A page that several rows hold is never written: the row that wants to write takes a copy of it first. Idle dialogues keep
    their pages until others need them; the least recently used lose theirs first, from the end.

    Bookkeeping is in lists and not in arrays: it handles one row after another, and a look at an array costs ten times one at a
    list. For 256 dialogues that took 30 ms an admission on a CPU; perhaps why pages were 5 % slower than rows on a GPU."""

    pages: int = 0
    page: int = PAGE

    def __post_init__(self) -> None:
        super().__post_init__()
        per_row = self._pages_for(self.context)
        least = per_row + 1  # a dialogue that continues another holds one page twice while it copies it
        self.pages = min(self.pages or sys.maxsize, self.rows * least)
        if self.pages < least:
            raise CacheTooSmall(
                f"the KV cache has {self.pages} pages of {self.page} ids, and one dialogue of {self.context} ids needs "
                f"{least}; write a smaller context"
            )
        self.allocator = PageAllocator(self.pages + 1)
        self.paged_rows = [PagedRow(row) for row in range(self.rows)]
        self.active = self.clock = 0  # running rows, admissions
        self.capacity = 0  # pages allocated so far
        self.width = self.context
        self.block_table = np.zeros((self.rows, per_row), np.int32)  # 0 where a row holds no page
        self._changed: set[int] = set()  # rows whose line of the block table is to be written
        self.table = self.host_table = torch.from_numpy(self.block_table)
        if self.device.type != "cpu":
            self.table = self.table.to(self.device)
        self._grow(FIRST_PAGES)

    def describe(self) -> str:
        return f"KV cache in {self.pages:,} pages of {self.page} ids{self.why}"

    def _pages_for(self, columns: int) -> int:
        return -(-columns // self.page)

    # ------------------------------------------------------------------ memory

    def allocate_all(self) -> None:
        self._grow(self.pages + 1)

    def reserve(self, width: int) -> None:
        """Nothing: ``hold`` and ``admit`` take pages row by row."""

    def _grow(self, pages: int) -> None:
        """Allocate at least so many pages. Doubles."""
        if pages > self.capacity:
            self.capacity = min(self.pages + 1, max(pages, 2 * self.capacity))
            self._allocate(self.capacity, self.page)

    def _write_table(self, upload: bool) -> None:
        """Write the lines of the block table that changed; ``upload`` those of the running rows to the device."""
        for row in self._changed:
            pages = self.paged_rows[row].pages
            self.block_table[row, : len(pages)] = pages
            self.block_table[row, len(pages) :] = 0
        self._changed.clear()
        if upload and self.device.type != "cpu" and self.active:
            assert self.table is not None
            host = torch.from_numpy(self.block_table[: self.active].copy())
            self.table[: self.active] = to_device(host, self.device)

    # ------------------------------------------------------------------ pages of a row

    def _truncate(self, line: PagedRow, pages: int) -> None:
        """Keep the first pages of a row."""
        if pages < len(line.pages):
            self.allocator.drop(line.pages[pages:])
            del line.pages[pages:]
            line.indexed = min(line.indexed, pages)
            self._changed.add(line.row)

    def _extend(self, line: PagedRow, columns: int, written: int) -> list[BlockCopy]:
        """Take pages for ``columns`` columns, of which those from ``written`` on will be written; return the page copies that
        come before. There must be enough free pages."""
        copies, first = list[BlockCopy](), written // self.page
        for index in range(first, min(len(line.pages), self._pages_for(columns))):
            page = line.pages[index]
            if self.allocator.holders[page] > 1:
                (line.pages[index],) = self.allocator.take(1)
                if index == first and written % self.page:  # the others are written from their first column on
                    copies.append(BlockCopy(page, line.pages[index], self.page))
                self.allocator.drop([page])
            else:
                self.allocator.forget(page)
        line.indexed = min(line.indexed, first)
        more = self._pages_for(columns) - len(line.pages)
        if more > 0:
            line.pages += self.allocator.take(more)
        self._changed.add(line.row)
        self._grow(self.allocator.used)
        return copies

    def hold(self, growths: Sequence[Growth], evict: bool = True) -> bool:
        """Make room for the next columns of rows [0, n), if need be and ``evict`` at the expense of idle dialogues. False: there
        is none."""
        self.active = max(self.active, len(growths))
        ends = [(line, min(self.context, sum(growth)), growth[0]) for line, growth in zip(self.paged_rows, growths)]
        wanted = 0  # pages that ``_extend`` will take: new ones, and copies of shared ones that are written
        for line, columns, written in ends:
            first, last = written // self.page, self._pages_for(columns)
            shared = sum(self.allocator.holders[page] > 1 for page in line.pages[first:last])
            wanted += max(0, last - len(line.pages)) + shared
        if wanted > self.allocator.free and not (evict and wanted <= self.pages - len(self._pinned())):
            return False
        self._free_pages(wanted)
        self.copy_blocks([copy for end in ends for copy in self._extend(*end)])
        self._write_table(upload=True)
        return True

    def _pinned(self) -> set[int]:
        """The pages that running rows hold."""
        return {page for line in self.paged_rows[: self.active] for page in line.pages}

    def _free_pages(self, wanted: int) -> None:
        """Free pages of idle rows until so many are free: of the least recently used first, its last page first."""
        if wanted <= self.allocator.free:
            return
        for line in sorted(self.paged_rows[self.active :], key=lambda line: line.used_at):
            while line.pages and wanted > self.allocator.free:
                self._truncate(line, len(line.pages) - 1)
            self.cached_ids[line.row] = self.cached_ids[line.row][: len(line.pages) * self.page]
            if not line.pages:
                self.release(self.owner[line.row])
            if wanted <= self.allocator.free:
                return

    # ------------------------------------------------------------------ rows

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        books: tuple[list[Any], ...] = (self.paged_rows, self.owner, self.cached_ids)
        for entries in books:
            entries[a], entries[b] = entries[b], entries[a]
        for row in (a, b):
            self.paged_rows[row].row = row
            if (slot := self.owner[row]) is not None:
                slot.row = row
        self._changed |= {a, b}

    def _enter(self, slot: CacheSlot) -> PagedRow:
        """Give a dialogue the first row after the running ones; what is there moves to an empty row, or the least recently used
        row is emptied."""
        row = self.active
        if slot.row is not None:
            self._swap(slot.row, row)
        else:
            idle = self.paged_rows[row:]
            line = next((line for line in idle if not line.pages), None) or min(idle, key=lambda line: line.used_at)
            self._truncate(line, 0)
            self.cached_ids[line.row] = []
            self.release(self.owner[line.row])
            self._swap(line.row, row)
            slot.row, self.owner[row] = row, slot
        self.active += 1
        return self.paged_rows[row]

    def admit(self, running: Sequence[CacheSlot], admissions: Sequence[Admission]) -> AdmissionPlan:
        """One dialogue after another while there are pages. Each begins with the pages of the longest prefix that any row holds,
        those of this admission included."""
        assert self.active == len(running)
        self.clock += 1
        for line in self.paged_rows:
            self._index(line)
        plan, tails = AdmissionPlan(0), dict[int, list[PagedRow]]()
        for line, ids in zip(
            self.paged_rows, self.cached_ids
        ):  # rows that end within a page, by the page before it (0: none)
            if len(ids) % self.page:
                full = len(ids) // self.page
                tails.setdefault(line.page(full - 1) if full else 0, []).append(line)
        leaders: dict[tuple[int, ...], PagedRow] = {}
        rounds: dict[int, list[PrefillChunk]] = {}
        ready: dict[int, int] = {}  # round after which a page of this admission is computed
        copies: list[BlockCopy] = []
        # Running rows will soon need one page of columns each: without it an admitted dialogue would have to leave at once.
        running_ends = [
            self._pages_for(min(self.context, len(ids) + 1 + self.page)) for ids in self.cached_ids[: self.active]
        ]
        growth = sum(max(0, end - len(line.pages)) for end, line in zip(running_ends, self.paged_rows))
        pinned = self._pinned()
        for slot, ids in admissions:
            key = tuple(ids)
            if key in leaders:
                pages, cached = list(leaders[key].pages), len(ids)
            else:
                pages, cached = self._source(slot, ids, tails, ready)
            fresh = self._pages_for(len(ids)) - len(pages) + bool(cached % self.page and cached < len(ids))
            more = self._pages_for(min(self.context, len(ids) + 1 + self.page)) - self._pages_for(len(ids)) + 1
            unpinned = sum(page not in pinned for page in pages)
            if self.active and len(pinned) + unpinned + fresh + growth + more > self.pages:
                break
            self.allocator.share(pages)  # first, so that no eviction frees them
            line = self._enter(slot)
            self._truncate(line, 0)
            line.pages, line.indexed, line.used_at = pages, 0, self.clock
            self._changed.add(line.row)
            self._free_pages(fresh)
            copies += self._extend(line, len(ids), cached) if cached < len(ids) else []
            self.cached_ids[line.row] = ids
            self._index(line)
            leaders.setdefault(key, line)
            rounds_before = [ready.get(page, 0) for page in pages]
            when, old = max(rounds_before, default=0), min(cached, rounds_before.count(0) * self.page)
            plan.cached, plan.shared = plan.cached + old, plan.shared + cached - old
            if cached < len(ids):
                rounds.setdefault(when, []).append(PrefillChunk(line.row, cached, ids[cached:]))
                ready |= dict.fromkeys(line.pages[cached // self.page :], when + 1)
            pinned.update(line.pages)
            growth += more
            plan.admitted += 1
        self.copy_blocks(copies)
        self._write_table(upload=True)
        plan.rounds = [rounds[when] for when in sorted(rounds)]
        return plan

    def _source(
        self, slot: CacheSlot, ids: list[int], tails: Mapping[int, list[PagedRow]], unread: Container[int]
    ) -> tuple[list[int], int]:
        """The pages that hold the longest prefix of these ids, and its length: the dialogue's own, or those of any row. The last
        page may be copied before anything is computed, so it is none of ``unread``."""
        in_own_row = 0 if slot.row is None else common_prefix_length(self.cached_ids[slot.row], ids)
        pages = self.allocator.prefix(ids, self.page)
        length = len(pages) * self.page
        rest, best, source = ids[length : length + self.page], 0, None
        before = pages[-1] if pages else 0
        for line in tails.get(before, ()):
            replaced = before and line.page(len(pages) - 1) != before  # since the tails were listed
            if replaced or line.page(len(pages)) in unread:
                continue
            common = common_prefix_length(self.cached_ids[line.row][length:], rest)  # 0 for a row that lost the page
            if common > best:
                best, source = common, line
            if best == len(rest):
                break
        if in_own_row >= length + best and slot.row is not None:
            return self.paged_rows[slot.row].pages[: self._pages_for(in_own_row)], in_own_row
        return pages if source is None else source.pages[: len(pages) + 1], length + best

    def _index(self, line: PagedRow) -> None:
        """Tell the allocator the ids of pages that have become full."""
        ids = self.cached_ids[line.row] if line.pages else []
        for index in range(line.indexed, len(ids) // self.page):
            part = ids[index * self.page : (index + 1) * self.page]
            self.allocator.remember(line.pages[index - 1] if index else 0, part, line.pages[index])
        line.indexed = max(line.indexed, len(ids) // self.page)

    def assign_rows(self, active: Sequence[CacheSlot]) -> None:
        """Give the ``active`` slots, which must have rows, rows [0, n). The others keep the pages of the ids they have read."""
        n = len(active)
        taken = {slot.row for slot in active}
        free = [row for row in range(n) if row not in taken]
        for slot, row in zip([s for s in active if s.row is not None and s.row >= n], free):
            assert slot.row is not None
            self._swap(slot.row, row)
        for line in self.paged_rows[n : max(n, self.active)]:
            self._truncate(line, self._pages_for(len(self.cached_ids[line.row])))
        self.active = n
        self._write_table(upload=False)

    def invalidate(self) -> None:
        """Forgets all pages, too."""
        for line in self.paged_rows:
            self._truncate(line, 0)
            if line.row >= self.active:
                self.release(self.owner[line.row])
        self._write_table(upload=False)
        super().invalidate()


KVCache = RowCache | PagedCache


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """Rows or pages, how many, and why. Pages where rows would not fit into the memory left for the cache, or where they are
    asked for. ``room``: bytes for the cache, None for any. ``page``: columns of a page; 0 for rows, None to choose by the
    room."""

    room: int | None = None
    page: int | None = None

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
        why = ""
        if not fits and not self.page:
            sizes = [rows * context * column, self.room or 0]
            need, have = (f"{n / GIB:.1f} GiB" if n >= GIB else f"{n / (1 << 20):.0f} MiB" for n in sizes)
            why = f"{rows} rows of {context} ids would take {need} of {have}"
        if not page:
            return RowCache(shapes, rows, context, dtype, device, why=why and f", which may not fit: {why}")
        why = why and f", because {why}"
        return PagedCache(shapes, rows, context, dtype, device, pages=pages, page=page, why=why)
