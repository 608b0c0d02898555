"""Whatever runs together gives what each gives alone: random mixes of requests on engines of random limits."""

from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headlong.engine.request import Request
from tests.engine import long_mix
from tests.engine.fake_mix import CONSTRAINED, END_TOKEN, TASTE, TEXT, Check, draw_engine, play_one, scripted, wander
from tests.engine.mix import Ask, Mixer, Played, alone, play
from tests.engine.scripted import assert_empty, walk

EXAMPLES, REQUESTS = 150, 10
HEAVY = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def play_mixes(examples, taste):
    """So many mixes, each on an engine of its own; what happened in all of them."""
    seen = Counter()

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=HEAVY)
    @given(st.randoms(use_true_random=False))
    def play_mix(random):
        seen.update(play_one(random, REQUESTS, taste).counts)

    play_mix()
    return seen


def test_together_is_as_alone():
    """And something of everything happens, or the mixes would be worth little."""
    seen = play_mixes(EXAMPLES, TASTE)
    assert seen["requests"] >= 500
    for name in ("preemptions", "preempted_prompts", "prefix_hits", "refused", "drafted", "accepted"):
        assert seen[name] >= 20, name
    assert seen["faults"] == 0


def test_constrained_texts_are_as_alone_too():
    seen = play_mixes(20, CONSTRAINED)
    assert seen["requests"] >= 150
    assert seen["accepted"] >= 20


def test_mixes_may_be_as_long_as_one_likes(capsys):
    long_mix.main(["--requests", "60", "--seed", "3"])
    printed = capsys.readouterr().out
    assert "faults 0" in printed
    assert int(printed.split("requests ")[1].split(",")[0]) >= 60


def test_a_mix_may_be_held_against_the_engine_itself(build):
    """As it must be with a real model, whose script nobody knows."""
    engine = build(wander, right=(True, False))
    mixes = long_mix.model_mixes(5, engine, TASTE)
    assert sum((next(mixes).counts["requests"] for _ in range(3)), 0) >= 30
    assert_empty(engine)


def test_an_engine_alone_says_what_the_script_says(build):
    engine = build(wander, right=(True, False))
    mixer = Mixer(Random(5), engine.limits, TASTE, alone(engine))
    for ask in mixer.draw(40):
        own, read = mixer.plain(ask.request), scripted(wander)(ask.request)
        assert (own.tokens, own.text, own.finish_reason) == (read.tokens, read.text, read.finish_reason)
    assert_empty(engine)


@pytest.mark.parametrize("wrong", ["token", "fault"])
def test_a_mix_notices_what_is_wrong(build, wrong, caplog):
    """The player itself can fail."""
    calls = iter(range(1000))

    def script(history):
        if next(calls) == 7:
            if wrong == "fault":
                raise ValueError("the script is lost")
            return 1
        return walk(history)

    engine = build(script)
    asks = [Ask(Request((2, 3, place), 9, depth=0), 0) for place in range(3)]
    with pytest.raises(AssertionError, match="the script is lost" if wrong == "fault" else "alone"):
        play(engine, asks, scripted(walk), Check(engine))
    assert bool(caplog.records) == (wrong == "fault")


@pytest.mark.parametrize("spoil", ["length", "free page", "cached page"])
def test_the_check_notices_what_is_wrong(build, spoil):
    engine = build(walk, chunk=4)
    check = Check(engine)
    engine.submit(Request(range(20), 9))
    engine.step()
    check()
    job = engine._loop.scheduler.running[0]
    if spoil == "length":
        job.length -= 1
    elif spoil == "free page":
        engine.backend.rows[0].pages[-1] = engine._loop.scheduler.pool._free[0]
    else:
        engine.backend.cells[job.pages[0] * 4] += 1
    with pytest.raises(AssertionError):
        check()


def test_the_oracle_reads_the_script():
    plain = scripted(lambda history: END_TOKEN if len(history) in (4, 6) else 70 + len(history))
    letters = [TEXT.decode([70 + place]) for place in range(10)]

    def told(**options):
        got = plain(Request([1], max_tokens=options.pop("max_tokens", 7), **options))
        return got.text, len(got.tokens), got.finish_reason

    assert told() == ("".join(letters[1:4]), 3, "stop")
    assert told(max_tokens=2) == ("".join(letters[1:3]), 2, "length")
    assert told(min_tokens=4) == ("".join([*letters[1:4], letters[5]]), 5, "stop")
    assert told(ignore_eos=True) == ("".join([*letters[1:4], letters[5], letters[7]]), 7, "length")
    assert told(stop=(letters[2],)) == (letters[1], 2, "stop")
    assert told(stop=(letters[2],), min_tokens=3) == ("".join(letters[1:4]), 3, "stop")


def test_engines_of_a_mix_differ():
    made = [draw_engine(Random(seed)) for seed in range(60)]
    assert {engine.limits.overlaps for engine in made} == {True, False}
    assert len({engine.limits.rows for engine in made}) > 2
    assert {engine.settings.prefix_bytes > 0 for engine in made} == {True, False}
    assert Played() + Played() == Played()
