"""One engine, many callers: event loops, threads, and what each of them sees when it is cancelled or closed."""

import asyncio
import contextlib
import gc
import threading
from collections import Counter

import pytest

import headlong.engine.engine as engine_module
from headlong.backends.fake import FakeBackend
from headlong.errors import Fault, QueueFull, UserError
from headlong.settings import Settings
from tests.engine.scripted import MIXED, assert_empty, prompts, run, submit, walk, walked

PATIENCE = 20  # seconds after which a test gives up on what should come at once


class Gate(FakeBackend):
    """Holds every round until it is let through; counts the rounds that each prompt's row has been in."""

    def __init__(self, script, **options):
        super().__init__(script, **options)
        self.entered, self.opened = threading.Semaphore(0), threading.Semaphore(0)
        self.shares = Counter()

    def round(self, plan):
        self.shares.update(tuple(self.rows[part.row].prompt) for part in plan)
        self.entered.release()
        assert self.opened.acquire(timeout=PATIENCE)
        return super().round(plan)

    def let(self, rounds):
        for _ in range(rounds):
            self.opened.release()

    def wait(self):
        assert self.entered.acquire(timeout=PATIENCE)


@pytest.fixture
def engine(build):
    """Closed at the end, so that no thread outlives its test."""
    made = build(walk, MIXED)
    yield made
    made.close()
    assert_empty(made)


@pytest.fixture
def gated(build):
    made = build(walk, MIXED, backend=Gate, rows=2)
    yield made
    made.backend.let(1000)
    made.close()
    assert_empty(made)


def in_loop(coroutine):
    """Run to its end; what hangs fails."""

    async def within():
        async with asyncio.timeout(PATIENCE):
            return await coroutine

    return asyncio.run(within())


def in_thread(call, *args):
    """Call in a thread; what it gave comes from the function returned."""
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(call(*args)), daemon=True)
    thread.start()

    def result():
        thread.join(PATIENCE)
        assert outcome, "the thread hangs, or has raised"
        return outcome[0]

    return result


async def until(condition):
    """Let other tasks run until something holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def assert_settles(engine):
    """Whatever was cancelled while a step ran is gone after the next one; the engine's thread may rest by then."""
    run(engine)
    assert not engine._loop.answers
    engine.close()
    assert_empty(engine)


# --- event loops -------------------------------------------------------------------------------------------------


def test_a_stream_has_every_token_in_order(engine):
    async def main():
        return [emitted async for emitted in engine.stream_async([1, 2], max_tokens=12)]

    emitted = in_loop(main())
    assert tuple(one.token for one in emitted) == walked([1, 2], 12)
    assert [one.finish_reason for one in emitted] == [None] * 11 + ["length"]


def test_many_streams_at_once(engine):
    async def read(prompt):
        return tuple([emitted.token async for emitted in engine.stream_async(prompt, max_tokens=9)])

    async def main(asked):
        return await asyncio.gather(*(read(prompt) for prompt in asked))

    asked = prompts(*range(1, 31))
    assert in_loop(main(asked)) == [walked(prompt, 9) for prompt in asked]
    assert max(len(plan) for plan in engine.backend.rounds) == engine.limits.rows


def test_a_list_of_prompts_is_one_stream(engine):
    async def main():
        return [emitted async for emitted in engine.stream_async(asked, max_tokens=5, n=2)]

    asked = prompts(3, 9)
    tokens = {place: [] for place in range(4)}
    for emitted in in_loop(main()):
        tokens[emitted.index].append(emitted.token)
    assert [tuple(tokens[place]) for place in range(4)] == [walked(prompt, 5) for prompt in asked for _ in range(2)]


def test_whole_answers(engine):
    async def main():
        one = await engine.generate_async([1, 2], max_tokens=7)
        many = await engine.generate_async(prompts(3, 9), max_tokens=7)
        return one, many, await engine.generate_async([])

    one, many, none = in_loop(main())
    assert one.tokens == walked([1, 2], 7)
    assert [output.tokens for output in many] == [walked(prompt, 7) for prompt in prompts(3, 9)]
    assert none == []


def test_loops_of_several_threads(engine):
    def ask(prompt):
        return in_loop(engine.generate_async(prompt, max_tokens=9)).tokens

    asked = prompts(*range(1, 9))
    waiting = [in_thread(ask, prompt) for prompt in asked]
    assert [result() for result in waiting] == [walked(prompt, 9) for prompt in asked]


def test_one_loop_after_another(engine):
    for prompt in prompts(1, 9, 20):
        assert in_loop(engine.generate_async(prompt, max_tokens=5)).tokens == walked(prompt, 5)


def test_a_refusal_comes_before_the_first_token(engine):
    with pytest.raises(UserError, match="the prompt has no tokens"):
        engine.rounds_async("")
    with pytest.raises(UserError, match="the prompt has no tokens"):
        in_loop(anext(engine.stream_async("")))
    with pytest.raises(UserError, match="the prompt has no tokens"):
        in_loop(engine.generate_async(""))


def test_a_stream_that_is_never_read_queues_nothing(engine):
    engine.stream_async([1, 2], max_tokens=5)
    assert not engine.busy


def test_a_fault_reaches_the_one_who_asked(build):
    class Broken(FakeBackend):
        def prefill(self, chunk, pieces=1):
            if chunk.tokens[0] == 66:
                raise ValueError("no such prompt")
            return super().prefill(chunk, pieces)

    async def main():
        asked = [engine.generate_async(prompt, max_tokens=5) for prompt in ([1, 2], [66, 2], [3, 4])]
        return await asyncio.gather(*asked, return_exceptions=True)

    engine = build(walk, backend=Broken)
    first, second, third = in_loop(main())
    assert (first.tokens, third.tokens) == (walked([1, 2], 5), walked([3, 4], 5))
    assert isinstance(second, Fault)
    assert "ValueError: no such prompt" in str(second)
    engine.close()
    assert_empty(engine)


# --- leaving early -----------------------------------------------------------------------------------------------


def test_leaving_a_stream_cancels_its_request(gated):
    async def main():
        gated.backend.let(1)
        async with contextlib.aclosing(gated.stream_async([1, 2], max_tokens=50, depth=0)) as stream:
            async for _ in stream:
                break
        gated.backend.let(1000)
        return await gated.generate_async([3], max_tokens=3, depth=0)

    assert in_loop(main()).tokens == walked([3], 3)
    assert_settles(gated)
    assert len(gated.backend.rounds) <= 2 + 3


def test_a_stream_that_is_dropped_cancels_its_request(engine):
    async def main():
        async for _ in engine.stream_async([1, 2], max_tokens=50, depth=0):
            break
        gc.collect()
        await asyncio.sleep(0)  # the loop closes dropped generators

    in_loop(main())
    assert_settles(engine)


@pytest.mark.parametrize("entered", [1, 3])
def test_a_cancelled_task_cancels_its_request_and_no_other(gated, entered):
    """As Ctrl-C does to the task that asyncio.run waits for."""

    async def main():
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(gated.generate_async([1, 2], max_tokens=50, depth=0))
        other = asyncio.create_task(gated.generate_async([3, 4], max_tokens=6, depth=0))
        for _ in range(entered):
            await loop.run_in_executor(None, gated.backend.wait)
            gated.backend.let(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gated.backend.let(1000)
        return await other

    assert in_loop(main()).tokens == walked([3, 4], 6)
    assert_settles(gated)
    assert gated.backend.shares[1, 2] <= entered + 1  # the round that ran already
    assert gated.backend.shares[3, 4] == 6


def test_a_timeout_cancels_its_request(gated):
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await gated.generate_async([1, 2], max_tokens=50)
        gated.backend.let(1000)
        return await gated.generate_async([3], max_tokens=3)

    assert in_loop(main()).tokens == walked([3], 3)
    assert_settles(gated)


def test_a_loop_that_is_gone_hinders_nobody(gated):
    """It was closed without a word to its generators, while a round ran."""
    loop = asyncio.new_event_loop()
    stream = gated.stream_async([1, 2], max_tokens=5, depth=0)
    gated.backend.let(1)
    loop.run_until_complete(asyncio.wait_for(anext(stream), PATIENCE))
    gated.backend.wait()
    gated.backend.wait()
    loop.close()
    gated.backend.let(1000)
    assert in_loop(gated.generate_async([3], max_tokens=3)).tokens == walked([3], 3)
    with contextlib.suppress(RuntimeError):  # its loop is closed
        asyncio.run(stream.aclose())
    assert_settles(gated)


# --- threads -----------------------------------------------------------------------------------------------------


def test_callers_that_block_and_callers_that_do_not(engine):
    def ask(prompt):
        return engine.generate(prompt, max_tokens=9).tokens

    async def main():
        return await asyncio.gather(*(engine.generate_async(prompt, max_tokens=9) for prompt in asked))

    asked = prompts(*range(1, 20))
    blocking = [in_thread(ask, prompt) for prompt in asked]
    assert [output.tokens for output in in_loop(main())] == [walked(prompt, 9) for prompt in asked]
    assert [result() for result in blocking] == [walked(prompt, 9) for prompt in asked]


def test_a_blocking_call_inside_a_loop(engine):
    """Not kind to the loop, but it must not hang: the engine's thread or the caller steps."""

    async def main():
        task = asyncio.create_task(engine.generate_async([1, 2], max_tokens=9))
        await asyncio.sleep(0)
        return engine.generate([3, 4], max_tokens=9), await task

    blocking, other = in_loop(main())
    assert (blocking.tokens, other.tokens) == (walked([3, 4], 9), walked([1, 2], 9))


def test_requests_from_many_threads_while_another_steps(engine):
    """None is lost, and each gets a number of its own."""
    indices, done = {}, threading.Event()

    def ask(base):
        for prompt in prompts(*range(base, base + 20)):
            indices[submit(engine, prompt, 4)] = prompt

    def step():
        while not done.is_set() or engine.busy:
            engine.step()

    stepping = in_thread(step)
    asking = [in_thread(ask, base) for base in (1, 4, 7, 10)]
    for result in asking:
        result()
    done.set()
    stepping()
    assert sorted(indices) == list(range(80))
    for index, prompt in indices.items():
        assert engine.output(index).tokens == walked(prompt, 4)


def test_cancellations_from_another_thread(engine):
    """While one steps; each has a beginning of its text or the whole."""
    indices = [submit(engine, [place, 5], 20, depth=0) for place in range(40)]

    def cancel():
        for index in indices[::2]:
            engine.cancel(index)

    cancelling = in_thread(cancel)
    run(engine)
    cancelling()
    run(engine)
    for place, index in enumerate(indices):
        output = engine.output(index)
        assert output.finish_reason == "length" or (place % 2 == 0 and output.finish_reason == "cancelled")
        assert output.tokens == walked([place, 5], 20)[: len(output.tokens)]


def test_a_full_queue_refuses_until_there_is_room(gated):
    gated.settings = Settings(queue=1)

    async def main():
        tasks = [asyncio.create_task(gated.generate_async([place], max_tokens=4)) for place in range(3)]
        await until(lambda: len(gated._answers) == 3)
        with pytest.raises(QueueFull, match="3 requests wait or run and 3 may; try again later"):
            await gated.generate_async([7], max_tokens=4)
        gated.backend.let(1000)
        first = await asyncio.gather(*tasks)
        return [*first, await gated.generate_async([7], max_tokens=4)]

    assert [output.tokens for output in in_loop(main())] == [walked([place], 4) for place in (0, 1, 2, 7)]


def test_a_full_queue_refuses_every_way_of_asking(gated):
    gated.settings = Settings(queue=1)
    waiting = [submit(gated, [place], 2, depth=0) for place in range(3)]
    with pytest.raises(QueueFull, match="3 may"):
        submit(gated, [1])
    with pytest.raises(QueueFull, match="3 may"):
        gated.generate([1], max_tokens=2)
    with pytest.raises(QueueFull, match="3 may"):
        next(gated.stream([1], max_tokens=2))
    gated.backend.let(1000)
    run(gated)
    waiting.append(submit(gated, [9], 2))  # those that ended do not count, though nobody has taken them yet
    run(gated)
    assert [gated.output(index).tokens for index in waiting] == [walked([place], 2) for place in (0, 1, 2, 9)]


# --- closing -----------------------------------------------------------------------------------------------------


def test_closing_cancels_everybody_who_waits(gated):
    async def main():
        streams = [asyncio.create_task(gated.generate_async([place], max_tokens=20, depth=0)) for place in range(4)]
        await until(lambda: len(gated._answers) == 5)
        closing = asyncio.get_running_loop().run_in_executor(None, gated.close)
        await until(lambda: len(gated._cancelled) == 5)  # as long as the round is held nobody sees that
        gated.backend.let(1000)
        outputs = await asyncio.gather(*streams)
        await closing
        return outputs

    blocking = in_thread(lambda: gated.generate([9, 9], max_tokens=20, depth=0))
    gated.backend.wait()
    for output in (*in_loop(main()), blocking()):
        assert output.finish_reason == "cancelled"
        assert len(output.tokens) <= 1


def test_closing_may_finish_what_there_is(gated):
    async def main():
        streams = [asyncio.create_task(gated.generate_async([place], max_tokens=6, depth=0)) for place in range(4)]
        await until(lambda: len(gated._answers) == 5)
        closing = asyncio.get_running_loop().run_in_executor(None, lambda: gated.close(finish=True))
        await until(lambda: gated._closed)
        with pytest.raises(UserError, match="the engine of fake is closed"):
            await gated.generate_async([1], max_tokens=2)
        gated.backend.let(1000)
        outputs = await asyncio.gather(*streams)
        await closing
        return outputs

    blocking = in_thread(lambda: gated.generate([9, 9], max_tokens=6, depth=0))
    gated.backend.wait()
    outputs = in_loop(main())
    assert [output.tokens for output in outputs] == [walked([place], 6) for place in range(4)]
    assert blocking().tokens == walked([9, 9], 6)


def test_closing_finishes_what_nobody_steps(build):
    engine = build(walk)
    indices = [submit(engine, [place], 6) for place in range(9)]
    engine.close(finish=True)
    assert [engine.output(index).tokens for index in indices] == [walked([place], 6) for place in range(9)]
    assert_empty(engine)


@pytest.mark.parametrize("finish", [False, True])
def test_nothing_is_taken_after_closing(engine, finish):
    in_loop(engine.generate_async([1], max_tokens=2))
    engine.close(finish)
    for ask in (engine.generate, lambda *given, **options: submit(engine, [1])):
        with pytest.raises(UserError, match="the engine of fake is closed; load the model again"):
            ask([1], max_tokens=2)
    with pytest.raises(UserError, match="closed"):
        in_loop(engine.generate_async([1], max_tokens=2))
    assert engine._thread is not None
    assert not engine._thread.is_alive()


def test_closing_from_several_threads(engine):
    indices = [submit(engine, [place], 20) for place in range(4)]
    closing = [in_thread(engine.close) for _ in range(4)]
    for result in closing:
        result()
    assert {engine.output(index).finish_reason for index in indices} == {"cancelled"}


def test_closing_from_inside_the_loop_that_waits(engine):
    async def main():
        task = asyncio.create_task(engine.generate_async([1, 2], max_tokens=60, depth=0))
        while not engine.backend.rounds:
            await asyncio.sleep(0)
        engine.close()
        return await task

    output = in_loop(main())
    assert output.finish_reason in ("cancelled", "length")
    assert output.tokens == walked([1, 2], 60)[: len(output.tokens)]


def test_a_context_closes_at_its_end(build):
    with build(walk) as engine:
        assert in_loop(engine.generate_async([1], max_tokens=2)).tokens == walked([1], 2)
    assert not engine._thread.is_alive()
    assert_empty(engine)


# --- the engine's thread -----------------------------------------------------------------------------------------


def test_the_thread_prefills_what_was_said_while_it_is_idle(engine):
    async def main():
        said = (await engine.generate_async([1, 2, 3], max_tokens=30)).tokens
        await until(lambda: not engine._loop.turns.busy)
        return [1, 2, 3, *said, 9], await engine.generate_async([1, 2, 3, *said, 9], max_tokens=5)

    again, output = in_loop(main())
    assert (output.tokens, output.timings.cached_tokens) == (walked(again, 5), 32)


class BreaksWhenIdle(FakeBackend):
    """Cannot prefill what was said; the rows for that have seed 0."""

    def prefill(self, chunk, pieces=1):
        if self.rows[chunk.row].start.seed == 0:
            raise ValueError("no room for what was said")
        return super().prefill(chunk, pieces)


def test_the_thread_survives_what_breaks_while_it_is_idle(build):
    async def main():
        await engine.generate_async([1, 2, 3], max_tokens=30, seed=5)
        await until(lambda: not engine._loop.turns.busy)
        return await engine.generate_async([4], max_tokens=5, seed=5)

    with build(walk, backend=BreaksWhenIdle) as engine:
        assert in_loop(main()).tokens == walked([4], 5)


class NoIdea:
    """A prediction that breaks."""

    name = "prediction"

    def __init__(self, tokens):
        pass

    def matches(self, least):
        return False

    def extend(self, tokens):
        pass

    def propose(self, most):
        raise ValueError("no idea")


def test_the_thread_survives_a_proposer_that_breaks(build, monkeypatch):
    async def main():
        with pytest.raises(Fault, match="no idea"):
            await engine.generate_async([1, 2, 3], max_tokens=30, prediction=[1])
        return await engine.generate_async([4], max_tokens=5)

    monkeypatch.setattr("headlong.engine.intake.Prediction", NoIdea)
    with build(walk) as engine:
        assert in_loop(main()).tokens == walked([4], 5)


def test_the_thread_survives_a_step_that_breaks(build, monkeypatch):
    """As a mistake in planning would; those who run get an end, those who wait are served."""
    engine = build(walk, rows=1)
    plan, calls = engine._loop.windows.plan, iter(range(1000))

    def broken(*given):
        if next(calls) == 2:
            raise ValueError("no plan")
        return plan(*given)

    async def main():
        asked = [engine.generate_async([place], max_tokens=5, depth=0) for place in range(3)]
        return await asyncio.gather(*asked, return_exceptions=True)

    monkeypatch.setattr(engine._loop.windows, "plan", broken)
    with engine:
        first, second, third = in_loop(main())
    assert isinstance(first, Fault) or first.finish_reason in ("cancelled", "fault")
    assert (second.tokens, third.tokens) == (walked([1], 5), walked([2], 5))


def test_a_round_comes_whole_and_the_last_one_tells_all(build, says):
    engine = build(says("one two STOP"))

    async def main():
        return [emitted async for emitted in engine.rounds_async(["x"], max_tokens=30, depth=3, stop="STOP")]

    with engine:
        rounds = in_loop(main())
    assert [[one.position for one in emitted] for emitted in rounds[:3]] == [[0], [1, 2, 3, 0], [1, 2, 3, 0]]
    *others, last = [one for emitted in rounds for one in emitted]
    assert not any(one.output for one in others)
    assert (last.output.text, last.output.finish_reason, last.output.stopped_by) == ("one two ", "stop", "STOP")
    assert "".join(one.text for one in (*others, last)) == last.output.text
    assert last.output.speculative.rounds == len(rounds)


def test_a_loop_that_closes_at_the_wrong_moment_hinders_nobody(build, monkeypatch):
    """After it was asked whether it is closed, and before it is told."""
    engine = build(walk)
    hand_over, calls = engine_module._hand_over, iter(range(1000))

    class Closing:
        def is_closed(self):
            return False

        def call_soon_threadsafe(self, *given):
            raise RuntimeError("Event loop is closed")

    def racing(loop, outbox, emitted):
        hand_over(Closing() if next(calls) == 0 else loop, outbox, emitted)

    async def main():
        async with contextlib.aclosing(engine.stream_async([1], max_tokens=2, depth=0)) as stream:
            return [emitted.token async for emitted in stream]

    monkeypatch.setattr(engine_module, "_hand_over", racing)
    with engine:
        assert tuple(in_loop(main())) == walked([1], 2)[1:]
