"""Who runs, who waits, who makes room, and what is planned for them, step by step, without a backend."""

import pytest

from headlong.backends.fake import fake_limits
from headlong.engine.depth import RowDepth
from headlong.engine.request import RowPlan
from headlong.engine.scheduler import Job, Scheduler, pages_for
from headlong.engine.windows import Drafting, Window
from headlong.errors import Fault

PLENTY = 1 << 30


class State:
    nbytes = 100


def job(index=0, prompt=5, max_tokens=10, priority=0, tokens=None):
    """A prompt of its own, unless its tokens are given."""
    own = (1000 + index, *range(1, prompt)) if tokens is None else tuple(tokens)
    return Job(index, own, max_tokens, Drafting(RowDepth(asked=2), uses_head=True), priority=priority)


def window(verify, draft):
    return Window(drafter="mtp", source="mtp", verify=verify, draft=draft)


def admitted(scheduler, *jobs):
    for one in jobs:
        scheduler.add(one)
    return [scheduler.admit() for _ in jobs]


def begun(scheduler, *jobs):
    """Jobs that have a row and can begin; who began, with what was found."""
    admitted(scheduler, *jobs)
    return [(one.index, match.length) for one, match in scheduler.begin()]


def run_chunk(scheduler, draft=0):
    """Run the next chunk, as the loop does, and offer it to later prompts; whose it was."""
    one = scheduler.next_prompt()
    if one is None:
        return None
    chunk = scheduler.plan_chunk(one, draft)
    assert chunk is not None
    scheduler.record_chunk(one, chunk)
    if scheduler.prefix.budget and one.length % scheduler.limits.chunk == 0:
        scheduler.prefix.add(one.prompt, one.length, one.pages, State() if one.length in one.saves else None)
    scheduler.check()
    return one.index, chunk


def prefill(scheduler, draft=0):
    """Run every chunk there is."""
    chunks = []
    while (ran := run_chunk(scheduler, draft)) is not None:
        chunks.append(ran[1])
    return chunks


def order(scheduler, chunks):
    return [run_chunk(scheduler)[0] for _ in range(chunks)]


# --- chunks ------------------------------------------------------------------------------------------------------


def test_a_prompt_is_cut_at_multiples_of_the_chunk():
    scheduler = Scheduler(fake_limits(chunk=8, page=4))
    begun(scheduler, job(tokens=range(1, 21)))
    chunks = prefill(scheduler, draft=2)
    assert [(chunk.start, len(chunk.tokens), chunk.after, chunk.draft) for chunk in chunks] == [
        (0, 8, 9, 0),
        (8, 8, 17, 0),
        (16, 3, 20, 2),
    ]
    assert [len(chunk.pages) for chunk in chunks] == [2, 2, 2]  # the last one has room for its drafts


@pytest.mark.parametrize(("prompt", "draft"), [(8, 2), (9, 0), (10, 2), (17, 0)])
def test_the_last_prompt_token_is_left_for_the_round(prompt, draft):
    """Drafts follow the last chunk, unless it is a whole one, whose pages may be shared."""
    scheduler = Scheduler(fake_limits(chunk=8))
    begun(scheduler, one := job(prompt=prompt))
    chunks = prefill(scheduler, draft=2)
    assert sum(len(chunk.tokens) for chunk in chunks) == prompt - 1
    assert [chunk.draft for chunk in chunks] == [0] * (len(chunks) - 1) + [draft]
    assert one.drafting.left == draft
    assert scheduler.ready() == [one]


def test_a_prompt_of_one_token_has_no_chunk():
    scheduler = Scheduler(fake_limits())
    begun(scheduler, one := job(prompt=1))
    assert prefill(scheduler) == []
    assert scheduler.ready() == [one]


def test_prompts_take_turns():
    scheduler = Scheduler(fake_limits(chunk=8))
    begun(scheduler, job(0, prompt=25), job(1, prompt=17), job(2, prompt=9))
    assert order(scheduler, 6) == [0, 1, 2, 0, 1, 0]
    assert scheduler.next_prompt() is None


def test_a_newcomer_takes_its_turn_first():
    scheduler = Scheduler(fake_limits(chunk=8))
    begun(scheduler, job(0, prompt=33))
    assert order(scheduler, 2) == [0, 0]
    begun(scheduler, job(1, prompt=17))
    assert order(scheduler, 4) == [1, 0, 1, 0]


def test_the_highest_priority_prompts_run_before_any_other():
    scheduler = Scheduler(fake_limits(chunk=8))
    begun(scheduler, job(0, prompt=17), job(1, prompt=17, priority=1), job(2, prompt=17, priority=1))
    assert order(scheduler, 6) == [1, 2, 1, 2, 0, 0]


# --- rows --------------------------------------------------------------------------------------------------------


def test_rows_and_pages_come_back():
    scheduler = Scheduler(fake_limits(rows=2))
    first, second, third = job(0), job(1), job(2)
    assert admitted(scheduler, first, second, third) == [first, second, None]
    list(scheduler.begin())
    prefill(scheduler)
    scheduler.remove(first)
    assert scheduler.admit() is third
    assert third.row == 0
    for one in (second, third):
        scheduler.remove(one)
    scheduler.check()
    assert scheduler.pool.free == scheduler.pool.count
    assert not scheduler.busy


def test_the_higher_priority_gets_a_row_first_then_the_older():
    scheduler = Scheduler(fake_limits(rows=1))
    jobs = [job(0), job(1, priority=-1), job(2, priority=5), job(3), job(4, priority=5)]
    for one in jobs:
        scheduler.add(one)
    came = []
    while (one := scheduler.admit()) is not None:
        came.append(one.index)
        scheduler.remove(one)
    assert came == [2, 4, 0, 3, 1]


def test_a_waiting_job_can_leave():
    scheduler = Scheduler(fake_limits(rows=1))
    first, second = job(0), job(1)
    admitted(scheduler, first, second)
    scheduler.remove(second)
    assert not scheduler.waiting


def test_a_job_without_a_row_cannot_be_planned():
    with pytest.raises(Fault, match="request 3 was planned before it had a row"):
        job(3).placed  # noqa: B018


# --- pages -------------------------------------------------------------------------------------------------------


def test_pages_are_taken_as_they_are_needed():
    scheduler = Scheduler(fake_limits(page=4, chunk=8))
    begun(scheduler, one := job(prompt=20, max_tokens=30))
    assert len(one.pages) == 0
    run_chunk(scheduler)
    assert len(one.pages) == 2
    prefill(scheduler)
    assert (one.length, len(one.pages)) == (19, 5)
    plan = scheduler.plan_row(one, window(2, 2))  # positions to 19 + 3 + 2 = 24
    assert (plan, len(one.pages)) == (RowPlan(0, 2, 2, plan.pages), 6)
    assert plan.pages == (one.pages[-1],)
    assert scheduler.plan_row(one, window(2, 2)).pages == ()


def test_a_row_never_holds_more_pages_than_the_context():
    scheduler = Scheduler(fake_limits(context=16, page=4, chunk=8))
    begun(scheduler, one := job(prompt=10, max_tokens=6))
    prefill(scheduler)
    one.length = 15
    scheduler.plan_row(one, window(0, 8))
    assert len(one.pages) == 4


def test_a_job_enters_when_there_are_pages_for_its_prompt_and_a_window_and_one_for_each_row():
    """Windows of up to 9 tokens: with a prompt of 7, four pages, and a spare one for the row that runs."""
    scheduler = Scheduler(fake_limits(rows=3, page=4, pages=9))
    first, second = job(0, prompt=7, max_tokens=30), job(1, prompt=7, max_tokens=30)
    begun(scheduler, first)
    prefill(scheduler)
    scheduler._grow(first, 17)
    assert scheduler.pool.free == 4
    assert admitted(scheduler, second) == [None]
    scheduler.remove(first)
    scheduler.add(first)
    assert scheduler.admit() is first
    assert scheduler.admit() is second


def test_nobody_overtakes_a_job_that_waits_for_pages():
    scheduler = Scheduler(fake_limits(rows=4, page=4, pages=8))
    begun(scheduler, first := job(0, prompt=8))
    prefill(scheduler)
    scheduler._grow(first, 12)
    big, small = job(1, prompt=20, max_tokens=4), job(2, prompt=1, max_tokens=1)
    assert admitted(scheduler, big, small) == [None, None]
    scheduler.remove(big)
    assert scheduler.admit() is small


def test_a_job_that_is_alone_always_enters():
    scheduler = Scheduler(fake_limits(rows=2, page=4, pages=3, depth=8))
    assert admitted(scheduler, one := job(prompt=4, max_tokens=1)) == [one]  # 13 positions for a window of nine


def test_a_whole_sequence_and_its_last_drafts_must_fit():
    limits = fake_limits(page=4, context=64, depth=3)
    assert pages_for(5, 4, limits) == 3
    assert pages_for(5, 5, limits) == 4
    assert pages_for(60, 4, limits) == 16  # never more than the context


def test_prefixes_go_before_a_row_makes_room():
    scheduler = Scheduler(fake_limits(rows=2, page=4, chunk=8, pages=9), PLENTY)
    begun(scheduler, first := job(0, prompt=17, max_tokens=4))
    prefill(scheduler)
    scheduler.remove(first)
    assert (scheduler.pool.free, scheduler.prefix.nodes) == (5, 2)
    begun(scheduler, second := job(1, prompt=17, max_tokens=4))
    prefill(scheduler)
    assert len(second.pages) == 4
    assert scheduler.prefix.find(first.prompt).shared == 8  # its second chunk went


def test_without_a_page_left_nothing_is_planned_and_nothing_is_taken():
    scheduler = Scheduler(fake_limits(rows=2, page=4, chunk=8, pages=4))
    begun(scheduler, first := job(0, prompt=9), second := job(1, prompt=20, max_tokens=1))
    run_chunk(scheduler)
    run_chunk(scheduler)
    assert scheduler.pool.free == 0
    assert scheduler.plan_chunk(second, 0) is None
    assert scheduler.plan_row(first, window(0, 0)) is None
    assert (len(first.pages), len(second.pages)) == (2, 2)
    scheduler.check()


@pytest.mark.parametrize("wanting", [0, 1, 2])
def test_the_youngest_that_holds_pages_makes_room(wanting):
    scheduler = Scheduler(fake_limits(rows=4))
    jobs = [job(0, priority=1), job(1), job(2), job(3, priority=1)]
    begun(scheduler, *jobs)
    prefill(scheduler)
    assert scheduler.victim(jobs[wanting]) is jobs[2]
    scheduler.make_wait(jobs[2], State())
    assert scheduler.victim(jobs[0]) is jobs[1]
    scheduler.make_wait(jobs[1], State())
    assert scheduler.victim(jobs[0]) is jobs[3]  # a higher priority counts for more than age
    scheduler.make_wait(jobs[3], State())
    assert scheduler.victim(jobs[0]) is jobs[0]


def test_a_row_without_pages_makes_no_room_but_for_itself():
    scheduler = Scheduler(fake_limits(rows=2))
    begun(scheduler, first := job(0), second := job(1))
    run_chunk(scheduler)
    assert scheduler.victim(first) is first
    assert scheduler.victim(second) is second


def test_who_made_room_waits_in_its_old_place_and_resumes():
    scheduler = Scheduler(fake_limits(rows=2))
    first, second, third = job(0), job(1), job(2)
    begun(scheduler, first, second, third)
    prefill(scheduler)
    second.length, state = 7, State()
    scheduler.make_wait(second, state)
    scheduler.check()
    assert scheduler.waiting == [second, third]
    assert (second.row, second.pages, second.length, second.aside) == (None, [], 7, state)
    assert scheduler.ready() == [first]
    assert scheduler.admit() is second
    assert list(scheduler.begin()) == []  # its prompt is in
    assert scheduler.ready() == [first]  # and its pages are not yet
    assert len(scheduler.bring_back(second)) == 2
    second.aside = None
    assert scheduler.ready() == [first, second]
    scheduler.check()


def test_a_job_whose_pages_are_not_free_yet_is_not_brought_back():
    scheduler = Scheduler(fake_limits(rows=2, page=4, chunk=8, pages=4))
    begun(scheduler, first := job(0, prompt=9), second := job(1, prompt=9))
    prefill(scheduler)
    scheduler.make_wait(second, State())
    scheduler._grow(first, 12)
    scheduler.running.append(second)
    assert scheduler.bring_back(second) is None
    assert second.pages == []


def test_nobody_overtakes_a_row_that_waits_for_its_pages():
    """Two that made room may get rows in one step, and pages for one alone; small ones could starve the other."""
    scheduler = Scheduler(fake_limits(rows=4, page=4, chunk=8, pages=20))
    begun(scheduler, first := job(0, prompt=9, max_tokens=40), second := job(1, prompt=9, max_tokens=40))
    prefill(scheduler)
    for one in (second, first):
        one.length = 45
        scheduler.make_wait(one, State())
    assert [scheduler.admit(), scheduler.admit()] == [first, second]
    assert len(scheduler.bring_back(first)) == 12
    first.aside = None
    assert scheduler.bring_back(second) is None  # 8 pages are free, 12 are needed
    assert admitted(scheduler, job(2, prompt=1, max_tokens=1)) == [None]


def test_a_prompt_that_made_room_begins_anew():
    scheduler = Scheduler(fake_limits(chunk=8))
    begun(scheduler, one := job(prompt=20))
    run_chunk(scheduler)
    scheduler.make_wait(one, None)
    assert (one.length, one.started, one.pages) == (0, False, [])
    assert scheduler.admit() is one
    assert [(each.index, match.length) for each, match in scheduler.begin()] == [(0, 0)]
    assert len(prefill(scheduler)) == 3


# --- prefixes ----------------------------------------------------------------------------------------------------


def test_a_prompt_begins_where_another_left_a_state():
    scheduler = Scheduler(fake_limits(page=4, chunk=8), PLENTY)
    begun(scheduler, first := job(0, tokens=range(20)))
    prefill(scheduler)
    assert begun(scheduler, second := job(1, tokens=[*range(18), 99, 98, 97])) == [(1, 16)]
    assert (second.length, second.found, second.pages) == (16, 16, first.pages[:4])
    scheduler.check()
    assert [chunk.start for chunk in prefill(scheduler)] == [16]


SAME_BEGINNING = [range(20), [*range(18), 99], [*range(12), 98]]


def test_a_row_waits_for_another_that_runs_the_same_beginning():
    scheduler = Scheduler(fake_limits(page=4, chunk=8), PLENTY)
    jobs = [job(index, tokens=tokens) for index, tokens in enumerate(SAME_BEGINNING)]
    assert begun(scheduler, *jobs) == [(0, 0)]
    order(scheduler, 1)
    assert [(one.index, match.length) for one, match in scheduler.begin()] == [(2, 8)]  # no more is common
    order(scheduler, 2)
    assert [(one.index, match.length) for one, match in scheduler.begin()] == [(1, 16)]


def test_nobody_waits_where_no_prefix_is_kept():
    scheduler = Scheduler(fake_limits(page=4, chunk=8))
    jobs = [job(index, tokens=tokens) for index, tokens in enumerate(SAME_BEGINNING)]
    assert begun(scheduler, *jobs) == [(0, 0), (1, 0), (2, 0)]


def test_nobody_waits_for_chunks_that_are_in_or_end_elsewhere():
    scheduler = Scheduler(fake_limits(page=4, chunk=8), PLENTY)
    begun(scheduler, job(0, tokens=range(20)))
    order(scheduler, 2)
    assert begun(scheduler, job(1, tokens=range(19))) == [(1, 16)]  # only 16 to 18 are left of the first's
    assert begun(scheduler, job(2, tokens=[*range(8), 99])) == [(2, 0)]  # the head's last pair is another


def test_nobody_waits_for_one_that_made_room():
    scheduler = Scheduler(fake_limits(page=4, chunk=8), PLENTY)
    first, second = job(0, tokens=range(20)), job(1, tokens=range(20))
    assert begun(scheduler, second) == [(1, 0)]
    assert begun(scheduler, first) == []
    scheduler.make_wait(second, None)
    assert [one.index for one, _ in scheduler.begin()] == [0]


# --- the check ---------------------------------------------------------------------------------------------------


def test_the_check_finds_a_lost_page():
    scheduler = Scheduler(fake_limits())
    scheduler.pool.take(1)
    with pytest.raises(Fault, match=r"more or less often than counted: 0 \(0, counted 1\)"):
        scheduler.check()


def spoil_pages(one, other):
    one.pages.append(other.pages[0])


def spoil_row(one, other):
    one.row = other.row


def spoil_length(one, other):
    one.length = 100


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(spoil_pages, "more or less often"), (spoil_row, "rows are taken twice"), (spoil_length, "100 positions in 1")],
)
def test_the_check_finds_what_does_not_agree(spoil, says):
    scheduler = Scheduler(fake_limits(rows=2))
    begun(scheduler, one := job(0), other := job(1))
    prefill(scheduler)
    scheduler.check()
    spoil(one, other)
    with pytest.raises(Fault, match=says):
        scheduler.check()


def test_the_check_finds_pages_of_a_waiting_job():
    scheduler = Scheduler(fake_limits())
    scheduler.add(one := job())
    one.pages.extend(scheduler.pool.take(1))
    with pytest.raises(Fault, match="a waiting job holds pages"):
        scheduler.check()


def test_room_that_one_row_has_to_spare_is_no_room_for_another():
    scheduler = Scheduler(fake_limits(rows=2, page=4, pages=6), PLENTY)
    first, second = job(0), job(1)
    begun(scheduler, first, second)
    prefill(scheduler)
    assert scheduler.plan_row(first, window(2, 8)) is not None  # of which little is kept
    spare, free = len(first.pages) * 4 - first.reach, scheduler.pool.free
    assert spare >= 8
    most = len(second.pages) * 4 - second.reach + 4 * free
    assert scheduler.has_room([second], most)
    assert not scheduler.has_room([second], most + 1)
    assert not scheduler.has_room([first, second], most + 1)
