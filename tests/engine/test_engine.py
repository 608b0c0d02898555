"""The engine over the scripted backend, which refuses every plan that a real one could not run."""

import contextlib
import threading
from collections import deque

import pytest

from headlong.backends.fake import FakeBackend
from headlong.engine.request import Request, Sampling
from headlong.errors import UserError

RIGHT, WRONG = (True,), (False,)
MIXED = (True, True, False, True, False)


def walk(history):
    """A model whose next token depends on all before it and is never the end token."""
    return (sum(history) * 31 + history[-1] * 7 + len(history)) % 200


def walked(prompt, count):
    history = tuple(prompt)
    for _ in range(count):
        history += (walk(history),)
    return history[len(prompt) :]


def prompts(*lengths):
    return [[(3 * place + length) % 200 for place in range(length)] for length in lengths]


def assert_empty(engine):
    """Nothing is left behind: no row, no page, no request."""
    assert not engine.busy
    assert not engine.backend.rows
    assert not engine._answers
    assert not engine._outboxes
    engine._scheduler.check()
    assert engine._scheduler.pool.free == engine.limits.pages


# --- the same tokens, whatever is drafted ------------------------------------------------------------------------


@pytest.mark.parametrize("right", [RIGHT, WRONG, MIXED])
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 8])
def test_drafts_never_change_the_tokens(build, right, depth):
    engine = build(walk, right)
    asked = prompts(1, 2, 8, 9, 10, 17, 25)
    outputs = engine.generate(asked, max_tokens=13, depth=depth)
    assert [output.tokens for output in outputs] == [walked(prompt, 13) for prompt in asked]
    assert {output.finish_reason for output in outputs} == {"length"}
    assert_empty(engine)


@pytest.mark.parametrize("max_tokens", range(1, 9))
@pytest.mark.parametrize("right", [RIGHT, WRONG, MIXED])
def test_max_tokens_is_exact(build, right, max_tokens):
    engine = build(walk, right)
    output = engine.generate([5, 6, 7], max_tokens=max_tokens, depth=3)
    assert output.tokens == walked([5, 6, 7], max_tokens)
    assert output.timings.tokens == max_tokens


@pytest.mark.parametrize("right", [RIGHT, WRONG, MIXED])
@pytest.mark.parametrize("context", [17, 31, 32])
def test_the_context_can_be_filled(build, right, context):
    engine = build(walk, right, context=context)
    for prompt in prompts(1, 8, context - 1):
        output = engine.generate(prompt, max_tokens=context - len(prompt), depth=8)
        assert output.tokens == walked(prompt, context - len(prompt))
    assert_empty(engine)


def test_more_prompts_than_rows(build):
    engine = build(walk, MIXED, rows=2)
    asked = prompts(*range(1, 12))
    outputs = engine.generate(asked, max_tokens=6)
    assert [output.tokens for output in outputs] == [walked(prompt, 6) for prompt in asked]
    assert max(len(plan) for plan in engine.backend.rounds) == 2
    assert_empty(engine)


def test_few_pages_make_requests_wait(build):
    engine = build(walk, MIXED, rows=4, pages=7, page=4)
    asked = prompts(12, 3, 11, 5, 7)
    outputs = engine.generate(asked, max_tokens=9, depth=3)
    assert [output.tokens for output in outputs] == [walked(prompt, 9) for prompt in asked]
    assert max(len(plan) for plan in engine.backend.rounds) < 3
    assert_empty(engine)


def test_rows_may_have_depths_of_their_own(build):
    engine = build(walk)
    indices = [engine.submit(Request([4, 5], max_tokens=12, depth=depth)) for depth in (0, 1, 4, None)]
    while engine.busy:
        engine.step()
        engine._scheduler.check()
    outputs = [engine.output(index) for index in indices]
    assert {output.tokens for output in outputs} == {walked([4, 5], 12)}
    assert [output.speculative.depth for output in outputs] == [0, 1, 4, 2]
    assert_empty(engine)


# --- how an answer ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 3, 8])
def test_the_end_token_ends_an_answer_and_is_not_in_it(build, says, text, depth):
    engine = build(says("abcde"))
    output = engine.generate("x", max_tokens=30, depth=depth)
    assert (output.text, output.finish_reason) == ("abcde", "stop")
    assert output.tokens == tuple(text.encode("abcde"))
    assert_empty(engine)


def test_the_end_token_can_be_ignored(build, says):
    output = build(says("abc")).generate("x", max_tokens=9, ignore_eos=True)
    assert (output.text, output.finish_reason, len(output.tokens)) == ("abc", "length", 9)


@pytest.mark.parametrize("depth", [0, 1, 3, 8])
@pytest.mark.parametrize(("stop", "shown"), [("cd", "ab"), (["zz", "de"], "abc"), ("a", ""), ("🙂é", "abcde ")])
def test_a_stop_string_ends_an_answer_and_is_not_in_it(build, says, depth, stop, shown):
    engine = build(says("abcde 🙂é and more"))
    output = engine.generate("x", max_tokens=30, depth=depth, stop=stop)
    assert (output.text, output.finish_reason) == (shown, "stop")
    assert_empty(engine)


@pytest.mark.parametrize("answer", ["abcS", "abcST", "ab🙂"])
def test_what_was_held_back_comes_at_the_end(build, says, answer):
    assert build(says(answer)).generate("x", max_tokens=30, stop="STOP").text == answer
    length = len(answer.encode())
    assert build(says(answer)).generate("x", max_tokens=length, stop="STOP").text == answer


def test_a_text_cut_inside_a_character_says_so(build, says):
    assert build(says("ab🙂")).generate("x", max_tokens=4).text == "ab�"


# --- streaming ---------------------------------------------------------------------------------------------------


def test_a_stream_has_every_token_in_order(build):
    engine = build(walk, MIXED, rows=2)
    asked = prompts(3, 9, 5)
    seen = {0: [], 1: [], 2: []}
    finished = []
    for emitted in engine.stream(asked, max_tokens=7, depth=2):
        assert emitted.index not in finished
        seen[emitted.index].append(emitted.token)
        if emitted.finish_reason:
            finished.append(emitted.index)
    assert [tuple(seen[place]) for place in range(3)] == [walked(prompt, 7) for prompt in asked]
    assert sorted(finished) == [0, 1, 2]
    assert_empty(engine)


def test_a_stream_gives_the_text_of_the_whole(build, says):
    engine = build(says("é🙂 ok STO"))
    pieces = list(engine.stream("x", max_tokens=30, stop="STOP"))
    assert "".join(piece.text for piece in pieces) == "é🙂 ok STO"
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]


def test_drafted_tokens_are_marked(build):
    tokens = list(build(walk, RIGHT).stream([1, 2], max_tokens=9, depth=2))
    assert [token.drafted for token in tokens] == [True, True, False] * 3
    assert not any(token.drafted for token in build(walk, WRONG).stream([1, 2], max_tokens=9))


def test_leaving_a_stream_cancels_its_requests(build):
    engine = build(walk, rows=2)
    stream = engine.stream(prompts(3, 3, 3, 3), max_tokens=20)
    next(stream)
    assert engine.busy
    stream.close()
    assert_empty(engine)


def test_a_stream_that_is_never_read_queues_nothing(build):
    engine = build(walk)
    engine.stream([1, 2], max_tokens=5)
    assert_empty(engine)


def test_streams_can_take_turns(build):
    engine = build(walk, MIXED)
    first, second = engine.stream([1, 2], max_tokens=9), engine.stream([3, 4], max_tokens=9)
    turns = [(one.token, other.token) for one, other in zip(first, second, strict=True)]
    assert tuple(one for one, _ in turns) == walked([1, 2], 9)
    assert tuple(other for _, other in turns) == walked([3, 4], 9)
    assert_empty(engine)


# --- parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_cancelled_request_keeps_what_it_had(build, steps):
    engine = build(walk, WRONG, rows=1)
    index, other = (engine.submit(Request([1, 2, 3], max_tokens=20)) for _ in range(2))
    for _ in range(steps):
        engine.step()
    assert engine.output(index).finish_reason == "cancelled"  # so far
    engine.cancel(index)
    engine.cancel(index)
    output = engine.output(index)
    assert (output.tokens, output.finish_reason) == (walked([1, 2, 3], steps), "cancelled")
    while engine.busy:
        engine.step()
    assert engine.output(other).tokens == walked([1, 2, 3], 20)
    assert_empty(engine)


def test_an_output_is_handed_out_once(build):
    engine = build(walk)
    index = engine.submit(Request([1], max_tokens=1))
    engine.step()
    engine.output(index)
    with pytest.raises(UserError, match="there is no request 0"):
        engine.output(index)


def test_an_idle_step_gives_nothing(build):
    assert build(walk).step() == []


def test_a_failing_backend_leaves_a_usable_engine(build):
    class Failing(FakeBackend):
        calls = 0

        def round(self, plan):
            self.calls += 1
            if self.calls == 3:
                raise MemoryError("the device is full")
            return super().round(plan)

    engine = build(walk, backend=Failing, rows=2)
    waiting = [engine.submit(Request([7, 8], max_tokens=9)) for _ in range(3)]
    with pytest.raises(MemoryError):
        engine.generate([1, 2], max_tokens=20)
    assert engine.generate([1, 2], max_tokens=20).tokens == walked([1, 2], 20)
    outputs = [engine.output(index) for index in waiting]
    assert [output.finish_reason for output in outputs] == ["cancelled", "cancelled", "length"]
    assert_empty(engine)


def test_a_closed_engine_refuses_work(build):
    engine = build(walk)
    index = engine.submit(Request([1, 2], max_tokens=5))
    engine.step()
    engine.close()
    engine.close()
    assert engine.output(index).finish_reason == "cancelled"
    assert_empty(engine)
    with pytest.raises(UserError, match="the engine of fake is closed"):
        engine.generate([1], max_tokens=5)


def test_closing_works_as_a_context(build):
    with contextlib.closing(build(walk)) as engine:
        assert engine.generate([1], max_tokens=1).tokens == walked([1], 1)


# --- prompts, seeds ----------------------------------------------------------------------------------------------


def test_one_prompt_gives_one_output_and_a_list_gives_a_list(build, says):
    engine = build(says("ok"), context=300)
    assert engine.generate("x").text == "ok"
    assert engine.generate(engine.text.encode("x")).text == "ok"
    assert [output.text for output in engine.generate(["x", "y"])] == ["ok", "ok"]
    assert [output.text for output in engine.generate([[1]])] == ["ok"]
    assert engine.generate([]) == []


def test_a_seed_reaches_the_backend_and_without_one_each_row_draws_its_own(build):
    engine = build(walk)
    for sampling in (Sampling(temperature=1.0, seed=7), Sampling(temperature=1.0), Sampling(temperature=1.0)):
        engine.submit(Request([1, 2], max_tokens=5, sampling=sampling))
    engine.step()
    seeds = [row.seed for row in engine.backend.rows.values()]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3


@pytest.mark.parametrize("right", [RIGHT, MIXED])
def test_threads_may_share_an_engine(build, right):
    engine = build(walk, right)
    found = {}

    def ask(name, asked):
        found[name] = [engine.generate(prompt, max_tokens=20, depth=2).tokens for prompt in asked]

    asked = {"one": prompts(*range(1, 13)), "two": prompts(*range(3, 15))}
    threads = [threading.Thread(target=ask, args=item) for item in asked.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {name: [walked(prompt, 20) for prompt in theirs] for name, theirs in asked.items()}
    assert_empty(engine)


@pytest.mark.parametrize("moment", range(4))
def test_an_interrupt_while_a_request_is_admitted_leaves_nothing_behind(build, moment, monkeypatch):
    """As Ctrl-C may come between any two lines of `admit`."""
    engine = build(walk)
    calls = iter(range(100))

    class Interrupted(deque):
        def popleft(self):
            if next(calls) == moment:
                raise KeyboardInterrupt
            return super().popleft()

    engine._scheduler.waiting = Interrupted()
    with contextlib.suppress(KeyboardInterrupt):
        engine.generate(prompts(3, 4, 5, 6, 7), max_tokens=5)
    assert_empty(engine)
    assert engine.generate([5, 6, 7], max_tokens=6).tokens == walked([5, 6, 7], 6)
