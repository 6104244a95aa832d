"""The KV cache in pages: a row is a list of pages, so that memory follows the lengths that dialogues have, and rows share pages.

Running requests have rows [0, n), like in ``KVCache``, but a row is only a line of the block table; moving one copies nothing.
A page that several rows hold is never written: the row that wants to write takes a copy of it first. Idle dialogues keep their
pages until others need them; the least recently used lose theirs first, from the end. Knows ids, rows and pages; neither models
nor sampling.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turnwise.core.transfer import to_device
from turnwise.engines.generator.kv_cache import (
    Admission,
    AdmissionPlan,
    CacheSlot,
    KVCache,
    PrefillChunk,
    RowCopy,
    RowGrowth,
    common_prefix_length,
)
from turnwise.engines.generator.page_allocator import PageAllocator, Pages
from turnwise.errors import SettingError

PAGE = 64  # columns of a page: the attention kernels read so many at once
FIRST_PAGES = 32  # allocated at first where the pool may grow
NONE: Pages = np.zeros(0, np.int32)


class CacheTooSmall(SettingError):
    """Not one dialogue fits: no other way to decode would help."""


@dataclass(eq=False)
class PagedKVCache(KVCache):
    """``pages``: most pages of the pool, at least those of one full context. ``page``: columns of a page."""

    pages: int = 0
    page: int = PAGE

    def __post_init__(self) -> None:
        self.pages_per_row = self._pages_for(self.context)
        least = self.pages_per_row + 1  # a dialogue that continues another holds one page twice while it copies it
        self.pages = min(self.pages or sys.maxsize, self.rows * least)
        if self.pages < least:
            raise CacheTooSmall(
                f"the KV cache has {self.pages} pages of {self.page} ids, and one dialogue of {self.context} ids needs "
                f"{least}; write a smaller context"
            )
        self.allocator = PageAllocator(self.pages + 1)
        self.block_table = np.zeros((self.rows, self.pages_per_row), np.int32)  # 0 where a row holds no page
        self.held = np.zeros(self.rows, np.int64)  # pages of each row
        self.indexed = np.zeros(self.rows, np.int64)  # of them, those that the allocator knows by their ids
        self.used_at = np.zeros(self.rows, np.int64)  # admission in which each row last ran
        self.name = np.arange(self.rows)  # of what a row holds: stays with it when rows are exchanged ...
        self.row_of = np.arange(self.rows)  # ... and where it is now
        self.active = self.clock = 0  # running rows, admissions
        self.capacity = 0  # pages allocated so far
        super().__post_init__()
        self.width = self.context
        self.table = torch.from_numpy(self.block_table)
        if self.device.type != "cpu":
            self.table = self.table.to(self.device)

    def describe(self) -> str:
        return f"KV cache in {self.pages:,} pages of {self.page} ids{self.why}"

    def _pages_for(self, columns: int) -> int:
        return -(-columns // self.page)

    # ------------------------------------------------------------------ memory

    def reserve(self, width: int) -> None:
        """Nothing: ``hold`` and ``admit`` take pages."""
        if not self.capacity:
            self._grow(FIRST_PAGES)

    def allocate_all(self) -> None:
        self._grow(self.pages + 1)

    def _grow(self, pages: int) -> None:
        """Allocate at least so many pages. Doubles."""
        if pages <= self.capacity:
            return
        pages = min(self.pages + 1, max(pages, 2 * self.capacity))
        old, flat = self._blocks, [shape for pair in self.shapes for shape in pair]
        plan = [(len(flat), flat[0])] if self.uniform else [(1, shape) for shape in flat]
        self._blocks = [  # zeros, not empty: a masked column is still multiplied by 0, and 0 * NaN is NaN
            torch.zeros(count, pages, heads, self.page, size, dtype=self.dtype, device=self.device)
            for count, (heads, size) in plan
        ]
        for new, block in zip(self._blocks, old):
            new[:, : self.capacity] = block
        self.capacity = pages
        tensors = [tensor for block in self._blocks for tensor in block.unbind(0)]
        self.keys, self.values = tensors[0::2], tensors[1::2]

    def upload(self) -> None:
        """Copy the block table of the running rows to the device."""
        if self.device.type != "cpu" and self.active:
            assert self.table is not None
            host = torch.from_numpy(self.block_table[: self.active].copy())
            self.table[: self.active] = to_device(host, self.device)

    @property
    def block_width(self) -> int:
        return self.page

    def places(self, row: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.from_numpy(self.block_table) if row.device.type == "cpu" else self.table
        assert table is not None
        return table[row, position // self.page].long(), position % self.page

    def columns(self, layer: int, rows: int | Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, Hkv, width, D] of these rows, or of the first so many (a copy)."""
        assert self.table is not None
        which = slice(rows) if isinstance(rows, int) else rows
        pages = self.table[which, : self._pages_for(width)].long()
        parts = (t[layer][pages].transpose(1, 2).flatten(2, 3)[:, :, :width] for t in (self.keys, self.values))
        keys, values = parts
        return keys, values

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        assert not copies, "rows share pages; nothing is copied"

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target); read every source before any target is written."""
        if not copies:
            return
        source, target = torch.tensor(copies, device=self.device).T
        for block in self._blocks:
            block.index_copy_(1, target, block.index_select(1, source))

    # ------------------------------------------------------------------ pages of a row

    def _row_pages(self, row: int) -> Pages:
        return self.block_table[row, : self.held[row]]

    def _truncate(self, row: int, pages: int) -> None:
        """Keep the first pages of a row."""
        if pages < self.held[row]:
            self.allocator.drop(self.block_table[row, pages : self.held[row]].copy())
            self.block_table[row, pages:] = 0
            self.held[row] = pages
            self.indexed[row] = min(self.indexed[row], pages)

    def _set_pages(self, row: int, pages: Pages) -> None:
        """Let a row hold these pages, which are counted for it already, instead of its own."""
        self._truncate(row, 0)
        self.block_table[row, : len(pages)] = pages
        self.held[row], self.indexed[row] = len(pages), 0

    def _extend(self, row: int, columns: int, written: int) -> list[tuple[int, int]]:
        """Take pages for ``columns`` columns, of which those from ``written`` on will be written; return the page copies that
        come before. There must be enough free pages."""
        copies, first = [], written // self.page
        for index in range(first, min(int(self.held[row]), self._pages_for(columns))):
            page = int(self.block_table[row, index])
            if self.allocator.holders[page] > 1:
                own = self.allocator.take(1)
                self.block_table[row, index] = own[0]
                copies += [(page, int(own[0]))] if index == first and written % self.page else []
                self.allocator.drop(np.array([page], np.int32))
            else:
                self.allocator.forget(page)
        self.indexed[row] = min(self.indexed[row], first)
        more = self._pages_for(columns) - int(self.held[row])
        if more > 0:
            self.block_table[row, self.held[row] : self.held[row] + more] = self.allocator.take(more)
            self.held[row] += more
        self._grow(self.allocator.used)
        return copies

    def _wanted(self, row: int, columns: int, written: int) -> int:
        """Pages that ``_extend`` would take."""
        first, last = written // self.page, self._pages_for(columns)
        kept = self.block_table[row, first : min(last, int(self.held[row]))]
        return max(0, last - int(self.held[row])) + int((self.allocator.holders[kept] > 1).sum())

    def hold(self, growths: Sequence[RowGrowth], evict: bool = True) -> bool:
        self.active = max(self.active, len(growths))
        ends = [min(self.context, g.length + g.more) for g in growths]
        wanted = sum(self._wanted(row, end, g.length) for row, (g, end) in enumerate(zip(growths, ends)))
        if wanted > self.allocator.free and not (evict and wanted <= self.pages - self._pinned().sum()):
            return False
        self._free_pages(wanted)
        copies = [c for row, (g, end) in enumerate(zip(growths, ends)) for c in self._extend(row, end, g.length)]
        self._copy_pages(copies)
        self.upload()
        return True

    def _pinned(self) -> np.ndarray:
        """Which pages running rows hold."""
        out = np.zeros(self.pages + 1, bool)
        out[self.block_table[: self.active]] = True
        out[0] = False
        return out

    def _free_pages(self, wanted: int) -> None:
        """Free pages of idle rows until so many are free: of the least recently used first, its last page first."""
        if wanted <= self.allocator.free:
            return
        for row in self.active + np.argsort(self.used_at[self.active :], kind="stable"):
            while self.held[row] and wanted > self.allocator.free:
                self._truncate(row, int(self.held[row]) - 1)
            self.cached_ids[row] = self.cached_ids[row][: int(self.held[row]) * self.page]
            if not self.held[row]:
                self._disown(row)
            if wanted <= self.allocator.free:
                return

    def _disown(self, row: int) -> None:
        slot, self.owner[row] = self.owner[row], None
        if slot is not None:
            slot.row = None

    # ------------------------------------------------------------------ rows

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        for array in (self.block_table, self.held, self.indexed, self.used_at, self.name):
            array[[a, b]] = array[[b, a]]
        self.row_of[self.name[[a, b]]] = a, b
        self.owner[a], self.owner[b] = self.owner[b], self.owner[a]
        self.cached_ids[a], self.cached_ids[b] = self.cached_ids[b], self.cached_ids[a]
        for row in (a, b):
            if (slot := self.owner[row]) is not None:
                slot.row = row

    def _enter(self, slot: CacheSlot) -> int:
        """Give a dialogue the first row after the running ones; what is there moves to an empty row, or the least recently used
        row is emptied."""
        row = self.active
        if slot.row is not None:
            self._swap(slot.row, row)
        else:
            empty = np.flatnonzero(self.held[row:] == 0)
            other = row + int(empty[0] if len(empty) else np.argmin(self.used_at[row:]))
            self._clear(other)
            self._swap(other, row)
            slot.row, self.owner[row] = row, slot
        self.active += 1
        return row

    def _clear(self, row: int) -> None:
        self._truncate(row, 0)
        self.cached_ids[row] = []
        self._disown(row)

    def admit(self, running: Sequence[CacheSlot], admissions: Sequence[Admission]) -> AdmissionPlan:
        """Give waiting dialogues rows and pages, one after another while there are pages. Each begins with the pages of the
        longest prefix that any row holds, those of this admission included."""
        assert self.active == len(running)
        self.clock += 1
        self._index_rows()
        plan, tails = AdmissionPlan(0), self._tails()
        leaders: dict[tuple[int, ...], int] = {}
        rounds: dict[int, list[PrefillChunk]] = {}
        ready: dict[int, int] = {}  # round after which a page of this admission is computed
        copies: list[tuple[int, int]] = []
        pinned, growth = self._pinned(), self._expected_growth()
        for slot, ids in admissions:
            leader = leaders.get(tuple(ids))
            pages, cached = (
                self._source(slot, ids, tails, ready) if leader is None else (self._row_pages(leader).copy(), len(ids))
            )
            fresh = self._pages_for(len(ids)) - len(pages) + bool(cached % self.page and cached < len(ids))
            more = self._pages_for(min(self.context, len(ids) + 1 + self.page)) - self._pages_for(len(ids)) + 1
            after = int(pinned.sum()) + int((~pinned[pages]).sum()) + fresh + growth + more
            if self.active and after > self.pages:
                break
            self.allocator.share(pages)  # first, so that no eviction frees them
            row = self._enter(slot)
            self._set_pages(row, pages)
            self._free_pages(fresh)
            copies += self._extend(row, len(ids), cached) if cached < len(ids) else []
            self.cached_ids[row], self.used_at[row] = ids, self.clock
            self._index(row)
            leaders.setdefault(tuple(ids), row)
            rounds_before = [ready.get(page, 0) for page in pages.tolist()]
            when, old = max(rounds_before, default=0), min(cached, rounds_before.count(0) * self.page)
            plan.cached, plan.shared = plan.cached + old, plan.shared + cached - old
            if cached < len(ids):
                rounds.setdefault(when, []).append(PrefillChunk(row, cached, ids[cached:]))
                ready |= dict.fromkeys(self._row_pages(row)[cached // self.page :].tolist(), when + 1)
            pinned[self._row_pages(row)] = True
            growth += more
            plan.admitted += 1
        self._copy_pages(copies)
        self.upload()
        plan.rounds = [rounds[when] for when in sorted(rounds)]
        return plan

    def _expected_growth(self) -> int:
        """Pages that running rows will soon need: one page of columns each. Without them an admitted dialogue would have to
        leave again at once."""
        ends = [self._pages_for(min(self.context, len(ids) + 1 + self.page)) for ids in self.cached_ids[: self.active]]
        return sum(max(0, end - int(held)) for end, held in zip(ends, self.held))

    def _source(
        self, slot: CacheSlot, ids: list[int], tails: dict[int, list[int]], unread: Container[int]
    ) -> tuple[Pages, int]:
        """The pages that hold the longest prefix of these ids, and its length: the dialogue's own, or those of any row. The last
        page may be copied before anything is computed, so it is none of ``unread``."""
        own = 0 if slot.row is None else common_prefix_length(self.cached_ids[slot.row], ids)
        pages = self.allocator.prefix(ids, self.page)
        length = len(pages) * self.page
        rest, best, row = ids[length : length + self.page], 0, -1
        before = int(pages[-1]) if len(pages) else 0
        for candidate in self.row_of[tails.get(before, [])].tolist():
            replaced = before and self.block_table[candidate, len(pages) - 1] != before  # since the tails were listed
            if replaced or int(self.block_table[candidate, len(pages)]) in unread:
                continue
            common = common_prefix_length(self.cached_ids[candidate][length:], rest)  # 0 for a row that lost the page
            if common > best:
                best, row = common, candidate
            if best == len(rest):
                break
        if own >= length + best and slot.row is not None:
            return self._row_pages(slot.row)[: self._pages_for(own)].copy(), own
        if row >= 0:
            pages = self.block_table[row, : len(pages) + 1].copy()
        return pages, length + best

    def _tails(self) -> dict[int, list[int]]:
        """Names of rows that end within a page, by the page before it (0 for none)."""
        out: dict[int, list[int]] = {}
        for row in range(self.rows):
            if len(self.cached_ids[row]) % self.page:
                full = len(self.cached_ids[row]) // self.page
                out.setdefault(int(self.block_table[row, full - 1]) if full else 0, []).append(int(self.name[row]))
        return out

    def _index_rows(self) -> None:
        for row in np.flatnonzero(self.held):
            self._index(int(row))

    def _index(self, row: int) -> None:
        """Tell the allocator the ids of pages that have become full."""
        ids = self.cached_ids[row]
        for index in range(int(self.indexed[row]), len(ids) // self.page):
            before = int(self.block_table[row, index - 1]) if index else 0
            part = ids[index * self.page : (index + 1) * self.page]
            self.allocator.remember(before, part, int(self.block_table[row, index]))
        self.indexed[row] = max(int(self.indexed[row]), len(ids) // self.page)

    def assign_rows(self, active: Sequence[CacheSlot], prefix_sources: object = None) -> None:
        """Give the ``active`` slots, which have rows, rows [0, n). The others keep the pages of the ids they have read."""
        n = len(active)
        taken = {slot.row for slot in active}
        free = [row for row in range(n) if row not in taken]
        for slot, row in zip([s for s in active if s.row is not None and s.row >= n], free):
            assert slot.row is not None
            self._swap(slot.row, row)
        for row in range(n, max(n, self.active)):
            self._truncate(row, self._pages_for(len(self.cached_ids[row])))
        self.active = n

    def invalidate(self) -> None:
        """Forget all ids and pages: after a weight update they hold the KV of an older policy."""
        for row in range(self.rows):
            self._truncate(row, 0)
            if row >= self.active:
                self._disown(row)
        super().invalidate()
