"""The engine: takes requests, steps the backend, hands out tokens."""

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Unpack, overload

from headlong.engine.answer import Answer
from headlong.engine.backend import Backend
from headlong.engine.intake import Options, Prompt, one_prompt, prompt_ids, refuse_unfit, requests_from
from headlong.engine.request import Chunk, Emitted, Output, Request, RowPlan
from headlong.engine.scheduler import Job, Scheduler
from headlong.engine.stats import Counts, depth_of
from headlong.errors import UserError
from headlong.settings import Settings

if TYPE_CHECKING:
    from headlong.engine.text import Text


class Engine:
    """One model, ready to answer. `generate` and `stream` are whole; `submit`, `step` and `output` are their parts.

    Threads may share an engine: one steps at a time, and a step serves the requests of all.
    """

    def __init__(
        self, backend: Backend, text: "Text", name: str, eos_token_ids: Collection[int], settings: Settings
    ) -> None:
        self.name = name
        self.text = text
        self.limits = backend.limits
        self.settings = settings
        self._backend = backend
        self._eos = frozenset(eos_token_ids)
        self._scheduler = Scheduler(self.limits)
        self._answers: dict[int, Answer] = {}  # every request not yet handed out, by index
        self._outboxes: dict[int, deque[Emitted]] = {}  # for requests that `stream` or `generate` waits on
        self._indices = itertools.count()
        self._closed = False
        self._lock = threading.RLock()

    # --- whole answers -------------------------------------------------------------------------------------------

    @overload  # a str is a sequence of str too; the first signature that fits is meant
    def generate(self, prompts: Prompt, **options: Unpack[Options]) -> Output: ...  # type: ignore[overload-overlap]

    @overload
    def generate(self, prompts: Sequence[Prompt], **options: Unpack[Options]) -> list[Output]: ...

    def generate(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]) -> Output | list[Output]:
        """Answer one prompt, or a list of them together. A prompt is text or token ids; `Options` has the rest."""
        answers = [self._accept(request) for request in requests_from(prompts, options)]
        for _ in self._run(answers):
            pass
        outputs = [answer.output(self.settings) for answer in answers]
        return outputs[0] if one_prompt(prompts) else outputs

    def stream(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]) -> Iterator[Emitted]:
        """Tokens as they come; `index` is the prompt's place in the list. Leaving early cancels what is left."""
        return self._run([self._accept(request) for request in requests_from(prompts, options)])

    def _run(self, answers: list[Answer]) -> Iterator[Emitted]:
        outbox: deque[Emitted] = deque()
        places = {answer.job.index: place for place, answer in enumerate(answers)}
        try:
            with self._lock:
                for answer in answers:
                    self._enqueue(answer)
                    self._outboxes[answer.job.index] = outbox
            while outbox or any(answer.finish_reason is None for answer in answers):
                with self._lock:
                    if not outbox and any(answer.finish_reason is None for answer in answers):
                        self.step()
                while outbox:
                    emitted = outbox.popleft()
                    yield replace(emitted, index=places[emitted.index])
        finally:
            for index in places:
                self.cancel(index)
                self._forget(index)

    # --- parts ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Queue a request; the number it is known by."""
        answer = self._accept(request)
        self._enqueue(answer)
        return answer.job.index

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return self._scheduler.busy

    def step(self) -> list[Emitted]:
        """Run the next piece of one prompt and a round of every row whose prompt is in; the tokens that gave."""
        with self._lock:
            try:
                self._admit()
                self._run_chunk(self._scheduler.plan_chunk())
                return self._run_round(self._scheduler.plan_round())
            except BaseException:
                self._cancel_running()  # the backend's rows are in an unknown state
                raise

    def cancel(self, index: int) -> None:
        """End a request where it is. One that has ended is left alone."""
        with self._lock:
            answer = self._answers.get(index)
            if answer is not None and answer.finish_reason is None:
                answer.finish_reason = "cancelled"
                self._leave(answer.job)

    def output(self, index: int) -> Output:
        """What a request gave, or what it has so far. One that has ended is handed out once, then forgotten."""
        with self._lock:
            if index not in self._answers:
                raise UserError(f"there is no request {index}; it was never submitted, or its output was handed out.")
            answer = self._answers[index]
            if answer.finish_reason is not None:
                self._forget(index)
            return answer.output(self.settings)

    @contextmanager
    def idle_backend(self) -> Iterator[Backend]:
        """The backend, lent for measurements while nothing waits or runs; requests wait until it is given back."""
        with self._lock:
            self._refuse_closed()
            if self.busy:
                raise UserError("the backend was asked for while requests run; wait until they end or cancel them.")
            yield self._backend

    def close(self) -> None:
        """Cancel everything and let go of the model."""
        with self._lock:
            for index in list(self._answers):
                self.cancel(index)
            if not self._closed:
                self._closed = True
                del self._backend  # nothing waits or runs, and nothing can be submitted, so no step needs it

    # --- one step ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while (job := self._scheduler.admit()) is not None:
            sampling = self._answers[job.index].request.sampling
            seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
            self._backend.start(job.placed, job.prompt, sampling, seed)

    def _run_chunk(self, chunk: Chunk | None) -> None:
        if chunk is None:
            return
        started = perf_counter()
        self._backend.prefill(chunk)
        job = self._scheduler.record_chunk(chunk)
        self._answers[job.index].counts.record_chunk(perf_counter() - started)

    def _run_round(self, plan: list[RowPlan]) -> list[Emitted]:
        if not plan:
            return []
        started = perf_counter()
        kept = self._backend.round(plan).result()
        seconds = perf_counter() - started
        emitted: list[Emitted] = []
        for job, result in self._scheduler.record_round(plan, kept):
            answer = self._answers[job.index]
            emitted += answer.take(result, seconds)
            if answer.finish_reason is not None:
                self._leave(job)
        self._post(emitted)
        return emitted

    def _post(self, emitted: list[Emitted]) -> None:
        for one in emitted:
            if one.index in self._outboxes:
                self._outboxes[one.index].append(one)

    # --- coming and going ----------------------------------------------------------------------------------------

    def _accept(self, request: Request) -> Answer:
        """Check a request against this engine; it is not queued yet."""
        prompt = prompt_ids(request, self.text)
        refuse_unfit(request, prompt, self.limits)
        job = Job(next(self._indices), prompt, request.max_tokens, depth_of(request, self.limits))
        return Answer(request, job, Counts(request, self.limits), self.text.decoder(prompt), self._eos)

    def _enqueue(self, answer: Answer) -> None:
        with self._lock:
            self._refuse_closed()
            self._answers[answer.job.index] = answer
            self._scheduler.add(answer.job)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UserError(f"the engine of {self.name} is closed; load the model again.")

    def _leave(self, job: Job) -> None:
        self._scheduler.remove(job)
        if job.row is not None:
            self._backend.release(job.row)

    def _cancel_running(self) -> None:
        for job in list(self._scheduler.running):
            self.cancel(job.index)

    def _forget(self, index: int) -> None:
        self._answers.pop(index, None)
        self._outboxes.pop(index, None)
