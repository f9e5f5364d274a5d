"""Page pool and prefix cache."""

from __future__ import annotations

from array import array

import pytest

from tetrad.core.step import PAGE_TOKENS
from tetrad.engine import prefix
from tetrad.engine.blocks import PagePool, pages_for
from tetrad.engine.prefix import PrefixCache, extend_names


def filled(*pages: int) -> array[int]:
    """Tokens of a sequence whose i-th page is filled with the token pages[i]."""
    return array("i", [token for token in pages for _ in range(PAGE_TOKENS)])


def names_of(*pages: int) -> list[bytes]:
    """Of the pages of such a sequence."""
    return [*prefix.names_of(filled(*pages).tobytes())]


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2)])
def test_pages_for(num_tokens: int, num_pages: int):
    assert pages_for(num_tokens) == num_pages


def test_a_page_is_free_when_its_last_holder_lets_go():
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.retain([page])
    assert pool.release([page]) == [page]
    assert pool.num_free == 1
    assert pool.release([page]) == []
    assert pool.num_free == 2


def test_a_free_page_cannot_be_released_or_shared():
    pool = PagePool(1)
    with pytest.raises(AssertionError, match="free already"):
        pool.release([0])
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.retain([0])


def test_a_leak_is_drawn_as_runs_of_pages():
    pool = PagePool(6)
    pool.allocate(4)
    with pytest.raises(AssertionError, match=r"3 of 6 pages: \[0..1\] 1 ref.* 0 owners; \[3..3\]"):
        pool.check([2])


def test_names_depend_on_everything_before():
    assert names_of(1, 2)[0] == names_of(1, 3)[0]
    assert names_of(1, 2)[1] != names_of(3, 2)[1]


def test_names_are_extended_not_repeated():
    names = names_of(1)
    extend_names(names, filled(1, 2), 2 * PAGE_TOKENS - 1)
    assert names == names_of(1)
    extend_names(names, filled(1, 2), 2 * PAGE_TOKENS)
    assert names == names_of(1, 2)


def kept(cache: PrefixCache, *pages: int) -> list[int]:
    """Compute and keep a sequence, then end it. Returns its pages, idle now."""
    held = cache.allocate(len(pages))
    for name, page in zip(names_of(*pages), held, strict=True):
        cache.keep(name, page)
    cache.release([held])
    cache.check([])
    return held


def test_a_kept_page_is_found_and_shared():
    cache = PrefixCache(PagePool(4))
    pages = kept(cache, 1, 2)
    assert cache.find(names_of(1, 2, 3)) == pages
    assert cache.find(names_of(1, 3)) == pages[:1]
    assert cache.find(names_of(2)) == []
    cache.share(pages)
    assert cache.num_idle == 0
    cache.check(pages)


def test_the_least_recently_idle_goes_first_and_tails_before_heads():
    cache = PrefixCache(PagePool(4))
    kept(cache, 1, 2)
    kept(cache, 3, 4)
    taken = cache.allocate(1)
    assert len(cache.find(names_of(1, 2))) == 1
    taken += cache.allocate(1)
    assert cache.find(names_of(1, 2)) == []
    assert len(cache.find(names_of(3, 4))) == 2
    cache.check(taken)


def test_use_makes_a_prefix_recent_again():
    cache = PrefixCache(PagePool(2))
    first = kept(cache, 1)
    kept(cache, 2)
    cache.share(first)
    cache.release([first])
    taken = cache.allocate(1)
    assert cache.find(names_of(1)) == first
    cache.check(taken)


def test_a_page_in_use_is_never_evicted():
    cache = PrefixCache(PagePool(2))
    pages = kept(cache, 1, 2)
    cache.share(pages[:1])
    assert cache.num_available == 1
    assert cache.allocate(1) == pages[1:]


def test_a_second_page_of_the_same_name_is_freed_with_its_sequence():
    cache = PrefixCache(PagePool(2))
    held = cache.allocate(2)
    for page in held:
        cache.keep(names_of(1)[0], page)
    cache.release([held])
    assert (cache.num_idle, cache.pool.num_free) == (1, 1)
    cache.check([])


def test_forget_takes_pages_out_but_not_away():
    cache = PrefixCache(PagePool(2))
    pages = kept(cache, 1, 2)
    cache.share(pages)
    cache.forget(pages)
    assert cache.find(names_of(1)) == []
    cache.check(pages)
    cache.release([pages])
    assert cache.pool.num_free == 2


def test_flush_frees_idle_pages():
    cache = PrefixCache(PagePool(2))
    kept(cache, 1, 2)
    cache.flush()
    assert (cache.num_idle, cache.pool.num_free) == (0, 2)
    cache.check([])


def test_a_disabled_cache_keeps_nothing():
    cache = PrefixCache(PagePool(2), is_enabled=False)
    kept(cache, 1, 2)
    assert cache.find(names_of(1)) == []
    assert cache.pool.num_free == 2
