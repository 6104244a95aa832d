"""Which pages of a pool are free, how many rows hold each of the others, and which full page follows which with which ids.

A page may be held by several rows: a fork, a group with one prompt and a dialogue that continues another hold the same pages of
their common prefix. Page 0 belongs to nobody: a column without a page is written there. Knows page numbers and ids; no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]
PageKey = tuple[int, tuple[int, ...]]
"""The page before (0 for none) and the ids of a full page: the same key means the same keys and values."""


class PageAllocator:
    """``pages``: pages of the pool, page 0 included."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.holders = np.zeros(pages, np.int32)  # rows that hold each page
        self.used = 1  # pages ever handed out: a pool that grows needs no more
        self._returned: list[int] = []
        self._page_of: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}

    @property
    def free(self) -> int:
        return len(self._returned) + self.pages - self.used

    def take(self, count: int) -> Pages:
        """Pages for one holder. Returned ones first, so that a pool grows as late as possible."""
        assert count <= self.free, f"{count} pages wanted, {self.free} free"
        again = [self._returned.pop() for _ in range(min(count, len(self._returned)))]
        new = range(self.used, self.used + count - len(again))
        self.used = new.stop
        out = np.array([*again, *new], np.int32)
        self.holders[out] = 1
        return out

    def share(self, pages: Pages) -> None:
        """One more row holds each of these different pages."""
        self.holders[pages] += 1

    def drop(self, pages: Pages) -> None:
        """One row fewer holds each of these different pages; those that nobody holds become free."""
        self.holders[pages] -= 1
        for page in pages[self.holders[pages] == 0].tolist():
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

    def prefix(self, ids: Sequence[int], size: int) -> Pages:
        """The longest chain of full pages of ``size`` ids that holds a prefix of these ids."""
        found, before = [], 0
        for start in range(0, len(ids) - size + 1, size):
            page = self._page_of.get((before, tuple(ids[start : start + size])))
            if page is None:
                break
            found.append(page)
            before = page
        return np.array(found, np.int32)
