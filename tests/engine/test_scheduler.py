"""Planning and recording, step by step, without a backend."""

import pytest

from headlong.backends.fake import fake_limits
from headlong.engine.request import Kept
from headlong.engine.scheduler import Job, Scheduler
from headlong.errors import Fault


def job(index=0, prompt=5, max_tokens=10, depth=2):
    return Job(index, tuple(range(1, prompt + 1)), max_tokens, depth)


def admitted(scheduler, *jobs):
    for one in jobs:
        scheduler.add(one)
    return [scheduler.admit() for _ in jobs]


def prefill(scheduler):
    """Run every chunk there is."""
    chunks = []
    while (chunk := scheduler.plan_chunk()) is not None:
        scheduler.record_chunk(chunk)
        chunks.append(chunk)
    return chunks


def play(scheduler, accepted):
    """One round of the only row, with this many drafts kept; what was planned."""
    (part,) = plan = scheduler.plan_round()
    tokens = tuple(range(min(accepted, part.verify) + 1))
    scheduler.record_round(plan, [Kept(part.row, tokens, part.verify)])
    scheduler.check()
    return part


def test_a_prompt_is_cut_at_multiples_of_the_chunk():
    scheduler = Scheduler(fake_limits(chunk=8, page=4))
    admitted(scheduler, job(prompt=20))
    chunks = prefill(scheduler)
    assert [(chunk.start, len(chunk.tokens), chunk.after, chunk.draft) for chunk in chunks] == [
        (0, 8, 9, 0),
        (8, 8, 17, 0),
        (16, 3, 20, 2),
    ]
    assert [len(chunk.pages) for chunk in chunks] == [2, 2, 2]  # the last one has room for its drafts


@pytest.mark.parametrize("prompt", [8, 9, 10, 17])
def test_the_last_prompt_token_is_left_for_the_round(prompt):
    scheduler = Scheduler(fake_limits(chunk=8))
    admitted(scheduler, job(prompt=prompt))
    chunks = prefill(scheduler)
    assert sum(len(chunk.tokens) for chunk in chunks) == prompt - 1
    assert [chunk.draft for chunk in chunks] == [0] * (len(chunks) - 1) + [2]


def test_a_prompt_of_one_token_has_no_chunk_and_nothing_to_verify():
    scheduler = Scheduler(fake_limits())
    admitted(scheduler, job(prompt=1))
    assert prefill(scheduler) == []
    (part,) = scheduler.plan_round()
    assert (part.verify, part.draft) == (0, 2)


def test_the_oldest_prompt_goes_first_and_rounds_go_on_beside_it():
    scheduler = Scheduler(fake_limits(chunk=8))
    admitted(scheduler, job(0, prompt=1), job(1, prompt=17), job(2, prompt=17))
    rows = []
    for _ in range(4):
        chunk = scheduler.plan_chunk()
        scheduler.record_chunk(chunk)
        rows.append((chunk.row, [part.row for part in scheduler.plan_round()]))
    assert rows == [(1, [0]), (1, [0, 1]), (2, [0, 1]), (2, [0, 1, 2])]


def test_a_round_verifies_what_the_last_one_left():
    scheduler = Scheduler(fake_limits())
    admitted(scheduler, job(max_tokens=20, depth=3))
    prefill(scheduler)
    assert [(part.verify, part.draft) for part in (play(scheduler, 1) for _ in range(3))] == [(3, 3)] * 3


@pytest.mark.parametrize(
    ("accepted", "windows"), [(0, [(2, 2), (2, 2), (2, 1), (1, 0), (0, 0)]), (9, [(2, 2), (1, 0)])]
)
def test_nothing_is_drafted_past_max_tokens(accepted, windows):
    scheduler = Scheduler(fake_limits())
    (only,) = admitted(scheduler, job(max_tokens=5, depth=2))
    prefill(scheduler)
    planned = []
    while only.remaining:
        planned.append(play(scheduler, accepted))
    assert [(part.verify, part.draft) for part in planned] == windows
    assert only.remaining == 0


def test_one_token_needs_no_drafts():
    scheduler = Scheduler(fake_limits())
    admitted(scheduler, job(prompt=5, max_tokens=1, depth=4))
    assert [chunk.draft for chunk in prefill(scheduler)] == [0]
    (part,) = scheduler.plan_round()
    assert (part.verify, part.draft) == (0, 0)


def test_drafts_stay_inside_the_context():
    limits = fake_limits(context=16, page=4)
    scheduler = Scheduler(limits)
    (only,) = admitted(scheduler, job(prompt=4, max_tokens=12, depth=8))
    prefill(scheduler)
    while only.remaining:
        start = only.length
        part = play(scheduler, 1)
        assert start + part.verify + part.draft + 1 <= limits.context
    assert len(only.pages) == 4


def test_rows_and_pages_come_back():
    scheduler = Scheduler(fake_limits(rows=2))
    first, second, third = job(0), job(1), job(2)
    assert admitted(scheduler, first, second, third) == [first, second, None]
    prefill(scheduler)
    scheduler.remove(first)
    assert scheduler.admit() is third
    assert third.row == 0
    for one in (second, third):
        scheduler.remove(one)
    scheduler.check()
    assert scheduler.pool.free == scheduler.pool.count
    assert not scheduler.busy


def test_a_job_waits_for_all_the_pages_it_may_need():
    scheduler = Scheduler(fake_limits(rows=4, page=4, pages=7))
    big, small, tiny = job(0, prompt=8, max_tokens=8, depth=2), job(1, prompt=8, max_tokens=1), job(2, 1, 1, 0)
    assert admitted(scheduler, big, small, tiny) == [big, None, None]  # 5 of 7 promised, 3 wanted; nobody overtakes
    assert scheduler.pool.free == 7
    scheduler.remove(big)
    assert [scheduler.admit(), scheduler.admit()] == [small, tiny]


def test_a_waiting_job_can_leave():
    scheduler = Scheduler(fake_limits(rows=1))
    first, second = job(0), job(1)
    admitted(scheduler, first, second)
    scheduler.remove(second)
    assert not scheduler.waiting


def test_the_check_finds_a_lost_page():
    scheduler = Scheduler(fake_limits())
    scheduler.pool.take(1)
    with pytest.raises(Fault, match="0 pages are held and 63 free, of 64"):
        scheduler.check()
