"""Drafts that are too unlikely to be kept are not left; no text depends on which ones are."""

import pytest

from headlong.backends.torch.cache import NULL_PAGE
from headlong.backends.torch.native.library import library
from headlong.engine.request import RowPlan, Sampling
from tests.backends.torch.driver import Driver, Job, fixed

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")
COUNT = 16
NATIVE = ("dense-native-1", "moe-native-1")
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=0.8, seed=3),
    "scored": Sampling(temperature=0.8, seed=3, top_p=0.9),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("least", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("bench", NATIVE, indirect=True)
def test_no_text_depends_on_which_drafts_are_left(bench, name, least):
    depths = (8, 3, 5, 8)
    jobs = {
        row: Job(bench.prompt(13 + row), SAMPLINGS[name], fixed(depth), least=lambda _: least)
        for row, depth in enumerate(depths)
    }
    assert not bench.differences(jobs, COUNT)


def prepared(bench, count):
    """Rows whose prompts are in."""
    driver = Driver(bench.open(rows=count))
    for row in range(count):
        driver.start(row, Job(bench.prompt(9 + row)))
        while driver.waiting(row):
            driver.prefill(row)
    return driver


@pytest.mark.parametrize("bench", NATIVE, indirect=True)
def test_the_head_rests_once_no_draft_goes_on(bench):
    driver, fed = prepared(bench, 2), []
    drafter = driver.backend.rounds.drafter
    feed = drafter._feed
    drafter._feed = lambda *given: fed.append(len(given[-1])) or feed(*given)
    for turn in range(4):  # steps are recorded, then played
        plan = [RowPlan(row, 0, 5, driver._grow(row, driver.length[row] + 6), least=1.0) for row in (0, 1)]
        result = driver.backend.round(plan).result()
        assert [kept.left for kept in result.kept] == [(), ()], turn
        assert result.steps == [2]
        for row in (0, 1):
            driver.length[row] += 1
    # What cannot be played is called step by step, once with all steps, to find out.
    assert drafter.chains[5].plays or fed == [2] * (5 + 3)


@pytest.mark.parametrize("bench", NATIVE, indirect=True)
def test_each_row_has_its_own_depth_in_a_replay(bench):
    """And a row with fewer drafts writes nothing where it has no pages."""
    driver = prepared(bench, 3)
    rounds = driver.backend.rounds
    zeros = rounds.cache.pages[-1].keys[NULL_PAGE]
    for turn in range(4):
        drafts = (8, 3 if turn else 8, 8)
        plan = [
            RowPlan(row, 0, draft, driver._grow(row, driver.length[row] + 1 + draft))
            for row, draft in enumerate(drafts)
        ]
        result = driver.backend.round(plan).result()
        assert tuple(len(kept.left) for kept in result.kept) == drafts
        together = rounds.drafter.chains[8].plays or not turn
        assert result.steps == ([3] * 8 if together else [3, 3, 3, 2, 2, 2, 2, 2])
        assert not zeros.any()
        for row in range(3):
            driver.length[row] += 1


@pytest.mark.parametrize("bench", ["dense-native-1"], indirect=True)
def test_chances_are_learnt_from_rounds(bench):
    jobs = {row: Job(bench.prompt(9 + row), depth=fixed(4), least=lambda _: 0.01) for row in range(3)}
    driver = Driver(bench.open(rows=3))
    driver.run(jobs, 40)
    counts = driver.backend.rounds.drafter.sureness.counts[0].sum(0)
    assert counts[0] > 10
    assert 0 <= counts[1] < counts[0]
