"""What breaks fails the requests it was for, whoever they are told by; all others go on as if nothing had happened."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from headlong.backends.fake import FakeBackend
from headlong.engine.proposals import Ngram
from headlong.engine.request import Constraint, Request
from headlong.engine.text import Decoder
from headlong.errors import Fault
from tests.engine.scripted import MIXED, assert_empty, run, submit, walk, walked

STAGES = ("start", "prefill", "save", "round", "result", "set_aside", "bring_back")
TIGHT = {"rows": 4, "page": 4, "chunk": 8, "pages": 13}
WANTED = 20  # tokens
PATIENCE = 10.0  # seconds
BEGINNING = list(range(50, 67))


class Broken(Exception):
    """What the backend, a grammar or a decoder raises here."""


class BreakingResult:
    """A round that breaks, if it does, when its result is asked for."""

    def __init__(self, fake, plan, handle):
        self.fake, self.plan, self.handle = fake, plan, handle

    def result(self):
        return self.fake.call("result", self.fake.rows_of(self.plan), self.handle.result)


class Breaking(FakeBackend):
    """The n-th call of a kind raises, before or after it has done its work. Remembers whose call that was."""

    def __init__(self, script, **options):
        super().__init__(script, **options)
        self.stage, self.number, self.error, self.after = "", 0, Broken, False
        self.calls = Counter()
        self.struck = set()

    def break_at(self, stage, number, error=Broken, after=False):
        self.stage, self.number, self.error, self.after = stage, number, error, after

    def call(self, stage, prompts, work, *args):
        self.calls[stage] += 1
        now = stage == self.stage and self.calls[stage] == self.number
        if now:
            self.struck = set(prompts)
            if not self.after:
                raise self.error(f"the {stage} broke")
        done = work(*args)
        if now:
            raise self.error(f"the {stage} broke")
        return done

    def rows_of(self, plan):
        return self.prompts_of(*(part.row for part in plan))

    def prompts_of(self, *rows):
        return [self.rows[row].prompt for row in rows if row in self.rows]

    def start(self, start):
        return self.call("start", [tuple(start.prompt)], super().start, start)

    def prefill(self, chunk, pieces=1):
        return self.call("prefill", self.prompts_of(chunk.row), super().prefill, chunk, pieces)

    def save(self, row):
        return self.call("save", self.prompts_of(row), super().save, row)

    def set_aside(self, row):
        return self.call("set_aside", self.prompts_of(row), super().set_aside, row)

    def bring_back(self, row, saved, pages):
        return self.call("bring_back", [saved.row.prompt], super().bring_back, row, saved, pages)

    def release(self, row):
        return self.call("release", self.prompts_of(row), super().release, row)

    def round(self, plan):
        return BreakingResult(self, plan, self.call("round", self.rows_of(plan), super().round, plan))


def requests():
    """Enough on few pages to meet every stage several times: shared beginnings, and rows that make room."""
    prompts = [[1, 2], BEGINNING, [3], [*BEGINNING, 4], [*BEGINNING[:12], 5, 6], [7, 8, 9], [*range(20)], [11]]
    return [Request(tuple(prompt), WANTED, depth=place % 4) for place, prompt in enumerate(prompts)]


@pytest.fixture
def breaking(build):
    def make(**options):
        return build(walk, MIXED, backend=Breaking, **{**TIGHT, **options})

    return make


def outputs_of(engine, asked):
    indices = [engine.submit(request) for request in asked]
    run(engine, most=400)
    return [engine.output(index) for index in indices]


def judge(outputs, asked, struck, error):
    """Those that were struck have failed with what they had; the others are whole."""
    for output, request in zip(outputs, asked, strict=True):
        whole = walked(request.prompt, request.max_tokens)
        if request.prompt in struck:
            assert output.finish_reason == "fault"
            assert output.error == error
            assert output.tokens == whole[: len(output.tokens)]
            assert len(output.tokens) < len(whole)
        else:
            assert (output.finish_reason, output.tokens, output.error) == ("length", whole, "")


# --- the backend -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_broken_call_fails_the_requests_it_was_for(breaking, stage, number, after):
    engine = breaking()
    engine.backend.break_at(stage, number, after=after)
    asked = requests()
    outputs = outputs_of(engine, asked)
    struck = engine.backend.struck
    assert struck, f"there were {engine.backend.calls} calls"
    assert stage in ("round", "result") or len(struck) == 1
    harmed = set() if stage == "save" else struck  # what is saved is for others
    judge(outputs, asked, harmed, f"Broken: the {stage} broke")
    assert_empty(engine)


@pytest.mark.parametrize("number", range(1, 9))
def test_a_row_that_breaks_as_it_is_given_back_harms_no_other(breaking, number):
    """Not even its own request, unless that was to go on later: to set a row aside gives it back too."""
    engine = breaking()
    engine.backend.break_at("release", number, after=True)
    asked = requests()
    outputs = outputs_of(engine, asked)
    struck = engine.backend.struck
    assert len(struck) == 1
    harmed = {request.prompt for request, output in zip(asked, outputs, strict=True) if output.error}
    assert harmed <= struck
    judge(outputs, asked, harmed, "Broken: the release broke")
    assert_empty(engine)


def test_a_row_that_breaks_as_its_request_is_cancelled_harms_nobody(breaking):
    engine = breaking()
    first, second = submit(engine, [1, 2], 9), submit(engine, [3, 4], 9)
    engine.step()
    engine.backend.break_at("release", 1, after=True)
    engine.cancel(first)
    run(engine)
    assert engine.output(first).finish_reason == "cancelled"
    assert engine.output(second).tokens == walked([3, 4], 9)
    assert_empty(engine)


def test_everybody_is_told_if_nothing_works_any_more(breaking):
    """As after an error that a GPU does not recover from; who waits and who comes later is told too."""
    engine = breaking(rows=2)
    calls = engine.backend.calls
    works = engine.backend.call

    def call(stage, *args):
        if calls["round"] == 3:  # too early for any of them to have 30 tokens
            raise Broken("nothing works")
        return works(stage, *args)

    engine.backend.call = call

    async def ask():
        tasks = [asyncio.create_task(engine.generate_async([place, 2], max_tokens=30)) for place in range(5)]
        async with asyncio.timeout(PATIENCE):
            told = await asyncio.gather(*tasks, return_exceptions=True)
            late = await asyncio.gather(engine.generate_async([9], max_tokens=3), return_exceptions=True)
        return told + late

    assert [str(each) for each in asyncio.run(ask())] == ["a request failed: Broken: nothing works"] * 6


@pytest.mark.parametrize("stage", STAGES)
def test_texts_are_the_same_after_a_fault(breaking, stage):
    """What broke left nothing in cached prefixes, pages or rows."""
    engine = breaking()
    engine.backend.break_at(stage, 2)
    outputs_of(engine, requests())
    judge(outputs_of(engine, requests()), requests(), set(), "")
    assert_empty(engine)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, 7))
def test_a_broken_piece_of_a_chunk_fails_its_request(breaking, number, after):
    """The first calls are for the second prompt: the first is one token."""
    engine = breaking(pieces=4)
    engine.backend.break_at("prefill", number, after=after)
    asked = [Request((1,), WANTED), *requests()[1:]]
    outputs = outputs_of(engine, asked)
    assert len(engine.backend.struck) == 1
    judge(outputs, asked, engine.backend.struck, "Broken: the prefill broke")
    judge(outputs_of(engine, asked), asked, set(), "")
    assert_empty(engine)


@pytest.mark.parametrize("stage", ["start", "prefill", "round", "result"])
def test_generate_raises_a_fault(breaking, stage):
    engine = breaking()
    engine.backend.break_at(stage, 1)
    with pytest.raises(Fault, match=f"a request failed: Broken: the {stage} broke"):
        engine.generate(BEGINNING, max_tokens=5)
    assert engine.generate(BEGINNING, max_tokens=5).tokens == walked(BEGINNING, 5)
    assert_empty(engine)


def test_a_stream_ends_with_the_fault(breaking):
    engine = breaking()
    engine.backend.break_at("round", 3)
    emitted = list(engine.stream([1, 2], max_tokens=12, depth=0))
    assert [(one.token, one.finish_reason) for one in emitted] == [
        *((token, None) for token in walked([1, 2], 2)),
        (None, "fault"),
    ]
    assert_empty(engine)


def test_a_fault_is_logged_with_its_requests(breaking, caplog):
    engine = breaking()
    engine.backend.break_at("round", 1)
    run_one = submit(engine, [1, 2])
    run(engine)
    assert engine.output(run_one).error == "Broken: the round broke"
    (record,) = caplog.records
    assert record.getMessage() == "a fault, in requests [0]"
    assert record.exc_info


# --- text --------------------------------------------------------------------------------------------------------


class BreakingDecoder(Decoder):
    """Breaks at its n-th token, and from then on or just once; or when it is to give what it held back."""

    calls, at, again = 0, 0, False

    def push(self, token):
        self.calls += 1
        if self.calls == self.at or (self.again and self.calls > self.at):
            raise Broken("the decoder broke")
        return super().push(token)

    def flush(self):
        if self.at == "flush":
            raise Broken("the decoder broke")
        return super().flush()


def break_text(engine, monkeypatch, prompt, at, again=False):
    """Give one prompt a decoder that breaks."""
    whole = engine.text.decoder

    def decoder(given):
        if tuple(given) != tuple(prompt):
            return whole(given)
        mine = BreakingDecoder(engine.text, given)
        mine.at, mine.again = at, again
        return mine

    monkeypatch.setattr(engine._intake, "text", SpyText(engine.text, decoder))


class SpyText:
    def __init__(self, text, decoder):
        self._text, self.decoder = text, decoder

    def __getattr__(self, name):
        return getattr(self._text, name)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("at", "again"), [(1, False), (4, False), (4, True), (WANTED, False), ("flush", False)])
def test_a_text_that_cannot_be_written_fails_alone(breaking, monkeypatch, at, again, overlaps):
    engine = breaking()
    engine._loop.limits = replace(engine.limits, overlaps=overlaps)
    asked = requests()
    break_text(engine, monkeypatch, asked[3].prompt, at, again)
    indices = [engine.submit(request) for request in asked]
    emitted = run(engine, most=400)
    outputs = [engine.output(index) for index in indices]
    assert [output.finish_reason for output in outputs] == ["length"] * 3 + ["fault"] + ["length"] * 4
    judge(outputs[:3] + outputs[4:], asked[:3] + asked[4:], set(), "")
    assert outputs[3].error == "Broken: the decoder broke"
    whole = walked(asked[3].prompt, WANTED)
    assert outputs[3].tokens == whole[: len(outputs[3].tokens)]
    told = tuple(one.token for one in emitted if one.index == indices[3] and one.token is not None)
    assert told == whole[: len(told)]
    assert_empty(engine)


def test_a_request_whose_text_is_broken_can_be_cancelled(breaking, monkeypatch):
    """With overlap the text of the last round waits when the cancellation comes."""
    engine = breaking()
    engine._loop.limits = replace(engine.limits, overlaps=True)
    break_text(engine, monkeypatch, [1, 2], 2, again=True)
    broken, other = submit(engine, [1, 2], depth=0), submit(engine, [3], depth=0)
    engine.step()
    engine.step()
    engine.cancel(broken)
    run(engine, most=100)
    assert engine.output(broken).finish_reason in ("cancelled", "fault")
    assert engine.output(other).tokens == walked([3], 8)
    assert_empty(engine)


# --- grammars and proposers --------------------------------------------------------------------------------------


class BreakingGuide:
    """Allows everything, and breaks at the n-th call of one of its methods."""

    complete = False

    def __init__(self, stage, number, vocab):
        self.stage, self.number, self.words = stage, number, -(-vocab // 32)
        self.calls = Counter()

    def _call(self, stage):
        self.calls[stage] += 1
        if stage == self.stage and self.calls[stage] == self.number:
            raise Broken(f"the guide's {stage} broke")

    def accept(self, tokens):
        self._call("accept")

    def valid(self, drafts):
        self._call("valid")
        return len(drafts)

    def forced(self, most):
        self._call("forced")
        return ()

    def masks(self, drafts):
        self._call("masks")
        return np.full((len(drafts) + 1, self.words), -1, np.int32)


def with_guide(engine, monkeypatch, stage, number):
    """Constrained requests get a guide that breaks."""
    guides = []

    def guide(request):
        if request.constraint is None:
            return None
        guides.append(BreakingGuide(stage, number, engine.limits.vocab))
        return guides[-1]

    monkeypatch.setattr(engine._intake, "_guide", guide)
    return guides


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("accept", "Broken: the guide's accept broke"),
        ("masks", "the constraint could not be followed"),
        ("forced", "Broken: the guide's forced broke"),
        ("valid", "Broken: the guide's valid broke"),
    ],
)
def test_a_grammar_that_breaks_fails_its_request_alone(breaking, monkeypatch, stage, error, number, overlaps):
    engine = breaking()
    engine._loop.limits = replace(engine.limits, overlaps=overlaps)
    guides = with_guide(engine, monkeypatch, stage, number)
    asked = requests()
    asked[3] = replace(asked[3], constraint=Constraint("regex", ".*"))
    outputs = outputs_of(engine, asked)
    assert guides[0].calls[stage] >= number
    judge(outputs, asked, {asked[3].prompt}, error)
    assert_empty(engine)


@pytest.mark.parametrize("number", [2, 5])
def test_a_grammar_that_breaks_while_the_next_round_is_foreseen_fails_its_request_alone(breaking, monkeypatch, number):
    """It is asked while a round is under way; what it says then it says again when asked for drafts."""
    engine = breaking(pages=100)
    engine._loop.limits = replace(engine.limits, overlaps=True)
    guides = with_guide(engine, monkeypatch, "forced", number)
    monkeypatch.setattr(BreakingGuide, "_call", broken_from)
    asked = [Request((1, 2), WANTED, depth=2), Request((3,), WANTED, depth=2, constraint=Constraint("regex", ".*"))]
    outputs = outputs_of(engine, asked)
    assert guides[0].calls["forced"] > number
    judge(outputs, asked, {(3,)}, "Broken: the guide's forced broke")
    assert_empty(engine)


def broken_from(guide, stage):
    guide.calls[stage] += 1
    if stage == guide.stage and guide.calls[stage] >= guide.number:
        raise Broken(f"the guide's {stage} broke")


def test_a_round_that_breaks_after_a_mask_did_fails_for_its_own_reason(breaking, monkeypatch):
    """And the broken grammar is not remembered for whoever comes next."""
    engine = breaking()
    with_guide(engine, monkeypatch, "masks", 1)
    engine.backend.break_at("result", 1)
    constrained = Request((1, 2), 12, constraint=Constraint("regex", ".*"))
    (output,) = outputs_of(engine, [constrained])
    assert output.error == "Broken: the result broke"
    judge(outputs_of(engine, requests()), requests(), set(), "")
    assert_empty(engine)


@pytest.mark.parametrize("stage", ["extend", "propose"])
def test_a_proposer_that_breaks_fails_its_request_alone(breaking, monkeypatch, stage):
    engine = breaking()
    asked = requests()

    class BreakingNgram(Ngram):
        def __init__(self, prompt):
            super().__init__(prompt)
            self.mine = tuple(prompt) == asked[3].prompt
            self.rounds = 0

        def extend(self, tokens):
            if stage == "extend" and len(self._text) > len(asked[3].prompt) and self.mine:
                raise Broken("the extend broke")
            super().extend(tokens)

        def matches(self, least):
            return True  # or else the head would stand in the window

        def propose(self, most):
            self.rounds += 1
            if stage == "propose" and self.mine and self.rounds == 2:
                raise Broken("the propose broke")
            return super().propose(most)

    monkeypatch.setattr("headlong.engine.intake.Ngram", BreakingNgram)
    outputs = outputs_of(engine, asked)
    judge(outputs, asked, {asked[3].prompt}, f"Broken: the {stage} broke")
    assert_empty(engine)


# --- idle moments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["start", "prefill", "save"])
def test_what_breaks_while_the_engine_rests_harms_nobody(breaking, stage):
    """Nobody asked for that work."""
    engine = breaking()
    engine.generate([1, 2, 3], max_tokens=20)
    engine.backend.break_at(stage, engine.backend.calls[stage] + 1)
    while engine.rest():
        pass
    assert engine.backend.struck
    judge(outputs_of(engine, requests()), requests(), set(), "")
    while engine.rest():
        pass
    with engine.idle_backend():
        pass
    assert_empty(engine)


# --- interrupts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupt_cancels_what_runs_and_the_rest_goes_on(breaking, stage, number, after):
    engine = breaking()
    engine.backend.break_at(stage, number, KeyboardInterrupt, after)
    asked = requests()
    indices = [engine.submit(request) for request in asked]
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert not engine.backend.rows
    engine._loop.scheduler.check()
    run(engine)
    outputs = [engine.output(index) for index in indices]
    cancelled = [output for output in outputs if output.finish_reason == "cancelled"]
    assert 1 <= len(cancelled) <= TIGHT["rows"]
    for output, request in zip(outputs, asked, strict=True):
        whole = walked(request.prompt, WANTED)
        assert output.finish_reason in ("length", "cancelled")
        assert output.tokens == (whole if output.finish_reason == "length" else whole[: len(output.tokens)])
    assert_empty(engine)


def limit_steps(engine, most=200):
    """A wait that nobody would end becomes an error."""
    step, calls = engine._loop.step, iter(range(most))

    def limited():
        assert next(calls, None) is not None, f"after {most} steps somebody still waits"
        return step()

    engine._loop.step = limited


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("stage", ["prefill", "round", "result"])
@pytest.mark.parametrize("number", range(1, 8))
@pytest.mark.parametrize("overlaps", [False, True])
def test_an_interrupted_caller_keeps_nobody_waiting(breaking, stage, number, after, overlaps):
    """Another caller's stream ends, whole or cancelled."""
    engine = breaking()
    engine._loop.limits = replace(engine.limits, overlaps=overlaps)
    limit_steps(engine)
    other = engine.stream([3, 4], max_tokens=4, depth=0)
    seen = [next(other)]
    engine.backend.break_at(stage, engine.backend.calls[stage] + number, KeyboardInterrupt, after)
    with contextlib.suppress(KeyboardInterrupt):
        engine.generate([*range(24)], max_tokens=9, depth=0)
    with contextlib.suppress(KeyboardInterrupt):
        seen += other
    reasons = [one.finish_reason for one in seen if one.finish_reason]
    assert len(reasons) <= 1
    tokens = tuple(one.token for one in seen if one.token is not None)
    assert tokens == walked([3, 4], 4)[: len(tokens)]
    assert reasons != ["length"] or len(tokens) == 4
    assert engine.generate([5], max_tokens=3).tokens == walked([5], 3)
    assert_empty(engine)


def test_an_interrupt_while_a_row_is_released_harms_no_other(breaking, monkeypatch):
    """The row may be somebody else's by then."""
    engine = breaking()
    release, calls = engine.backend.release, iter(range(100))

    def interrupted(row):
        release(row)
        if next(calls) == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine.backend, "release", interrupted)
    first, second = submit(engine, [1, 2], 2, depth=0), submit(engine, [3, 4], 9, depth=0)
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    third = submit(engine, [5, 6], 9, depth=0)
    run(engine)
    reasons = [engine.output(index).finish_reason for index in (first, second, third)]
    assert reasons == ["length", "cancelled", "length"]
    assert_empty(engine)
