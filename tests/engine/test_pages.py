"""The page pool."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headlong.engine.pages import PagePool
from headlong.errors import Fault


def test_what_is_taken_can_be_given_back():
    pool = PagePool(4)
    first, rest = pool.take(1), pool.take(3)
    assert first == (0,)
    assert rest == (1, 2, 3)
    assert pool.free == 0
    assert pool.give(rest) == rest
    assert pool.give(first) == first
    pool.check(held=[])
    assert pool.free == 4


def test_taking_nothing_is_allowed():
    assert PagePool(0).take(0) == ()


def test_taking_too_many_is_a_fault_and_takes_none():
    pool = PagePool(2)
    with pytest.raises(Fault, match="3 pages were taken and 2 are free"):
        pool.take(3)
    pool.check(held=[])


def test_a_shared_page_is_free_when_its_last_holder_gives_it_back():
    pool = PagePool(3)
    pages = pool.take(2)
    pool.share(pages[:1])
    assert [pool.holders(page) for page in range(3)] == [2, 1, 0]
    assert pool.give(pages) == (1,)
    assert pool.free == 2
    assert pool.give((0,)) == (0,)
    assert pool.holders(0) == 0


@pytest.mark.parametrize("page", [0, 2, -1])
def test_a_page_that_nobody_holds_is_neither_shared_nor_given(page):
    pool = PagePool(2)
    pool.give(pool.take(1))
    with pytest.raises(Fault, match=f"page {page} was given back and nobody holds it"):
        pool.give((page,))
    with pytest.raises(Fault, match=f"page {page} was shared and nobody holds it"):
        pool.share((page,))
    pool.check(held=[])


def test_a_page_given_twice_at_once_is_a_fault():
    pool = PagePool(1)
    (page,) = pool.take(1)
    with pytest.raises(Fault, match="nobody holds it"):
        pool.give((page, page))


@pytest.mark.parametrize("held", [(), (0,), (0, 1, 1, 1), (0, 0, 1, 1), (0, 1, 1, 2)])
def test_the_check_finds_holders_that_were_not_counted(held):
    pool = PagePool(3)
    pool.take(2)
    pool.share((1,))
    pool.check(held=(1, 0, 1))
    with pytest.raises(Fault, match="more or less often than counted"):
        pool.check(held=held)


@pytest.mark.parametrize("free", [[], [1, 1], [1, 0], [2], [-1]])
def test_the_check_finds_a_wrong_free_list(free):
    pool = PagePool(2)
    pool.take(1)
    pool.check()
    pool._free = free
    with pytest.raises(Fault, match="each of 2 pages once"):
        pool.check()


@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "give"]), st.integers(0, 5)), max_size=60))
def test_counts_are_those_of_a_multiset(steps):
    pool, held = PagePool(6), Counter()
    for action, number in steps:
        if action == "take" and number <= pool.free:
            taken = pool.take(number)
            assert not any(held[page] for page in taken)
            held.update(taken)
        elif action == "share" and held[number]:
            pool.share((number,))
            held[number] += 1
        elif action == "give" and held[number]:
            held[number] -= 1
            assert pool.give((number,)) == (() if held[number] else (number,))
        pool.check(held=held.elements())
        assert pool.free == sum(not held[page] for page in range(6))
