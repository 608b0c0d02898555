"""Chunks in pieces: rows that decode wait for some layers of a prompt's chunk, not for all of them."""

import pytest

from headlong.settings import Settings
from tests.engine.scripted import MIXED, assert_empty, prompts, run, submit, walk, walked

LONG = prompts(61)[0]  # seven chunks of 8 and one of 4


@pytest.fixture
def layered(build):
    """An engine over a model of four layers, and a row that decodes."""

    def make(settings=None, **limits):
        engine = build(walk, MIXED, settings=settings, **{"chunk": 8, "pieces": 4, **limits})
        submit(engine, [1], 40, depth=0)
        engine.step()
        return engine

    return make


def amid(engine, prompt=LONG, **options):
    """Another request, of whose first chunk a piece was run."""
    index = submit(engine, prompt, 3, **options)
    engine.step()
    (job,) = [job for job in engine._loop.scheduler.running if job.chunk]
    assert engine.backend.rows[job.row].layers
    return index


def finish(engine, *indices):
    """Run to the end; the tokens of these requests. The row that decoded has had its own."""
    run(engine)
    tokens = [engine.output(index).tokens for index in indices]
    found = engine.output(0).tokens
    assert found == walked([1], len(found))
    assert_empty(engine)
    return tokens


@pytest.mark.parametrize(("budget", "calls"), [(0, 16), (1, 32), (2, 30), (3, 16), (4, 15), (5, 15), (8, 8), (12, 8)])
def test_a_chunk_longer_than_the_budget_is_run_in_pieces(layered, budget, calls):
    """A round follows each; the last chunk is shorter, and so are those pieces, or it is run at once."""
    engine = layered(Settings(budget=budget))
    index, rounds = submit(engine, LONG, 1), len(engine.backend.rounds)
    while len(engine.backend.chunks) < 8:
        engine.step()
    assert len(engine.backend.rounds) - rounds == calls
    assert finish(engine, index) == [walked(LONG, 1)]


def test_between_two_rounds_there_is_one_piece(layered):
    engine = layered()
    submit(engine, LONG, 1)
    before, seen = engine.backend.prefill, []
    engine.backend.prefill = lambda chunk, pieces: (seen.append(len(engine.backend.rounds)), before(chunk, pieces))[1]
    run(engine)
    assert len(seen) == len(set(seen)) == 16


def test_chunks_are_whole_while_nobody_decodes(build):
    engine = build(walk, chunk=8, pieces=4)
    submit(engine, LONG, 1)
    for count in range(1, 8):
        engine.step()
        assert len(engine.backend.chunks) == count


def test_what_is_left_of_a_chunk_is_run_at_once_when_nobody_decodes_any_more(layered):
    engine = layered()
    index = amid(engine)
    engine.cancel(0)
    engine.step()
    assert len(engine.backend.chunks) == 1
    assert finish(engine, index) == [walked(LONG, 3)]


def test_backends_that_cannot_divide_chunks_are_not_asked_to(layered):
    engine = layered(Settings(budget=1), pieces=1)
    submit(engine, LONG, 1)
    engine.step()
    assert len(engine.backend.chunks) == 1


# --- amidst a chunk ----------------------------------------------------------------------------------------------


def test_a_request_may_be_cancelled(layered):
    engine = layered()
    index = amid(engine)
    engine.cancel(index)
    again = submit(engine, LONG, 3)
    assert finish(engine, index, again) == [(), walked(LONG, 3)]
    assert len(engine.backend.chunks) == 8


@pytest.mark.parametrize("stage", ["prefill", "round"])
def test_an_interrupt_cancels_it(layered, monkeypatch, stage):
    engine = layered()
    index = amid(engine)

    def interrupted(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.backend, stage, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine.backend.rows
    again = submit(engine, LONG, 3)
    assert finish(engine, index, again) == [(), walked(LONG, 3)]


def test_a_prompt_that_makes_room_begins_anew(layered):
    """The row that decodes is older, and takes the pages that it needs."""
    engine = layered(Settings(prefix_bytes=0, budget=1), rows=2, pages=16, page=4, pieces=8)
    index = submit(engine, prompts(40)[0], 3)
    waited = 0
    while len(engine.backend.chunks) < 5:
        engine.step()
        waiting = [job for job in engine._loop.scheduler.waiting if job.index == index]
        waited += len(waiting)
        assert not any(job.chunk for job in waiting)
    assert waited
    assert finish(engine, index) == [walked(prompts(40)[0], 3)]


def test_its_pages_are_cached_when_all_layers_are_run(layered):
    engine = layered()
    amid(engine)
    assert not engine._loop.scheduler.prefix._used
    engine.step()
    assert engine._loop.scheduler.prefix._used


def test_another_prompt_waits_for_its_end_unless_it_is_more_urgent(layered):
    for priority, order in ((0, [8, 5]), (1, [5, 8])):
        engine = layered(rows=3)
        amid(engine)
        submit(engine, prompts(6)[0], 3, priority=priority)
        while len(engine.backend.chunks) < 2:
            engine.step()
        assert [len(chunk.tokens) for chunk in engine.backend.chunks] == order


def test_a_prompt_with_the_same_beginning_waits_for_it(layered):
    engine = layered(rows=3)
    asked = [*LONG[:20], 7]
    first, second = amid(engine), submit(engine, asked, 3)
    assert finish(engine, first, second) == [walked(LONG, 3), walked(asked, 3)]
    assert [chunk.start for chunk in engine.backend.chunks if chunk.row == 2] == [16]


def test_seconds_and_chunks_are_counted_once(layered):
    engine = layered()
    index = amid(engine)
    run(engine)
    assert engine.totals.chunks == len(engine.backend.chunks) == 8
    assert 0 < engine.output(index).timings.prefill_s <= engine.totals.seconds["prefill"]
