"""Finished turns in idle moments, and who shares what of a prompt."""

import pytest

from headlong.backends.fake import FakeBackend
from headlong.engine.turns import MOST_TURNS
from headlong.settings import Settings
from tests.engine.scripted import MIXED, assert_empty, prompts, run, submit, walk, walked

LONG = {"chunk": 8, "context": 200}
PROMPT = prompts(20)[0]
WANTED = 30  # tokens of an answer: six full chunks with the prompt, of which the prompt has run two


class Careful(FakeBackend):
    """Breaks when it is told to; counts the states that were saved."""

    def __init__(self, script, **options):
        super().__init__(script, **options)
        self.breaks, self.saved = "", 0

    def prefill(self, chunk, pieces=1):
        if self.breaks == "prefill":
            raise ValueError("it broke")
        return super().prefill(chunk, pieces)

    def save(self, row):
        self.saved += 1
        if self.breaks == "save":
            raise ValueError("it broke")
        return super().save(row)


@pytest.fixture
def engine(build):
    return build(walk, MIXED, backend=Careful, **LONG)


def rest(engine, most=100):
    """Idle until nothing is left to do; the chunks that were run."""
    for _ in range(most):
        if not engine.rest():
            return
        engine._loop.scheduler.check()
    raise AssertionError(f"{most} idle moments were not enough")


def talk(engine, prompt=PROMPT):
    """A finished turn, as the next prompt of its conversation begins."""
    return [*prompt, *engine.generate(prompt, max_tokens=WANTED).tokens]


def interrupt(engine):
    assert engine.generate([5], max_tokens=2).tokens == walked([5], 2)


def starts(engine):
    return [chunk.start for chunk in engine.backend.chunks]


def found(engine, prompt):
    output = engine.generate(prompt, max_tokens=5)
    assert output.tokens == walked(prompt, 5)
    return output.timings.cached_tokens


# --- interruptions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", [(), (1,), (3,), (1, 1), (1, 1, 1, 1), (4,), (9,)])
def test_an_interrupted_turn_goes_on_where_it_was(engine, moments):
    """However often: no chunk is run twice, and the next turn finds all of it."""
    said = talk(engine)
    for count in moments:
        for _ in range(count):
            engine.rest()
        interrupt(engine)
    rest(engine)
    assert starts(engine) == [0, 8, 16, 16, 24, 32, 40]  # the rest of the prompt was no full chunk
    assert found(engine, [*said, 9]) == 48
    assert_empty(engine)


def test_the_next_prompt_goes_on_from_where_a_turn_was_interrupted(engine):
    said = talk(engine)
    assert engine.rest()
    assert engine.rest()
    assert found(engine, [*said, 9]) == 32
    assert starts(engine) == [0, 8, 16, 16, 24, 32, 40, 48]
    assert_empty(engine)


def test_a_turn_gives_way_to_the_next_of_its_conversation(engine):
    said = talk(engine)
    assert engine.rest()
    more = talk(engine, [*said, 9])
    ran = len(engine.backend.chunks)
    assert len(engine._loop.turns._waiting) == 1
    rest(engine)
    assert starts(engine)[ran:] == [48, 56, 64, 72]
    assert found(engine, [*more, 9]) == 80
    assert_empty(engine)


def test_the_interrupted_turn_goes_on_before_others(engine):
    asked = [[place] * 17 for place in (1, 2, 3)]
    said = [talk(engine, prompt) for prompt in asked]
    assert engine.rest()
    said.append(talk(engine, [4] * 17))
    ran = len(engine.backend.chunks)
    rest(engine)
    assert starts(engine)[ran:] == [24, 32, *3 * [16, 24, 32]]
    assert [found(engine, [*each, 9]) for each in said] == [40] * 4
    assert_empty(engine)


def test_a_turn_of_which_nothing_could_be_kept_is_not_tried_again(build):
    """It would begin anew every time."""
    room = 4 * 8 * 8 + 100  # as many bytes as four chunks and a state take
    engine = build(walk, settings=Settings(prefix_bytes=room), **LONG)
    talk(engine)
    for _ in range(3):
        assert engine.rest()
    interrupt(engine)
    assert not engine._loop.turns.busy


def test_only_the_newest_turns_wait(engine):
    for place in range(MOST_TURNS + 3):
        engine.generate([place] * 4, max_tokens=16)
    waiting = engine._loop.turns._waiting
    assert engine.rest()
    interrupt(engine)
    assert [turn[0] for turn in waiting] == list(range(3, MOST_TURNS + 3))
    engine.generate([99] * 4, max_tokens=16)
    assert [turn[0] for turn in waiting] == [*range(4, MOST_TURNS + 3), 99]


# --- what breaks, and the end ----------------------------------------------------------------------------------------


def test_a_turn_that_breaks_is_not_tried_again(engine):
    talk(engine)
    assert engine.rest()
    engine.backend.breaks = "prefill"
    assert not engine.rest()
    engine.backend.breaks = ""
    interrupt(engine)
    assert not engine.rest()
    assert_empty(engine)


def test_a_turn_that_breaks_while_it_makes_way_harms_nobody(engine):
    talk(engine)
    other = talk(engine, [7] * 17)
    assert engine.rest()
    engine.backend.breaks = "save"
    index = submit(engine, [5], 3)
    engine.step()
    engine.backend.breaks = ""
    run(engine)
    assert engine.output(index).tokens == walked([5], 3)
    assert len(engine._loop.turns._waiting) == 1
    rest(engine)
    assert found(engine, [*other, 9]) == 40
    assert_empty(engine)


def test_an_interrupted_idle_chunk_is_not_gone_on_with(engine, monkeypatch):
    """The row is in an unknown state then."""

    def interrupted(chunk, pieces=1):
        raise KeyboardInterrupt

    said = talk(engine)
    with monkeypatch.context() as broken:
        broken.setattr(engine.backend, "prefill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.rest()
    assert not engine.backend.rows
    assert not engine.rest()
    assert found(engine, [*said, 9]) == 16
    assert_empty(engine)


def test_an_engine_that_closes_keeps_nothing(engine):
    talk(engine)
    talk(engine, [7] * 17)
    assert engine.rest()
    saved, backend = engine.backend.saved, engine.backend
    engine.close()
    assert not engine._loop.turns.busy
    assert backend.saved == saved
    assert_empty(engine)


# --- what is counted -------------------------------------------------------------------------------------------------


def test_only_requests_count_as_lookups(engine):
    asked = [PROMPT, [7] * 17, [8] * 17, PROMPT]
    for prompt in asked:
        engine.generate(prompt, max_tokens=WANTED)
        rest(engine)
    assert (engine.load.prefix_lookups, engine.load.prefix_hits) == (4, 1)
    assert engine._loop.scheduler.prefix.tokens_found == engine.totals.cached_tokens == 16


def test_a_prompt_that_begins_anew_is_looked_up_once_and_found_nothing_of_its_own(build):
    engine = build(walk, rows=2, page=4, chunk=8, context=100, pages=27)
    asked = [prompts(90)[0], [7] * 30]
    long = submit(engine, asked[0], 5)
    while len(engine.backend.chunks) < 8:
        engine.step()
    urgent = submit(engine, asked[1], 5, priority=1)
    run(engine)
    outputs = [engine.output(index) for index in (long, urgent)]
    assert [output.tokens for output in outputs] == [walked(prompt, 5) for prompt in asked]
    assert starts(engine).count(64) == 2  # it made room, and went on from the state after 64 tokens
    assert starts(engine).count(56) == 1
    assert [output.timings.cached_tokens for output in outputs] == [0, 0]
    assert (engine.load.prefix_lookups, engine.load.prefix_hits) == (2, 0)
    assert_empty(engine)
