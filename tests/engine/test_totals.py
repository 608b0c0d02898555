"""What an engine counts over all of its requests."""

from headlong.engine.totals import DOES_NOT_PAY
from tests.engine.scripted import MIXED, RIGHT, prompts, walk


def test_totals_are_the_sum_of_the_requests(build):
    engine = build(walk, MIXED, rows=3)
    outputs = engine.generate(prompts(5, 9, 20, 3), max_tokens=17, depth=3)
    totals, spent = engine.totals, [output.speculative for output in outputs]
    assert totals.requests == {"length": 4}
    assert totals.tokens == sum(len(output.tokens) for output in outputs)
    assert totals.prompt_tokens == 37
    assert sum(totals.windows.values()) == sum(one.rounds for one in spent)
    for position in range(3):
        assert totals.drafted[position + 1] == sum(one.drafted_by_position[position] for one in spent)
        assert totals.accepted[position + 1] == sum(one.accepted_by_position[position] for one in spent)
    assert totals.rounds < sum(one.rounds for one in spent)
    assert totals.seconds["host"] > 0.0


def test_requests_without_drafts_are_counted_by_why(build):
    engine = build(walk, RIGHT)
    engine.generate(prompts(3, 4), max_tokens=5, draft_kind="none")
    engine.generate([1, 2], max_tokens=5, depth=0)
    engine.generate([1, 2], max_tokens=5, depth=1)
    assert engine.totals.undrafted == {"the request asked for plain decoding": 2, "depth 0 was asked": 1}
    assert DOES_NOT_PAY not in engine.totals.undrafted


def test_a_cancelled_request_is_counted_once(build):
    engine = build(walk)
    stream = engine.stream(prompts(3, 3), max_tokens=20)
    next(stream)
    stream.close()
    assert engine.totals.requests == {"cancelled": 2}


def test_how_full_an_engine_is(build):
    engine = build(walk, rows=2, page=8, chunk=8, context=64)
    stream = engine.stream(prompts(20, 20, 20), max_tokens=8)
    for _ in range(4):
        next(stream)
    load = engine.load
    assert (load.running, load.waiting, load.rows) == (2, 1, 2)
    assert 0 < load.pages_held <= load.pages
    stream.close()
    load = engine.load
    assert (load.running, load.waiting) == (0, 0)
    assert load.pages_held == load.pages_cached
