"""Who waits, who runs, who makes room, and what the next chunk and the next round are."""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headlong.engine.pages import PagePool
from headlong.engine.prefix import Match, PrefixCache, common_chunks
from headlong.engine.request import Chunk, Limits, RowPlan, Saved
from headlong.engine.windows import Drafting, Window
from headlong.errors import Fault


@dataclass(eq=False)
class Job:
    """One request's way through the backend: where its cache stands and how far it may go."""

    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    drafting: Drafting
    priority: int = 0
    sampled: bool = False  # its tokens cost more than an argmax
    seed: int | None = None  # drawn once, when it first starts
    row: int | None = None
    started: bool = False  # the backend knows its prompt
    length: int = 0  # positions committed to the cache
    ahead: int = 0  # that a round under way may add at most, while the next one is planned
    pages: list[int] = field(default_factory=list)
    found: int = 0  # positions that came from the prefix cache
    saves: set[int] = field(default_factory=set)  # lengths at which its state is worth keeping
    aside: Saved | None = None  # what it was when it last had to make room
    served: int = 0  # when its prompt last had a chunk
    chunk: Chunk | None = None  # of which a piece was run, or is about to be

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
        return not self.started or self.length < self.prefill_end

    @property
    def remaining(self) -> int:
        """Tokens still wanted. Each one commits the token before it, so lengths count them."""
        return self.prefill_end + self.max_tokens - self.reach

    @property
    def reach(self) -> int:
        """Positions that may be committed when the round that is planned begins."""
        return self.length + self.ahead

    @property
    def seniority(self) -> tuple[int, int]:
        """Smaller goes first: in the queue, for pages, and last to make room."""
        return -self.priority, self.index


def pages_for(prompt: int, max_tokens: int, limits: Limits) -> int:
    """Pages that a whole sequence may come to hold, drafts past its end included."""
    return -(-min(prompt + max_tokens + limits.depth, limits.context) // limits.page)


class Scheduler:
    """First come, first served, the higher priority first. A row grows page by page; when pages run out, cached
    prefixes go, then the youngest row makes room and waits for its turn to go on.

    The oldest row can always have every page, and each request alone fits, so there is always one that goes on.
    """

    def __init__(self, limits: Limits, prefix_bytes: int = 0) -> None:
        self.limits = limits
        self.pool = PagePool(limits.pages)
        self.prefix = PrefixCache(limits, self.pool, prefix_bytes)
        self.waiting: list[Job] = []  # in order of seniority
        self.running: list[Job] = []
        self._clock = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    # --- who waits, who runs -------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        insort(self.waiting, job, key=lambda job: job.seniority)

    def admit(self) -> Job | None:
        """Move the first waiting job to a free row, if there are pages for what it has and its next window."""
        free_rows = set(range(self.limits.rows)) - {job.row for job in self.running}
        if not self.waiting or not free_rows:
            return None
        job = self.waiting[0]
        if job.aside is None and any(other.aside is not None for other in self.running):
            return None  # nobody overtakes a row that waits for its pages
        # What others will come to need is not known; one page each keeps rows from being set aside at once.
        needed = self._pages(max(job.length, len(job.prompt)) + self.limits.depth + 1)
        if job.aside is None:
            needed -= self.prefix.touch(job.prompt) // self.limits.page
        spare = len(self.running)
        if not self.prefix.make_room(min(needed + spare, self.limits.pages)) and self.running:
            return None
        self.running.append(job)  # before it has a row, so that an interrupt in between leaves it where it waits
        job.row = min(free_rows)
        self.waiting.pop(0)
        return job

    def bring_back(self, job: Job) -> tuple[int, ...] | None:
        """Pages for a job that was set aside, as many as it had; None if it must wait on."""
        return self._grow(job, job.length)

    def make_wait(self, job: Job, aside: Saved | None) -> None:
        """Put a running job back into the queue. What it had is aside; a prompt that is not in yet begins anew."""
        self.remove(job)
        job.row, job.aside = None, aside
        if aside is None:
            job.started, job.length = False, 0
        self.add(job)

    def remove(self, job: Job) -> None:
        """Forget a job wherever it is; its pages are free again."""
        for place in (self.waiting, self.running):
            while job in place:
                place.remove(job)
        self.pool.give(job.pages)
        job.pages.clear()
        job.chunk = None

    # --- prompts -------------------------------------------------------------------------------------------------

    def begin(self) -> Iterator[tuple[Job, Match]]:
        """Rows that can begin their prompt, with what the prefix cache has of it.

        While another row that is no less urgent runs the same beginning, a row waits for that instead of running it
        twice.
        """
        for job in sorted(self.running, key=lambda job: job.seniority):
            if job.started or job.aside is not None or self._awaits(job):
                continue
            match = self.prefix.find(job.prompt)
            self.pool.share(match.pages)
            job.pages.extend(match.pages)
            job.length = job.found = match.length
            job.saves |= self.prefix.save_at(job.prompt, match)
            job.started = True
            yield job, match

    def _awaits(self, job: Job) -> bool:
        for other in self.running:
            if other is job or not other.started or not other.prefilling or other.priority < job.priority:
                continue
            if other.prompt == job.prompt:
                return True  # and is forked then
            if not self.prefix.budget:
                continue
            common = min(common_chunks(job.prompt, other.prompt, self.limits.chunk), _floor(other, self.limits.chunk))
            if common > other.length:
                other.saves.add(common)
                return True
        return False

    def twins(self, job: Job) -> list[Job]:
        """Rows that wait for this one's prompt, which is theirs too."""
        waiting = (other for other in self.running if not other.started and other.aside is None)
        return [other for other in waiting if other.prompt == job.prompt and other.priority <= job.priority]

    def fork(self, job: Job, twin: Job) -> tuple[Match, tuple[int, ...]] | None:
        """Let a row begin where another's prompt has come in: full pages are shared, and it gains one for the rest,
        which is to be copied. None if there is none; it begins by itself then."""
        shared = tuple(job.pages[: job.length // self.limits.page])
        self.pool.share(shared)
        twin.pages.extend(shared)
        gained = self._grow(twin, job.length)
        if gained is None:
            self.pool.give(shared)
            twin.pages.clear()
            return None
        twin.started, twin.length = True, job.length
        return Match(job.length, shared, None, job.length), gained

    def next_prompt(self) -> Job | None:
        """Whose prompt goes on: the highest priority's, then who is amidst a chunk, then who had one longest ago."""
        jobs = [job for job in self.running if job.started and job.aside is None and job.prefilling]
        return min(jobs, key=lambda job: (-job.priority, job.chunk is None, job.served, job.index), default=None)

    def plan_chunk(self, job: Job, draft: int) -> Chunk | None:
        """The next chunk of a prompt, with so many drafts after the last one; None if there is no page for it."""
        start = job.length
        end = min(start + self.limits.chunk, job.prefill_end)
        # A full chunk's pages may be shared, and drafting would write the head's newest pair into them again.
        draft = draft if end == job.prefill_end and end % self.limits.chunk else 0
        pages = self._grow(job, end + draft)
        if pages is None:
            return None
        self._clock += 1
        job.served = self._clock
        job.chunk = Chunk(job.placed, start, job.prompt[start:end], job.prompt[end], pages, draft)
        return job.chunk

    def record_chunk(self, job: Job, chunk: Chunk) -> None:
        job.length += len(chunk.tokens)
        job.drafting.left = chunk.draft
        job.chunk = None

    # --- rounds --------------------------------------------------------------------------------------------------

    def ready(self) -> list[Job]:
        """The rows whose prompt is in, the most senior first."""
        ready = [job for job in self.running if job.aside is None and not job.prefilling]
        return sorted(ready, key=lambda job: job.seniority)

    def plan_row(self, job: Job, window: Window) -> RowPlan | None:
        """A row's part of the round; None if there is no page for it."""
        pages = self._grow(job, job.reach + window.verify + 1 + window.draft)
        if pages is None:
            return None
        return RowPlan(job.placed, window.verify, window.draft, pages, window.given, window.masks, window.least)

    @property
    def changes(self) -> bool:
        """Whether somebody could come in, or has a prompt to run, before the next round."""
        return any(job.prefilling or job.aside for job in self.running) or bool(
            self.waiting and len(self.running) < self.limits.rows
        )

    def has_room(self, jobs: Sequence[Job], most: int) -> bool:
        """Whether each of these jobs can have so many more positions without anybody making room."""
        return sum(max(0, self._pages(job.reach + most) - len(job.pages)) for job in jobs) <= self.pool.free

    def victim(self, job: Job) -> Job:
        """Who makes room for a job that needs pages: the youngest that holds any, perhaps itself."""
        holders = [other for other in self.running if other.pages or other is job]
        return max(holders, key=lambda other: other.seniority)

    def _grow(self, job: Job, positions: int) -> tuple[int, ...] | None:
        """Pages the job gains so that it covers so many positions; None if there are too few."""
        missing = max(0, self._pages(positions) - len(job.pages))
        if missing and not self.prefix.make_room(missing):
            return None
        gained = self.pool.take(missing)
        job.pages.extend(gained)
        return gained

    def _pages(self, positions: int) -> int:
        return -(-min(positions, self.limits.context) // self.limits.page)

    # --- invariants ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every page is free, or held by just those jobs and cached prefixes that say so."""
        self.prefix.check()
        held = [page for job in self.running for page in job.pages]
        if any(job.pages for job in self.waiting):
            raise Fault("a waiting job holds pages.")
        self.pool.check([*held, *self.prefix.held_pages()])
        rows = [job.row for job in self.running]
        if len(set(rows)) != len(rows):
            raise Fault(f"rows are taken twice: {rows}.")
        for job in self.running:
            if job.aside is None and len(job.pages) * self.limits.page < job.length:
                raise Fault(f"request {job.index} has {job.length} positions in {len(job.pages)} pages.")


def _floor(job: Job, chunk: int) -> int:
    return job.prefill_end // chunk * chunk
