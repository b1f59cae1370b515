"""Pages of a paged KV cache: which of them are free."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from vtensors.counts import counted
from vtensors.errors import VtensorsError

DUMMY_PAGE = 0
"""Padding rows of a batch read and write this page; no sequence ever gets it."""
PAGE_SIZE = 64


class PageAllocator:
    """Gives out pages by number, lowest first.

    pages: of the cache, the dummy included, so one fewer can be given out. page_size: tokens of a page.
    Raises VtensorsError where no page is left beside the dummy.
    """

    def __init__(self, pages: int, page_size: int = PAGE_SIZE) -> None:
        if pages < 2 or page_size < 1:
            raise VtensorsError(
                "a cache of this size holds no token",
                seen=f"{counted(pages, 'page')} of {counted(page_size, 'token')}",
                accepted="the dummy page and at least one other, of at least one token",
            )
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(1, pages))  # a heap; a sorted list is one
        self._used: set[int] = set()

    @property
    def capacity(self) -> int:
        """Pages that can be given out at most."""
        return self.pages - 1

    @property
    def free_pages(self) -> int:
        """Pages that can be given out now."""
        return len(self._free)

    @property
    def used_pages(self) -> int:
        """Pages that are given out."""
        return len(self._used)

    def pages_for(self, tokens: int) -> int:
        """How many pages that many tokens take."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """count >= 1 pages, ascending; None, and nothing is taken, where fewer are free."""
        if count < 1:
            raise VtensorsError("a sequence takes at least one page", seen=counted(count, "page"))
        if count > len(self._free):
            return None
        taken = tuple(heapq.heappop(self._free) for _ in range(count))
        self._used.update(taken)
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back. Raises VtensorsError, and takes none, where one is not given out or comes twice."""
        back = list(pages)
        wrong = sorted(set(back) - self._used)
        if wrong or len(set(back)) != len(back):
            raise VtensorsError(
                "pages are given back that are not given out",
                seen=f"pages {wrong}" if wrong else f"a page twice in {sorted(back)}",
                accepted="every page of an allocation, once",
            )
        self._used.difference_update(back)
        for page in back:
            heapq.heappush(self._free, page)
