"""Where the host is free while a round runs, it writes the text of the round before, and the texts are the same."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from headlong.backends.fake import FakeBackend, fake_limits
from headlong.engine.engine import Engine
from headlong.engine.request import Constraint, Request
from headlong.engine.text import Text
from headlong.settings import Settings
from tests.engine.conftest import byte_tokenizer
from tests.engine.fake_mix import scripted
from tests.engine.scripted import MIXED, RIGHT, WRONG, assert_empty, prompts, run, submit, walk, walked


class SpyDecoder:
    def __init__(self, log, decoder):
        self.log, self.decoder = log, decoder

    def push(self, token):
        self.log.append(("text", token))
        return self.decoder.push(token)

    def flush(self):
        return self.decoder.flush()


class SpyText(Text):
    """Notes every token whose text is written."""

    log = None

    def decoder(self, prompt=()):
        return SpyDecoder(self.log, super().decoder(prompt))


class Handle:
    def __init__(self, fake, number, done):
        self.fake, self.number, self.done = fake, number, done

    def result(self):
        self.fake.log.append(("result", self.number))
        self.fake.gave.append(sum(len(kept.tokens) for kept in self.done.kept))
        return self.done.result()


class Overlapping(FakeBackend):
    """Notes when rounds begin and when their results are asked for."""

    def __init__(self, script, **options):
        super().__init__(script, **options)
        self.log, self.gave = [], []

    def round(self, plan):
        number = len(self.rounds)
        self.log.append(("round", number))
        return Handle(self, number, super().round(plan))


@pytest.fixture
def overlapping(end):
    def make(script, right=MIXED, overlaps=True, **limits):
        fake = Overlapping(script, right=right, limits=replace(fake_limits(vocab=300, **limits), overlaps=overlaps))
        text = SpyText(byte_tokenizer())
        text.log = fake.log
        engine = Engine(fake, text, "fake", (end,), Settings())
        engine.backend = fake
        return engine

    return make


def texts_by_place(log):
    """Tokens written while round n, the newest, ran, and those written when none did."""
    during, between, running = Counter(), 0, []
    for name, what in log:
        if name == "round":
            running.append(what)
        elif name == "result":
            running.remove(what)
        elif running:
            during[running[-1]] += 1
        else:
            between += 1
    return during, between


@pytest.mark.parametrize("right", [RIGHT, WRONG, MIXED])
def test_a_rounds_text_is_written_while_the_next_one_runs(overlapping, right):
    engine = overlapping(walk, right)
    assert engine.generate([1, 2], max_tokens=20, depth=3).tokens == walked([1, 2], 20)
    during, between = texts_by_place(engine.backend.log)
    gave = engine.backend.gave
    assert [during[number] for number in range(len(gave))] == [0, *gave[:-1]]
    assert between == gave[-1]  # there is no round left to hide behind
    assert_empty(engine)


def test_without_overlap_text_comes_with_its_own_round(overlapping):
    engine = overlapping(walk, overlaps=False)
    engine.generate([1, 2], max_tokens=20, depth=3)
    during, between = texts_by_place(engine.backend.log)
    assert (sum(during.values()), between) == (0, 20)


def test_a_token_is_seen_one_step_later(overlapping):
    told = {}
    for overlaps in (False, True):
        engine = overlapping(walk, overlaps=overlaps)
        submit(engine, [1], 3, depth=0)
        told[overlaps] = [[one.token for one in engine.step()] for _ in range(4)]
    first, second, third = walked([1], 3)
    assert told == {False: [[first], [second], [third], []], True: [[], [first], [second], [third]]}


@pytest.mark.parametrize("depth", [0, 1, 3, 8])
def test_the_same_texts(overlapping, depth):
    asked = prompts(1, 2, 8, 9, 17, 25)
    engine = overlapping(walk)
    outputs = engine.generate(asked, max_tokens=13, depth=depth)
    assert [output.tokens for output in outputs] == [walked(prompt, 13) for prompt in asked]
    assert {output.finish_reason for output in outputs} == {"length"}
    assert_empty(engine)


@pytest.mark.parametrize("right", [RIGHT, WRONG, MIXED])
@pytest.mark.parametrize("depth", [0, 1, 3, 8])
@pytest.mark.parametrize(("stop", "shown"), [("cd", "ab"), (["zz", "de"], "abc"), ("a", ""), ("🙂é", "abcde ")])
def test_a_stop_string_ends_a_text_though_a_round_runs_past_it(overlapping, says, right, depth, stop, shown):
    engine = overlapping(says("abcde 🙂é and more"), right)
    output = engine.generate("x", max_tokens=30, depth=depth, stop=stop)
    assert (output.text, output.finish_reason) == (shown, "stop")
    spent = output.speculative
    assert len(output.tokens) <= spent.rounds + spent.accepted
    assert_empty(engine)


@pytest.mark.parametrize("depth", [0, 1, 3, 8])
@pytest.mark.parametrize("answer", ["abcde", "abcS", "ab🙂", ""])
def test_an_end_token_ends_a_text_at_once(overlapping, says, answer, depth):
    """Tokens tell it before any text is written; by then the next round has begun, and no other does."""
    engine = overlapping(says(answer))
    output = engine.generate("x", max_tokens=30, depth=depth, stop="STOP")
    assert (output.text, output.finish_reason) == (answer, "stop")
    tokens = len(answer.encode()) + 1
    assert len(engine.backend.rounds) <= tokens + 1
    assert_empty(engine)


def test_tokens_past_a_stop_string_are_nobodys(overlapping, says):
    """Neither in the answer, nor in its figures, nor handed out."""
    engine = overlapping(says("abcdefgh"), WRONG)
    index = engine.submit(Request(engine.text.encode("x"), 30, stop=("b",), depth=1, logprobs=0))
    emitted = run(engine)
    output = engine.output(index)
    assert [one.token for one in emitted] == list(output.tokens) == engine.text.encode("ab")
    assert len(output.logprobs) == 2
    assert output.speculative.rounds == 2
    assert len(engine.backend.rounds) == 3  # one ran in vain
    assert output.timings.tokens == 2
    assert_empty(engine)


@pytest.mark.parametrize("steps", range(1, 8))
def test_what_waits_is_written_when_a_request_is_cancelled(overlapping, steps):
    engine = overlapping(walk, WRONG)
    index = submit(engine, [1, 2], 20, depth=0)
    for _ in range(steps):
        engine.step()
    engine.cancel(index)
    output = engine.output(index)
    assert (output.tokens, output.finish_reason) == (walked([1, 2], steps), "cancelled")
    run(engine)
    assert_empty(engine)


def test_a_request_that_is_complete_is_not_cancelled_any_more(overlapping):
    """Its last text is written in the next step."""
    engine = overlapping(walk)
    index = submit(engine, [1], 2, depth=0)
    engine.step()
    engine.step()
    engine.cancel(index)
    run(engine)
    output = engine.output(index)
    assert (output.tokens, output.finish_reason) == (walked([1], 2), "length")
    assert_empty(engine)


@pytest.mark.parametrize("finish", [False, True])
def test_closing_writes_what_waits(overlapping, finish):
    engine = overlapping(walk)
    whole, cut = submit(engine, [1], 2, depth=0), submit(engine, [3], 9, depth=0)
    for _ in range(2):
        engine.step()
    engine.close(finish)
    run(engine)
    assert engine.output(whole).tokens == walked([1], 2)
    assert engine.output(cut).tokens == walked([3], 9 if finish else 2)
    assert_empty(engine)


@pytest.mark.parametrize("place", range(0, 24, 3))
def test_a_stop_string_may_end_a_row_that_has_made_room(overlapping, place):
    """Its last text is written after that."""
    engine = overlapping(walk, rows=2, pages=10, page=4)
    plain = scripted(walk)
    letters = plain(Request((3, 4, 5, 6), 24)).text
    asked = [Request((1, 2, 3), 24, depth=3), Request((3, 4, 5, 6), 24, depth=3, stop=(letters[place % len(letters)],))]
    indices = [engine.submit(request) for request in asked]
    run(engine)
    for index, request in zip(indices, asked, strict=True):
        output, alone = engine.output(index), plain(request)
        assert (output.tokens, output.text, output.finish_reason) == (alone.tokens, alone.text, alone.finish_reason)
    assert_empty(engine)


class Behind(FakeBackend):
    """Chunks take a device a second each, and their calls nothing."""

    def round(self, plan):
        done, chunks = super().round(plan), len(self.chunks)
        self.told, told = chunks, chunks - getattr(self, "told", 0)
        return SimpleNamespace(result=lambda: replace(done.result(), prompt_s=float(told)))


def test_what_chunks_take_behind_the_host_is_theirs(text, end):
    """Two requests, of three chunks and of one: neither the rounds' host time nor the other's prompt has it."""
    limits = replace(fake_limits(chunk=8, page=8), overlaps=True)
    engine = Engine(Behind(walk, limits=limits), text, "fake", (end,), Settings(budget=32))
    indices = [engine.submit(Request(list(range(first, 50)), max_tokens=3)) for first in (25, 41)]
    while engine.busy:
        engine.step()
    long, short = (engine.output(index).timings for index in indices)
    assert long.prefill_s == pytest.approx(3.0, abs=0.2)
    assert short.prefill_s == pytest.approx(1.0, abs=0.2)
    assert max(long.host_s, short.host_s) < 0.5
    assert engine.totals.seconds["prefill"] == pytest.approx(4.0, abs=0.2)


def repeated(history):
    return len(history) % 7


@pytest.mark.parametrize("worth", [False, True])
def test_a_text_that_repeats_itself_is_waited_for_where_that_pays(overlapping, monkeypatch, worth):
    """Or else the head goes on alone, and every round begins before the one before it is known."""
    engine = overlapping(repeated, WRONG, context=128)
    monkeypatch.setattr(engine._loop.controller, "worth_waiting", lambda *_: worth)
    output = engine.generate([1], max_tokens=100)
    assert output.tokens == tuple(place % 7 for place in range(1, 101))
    log = [what for what in engine.backend.log if what[0] != "text"]
    waited = [
        number
        for number in range(1, len(engine.backend.rounds))
        if ("result", number - 1) in log[: log.index(("round", number))]
    ]
    assert bool(waited) == worth
    assert (output.speculative.accepted > 50) == worth  # by what followed the same tokens before
    assert_empty(engine)


class Watched(Overlapping):
    """Notes which rows are released, and when a round is wholly told."""

    def round(self, plan):
        handle = super().round(plan)
        self.log.append(("told", len(self.rounds) - 1))
        return handle

    def release(self, row):
        self.log.append(("release", row))
        super().release(row)


@pytest.mark.parametrize("depth", [None, 0, 2])
@pytest.mark.parametrize("right", [RIGHT, WRONG, MIXED])
def test_constrained_rows_hold_no_round_up(text, end, depth, right):
    """A round begins before the one before it is known; masks wait for that, and rows that end with it stay so long."""
    asked = [
        Request((1, 2), 40, depth=depth),
        Request((3,), 40, depth=depth, constraint=Constraint("regex", "[a-p]{9,30}")),
        Request((4, 5), 40, depth=depth, constraint=Constraint("choice", ("abcabcabc", "bcdbcd", "dddd"))),
    ]
    wanted = []
    for overlaps in (False, True):
        limits = replace(fake_limits(vocab=300), overlaps=overlaps)
        engine = Engine(Watched(walk, right=right, limits=limits), text, "fake", (end,), Settings())
        engine.backend = engine._loop.backend
        indices = [engine.submit(request) for request in asked]
        run(engine)
        outputs = [engine.output(index) for index in indices]
        wanted.append([(output.tokens, output.finish_reason) for output in outputs])
        assert_empty(engine)
    assert wanted[0] == wanted[1]
    log, rounds = engine.backend.log, engine.backend.rounds
    early = [n for n in range(1, len(rounds)) if log.index(("round", n)) < log.index(("result", n - 1))]
    assert sum(any(row.masks for row in rounds[number]) for number in early) > 1
    began, told = ([log.index((name, number)) for number in range(len(rounds))] for name in ("round", "told"))
    released = [place for place, (name, _) in enumerate(log) if name == "release"]
    assert released
    assert not any(first < place < last for place in released for first, last in zip(began, told, strict=True))


def test_what_waiting_costs_is_known_where_rounds_that_do_not_wait_cost_nothing(overlapping):
    """Which is not to be taken for never seen."""
    engine = overlapping(repeated, WRONG, context=128)
    engine.generate([1], max_tokens=100, draft_kind="mtp")
    costs = engine._loop.controller.costs.of("plain")
    costs.waits[False] = 0.0
    assert costs.wait == costs.waits[True] > 0.0


def test_where_rounds_need_not_wait_those_that_do_say_nothing_of_the_host(overlapping, monkeypatch):
    """Nor do rounds that were the first of their shape."""
    engine = overlapping(walk)
    costs, told = engine._loop.controller.costs, []
    monkeypatch.setattr(costs, "record_host", lambda *args: told.append("host"))
    monkeypatch.setattr(costs, "record_wait", lambda kind, seconds, waited: told.append(waited))
    engine.generate([1, 2], max_tokens=12, depth=0)
    assert told.count("host") == told.count(False) > told.count(True) > 0
    told.clear()
    monkeypatch.setattr(Handle, "result", lambda self: replace(self.done.result(), cold=True))
    engine.generate([1, 2], max_tokens=12, depth=0)
    assert told == []


def test_a_round_begins_early_behind_drafts_that_the_host_gave(overlapping, monkeypatch):
    """Where the next such drafts are not worth a wait."""
    engine = overlapping(repeated, WRONG, context=128)
    verdicts = iter([True] * 3 + [False] * 200)
    monkeypatch.setattr(engine._loop.controller, "worth_waiting", lambda *_: next(verdicts))
    assert engine.generate([1], max_tokens=100).tokens == tuple(place % 7 for place in range(1, 101))
    log, rounds = engine.backend.log, engine.backend.rounds
    given = [number for number in range(len(rounds) - 1) if rounds[number][0].drafts]
    assert any(log.index(("round", number + 1)) < log.index(("result", number)) for number in given)
