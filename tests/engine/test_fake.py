"""The fake refuses what a real backend could not run, so tests over it prove the engine's plans."""

import pytest

from headlong.backends.fake import FakeBackend, fake_limits
from headlong.engine.request import Chunk, RowPlan, Sampling
from headlong.errors import Fault


@pytest.fixture
def fake():
    """Row 0 with a prompt of 11 tokens, nothing run yet; chunks of 8, pages of 4."""
    backend = FakeBackend(lambda history: len(history), limits=fake_limits(rows=2))
    backend.start(0, range(11), Sampling(), seed=1)
    return backend


def first(**changes):
    return Chunk(**{"row": 0, "start": 0, "tokens": range(8), "after": 8, "pages": (0, 1), **changes})


def second(**changes):
    return Chunk(**{"row": 0, "start": 8, "tokens": (8, 9), "after": 10, "pages": (2,), "draft": 2, **changes})


def test_a_valid_life(fake):
    fake.prefill(first())
    fake.prefill(second())
    (kept,) = fake.round([RowPlan(0, verify=2, draft=1, pages=(3,))]).result()
    assert (kept.tokens, kept.verified) == ((11, 12, 13), 2)
    fake.release(0)
    assert not fake.rows


@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        (first(row=1), "row 1 was used before it was started"),
        (first(start=4), "a chunk starts at 4 and the row stands at 0"),
        (first(tokens=range(5), after=5), "a chunk ends at 5"),
        (first(tokens=range(1, 9)), "a chunk's tokens are not the prompt's"),
        (first(after=9), "the token after a chunk is not the prompt's"),
        (first(draft=1, pages=(0, 1, 2)), "a chunk before the last one drafts"),
        (first(pages=(0,)), "1 pages do not cover 8 positions"),
        (first(pages=(0, 0)), "a page that is taken"),
        (first(pages=(0, 99)), "an unknown page"),
    ],
)
def test_a_bad_chunk_is_a_fault(fake, chunk, says):
    with pytest.raises(Fault, match=says):
        fake.prefill(chunk)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (RowPlan(1, 0, 0), "row 1 was used before it was started"),
        (RowPlan(0, 3, 0), "3 of 2 drafts are verified"),
        (RowPlan(0, 2, 0), "3 pages do not cover 13 positions"),
        (RowPlan(0, 1, 1), "3 pages do not cover 13 positions"),
        (RowPlan(0, 0, 9, tuple(range(3, 9))), "9 drafts were asked"),
        (RowPlan(0, 0, 0, tuple(range(3, 20))), "more pages than the context"),
    ],
)
def test_a_bad_round_is_a_fault(fake, part, says):
    fake.prefill(first())
    fake.prefill(second())
    with pytest.raises(Fault, match=says):
        fake.round([part])


def test_a_round_before_the_prompt_is_in_is_a_fault(fake):
    fake.prefill(first())
    with pytest.raises(Fault, match="before its prompt is in"):
        fake.round([RowPlan(0, 0, 0)])


@pytest.mark.parametrize("plan", [[], [RowPlan(0, 0, 0)] * 2])
def test_a_round_has_every_row_once(fake, plan):
    with pytest.raises(Fault, match="empty or has a row twice"):
        fake.round(plan)


def test_rows_cannot_share_a_page(fake):
    fake.prefill(first())
    fake.start(1, range(11), Sampling(), seed=1)
    with pytest.raises(Fault, match="a page that is taken"):
        fake.prefill(first(row=1, pages=(1, 2)))


@pytest.mark.parametrize(("row", "prompt", "seed"), [(0, [1], 0), (2, [1], 0), (1, [], 0), (1, [1], -1)])
def test_a_bad_start_is_a_fault(fake, row, prompt, seed):
    with pytest.raises(Fault):
        fake.start(row, prompt, Sampling(), seed)
