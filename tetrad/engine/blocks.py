"""The page pool: which pages are free, and how many holders each of the others has."""

from __future__ import annotations

from collections.abc import Iterable

from tetrad.core.step import PAGE_TOKENS


def pages_for(num_tokens: int) -> int:
    """Pages that `num_tokens` tokens fill, the last one perhaps in part."""
    return -(-num_tokens // PAGE_TOKENS)


class PagePool:
    """Pages 0 .. num_pages - 1 with reference counts: one for each sequence that holds the page,
    and one for the prefix cache if it keeps it. A page nobody holds is free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one reference. The caller has made sure they exist."""
        assert 0 <= count <= len(self._free), f"{count} pages asked, {len(self._free)} free"
        split = len(self._free) - count
        pages = self._free[split:][::-1]
        del self._free[split:]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each of these, which somebody holds."""
        references = self._references
        for page in pages:
            assert references[page] > 0, f"page {page} is free and cannot be shared"
            references[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Drop one reference of each; at zero a page is free. Returns those that have one left."""
        references, single = self._references, []
        for page in pages:
            left = references[page] - 1
            assert left >= 0, f"page {page} is free already"
            references[page] = left
            if not left:
                self._free.append(page)
            elif left == 1:
                single.append(page)
        return single

    def references(self, page: int) -> int:
        return self._references[page]

    def check(self, owners: Iterable[int]) -> None:
        """Raise AssertionError unless `owners` (a page for each reference) explains every count."""
        expected = [0] * self.num_pages
        for page in owners:
            expected[page] += 1
        free = [0] * self.num_pages
        for page in self._free:
            free[page] += 1
        faults = {
            page: fault
            for page in range(self.num_pages)
            if (fault := _fault(self._references[page], expected[page], free[page]))
        }
        if faults:
            raise AssertionError(f"{len(faults)} of {self.num_pages} pages: {_drawing(faults)}")


def _fault(references: int, owners: int, free: int) -> str:
    """What is wrong with one page; "" if nothing is."""
    if references != owners:
        return f"{references} references but {owners} owners"
    if free != (references == 0):
        return f"{references} references but {free} times in the free list"
    return ""


def _drawing(faults: dict[int, str]) -> str:
    """`[3..7] 1 references but 0 owners; [9..9] ...`: runs of pages with the same fault."""
    runs: list[tuple[int, int, str]] = []
    for page, fault in faults.items():
        if runs and runs[-1][1] == page - 1 and runs[-1][2] == fault:
            runs[-1] = (runs[-1][0], page, fault)
        else:
            runs.append((page, page, fault))
    return "; ".join(f"[{first}..{last}] {fault}" for first, last, fault in runs)
