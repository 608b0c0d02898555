"""What callers may ask for in one call, and what they get when some of it breaks, is too much, or takes its time."""

import asyncio
import threading

import pytest

from headlong.backends.fake import FakeBackend
from headlong.engine.request import Request, Sampling
from headlong.errors import Fault, QueueFull, UserError
from headlong.settings import Settings
from tests.engine.scripted import MIXED, assert_empty, prompts, run, submit, walk, walked

PATIENCE = 20  # seconds after which a test gives up on what should come at once


class Broken(FakeBackend):
    """Cannot take prompts that begin with 66."""

    def prefill(self, chunk, pieces=1):
        if chunk.tokens[0] == 66:
            raise ValueError("no such prompt")
        return super().prefill(chunk, pieces)


def sync(engine, asked, **options):
    return engine.generate(asked, **options)


def in_loop(engine, asked, **options):
    async def main():
        async with asyncio.timeout(PATIENCE):
            return await engine.generate_async(asked, **options)

    try:
        return asyncio.run(main())
    finally:
        engine.close()


def streamed(engine, asked, **options):
    """The outputs of a stream, in the order of what was asked."""
    outputs = {one.index: one.output for one in engine.stream(asked, **options) if one.output}
    return [outputs[place] for place in range(len(outputs))]


def streamed_in_loop(engine, asked, **options):
    async def main():
        async with asyncio.timeout(PATIENCE):
            return {one.index: one.output async for one in engine.stream_async(asked, **options) if one.output}

    try:
        outputs = asyncio.run(main())
    finally:
        engine.close()
    return [outputs[place] for place in range(len(outputs))]


FACES = pytest.mark.parametrize("face", [sync, in_loop, streamed, streamed_in_loop])
WHOLE = pytest.mark.parametrize("face", [sync, in_loop])


# --- faults ------------------------------------------------------------------------------------------------------


@FACES
def test_a_fault_costs_a_list_one_answer(build, face):
    engine = build(walk, MIXED, backend=Broken, rows=2)
    asked = [[1, 2], [66, 2], [3, 4], [5]]
    outputs = face(engine, asked, max_tokens=5)
    assert [output.finish_reason for output in outputs] == ["length", "fault", "length", "length"]
    assert [output.error for output in outputs] == ["", "ValueError: no such prompt", "", ""]
    assert [outputs[place].tokens for place in (0, 2, 3)] == [walked(asked[place], 5) for place in (0, 2, 3)]
    assert_empty(engine)


@WHOLE
@pytest.mark.parametrize("asked", [[66, 2], Request([66, 2], 5)], ids=["prompt", "request"])
def test_a_fault_of_the_only_answer_is_raised(build, face, asked):
    engine = build(walk, backend=Broken)
    with pytest.raises(Fault, match="a request failed: ValueError: no such prompt"):
        face(engine, asked, **({} if isinstance(asked, Request) else {"max_tokens": 5}))
    assert_empty(engine)


@WHOLE
def test_several_answers_to_one_prompt_are_a_list(build, face):
    outputs = face(build(walk, backend=Broken), [66, 2], n=2, max_tokens=5)
    assert [output.finish_reason for output in outputs] == ["fault", "fault"]


# --- more than may wait ------------------------------------------------------------------------------------------


@FACES
def test_a_list_may_be_longer_than_the_queue(build, face):
    engine = build(walk, MIXED, rows=2, settings=Settings(queue=3))
    asked = prompts(*range(1, 21))
    assert [output.tokens for output in face(engine, asked, max_tokens=4)] == [walked(prompt, 4) for prompt in asked]
    assert_empty(engine)


def test_a_bad_prompt_of_a_long_list_is_refused_before_anything_runs(build):
    engine = build(walk, rows=2, settings=Settings(queue=3))
    with pytest.raises(UserError, match="the prompt has no tokens"):
        engine.generate([[1]] * 20 + [[]], max_tokens=4)
    assert not engine.backend.rounds
    assert_empty(engine)


@FACES
def test_a_list_that_finds_the_queue_full_is_refused(build, face):
    engine = build(walk, rows=2, settings=Settings(queue=3))
    waiting = [submit(engine, [place], 2) for place in range(5)]
    with pytest.raises(QueueFull, match="5 requests wait or run and 5 may; try again later"):
        face(engine, [[1], [2]], max_tokens=2)
    if not engine._closed:
        assert face(engine, [], max_tokens=2) == []
        run(engine)
        assert [engine.output(index).tokens for index in waiting] == [walked([place], 2) for place in range(5)]


def test_leaving_a_long_list_cancels_all_of_it(build):
    engine = build(walk, rows=2, settings=Settings(queue=3))
    stream = engine.stream(prompts(*[3] * 20), max_tokens=20)
    next(stream)
    assert engine.load.waiting == 18
    stream.close()
    assert_empty(engine)


# --- requests ----------------------------------------------------------------------------------------------------


@FACES
def test_requests_have_options_of_their_own(build, face):
    engine = build(walk, MIXED)
    asked = [Request([1, 2], max_tokens=3, depth=0), Request([3], 7, Sampling(temperature=1.0, seed=3), depth=2)]
    outputs = face(engine, asked)
    assert [output.tokens for output in outputs] == [walked([1, 2], 3), walked([3], 7)]
    assert [output.speculative.depth for output in outputs] == [0, 2]
    assert_empty(engine)


@WHOLE
def test_one_request_gives_one_output(build, face):
    assert face(build(walk), Request([1, 2], max_tokens=3)).tokens == walked([1, 2], 3)


MIXTURE = "the list holds prompts beside Requests; give prompts alone or Requests alone."
OPTION = "max_tokens was given beside a Request, which has its own options; set it there."


@FACES
@pytest.mark.parametrize(
    ("asked", "options", "says"),
    [
        (
            Request([1]),
            {"max_tokens": 3},
            "max_tokens was given beside a Request, which has its own options; set it there.",
        ),
        ([Request([1])], {"n": 2, "seed": 1}, "n, seed was given beside a Request"),
        ([Request([1]), [2]], {}, MIXTURE),
        ([[2], Request([1])], {}, MIXTURE),
        (
            ["x", Request([1])],
            {"max_tokens": 3},
            MIXTURE,
        ),
    ],
)
def test_requests_stand_alone(build, face, asked, options, says):
    engine = build(walk)
    with pytest.raises(UserError, match=says):
        face(engine, asked, **options)
    assert_empty(engine)


# --- an event loop goes on while requests are accepted -----------------------------------------------------------


class Slow:
    """An intake that takes as long as it is told to for requests with a seed."""

    def __init__(self, intake):
        self.intake, self.entered, self.opened = intake, threading.Event(), threading.Event()

    def accept(self, request, index, since):
        if request.sampling.seed is not None:
            self.entered.set()
            assert self.opened.wait(PATIENCE)
        return self.intake.accept(request, index, since)


@pytest.fixture
def slow(build):
    engine = build(walk, MIXED, rows=1)
    engine._intake = Slow(engine._intake)
    yield engine
    engine._intake.opened.set()
    engine.close()
    assert_empty(engine)


async def entered(intake):
    async with asyncio.timeout(PATIENCE):
        while not intake.entered.is_set():
            await asyncio.sleep(0.001)


def test_a_loop_goes_on_while_a_request_is_accepted_and_nobody_is_overtaken(slow):
    async def main():
        first = asyncio.create_task(slow.generate_async([1, 2], max_tokens=5, seed=1))
        await entered(slow._intake)  # this very loop saw it
        ended = []
        first.add_done_callback(lambda _: ended.append("first"))
        second = asyncio.create_task(slow.generate_async([3], max_tokens=1))
        second.add_done_callback(lambda _: ended.append("second"))
        await asyncio.sleep(0.01)
        assert not ended
        slow._intake.opened.set()
        outputs = await asyncio.gather(first, second)
        return ended, [output.tokens for output in outputs]

    assert asyncio.run(main()) == (["first", "second"], [walked([1, 2], 5), walked([3], 1)])


@pytest.mark.parametrize("streams", [False, True])
def test_who_is_cancelled_while_a_request_is_accepted_leaves_nothing_behind(slow, streams):
    async def ask():
        if not streams:
            await slow.generate_async([1, 2], max_tokens=5, seed=1)
        async for _ in slow.stream_async([1, 2], max_tokens=5, seed=1):
            pass

    async def main():
        task = asyncio.create_task(ask())
        await entered(slow._intake)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not slow._answers
        slow._intake.opened.set()
        return await slow.generate_async([3], max_tokens=3)

    assert asyncio.run(main()).tokens == walked([3], 3)
    assert not slow._answers
    assert len(slow.backend.rounds) <= 3


def test_a_request_waits_from_the_moment_it_is_asked_for(slow):
    """Not only once it is accepted, as its deadline is counted too."""

    async def main():
        asked = [([1, 2], {"seed": 1}), ([3], {"deadline_s": 0.05})]
        tasks = [asyncio.create_task(slow.generate_async(prompt, max_tokens=5, **each)) for prompt, each in asked]
        await entered(slow._intake)
        await asyncio.sleep(0.1)
        slow._intake.opened.set()
        return await asyncio.gather(*tasks)

    first, second = asyncio.run(main())
    assert first.timings.queue_s >= 0.1
    assert (second.finish_reason, second.tokens) == ("deadline", ())


def test_an_engine_that_closes_while_a_request_is_accepted_refuses_it(slow):
    async def main():
        task = asyncio.create_task(slow.generate_async([1, 2], max_tokens=5, seed=1))
        await entered(slow._intake)
        slow.close()
        slow._intake.opened.set()
        with pytest.raises(UserError, match="the engine of fake is closed"):
            await task
        with pytest.raises(UserError, match="the engine of fake is closed"):
            await slow.generate_async([1], max_tokens=2)

    asyncio.run(main())
