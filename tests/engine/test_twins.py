"""Requests with the same prompt: one runs it, the others begin where it has come in."""

import pytest

from headlong.settings import Settings
from tests.engine.scripted import MIXED, assert_empty, prompts, run, submit, walk, walked
from tests.engine.test_faults import Breaking, Broken

LONG, SHORT = prompts(21, 6)  # of chunks of 8, on pages of 4


@pytest.fixture
def engine(build):
    return build(walk, MIXED, chunk=8, page=4, rows=4, context=64)


def held(engine):
    """Pages that rows and the prefix cache have, each counted once."""
    return engine.limits.pages - engine._loop.scheduler.pool.free


def check_all(engine, indices, prompt, count=8):
    run(engine)
    assert [engine.output(index).tokens for index in indices] == [walked(prompt, count)] * len(indices)
    assert_empty(engine)


@pytest.mark.parametrize("prompt", [LONG, SHORT, LONG[:17], LONG[:13], LONG[:2]], ids=len)
@pytest.mark.parametrize("prefix_bytes", [0, 1 << 30])
def test_a_prompt_is_run_once_for_all_its_answers(build, prompt, prefix_bytes):
    engine = build(walk, MIXED, settings=Settings(prefix_bytes=prefix_bytes), chunk=8, page=4, rows=4, context=64)
    indices = [submit(engine, prompt) for _ in range(4)]
    check_all(engine, indices, prompt)
    assert len(engine.backend.chunks) == -(-(len(prompt) - 1) // 8)


def test_full_pages_are_held_once(engine):
    for _ in range(4):
        submit(engine, LONG, depth=0)
    for _ in range(3):
        engine.step()
    # 20 positions in five full pages, and one for what each row writes now.
    assert held(engine) == 5 + 4


def test_answers_of_one_prompt_say_what_they_did_not_run(engine):
    outputs = engine.generate(LONG, max_tokens=3, n=3)
    assert [output.timings.cached_tokens for output in outputs] == [0, 20, 20]
    assert (engine._loop.scheduler.prefix.lookups, engine._loop.scheduler.prefix.hits) == (3, 2)


def test_each_keeps_its_own_seed_and_depth(engine):
    indices = [submit(engine, LONG, depth=depth) for depth in (3, 0, None, 8)]
    while len(engine.backend.rows) < 4:
        engine.step()
    seeds = {row.start.seed for row in engine.backend.rows.values()}
    run(engine)
    outputs = [engine.output(index) for index in indices]
    assert [output.tokens for output in outputs] == [walked(LONG, 8)] * 4
    assert len(seeds) == 4
    drafted = [len(output.speculative.drafted_by_position) for output in outputs]
    assert (drafted[0], drafted[1]) == (3, 0)
    assert drafted[3] > 3
    assert_empty(engine)


def test_one_that_comes_later_waits_for_the_end_of_the_prompt(engine):
    first = submit(engine, LONG)
    engine.step()
    second = submit(engine, LONG)
    check_all(engine, [first, second], LONG)
    assert len(engine.backend.chunks) == 3


def test_one_that_comes_amidst_a_last_chunk_with_drafts_runs_it_itself(build):
    """Drafts are not shared, and they were planned when nobody waited for the prompt."""
    engine = build(walk, MIXED, settings=Settings(budget=2), chunk=8, page=4, rows=4, context=64, pieces=4)
    running = submit(engine, SHORT, 40, depth=0)
    first = submit(engine, LONG, depth=3)
    jobs = engine._loop.scheduler.running
    for _ in range(40):
        engine.step()
        if any(job.chunk and job.chunk.draft for job in jobs):
            break
    else:
        pytest.fail("no last chunk with drafts was run in pieces")
    second = submit(engine, LONG, depth=3)
    run(engine)
    assert engine.output(running).tokens == walked(SHORT, 40)
    assert engine.output(first).tokens == engine.output(second).tokens == walked(LONG, 8)
    assert_empty(engine)


@pytest.mark.parametrize("prompt", [LONG, LONG[:17] + SHORT], ids=["the same prompt", "the same beginning"])
def test_a_more_urgent_one_waits_for_nobody(engine, prompt):
    """Nor do those in between then keep it waiting."""
    first = submit(engine, LONG)
    engine.step()
    between, urgent = submit(engine, [40, *LONG], priority=1), submit(engine, prompt, priority=2)
    ends = [one.index for one in run(engine) if one.finish_reason]
    assert ends[0] == urgent
    for index, each in ((first, LONG), (between, [40, *LONG]), (urgent, prompt)):
        assert engine.output(index).tokens == walked(each, 8)
    assert_empty(engine)


def test_the_others_run_it_if_it_is_cancelled(engine):
    indices = [submit(engine, LONG) for _ in range(3)]
    engine.step()
    engine.cancel(indices[0])
    assert engine.output(indices[0]).tokens == ()
    check_all(engine, indices[1:], LONG)
    assert len(engine.backend.chunks) == 1 + 3


def test_who_finds_no_page_begins_by_itself(build):
    engine = build(walk, MIXED, settings=Settings(prefix_bytes=0), chunk=8, page=4, rows=4, context=32, pages=9)
    indices = [submit(engine, LONG[:18], 6) for _ in range(3)]
    check_all(engine, indices, LONG[:18], 6)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_fork_that_breaks_fails_its_request_alone(build, after):
    class Forks(Breaking):
        def fork(self, row, start, pages):
            return self.call("fork", [], super().fork, row, start, pages)

    engine = build(walk, MIXED, chunk=8, page=4, rows=4, context=64, backend=Forks)
    engine.backend.break_at("fork", 2, Broken, after)
    outputs = engine.generate(LONG, max_tokens=8, n=4)
    assert [output.finish_reason for output in outputs] == ["length", "length", "fault", "length"]
    assert {output.tokens for output in outputs if output.finish_reason == "length"} == {walked(LONG, 8)}
    assert_empty(engine)
