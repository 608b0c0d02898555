"""The engine: takes requests from any thread or event loop, steps the backend, hands out tokens."""

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from headlong.engine.answer import Answer
from headlong.engine.backend import Backend
from headlong.engine.depth import DepthController
from headlong.engine.intake import Intake, Options, Prompt, one_answer, one_prompt, requests_from
from headlong.engine.loop import Loop
from headlong.engine.request import Emitted, Output, Request
from headlong.engine.roundcost import RoundCosts
from headlong.engine.stats import plain_reason
from headlong.engine.totals import Load, Totals
from headlong.errors import Fault, QueueFull, UserError
from headlong.settings import Settings

if TYPE_CHECKING:
    from headlong.engine.text import Text

Asked = Prompt | Request
Several = Sequence[Prompt] | Sequence[Request]
Post = Callable[[list[Emitted]], None]
PATIENCE_S = 0.05  # how long a waiting caller trusts that somebody else steps


class Engine:
    """One model, ready to answer. `generate` and `stream` are whole, and so are their `_async` twins; `submit`, `step`
    and `output` are their parts.

    Threads and event loops may share an engine: one thread steps at a time, and a step serves the requests of all.
    Callers that block step themselves; the first asynchronous one starts a thread that does.
    """

    def __init__(
        self,
        backend: Backend,
        text: "Text",
        name: str,
        eos_token_ids: Collection[int],
        settings: Settings,
        costs: RoundCosts | None = None,
    ) -> None:
        self.name = name
        self.text = text
        self.limits = backend.limits
        self.settings = settings
        self.depths = DepthController(costs or RoundCosts(), self.limits.depth, self.limits.depths, self.limits.sizes)
        self.totals = Totals()
        self._intake = Intake(text, self.limits, settings, frozenset(eos_token_ids), self.depths, self.totals)
        self._loop = Loop(backend, settings, self.depths, self.totals)
        self._stepping = threading.Lock()  # held by whoever steps
        self._news = threading.Condition()  # guards what follows; never held while the backend works
        self._arrived: deque[Answer] = deque()
        self._cancelled: deque[Answer] = deque()
        self._answers: dict[int, Answer] = {}  # every request not yet handed out, by index
        self._outboxes: dict[int, Post] = {}  # for requests that somebody waits on
        self._indices = itertools.count()
        self._clerk = ThreadPoolExecutor(1, f"headlong {name}, requests")  # one, so that nobody is overtaken
        self._thread: threading.Thread | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- whole answers -------------------------------------------------------------------------------------------

    @overload  # a str is a sequence of str too; the first signature that fits is meant
    def generate(self, prompts: Asked, **options: Unpack[Options]) -> Output: ...  # type: ignore[overload-overlap]

    @overload
    def generate(self, prompts: Several, **options: Unpack[Options]) -> list[Output]: ...

    def generate(self, prompts: Asked | Several, **options: Unpack[Options]) -> Output | list[Output]:
        """Answer one prompt, or a list of them together. A prompt is text or token ids; `Options` has the rest.

        With `n` above 1 every prompt gives so many answers, one after the other in a list. Instead of prompts there may
        be `Request`s, each with options of its own. A list may be longer than the queue.

        One answer that breaks raises a `Fault`. In a list it has finish_reason "fault" and an `error`, beside the
        others, which are whole.
        """
        answers = self._accept_all(prompts, options, monotonic())
        for _ in self._run(answers):
            pass
        return _outputs(answers, _wants_one(prompts, options))

    def stream(self, prompts: Asked | Several, **options: Unpack[Options]) -> Iterator[Emitted]:
        """Tokens as they come; `index` is the answer's place in the list. Leaving early cancels what is left."""
        return self._run(self._accept_all(prompts, options, monotonic()))

    async def generate_async(self, prompts: Asked | Several, **options: Unpack[Options]) -> Output | list[Output]:
        """`generate` for an event loop."""
        answers = await self._accept_aside(prompts, options)
        async with aclosing(self._run_async(answers)) as rounds:
            async for _ in rounds:
                pass
        return _outputs(answers, _wants_one(prompts, options))

    async def stream_async(self, prompts: Asked | Several, **options: Unpack[Options]) -> AsyncIterator[Emitted]:
        """`stream` for an event loop: `async for emitted in engine.stream_async(...)`."""
        answers = await self._accept_aside(prompts, options)
        async with aclosing(self._run_async(answers)) as rounds:
            async for emitted in rounds:
                for one in emitted:
                    yield one

    def rounds_async(self, prompts: Asked | Several, **options: Unpack[Options]) -> AsyncGenerator[list[Emitted]]:
        """`stream_async`, with all tokens that one round gave these requests together.

        Requests are checked before it returns, so that a refusal comes before an answer begins. That takes time: call
        it in a thread of your own.
        """
        return self._run_async(self._accept_all(prompts, options, monotonic()))

    def _run(self, answers: list[Answer]) -> Iterator[Emitted]:
        outbox: deque[Emitted] = deque()
        places = _places(answers)
        try:
            self._enqueue(answers, outbox.extend)
            left = len(answers)
            while left:
                while outbox:
                    emitted = outbox.popleft()
                    left -= emitted.finish_reason is not None
                    yield _placed(emitted, places)
                if left:
                    self._step_or_wait(lambda: bool(outbox))
        finally:
            self._leave(places)

    async def _run_async(self, answers: list[Answer]) -> AsyncGenerator[list[Emitted]]:
        loop = asyncio.get_running_loop()
        outbox: asyncio.Queue[list[Emitted]] = asyncio.Queue()
        places = _places(answers)
        try:
            self._enqueue(answers, lambda emitted: _hand_over(loop, outbox, emitted))
            self._start_thread()
            left = len(answers)
            while left:
                emitted = await outbox.get()
                left -= sum(one.finish_reason is not None for one in emitted)
                yield [_placed(one, places) for one in emitted]
        finally:
            self._leave(places)

    # --- parts ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Queue a request, from any thread; the number it is known by."""
        if not isinstance(request, Request):
            raise UserError(f"{request!r} was submitted; it must be a Request, or be given to generate.")
        answer = self._intake.accept(request, next(self._indices), monotonic())
        self._enqueue([answer], None)
        return answer.job.index

    @property
    def no_draft_reason(self) -> str:
        """Why nothing is drafted for requests that do not say how; empty where something is."""
        return plain_reason(Request(""), self.limits, self.settings)

    @property
    def load(self) -> Load:
        """How full it is. While it works, some of the numbers are a moment older than others."""
        scheduler = self._loop.scheduler
        return Load(
            running=sum(job.index >= 0 for job in list(scheduler.running)),  # idle turns are nobody's
            waiting=len(scheduler.waiting) + len(self._arrived),
            rows=self.limits.rows,
            pages=self.limits.pages,
            pages_held=self.limits.pages - scheduler.pool.free,
            pages_cached=scheduler.prefix.nodes * (self.limits.chunk // self.limits.page),
            prefix_lookups=scheduler.prefix.lookups,
            prefix_hits=scheduler.prefix.hits,
        )

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._arrived or self._cancelled or self._loop.busy)

    def step(self) -> list[Emitted]:
        """Run the next piece of a prompt and a round of every row whose prompt is in; the tokens that gave."""
        with self._stepping:
            return self._step()

    def rest(self) -> bool:
        """Use an idle moment: prefill a piece of a finished turn, so that the next one finds it cached.

        Whether there is more to do. A thread of the engine's does this by itself.
        """
        with self._stepping:
            if not self.busy and not self._closed:
                self._loop.rest()
            return self._loop.turns.busy

    def cancel(self, index: int) -> None:
        """End a request where it is, at the latest before the next round. One that has ended is left alone."""
        with self._news:
            answer = self._answers.get(index)
            if answer is None or answer.finish_reason is not None:
                return
            self._cancelled.append(answer)
            self._news.notify_all()
        if self._stepping.acquire(blocking=False):  # nobody steps, so nobody would see it soon
            try:
                self._take_in()
                self._post(self._loop.emitted())
            finally:
                self._stepping.release()

    def output(self, index: int) -> Output:
        """What a request gave, or what it has so far, with an empty finish_reason.

        One that has ended is handed out once, then forgotten.
        """
        with self._news:
            if index not in self._answers:
                raise UserError(f"there is no request {index}; it was never submitted, or its output was handed out.")
            answer = self._answers[index]
            if answer.finish_reason is not None:
                self._forget(index)
            return answer.output()

    @contextmanager
    def idle_backend(self) -> Iterator[Backend]:
        """The backend, lent for measurements while nothing waits or runs; requests wait until it is given back."""
        with self._stepping:
            self._refuse_closed()
            if self.busy:
                raise UserError("the backend was asked for while requests run; wait until they end or cancel them.")
            self._loop.turns.drop()
            self._loop.scheduler.prefix.clear()  # who measures takes pages as they come
            yield self._loop.backend

    def close(self, finish: bool = False) -> None:
        """Take no more requests, finish those there are or cancel them, and let go of the model."""
        with self._news:
            already, self._closed = self._closed, True
            self._clerk.shutdown(wait=False)
        while finish and not already and self.busy:
            self._step_or_wait(lambda: False)
        for index in list(self._answers):
            self.cancel(index)
        with self._news:
            self._news.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if not already:
            with self._stepping:
                self._take_in()
                self._post(self._loop.emitted())
                self._loop.close()

    # --- stepping ------------------------------------------------------------------------------------------------

    def _step(self) -> list[Emitted]:
        self._take_in()
        try:
            self._loop.step()
        finally:  # an interrupt must not swallow the ends it brings about
            emitted = self._loop.emitted()
            self._post(emitted)
        return emitted

    def _take_in(self) -> None:
        while self._arrived:
            self._loop.add(self._arrived.popleft())
        while self._cancelled:
            self._loop.end(self._cancelled.popleft(), "cancelled")

    def _post(self, emitted: Sequence[Emitted]) -> None:
        with self._news:
            waited_for = [one for one in emitted if one.index in self._outboxes]
            for post, ours in itertools.groupby(waited_for, lambda one: self._outboxes[one.index]):
                post(list(ours))
            self._news.notify_all()

    def _step_or_wait(self, done: Callable[[], bool]) -> None:
        """Step, unless another thread does; then wait for what it brings."""
        if self._stepping.acquire(blocking=False):
            try:
                if not done():
                    self._step()
            finally:
                self._stepping.release()
        else:
            with self._news:
                if not done():
                    self._news.wait(PATIENCE_S)

    def _start_thread(self) -> None:
        with self._news:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._drive, name=f"headlong {self.name}", daemon=True)
                self._thread.start()

    def _drive(self) -> None:
        """The engine's own thread: steps while there is work, rests while there is none."""
        while True:
            with self._news:
                if self._closed and not self.busy:
                    return
                if not self.busy and not self._loop.turns.busy:
                    self._news.wait()
                    continue
            if self.busy:
                self.step()
            else:
                self.rest()

    # --- coming and going ----------------------------------------------------------------------------------------

    def _accept_all(self, prompts: Asked | Several, options: Any, since: float) -> list[Answer]:
        """Check requests against this engine; they are not queued yet."""
        return [self._intake.accept(request, next(self._indices), since) for request in _requests(prompts, options)]

    async def _accept_aside(self, prompts: Asked | Several, options: Any) -> list[Answer]:
        """The same without holding up an event loop, as tokenizers and grammars would; in the order of the calls."""
        with self._news:
            self._refuse_closed()
            accepted = self._clerk.submit(self._accept_all, prompts, options, monotonic())
        return await asyncio.wrap_future(accepted)

    def _enqueue(self, answers: Sequence[Answer], post: Post | None) -> None:
        """The queue bounds what callers add to it one by one; a list waits with its caller, so it is taken whole."""
        with self._news:
            self._refuse_closed()
            unfinished = sum(answer.finish_reason is None for answer in self._answers.values())
            most = self.limits.rows + self.settings.queue
            if answers and unfinished >= most:
                raise QueueFull(
                    f"{unfinished} requests wait or run and {most} may; "
                    "try again later or load the model with a longer queue."
                )
            for answer in answers:
                self._answers[answer.job.index] = answer
                if post:
                    self._outboxes[answer.job.index] = post
                self._arrived.append(answer)
            self._news.notify_all()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UserError(f"the engine of {self.name} is closed; load the model again.")

    def _leave(self, indices: Collection[int]) -> None:
        for index in indices:
            self.cancel(index)
        with self._news:
            for index in indices:
                self._forget(index)

    def _forget(self, index: int) -> None:
        self._answers.pop(index, None)
        self._outboxes.pop(index, None)


def _requests(prompts: Any, options: Any) -> list[Request]:
    each: Any = [prompts] if isinstance(prompts, Request) else prompts
    if one_prompt(each) or not any(isinstance(one, Request) for one in each):
        return requests_from(each, options)
    if not all(isinstance(one, Request) for one in each):
        raise UserError("the list holds prompts beside Requests; give prompts alone or Requests alone.")
    if options:
        raise UserError(f"{', '.join(options)} was given beside a Request, which has its own options; set it there.")
    return list(each)


def _wants_one(prompts: Any, options: Any) -> bool:
    return isinstance(prompts, Request) or one_answer(prompts, options)


def _outputs(answers: Sequence[Answer], one: bool) -> Output | list[Output]:
    outputs = [answer.output() for answer in answers]
    if one and outputs[0].finish_reason == "fault":
        raise Fault(f"a request failed: {outputs[0].error}")
    return outputs[0] if one else outputs


def _places(answers: Sequence[Answer]) -> dict[int, tuple[int, Answer]]:
    return {answer.job.index: (place, answer) for place, answer in enumerate(answers)}


def _placed(emitted: Emitted, places: Mapping[int, tuple[int, Answer]]) -> Emitted:
    """As its caller knows it: by the place of its prompt, and at the end with all that it gave."""
    place, answer = places[emitted.index]
    return replace(emitted, index=place, output=None if emitted.finish_reason is None else answer.output())


def _hand_over(loop: asyncio.AbstractEventLoop, outbox: "asyncio.Queue[list[Emitted]]", emitted: list[Emitted]) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
        loop.call_soon_threadsafe(outbox.put_nowait, emitted)
