"""Who waits, who runs, and what the next chunk and the next round are."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headlong.engine.pages import PagePool
from headlong.engine.request import Chunk, Kept, Limits, RowPlan
from headlong.errors import Fault


@dataclass(eq=False)
class Job:
    """One request's way through the backend: where its cache stands and how far it may go."""

    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    depth: int  # most drafts a round
    row: int | None = None
    length: int = 0  # positions committed to the cache
    left: int = 0  # drafts the last chunk or round left behind
    pages: list[int] = field(default_factory=list)

    @property
    def placed(self) -> int:
        """The row, which a running job has."""
        if self.row is None:
            raise Fault(f"request {self.index} was planned before it had a row.")
        return self.row

    @property
    def prefill_end(self) -> int:
        """The last prompt token is the first round's window, so prefill stops before it."""
        return len(self.prompt) - 1

    @property
    def prefilling(self) -> bool:
        return self.length < self.prefill_end

    @property
    def remaining(self) -> int:
        """Tokens still wanted. Each one commits the token before it, so lengths count them."""
        return self.prefill_end + self.max_tokens - self.length


def pages_for(prompt: int, max_tokens: int, depth: int, limits: Limits) -> int:
    """Pages that a whole sequence may come to hold, drafts past its end included."""
    return -(-min(prompt + max_tokens + depth, limits.context) // limits.page)


class Scheduler:
    """First come, first served. A job gets a row when one is free and all the pages it may need are unpromised.

    Pages reach the backend as the row grows. The sum of promises never exceeds the pool, so growing never fails.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = PagePool(limits.pages)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []  # oldest first

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    # --- who waits, who runs -------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        self.waiting.append(job)

    def admit(self) -> Job | None:
        """Move the first waiting job to a free row, if it fits."""
        free_rows = set(range(self.limits.rows)) - {job.row for job in self.running}
        promised = sum(self._pages_for(job) for job in self.running)
        if not self.waiting or not free_rows or promised + self._pages_for(self.waiting[0]) > self.pool.count:
            return None
        job = self.waiting[0]
        self.running.append(job)  # before it has a row, so that an interrupt in between leaves it where it waits
        job.row = min(free_rows)
        self.waiting.popleft()
        return job

    def remove(self, job: Job) -> None:
        """Forget a job wherever it is; its pages are free again."""
        for place in (self.waiting, self.running):
            while job in place:
                place.remove(job)
        self.pool.give(job.pages)
        job.pages.clear()

    # --- planning ------------------------------------------------------------------------------------------------

    def plan_chunk(self) -> Chunk | None:
        """The next piece of the oldest prompt that is not in yet."""
        job = next((job for job in self.running if job.prefilling), None)
        if job is None:
            return None
        start = job.length
        end = min(start + self.limits.chunk, job.prefill_end)
        draft = self._useful(job, job.max_tokens - 1, end) if end == job.prefill_end else 0
        pages = self._grow(job, end + draft)
        return Chunk(job.placed, start, job.prompt[start:end], job.prompt[end], pages, draft)

    def plan_round(self) -> list[RowPlan]:
        """A window for every row whose prompt is in."""
        return [self._plan_row(job) for job in self.running if not job.prefilling]

    def _plan_row(self, job: Job) -> RowPlan:
        # A round yields verify + 1 tokens at most and 1 at least: what goes past the last wanted token is waste.
        verify = min(job.left, job.remaining - 1)
        written = job.length + verify + 1
        draft = self._useful(job, job.remaining - 2, written)
        return RowPlan(job.placed, verify, draft, self._grow(job, written + draft))

    def _useful(self, job: Job, wanted: int, written: int) -> int:
        """Drafts worth making after position `written` - 1; the head's cache must stay inside the context too."""
        return max(0, min(job.depth, wanted, self.limits.context - written))

    def _grow(self, job: Job, positions: int) -> tuple[int, ...]:
        """Pages the job gains so that it covers so many positions."""
        missing = -(-positions // self.limits.page) - len(job.pages)
        gained = self.pool.take(max(0, missing))
        job.pages.extend(gained)
        return gained

    # --- recording -----------------------------------------------------------------------------------------------

    def record_chunk(self, chunk: Chunk) -> Job:
        job = self._at(chunk.row)
        job.length += len(chunk.tokens)
        job.left = chunk.draft
        return job

    def record_round(self, plan: Sequence[RowPlan], kept: Sequence[Kept]) -> list[tuple[Job, Kept]]:
        """Take a round's results; each with the job it belongs to, in the order of the plan."""
        by_row = {result.row: result for result in kept}
        recorded = []
        for part in plan:
            job, result = self._at(part.row), by_row[part.row]
            job.length += len(result.tokens)
            job.left = part.draft
            recorded.append((job, result))
        return recorded

    def check(self) -> None:
        """Every page is free or belongs to one job, and every promise can be kept."""
        self.pool.check()
        held = [page for job in self.running for page in job.pages]
        if len(set(held)) != len(held) or len(held) + self.pool.free != self.pool.count:
            raise Fault(f"{len(held)} pages are held and {self.pool.free} free, of {self.pool.count}.")
        if any(len(job.pages) > self._pages_for(job) for job in self.running):
            raise Fault("a job holds more pages than it was promised.")

    def _pages_for(self, job: Job) -> int:
        return pages_for(len(job.prompt), job.max_tokens, job.depth, self.limits)

    def _at(self, row: int) -> Job:
        return next(job for job in self.running if job.row == row)
