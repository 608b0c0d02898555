"""The fake refuses what a real backend could not run, so tests over it prove the engine's plans."""

import numpy as np
import pytest

from headlong.backends.fake import FakeBackend, fake_limits
from headlong.engine.request import Chunk, RowPlan, Sampling, Start
from headlong.errors import Fault

PROMPT = tuple(range(11))


def start(row=0, prompt=PROMPT, seed=1, **options):
    return Start(row, prompt, Sampling(), seed, **options)


@pytest.fixture
def fake():
    """Row 0 with a prompt of 11 tokens, nothing run yet; chunks of 8, pages of 4."""
    backend = FakeBackend(lambda history: len(history), limits=fake_limits(rows=2))
    backend.start(start())
    return backend


@pytest.fixture
def ready(fake):
    """The same with its prompt in, in pages 0 to 2, and two drafts left."""
    fake.prefill(first())
    fake.prefill(second())
    return fake


def first(**changes):
    return Chunk(**{"row": 0, "start": 0, "tokens": range(8), "after": 8, "pages": (0, 1), **changes})


def second(**changes):
    return Chunk(**{"row": 0, "start": 8, "tokens": (8, 9), "after": 10, "pages": (2,), "draft": 2, **changes})


def test_a_valid_life(ready):
    (kept,) = ready.round([RowPlan(0, verify=2, draft=1, pages=(3,))]).result().kept
    assert (kept.tokens, kept.verified, kept.left) == ((11, 12, 13), 2, (14,))
    ready.release(0)
    assert not ready.rows


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


@pytest.fixture
def layered():
    """The same row in a model of five layers."""
    backend = FakeBackend(lambda history: len(history), limits=fake_limits(rows=2, pieces=5))
    backend.start(start())
    return backend


def test_a_chunk_in_pieces_is_in_with_the_last(layered):
    assert [layered.prefill(first(), 3) for _ in range(3)] == [False, False, True]
    assert [layered.prefill(second(), 5), layered.prefill(second())] == [False, True]
    assert layered.rows[0].length == 10
    assert len(layered.chunks) == 2


def test_bad_pieces_are_a_fault(layered):
    with pytest.raises(Fault, match="a chunk is to be run in 6 pieces"):
        layered.prefill(first(), 6)
    layered.prefill(first(), 2)
    with pytest.raises(Fault, match="begun amidst another"):
        layered.prefill(second())
    with pytest.raises(Fault, match="saved amidst a chunk"):
        layered.save(0)
    with pytest.raises(Fault, match="before its prompt is in"):
        layered.round([RowPlan(0, 0, 0)])


def test_a_whole_chunk_leaves_no_drafts(fake):
    """Its pages may be shared, and drafts would write into them."""
    fake.start(start(1, PROMPT[:9]))
    with pytest.raises(Fault, match="a whole chunk drafts"):
        fake.prefill(first(row=1, draft=1, pages=(0, 1, 2)))


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (RowPlan(1, 0, 0), "row 1 was used before it was started"),
        (RowPlan(0, 3, 0), "3 of 2 are verified"),
        (RowPlan(0, 2, 0), "3 pages do not cover 13 positions"),
        (RowPlan(0, 1, 1), "3 pages do not cover 13 positions"),
        (RowPlan(0, 0, 9, tuple(range(3, 9))), "9 drafts were asked"),
        (RowPlan(0, 0, 0, tuple(range(3, 20))), "more pages than the context"),
        (RowPlan(0, 9, 0, tuple(range(3, 9)), drafts=(1,) * 9), "9 drafts stand in a window"),
        (RowPlan(0, 1, 0, drafts=(1, 2)), "1 drafts stand in a window of"),
        (RowPlan(0, 0, 0, masks=lambda: np.full((1, 4), -1, np.int32)), "masks in some rounds alone"),
    ],
)
def test_a_bad_round_is_a_fault(ready, part, says):
    with pytest.raises(Fault, match=says):
        ready.round([part])


def test_a_round_before_the_prompt_is_in_is_a_fault(fake):
    fake.prefill(first())
    with pytest.raises(Fault, match="before its prompt is in"):
        fake.round([RowPlan(0, 0, 0)])


@pytest.mark.parametrize("plan", [[], [RowPlan(0, 0, 0)] * 2])
def test_a_round_has_every_row_once(fake, plan):
    with pytest.raises(Fault, match="empty or has a row twice"):
        fake.round(plan)


def test_a_window_may_hold_drafts_of_others(ready):
    (kept,) = ready.round([RowPlan(0, 3, 0, pages=(3,), drafts=(11, 12, 99))]).result().kept
    assert kept.tokens == (11, 12, 13)


def masked():
    backend = FakeBackend(lambda history: len(history), limits=fake_limits(rows=1))
    backend.start(start(prompt=(1,), masked=True))
    return backend


def test_masks_say_which_tokens_may_come():
    """The script wants 1, then 2; the next ones above that may come are 40 and 45."""
    words = np.zeros((2, 4), np.int32)
    words[:, 1] = 1 << 8 | 1 << 13
    (kept,) = masked().round([RowPlan(0, 1, 0, (0,), drafts=(40,), masks=lambda: words)]).result().kept
    assert kept.tokens == (40, 40)


@pytest.mark.parametrize(
    ("masks", "says"),
    [
        (lambda: np.full((2, 4), -1, np.int32), "another number of masks"),
        (lambda: np.zeros((1, 4), np.int32), "no token is allowed"),
        (None, "masks in some rounds alone"),
    ],
)
def test_bad_masks_are_a_fault(masks, says):
    with pytest.raises(Fault, match=says):
        masked().round([RowPlan(0, 0, 0, (0,), masks=masks)])


def test_quiet_tokens_stay_away_for_as_long_as_was_asked():
    backend = FakeBackend(lambda history: 7, limits=fake_limits(rows=1))
    backend.start(start(prompt=(1,), quiet=(7, 8), min_tokens=2))
    tokens = [backend.round([RowPlan(0, 0, 0, pages)]).result().kept[0].tokens for pages in ((0,), (), ())]
    assert tokens == [(9,), (9,), (7,)]


def test_drafts_need_a_head_that_follows(ready):
    ready.start(start(1, (1,), follows=False))
    with pytest.raises(Fault, match="the head does not follow"):
        ready.round([RowPlan(1, 0, 1, pages=(5,))])


def test_a_model_without_a_head_drafts_nothing():
    backend = FakeBackend(lambda history: 7, limits=fake_limits(head=False))
    backend.start(start(prompt=(1,)))
    with pytest.raises(Fault, match="a model without a head"):
        backend.round([RowPlan(0, 0, 1, pages=(0,))])


# --- pages -------------------------------------------------------------------------------------------------------


def test_rows_cannot_share_a_page_that_is_new_to_one(fake):
    fake.prefill(first())
    fake.start(start(1))
    with pytest.raises(Fault, match="a page that is taken"):
        fake.prefill(first(row=1, pages=(1, 2)))


def test_a_row_may_start_in_pages_of_another(fake):
    fake.prefill(first())
    saved = fake.save(0)
    fake.prefill(second())
    fake.start(start(1, (*PROMPT[:9], 50, 51), length=8, pages=(0, 1), saved=saved))
    fake.prefill(Chunk(1, 8, (8, 50), 51, (3,)))
    kept = fake.round([RowPlan(0, 0, 0), RowPlan(1, 0, 0)]).result().kept
    assert [one.tokens for one in kept] == [(11,), (11,)]


def test_a_shared_page_is_not_written(fake):
    fake.prefill(first())
    fake.start(start(1, length=8, pages=(0, 1), saved=fake.save(0)))
    with pytest.raises(Fault, match="a shared page is written"):
        fake._write(fake.rows[1], 7, (9,))


def test_what_was_overwritten_is_noticed(ready):
    ready.cells[2 * 4 + 1] = 99
    with pytest.raises(Fault, match="row 0 reads what it did not write"):
        ready.round([RowPlan(0, 0, 0)])


def test_a_row_is_brought_back_elsewhere(ready):
    saved = ready.set_aside(0)
    assert not ready.rows
    ready.cells.clear()
    ready.bring_back(1, saved, (7, 9, 4))
    (kept,) = ready.round([RowPlan(1, 2, 0, pages=(5,))]).result().kept
    assert kept.tokens == (11, 12, 13)


@pytest.mark.parametrize(
    ("row", "pages", "says"),
    [(0, (3, 4, 5), "started twice"), (2, (3, 4, 5), "does not exist"), (1, (3, 4), "do not cover")],
)
def test_a_bad_return_is_a_fault(ready, row, pages, says):
    saved = ready.set_aside(0)
    ready.start(start())
    with pytest.raises(Fault, match=says):
        ready.bring_back(row, saved, pages)


def test_only_whole_chunks_of_a_prompt_are_saved(ready):
    with pytest.raises(Fault, match="saved off the chunk grid"):
        ready.save(0)
    ready.round([RowPlan(0, 2, 0, pages=(3,))])
    with pytest.raises(Fault, match="saved after its prompt"):
        ready.save(0)


# --- starts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "prompt", "seed", "says"),
    [(0, [1], 0, "twice"), (2, [1], 0, "not exist"), (1, [], 0, "with 0 tokens"), (1, [1], -1, "with seed -1")],
)
def test_a_bad_start_is_a_fault(fake, row, prompt, seed, says):
    with pytest.raises(Fault, match=says):
        fake.start(start(row, prompt, seed))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"saved": None}, "without a state"),
        ({"length": 0, "pages": ()}, "with another length's state"),
        ({"length": 16, "pages": (0, 1, 2, 3)}, "past its prompt"),
        ({"length": 4, "pages": (0,)}, "off the chunk grid"),
        ({"pages": (0,)}, "pages that are not full"),
        ({"pages": (0, 2)}, "reads what it did not write"),
        ({"prompt": (*range(8), 99, 9)}, "another prompt's state"),
    ],
)
def test_a_bad_cached_beginning_is_a_fault(fake, changes, says):
    fake.prefill(first())
    with pytest.raises(Fault, match=says):
        fake.start(start(**{"row": 1, "length": 8, "pages": (0, 1), "saved": fake.save(0), **changes}))
