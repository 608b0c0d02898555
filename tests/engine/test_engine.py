"""The engine over the scripted backend, which refuses every plan that a real one could not run."""

import contextlib
import threading

import pytest

from headlong.backends.fake import FakeBackend
from headlong.engine.request import Request, Sampling
from headlong.errors import UserError
from headlong.settings import Settings
from tests.engine.scripted import MIXED, RIGHT, WRONG, assert_empty, prompts, run, submit, walk, walked

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


def test_rows_may_have_depths_of_their_own(build):
    engine = build(walk)
    indices = [engine.submit(Request([4, 5], max_tokens=12, depth=depth)) for depth in (0, 1, 4, None)]
    while engine.busy:
        engine.step()
        engine._loop.scheduler.check()
    outputs = [engine.output(index) for index in indices]
    assert {output.tokens for output in outputs} == {walked([4, 5], 12)}
    assert [output.speculative.depth for output in outputs[:3]] == [0, 1, 4]
    assert 0 < outputs[3].speculative.depth <= engine.limits.depth  # chosen for it
    assert_empty(engine)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("deepest", [0, 1, 3])
def test_nobody_drafts_deeper_than_the_backend_goes(build, deepest, head):
    """Whether the head or others draft, and whatever was asked."""
    engine = build(walk, MIXED, depth=deepest, head=head)
    said = walked([4, 5], 20)
    for depth in (None, 8):
        for prediction in (None, said):
            output = engine.generate([4, 5], max_tokens=20, depth=depth, prediction=prediction)
            assert output.tokens == said
            assert output.speculative.depth <= deepest
    assert max(max(part.verify, part.draft) for plan in engine.backend.rounds for part in plan) <= deepest
    assert_empty(engine)


def test_several_answers_to_one_prompt(build):
    engine = build(walk, MIXED)
    outputs = engine.generate([[4, 5], [6]], max_tokens=7, n=3)
    assert [output.tokens for output in outputs] == [walked([4, 5], 7)] * 3 + [walked([6], 7)] * 3
    assert [output.tokens for output in engine.generate([6], max_tokens=7, n=2)] == [walked([6], 7)] * 2
    assert_empty(engine)


# --- rows and pages ----------------------------------------------------------------------------------------------


class Watched(FakeBackend):
    """Counts the rows that were set aside and brought back."""

    def __init__(self, script, **options):
        super().__init__(script, **options)
        self.left, self.returned = [], []

    def set_aside(self, row):
        self.left.append(self.rows[row].prompt)
        return super().set_aside(row)

    def bring_back(self, row, saved, pages):
        self.returned.append(saved.row.prompt)
        return super().bring_back(row, saved, pages)


def test_the_youngest_row_makes_room_and_goes_on_where_it_was(build):
    engine = build(walk, MIXED, backend=Watched, rows=2, pages=10, page=4)
    asked = prompts(3, 4)
    outputs = engine.generate(asked, max_tokens=24, depth=3)
    assert [output.tokens for output in outputs] == [walked(prompt, 24) for prompt in asked]
    assert engine.backend.left == engine.backend.returned
    assert set(engine.backend.left) == {tuple(asked[1])}
    assert len(engine.backend.chunks) == 2  # no prompt was run again
    assert_empty(engine)


def test_a_higher_priority_keeps_its_pages(build):
    engine = build(walk, MIXED, backend=Watched, rows=2, pages=10, page=4)
    asked = prompts(3, 4)
    indices = [submit(engine, prompt, 24, priority=place) for place, prompt in enumerate(asked)]
    run(engine)
    assert [engine.output(index).tokens for index in indices] == [walked(prompt, 24) for prompt in asked]
    assert set(engine.backend.left) == {tuple(asked[0])}


def test_a_prompt_that_made_room_is_run_again(build):
    engine = build(walk, backend=Watched, rows=2, pages=11, page=4, chunk=8, settings=Settings(prefix_bytes=0))
    first, second = submit(engine, [1], 32, depth=8), submit(engine, prompts(27)[0], 4, depth=8)
    run(engine)
    assert (engine.output(first).tokens, engine.output(second).tokens) == (walked([1], 32), walked(prompts(27)[0], 4))
    assert engine.backend.left == []
    assert len(engine.backend.chunks) > 4
    assert_empty(engine)


def test_few_pages_give_the_same_texts(build):
    engine = build(walk, MIXED, rows=4, pages=8, page=4)
    asked = prompts(12, 3, 11, 5, 7)
    outputs = engine.generate(asked, max_tokens=9, depth=3)
    assert [output.tokens for output in outputs] == [walked(prompt, 9) for prompt in asked]
    assert_empty(engine)


def test_higher_priorities_get_rows_first(build):
    engine = build(walk, rows=1)
    for priority in (0, 2, 1, 2):
        submit(engine, [1, 2], 2, priority=priority)
    ends = [emitted.index for emitted in run(engine) if emitted.finish_reason]
    assert ends == [1, 3, 2, 0]


@pytest.mark.parametrize(("budget", "most"), [(0, 1), (5, 1), (8, 1), (12, 1), (16, 2), (20, 2), (24, 3)])
def test_prompts_hold_up_rounds_for_no_more_than_the_budget(build, budget, most):
    engine = build(walk, chunk=8, settings=Settings(budget=budget))
    submit(engine, [1], 30, depth=0)
    engine.step()
    submit(engine, prompts(61)[0], 2)
    ran = []
    while engine.busy:
        chunks, rounds = len(engine.backend.chunks), len(engine.backend.rounds)
        engine.step()
        ran.append(len(engine.backend.chunks) - chunks)
        assert len(engine.backend.rounds) == rounds + 1
    assert max(ran) == most
    assert sum(ran) == 8


# --- prefixes ----------------------------------------------------------------------------------------------------


def test_a_prompt_that_was_there_before_is_not_run_again(build):
    engine = build(walk, MIXED, chunk=8)
    prompt = prompts(30)[0]
    first, second = (engine.generate(prompt, max_tokens=5) for _ in range(2))
    assert first.tokens == second.tokens == walked(prompt, 5)
    assert [chunk.start for chunk in engine.backend.chunks] == [0, 8, 16, 24, 24]
    assert_empty(engine)


def test_prompts_that_come_together_share_their_beginning(build):
    engine = build(walk, MIXED, chunk=8, context=100)
    prompt = prompts(30)[0]
    outputs = engine.generate([prompt, [*prompt, 7], [*prompt[:20], 8]], max_tokens=5)
    assert [output.timings.cached_tokens for output in outputs] == [0, 24, 16]
    assert [output.tokens for output in outputs] == [
        walked(asked, 5) for asked in (prompt, [*prompt, 7], [*prompt[:20], 8])
    ]
    assert_empty(engine)


def test_an_idle_engine_prefills_what_was_said(build):
    engine = build(walk, MIXED, chunk=8)
    said = engine.generate([1, 2, 3], max_tokens=30).tokens
    while engine.rest():
        pass
    again = [1, 2, 3, *said, 9]
    output = engine.generate(again, max_tokens=5)
    assert (output.tokens, output.timings.cached_tokens) == (walked(again, 5), 32)
    assert_empty(engine)


def test_a_request_drives_away_who_rests(build):
    engine = build(walk, MIXED, rows=1, chunk=8)
    engine.generate([1, 2, 3], max_tokens=30)
    assert engine.rest()
    assert engine.backend.rows
    assert engine.generate([5], max_tokens=5).tokens == walked([5], 5)
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


@pytest.mark.parametrize("depth", [0, 1, 3, 8])
@pytest.mark.parametrize(("least", "count"), [(0, 5), (5, 5), (6, 7), (8, 8), (9, 9)])
def test_no_end_token_comes_before_there_are_enough(build, end, depth, least, count):
    """The model ends after 5 tokens, after 7 and from then on."""
    engine = build(lambda history: end if len(history) in (6, 8) or len(history) > 8 else 70 + len(history))
    output = engine.generate([1], max_tokens=20, min_tokens=least, depth=depth)
    assert (len(output.tokens), output.finish_reason) == (count, "stop")
    assert end not in output.tokens
    assert_empty(engine)


@pytest.mark.parametrize("depth", [0, 1, 3, 8])
@pytest.mark.parametrize(("least", "shown"), [(0, ""), (1, ""), (2, "a"), (3, "abc"), (4, "abc"), (5, "abca")])
def test_stop_strings_count_once_there_are_enough_tokens(build, says, depth, least, shown):
    output = build(says("abcabcabc")).generate("x", max_tokens=30, min_tokens=least, stop=["a", "b"], depth=depth)
    assert (output.text, output.finish_reason) == (shown, "stop")


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
    assert [token.position for token in tokens] == [1, 2, 0] * 3
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
    assert engine.output(index).finish_reason == ""  # so far
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


def test_an_interrupted_backend_leaves_a_usable_engine(build):
    class Interrupted(FakeBackend):
        calls = 0

        def round(self, plan):
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().round(plan)

    engine = build(walk, backend=Interrupted, rows=2)
    waiting = [submit(engine, [7, 8], 9, depth=0) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):
        engine.generate([1, 2], max_tokens=20)
    assert engine.generate([1, 2], max_tokens=20).tokens == walked([1, 2], 20)
    run(engine)
    outputs = [engine.output(index) for index in waiting]
    assert [output.finish_reason for output in outputs] == ["cancelled", "cancelled", "length"]
    assert_empty(engine)


@pytest.mark.parametrize("seconds", [0, 1e-9])
def test_a_deadline_ends_a_request_where_it_is(build, seconds):
    engine = build(walk, rows=1)
    other, late = submit(engine, [3, 4], 6), submit(engine, [1, 2], 6, deadline_s=seconds)
    emitted = run(engine)
    output = engine.output(late)
    assert (output.finish_reason, output.tokens, output.text) == ("deadline", (), "")
    assert [(one.token, one.finish_reason) for one in emitted if one.index == late] == [(None, "deadline")]
    assert engine.output(other).tokens == walked([3, 4], 6)
    assert_empty(engine)


def test_a_deadline_may_pass_while_a_request_runs(build, monkeypatch):
    engine = build(walk, WRONG)
    index = submit(engine, [1, 2], 6, deadline_s=3600.0, depth=0)
    for _ in range(3):
        engine.step()
    engine._loop.answers[index].expires = 0.0
    run(engine)
    output = engine.output(index)
    assert (output.finish_reason, output.tokens) == ("deadline", walked([1, 2], 3))
    assert_empty(engine)


def test_logprobs_come_with_their_tokens(build):
    engine = build(walk, MIXED)
    emitted = list(engine.stream([1, 2], max_tokens=6, depth=3, logprobs=0))
    assert [one.logprob.token for one in emitted] == [one.token for one in emitted] == list(walked([1, 2], 6))
    output = engine.generate([1, 2], max_tokens=6, depth=3, logprobs=0)
    assert tuple(one.token for one in output.logprobs) == output.tokens
    assert engine.generate([1, 2], max_tokens=6).logprobs == ()


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
    seeds = [row.start.seed for row in engine.backend.rows.values()]
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


class Interrupted(list):
    """A list during whose n-th change Ctrl-C comes, before it or after it."""

    def __init__(self, name, moment, after):
        super().__init__()
        self.name, self.moment, self.after, self.calls = name, moment, after, 0

    def _change(self, name, change, *args):
        self.calls += name == self.name
        now = name == self.name and self.calls == self.moment + 1
        if now and not self.after:
            raise KeyboardInterrupt
        changed = change(*args)
        if now:
            raise KeyboardInterrupt
        return changed

    def append(self, item):
        return self._change("append", super().append, item)

    def pop(self, place):
        return self._change("pop", super().pop, place)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("place", "name"), [("waiting", "pop"), ("running", "append")])
@pytest.mark.parametrize("moment", range(4))
def test_an_interrupt_while_a_request_is_admitted_leaves_nothing_behind(build, place, name, moment, after):
    """As Ctrl-C may come between any two lines of `admit`."""
    engine = build(walk)
    setattr(engine._loop.scheduler, place, Interrupted(name, moment, after))
    with contextlib.suppress(KeyboardInterrupt):
        engine.generate(prompts(3, 4, 5, 6, 7), max_tokens=5)
    assert_empty(engine)
    assert engine.generate([5, 6, 7], max_tokens=6).tokens == walked([5, 6, 7], 6)
