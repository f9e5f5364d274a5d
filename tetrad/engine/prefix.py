"""The prefix cache: full pages of finished and running sequences, found by what they hold.

A page is named by a hash of its 64 tokens and of the name of the page before it, so that equal
names mean equal prefixes. The hash is a cryptographic one: with a weaker hash a client could craft
tokens that make another client's prompt continue from the wrong keys.

Only full pages are shared and nobody writes to a full page, so sharing needs no copies. A page that
only the cache holds is *idle*. Idle pages are evicted in the order in which they became so, and the
pages of a sequence become so from the last to the first: a prefix outlives its extensions.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.blocks import PagePool

NAME_BYTES = 16


def extend_names(names: list[bytes], token_ids: array[int], num_tokens: int) -> None:
    """Append the names of the full pages of `token_ids[:num_tokens]`, int32, that `names` lacks."""
    for page in range(len(names), num_tokens // PAGE_TOKENS):
        its = token_ids[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS].tobytes()
        before = names[-1] if names else b""
        names.append(blake2b(before + its, digest_size=NAME_BYTES).digest())


def names_of(prompt: bytes) -> tuple[bytes, ...]:
    """`Request.page_names`, which an API process finds so that no step waits for it."""
    names: list[bytes] = []
    extend_names(names, token_ids := array("i", prompt), len(token_ids))
    return tuple(names)


class PrefixCache:
    """Stands before the pool: allocates (evicting if it must), shares, and keeps pages.

    A disabled cache keeps nothing and finds nothing.
    """

    def __init__(self, pool: PagePool, *, is_enabled: bool = True) -> None:
        self.pool = pool
        self.is_enabled = is_enabled
        self._page_of: dict[bytes, int] = {}
        self._name_of: list[bytes | None] = [None] * pool.num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Pages held by the cache alone."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages an allocation can have: free ones and idle ones."""
        return self.pool.num_free + len(self._idle)

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Pages of the longest known prefix of `names`. Nothing is held yet."""
        pages = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_idle_among(self, pages: Iterable[int]) -> int:
        return sum(map(self._idle.__contains__, pages))

    def share(self, pages: Sequence[int]) -> None:
        """Hold found pages for one more sequence."""
        self.pool.retain(pages)
        for page in pages:
            self._idle.pop(page, None)

    def allocate(self, count: int) -> list[int]:
        """Take pages for a sequence; evicts idle ones as needed. At most `num_available`."""
        while self.pool.num_free < count:
            page, _ = self._idle.popitem(last=False)
            self._drop(page)
        return self.pool.allocate(count)

    def keep(self, name: bytes, page: int) -> None:
        """Remember a full, computed page that a sequence holds. A name that is known stays with the
        page it has: the newcomer's page is freed with its sequence."""
        if self.is_enabled and name not in self._page_of:
            self._page_of[name], self._name_of[page] = page, name
            self.pool.retain((page,))

    def release(self, held: Iterable[Sequence[int]]) -> None:
        """Give back all pages of some sequences; those the cache keeps become idle."""
        name_of, idle = self._name_of, self._idle
        for page in self.pool.release([page for pages in held for page in reversed(pages)]):
            if name_of[page]:
                idle[page] = None

    def forget(self, pages: Iterable[int]) -> None:
        """Drop pages whose content must not be trusted. Sequences that hold them keep them."""
        for page in pages:
            if self._name_of[page]:
                self._idle.pop(page, None)
                self._drop(page)

    def flush(self) -> None:
        """Forget every page."""
        self.forget(list(self._page_of.values()))

    def _drop(self, page: int) -> None:
        name, self._name_of[page] = self._name_of[page], None
        assert name is not None
        del self._page_of[name]
        self.pool.release((page,))

    def check(self, held: Sequence[int]) -> None:
        """Raise AssertionError unless every page is explained by `held` (what sequences hold, one
        entry per reference) and by this cache."""
        kept = {page: name for name, page in self._page_of.items()}
        assert kept == {page: name for page, name in enumerate(self._name_of) if name}
        live = set(held)
        idle = {page for page in kept if page not in live}
        assert idle == set(self._idle), f"idle: {sorted(self._idle)}, should be {sorted(idle)}"
        self.pool.check([*held, *kept])
