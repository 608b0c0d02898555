"""The page pool."""

import pytest

from headlong.engine.pages import PagePool
from headlong.errors import Fault


def test_what_is_taken_can_be_given_back():
    pool = PagePool(4)
    first, rest = pool.take(1), pool.take(3)
    assert first == (0,)
    assert rest == (1, 2, 3)
    assert pool.free == 0
    pool.give(rest)
    pool.give(first)
    pool.check()
    assert pool.free == 4


def test_taking_nothing_is_allowed():
    assert PagePool(0).take(0) == ()


def test_taking_too_many_is_a_fault():
    pool = PagePool(2)
    with pytest.raises(Fault, match="3 pages were taken and 2 are free"):
        pool.take(3)


@pytest.mark.parametrize("pages", [(0,), (2,), (-1,)])
def test_the_check_finds_a_page_given_twice_or_unknown(pages):
    pool = PagePool(2)
    pool.give(pages)
    with pytest.raises(Fault, match="a double or an unknown id"):
        pool.check()
