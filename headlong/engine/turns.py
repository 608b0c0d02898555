"""Finished turns, prefilled while nobody waits, so that a conversation's next prompt finds all of its past.

Decoding made the answer's pages, and prefill makes others in their last bits, so those cannot be shared as they are.
"""

from collections import deque
from collections.abc import Sequence

from headlong.engine.backend import Backend
from headlong.engine.depth import RowDepth
from headlong.engine.request import Sampling, Start
from headlong.engine.scheduler import Job, Scheduler
from headlong.engine.windows import Drafting

MOST_TURNS = 16


class Turns:
    """A queue of turns, and the one that is being prefilled. Everybody else comes first."""

    def __init__(self, backend: Backend, scheduler: Scheduler) -> None:
        self.backend, self.scheduler = backend, scheduler
        self._waiting: deque[tuple[int, ...]] = deque(maxlen=MOST_TURNS)
        self._job: Job | None = None  # between two chunks, of which the first was run

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._job)

    def offer(self, tokens: Sequence[int]) -> None:
        """A prompt and its answer, of which full chunks are worth keeping. Turns that it begins with need not wait."""
        chunk, prefix = self.scheduler.limits.chunk, self.scheduler.prefix
        whole = (len(tokens) - 1) // chunk * chunk
        if prefix.budget and whole and len(tokens) <= self.scheduler.limits.context:
            turn = tuple(tokens[: whole + 1])
            for earlier in [each for each in self._waiting if turn[: len(each)] == each]:
                self._waiting.remove(earlier)
            self._waiting.append(turn)

    def step(self) -> None:
        """Run one chunk, if there is one and it fits. A turn that is through, or that breaks, is let go of."""
        goes_on = False
        try:
            goes_on = self._run_chunk()
        finally:
            if not goes_on:
                self._leave()

    def drop(self) -> None:
        """Make way. What was prefilled stays cached, and the turn goes on from there in the next idle moment."""
        try:
            if self._job is not None:
                self._put_back(self._job)
        finally:
            self._leave()

    def close(self) -> None:
        self._leave()
        self._waiting.clear()
        del self.backend

    def _run_chunk(self) -> bool:
        """Whether the turn goes on after it."""
        job = self._job or self._begin()
        chunk = self.scheduler.plan_chunk(job, draft=0) if job and job.prefilling else None
        if job is None or chunk is None:
            return False
        self.backend.prefill(chunk)
        self.scheduler.record_chunk(job, chunk)
        keep_prefix(job, self.backend, self.scheduler)
        return job.prefilling

    def _put_back(self, job: Job) -> None:
        if job.length not in job.saves:
            job.saves.add(job.length)
            keep_prefix(job, self.backend, self.scheduler)
        if self.scheduler.prefix.touch(job.prompt) == job.length:  # or it would begin anew, and perhaps every time
            self._waiting.appendleft(job.prompt)

    def _leave(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            self.scheduler.remove(job)
            if job.row is not None:
                self.backend.release(job.row)

    def _begin(self) -> Job | None:
        if not self._waiting:
            return None
        self._job = Job(-1, self._waiting.popleft(), 0, Drafting(RowDepth(asked=0)))
        self.scheduler.add(self._job)
        self.scheduler.admit()
        for job, match in self.scheduler.begin():
            self.backend.start(
                Start(job.placed, job.prompt, Sampling(), 0, length=match.length, pages=match.pages, saved=match.saved)
            )
        return self._job


def keep_prefix(job: Job, backend: Backend, scheduler: Scheduler) -> None:
    """Offer the chunk that a row has just run to later prompts, if it is a full one."""
    prefix = scheduler.prefix
    if prefix.budget and job.length % scheduler.limits.chunk == 0:
        saved = backend.save(job.placed) if job.length in job.saves else None
        prefix.add(job.prompt, job.length, job.pages, saved)
