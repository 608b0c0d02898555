"""One step after another: admit, run a piece of a prompt, plan and run a round, write what it gave."""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from headlong.engine.answer import Answer
from headlong.engine.backend import Backend, Handle
from headlong.engine.depth import DepthController
from headlong.engine.prefix import Match
from headlong.engine.request import Chunk, Emitted, Kept, RoundResult, RowPlan, Start
from headlong.engine.scheduler import Job, Scheduler
from headlong.engine.totals import Totals
from headlong.engine.turns import Turns, keep_prefix
from headlong.engine.windows import Window, Windows
from headlong.errors import Fault
from headlong.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PIECES = 3  # of a chunk by default, each followed by a round of the rows that decode

P = ParamSpec("P")
T = TypeVar("T")


class Part(NamedTuple):
    """One request's part in a round."""

    job: Job
    answer: Answer
    window: Window
    plan: RowPlan


@dataclass(frozen=True)
class Flight:
    """A round under way."""

    parts: Sequence[Part]
    handle: Handle
    kind: str
    started: float
    waited: bool = True  # until the round before was known

    @property
    def answers(self) -> list[Answer]:
        return [part.answer for part in self.parts]


class Loop:
    """Steps a backend for the answers it is given. Of one thread at a time.

    Whatever a call to the backend, a grammar or a decoder raises fails the requests that the call was for; the loop
    goes on with the others.
    """

    def __init__(self, backend: Backend, settings: Settings, controller: DepthController, totals: Totals) -> None:
        self.backend = backend
        self.limits = backend.limits
        self.settings = settings
        self.controller = controller
        self.totals = totals
        self.scheduler = Scheduler(self.limits, settings.prefix_bytes)
        self.windows = Windows(self.limits, controller)
        self.turns = Turns(backend, self.scheduler)
        self.answers: dict[int, Answer] = {}  # by the index of their job, until they end
        self._unwritten: list[Answer] = []  # with tokens of the last round
        self._emitted: list[Emitted] = []  # that nobody was told of yet
        self._chunks: list[tuple[Answer, int, float]] = []  # since the last round: whose, tokens, seconds of the call
        self._broken: list[Answer] = []  # whose grammar failed in a round that others share
        self._flight: Flight | None = None  # between steps, where the device runs by itself
        self._begins = False  # the backend is being told of a round, in the midst of which another may land
        self._gone: list[int] = []  # rows that left meanwhile

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do for somebody."""
        return bool(self.answers or self._unwritten or self._emitted or self._flight)

    def add(self, answer: Answer) -> None:
        self.answers[answer.job.index] = answer
        self.scheduler.add(answer.job)

    def end(self, answer: Answer, reason: str, error: str = "") -> None:
        """End an answer where it is; what a round under way gives it and what waits to be written is part of it."""
        if reason != "fault" and self._flight and answer in self._flight.answers:
            self._land()
        if answer.finish_reason is None:
            self._leave(answer)
            self._emitted += self._attempt([], answer.write) or []
            self._emitted += answer.end(reason, error)
            self.totals.record_end(answer.output(), answer.counts.reason)

    def step(self) -> None:
        """Run the next piece of a prompt and a round of every row whose prompt is in."""
        try:
            self._attempt([], self.turns.drop)
            self._expire()
            if self._flight and self._fly_on(self._flight):
                return
            self._land()
            self._admit()
            self._begin()
            self._run_prompts()
            self._run_round()
        except BaseException as error:
            ours, self._flight = isinstance(error, Exception), None  # or else somebody wants to stop
            for job in list(self.scheduler.running):  # the backend's rows are in an unknown state
                self.end(self.answers[job.index], *(("fault", _told(error)) if ours else ("cancelled",)))
            if not ours:
                raise
            logging.getLogger("headlong").exception("a fault, in a step")

    def rest(self) -> None:
        """Use a moment in which nobody waits."""
        self._attempt([], self.turns.step)

    def emitted(self) -> list[Emitted]:
        """What nobody was told of yet."""
        emitted, self._emitted = self._emitted, []
        return emitted

    def close(self) -> None:
        """Let go of the model. Nothing runs, and nothing will."""
        self.turns.close()
        del self.backend

    # --- coming and going ----------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = monotonic()
        for answer in [answer for answer in self.answers.values() if answer.expires <= now]:
            self.end(answer, "deadline")

    def _admit(self) -> None:
        while (job := self.scheduler.admit()) is not None:
            answer = self.answers[job.index]
            answer.counts.queue_s += monotonic() - answer.waits_since

    def _begin(self) -> None:
        for job in [job for job in self.scheduler.running if job.aside is not None]:
            self._bring_back(job)
        for job, match in self.scheduler.begin():
            self._attempt([self.answers[job.index]], self._start, self.answers[job.index], match)

    def _start(self, answer: Answer, match: Match) -> None:
        self.backend.start(self._start_of(answer, match))

    def _start_of(self, answer: Answer, match: Match) -> Start:
        job, request, guide = answer.job, answer.request, answer.job.drafting.guide
        least = 0 if guide else request.min_tokens  # a guide alone knows where nothing but an end token may come
        if job.seed is None:  # later it may find what it has run itself
            job.seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
            answer.counts.cached_tokens = match.length
            self.scheduler.prefix.count(match)
        return Start(
            job.placed,
            job.prompt,
            request.sampling,
            job.seed,
            quiet=tuple(sorted(answer.eos)) if least else (),
            min_tokens=least,
            logprobs=request.logprobs,
            masked=guide is not None,
            follows=job.drafting.uses_head,
            **_cached(match),
        )

    def _fork(self, job: Job) -> None:
        """Rows that wait for this prompt, which is in now, begin behind it."""
        for twin in self.scheduler.twins(job):
            forked, answer = self.scheduler.fork(job, twin), self.answers[twin.index]
            if forked is not None:
                self._attempt([answer], self._begin_behind, job, answer, *forked)

    def _begin_behind(self, job: Job, answer: Answer, match: Match, pages: Sequence[int]) -> None:
        self.backend.fork(job.placed, self._start_of(answer, match), pages)

    def _bring_back(self, job: Job) -> None:
        saved, pages = job.aside, self.scheduler.bring_back(job)
        if saved is not None and pages is not None:
            self._attempt([self.answers[job.index]], self.backend.bring_back, job.placed, saved, pages)
            job.aside = None

    def _planned(self, job: Job, plan: Callable[[], T | None]) -> T | None:
        """A plan that needs pages, making room until there are enough; None if the job itself had to make room."""
        while (planned := plan()) is None:
            victim = self.scheduler.victim(job)
            self._make_room(victim)
            if victim is job:
                return None
        return planned

    def _make_room(self, job: Job) -> None:
        """Take a row's pages; it goes on later, with the same text."""
        saved, answer = job.aside, self.answers[job.index]
        if job.prefilling:
            self._release(job.placed)
        elif saved is None:
            saved = self._attempt([answer], self.backend.set_aside, job.placed)
            if saved is None:
                return
        answer.waits_since = monotonic()
        self.scheduler.make_wait(job, saved)

    def _leave(self, answer: Answer) -> None:
        self.answers.pop(answer.job.index, None)
        self.scheduler.remove(answer.job)
        if self._flight and not any(part.job.index in self.answers for part in self._flight.parts):
            self._land()  # nobody is in it any more
        row, answer.job.row = answer.job.row, None  # first, or a row whose release is interrupted would go twice
        if row is not None and self._begins:
            self._gone.append(row)
        elif row is not None:
            self._release(row)

    def _release(self, row: int) -> None:
        """A row that breaks as it is given back is nobody's any more."""
        self._attempt([], self.backend.release, row)

    def _attempt(self, answers: Sequence[Answer], call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
        """The door for faults: what a call raises fails the answers it was for, and nothing else."""
        try:
            return call(*args, **options)
        except Exception as error:
            logging.getLogger("headlong").exception("a fault, in requests %s", [each.job.index for each in answers])
            for answer in answers:
                self.end(answer, "fault", _told(error))
            return None

    # --- prompts -------------------------------------------------------------------------------------------------

    def _run_prompts(self) -> None:
        """While rows decode, prompts may hold them up for no more than the budget: some chunks, or a piece of one that
        takes as long as so many tokens would, but for a part of a layer."""
        whole = self.limits.chunk
        budget = self.settings.budget or (-(-whole // PIECES) if self.limits.pieces > 1 else whole)
        most = min(budget, whole) if self.scheduler.ready() else whole  # tokens' worth of one call
        budget = max(budget, most)
        while budget >= most and (job := self.scheduler.next_prompt()) is not None:
            chunk = job.chunk or self._plan_chunk(job)
            if chunk is not None:
                budget -= most
                answer, pieces = self.answers[job.index], -(-len(chunk.tokens) // most)
                self._attempt([answer], self._run_piece, answer, chunk, min(pieces, self.limits.pieces))

    def _plan_chunk(self, job: Job) -> Chunk | None:
        drafts, running = 0, self.scheduler.ready()
        if job.prefill_end - job.length <= self.limits.chunk and not self.scheduler.twins(job):
            drafts = self.windows.first(job, running, _kind([*running, job]))
        return self._planned(job, partial(self.scheduler.plan_chunk, job, drafts))

    def _run_piece(self, answer: Answer, chunk: Chunk, pieces: int) -> None:
        started = perf_counter()
        complete = self.backend.prefill(chunk, pieces)
        if complete:
            self.scheduler.record_chunk(answer.job, chunk)
            self._attempt([], keep_prefix, answer.job, self.backend, self.scheduler)  # for others, if it can be
            if not (answer.job.prefilling or chunk.draft):  # who came after drafts were planned runs the rest itself
                self._fork(answer.job)
        seconds = perf_counter() - started
        answer.counts.prefill_s += seconds
        self.totals.record_piece(seconds, complete)
        self._chunks.append((answer, len(chunk.tokens), seconds))

    # --- rounds --------------------------------------------------------------------------------------------------

    def _run_round(self) -> None:
        """Plan a round and begin it; where the device runs by itself it is left to, and ends in the next step."""
        started = perf_counter()
        answers = [self.answers[job.index] for job in self.scheduler.ready()]
        kind = _kind([answer.job for answer in answers])
        self._flight = self._begin_round(self._plan_round(answers, kind), kind, started)
        self._write()  # of the round before, while this one runs
        if not self.limits.overlaps:
            self._land()
            self._write()

    def _begin_round(self, parts: Sequence[Part], kind: str, started: float) -> Flight | None:
        if not parts:
            return None
        answers = [part.answer for part in parts]
        self._begins = True
        try:
            handle = self._attempt(answers, self.backend.round, [part.plan for part in parts])
        finally:
            self._begins, gone, self._gone = False, self._gone, []
            for row in gone:
                self._release(row)
        return None if handle is None else Flight(parts, handle, kind, started)

    def _land(self) -> None:
        """Wait for the round under way, if there is one, and take what it gave."""
        flight, self._flight = self._flight, None
        result = None if flight is None else self._attempt(flight.answers, flight.handle.result)
        if flight is not None and result is not None:
            busy_s = self._count_late(result.prompt_s) + result.verify_s + result.draft_s
            self._record(flight.parts, result, flight.kind)
            host_s = max(0.0, perf_counter() - flight.started - busy_s)
            if not result.cold:
                self._record_host(flight, host_s)
            self.totals.record_round(result.verify_s, result.draft_s, host_s)
            _count_seconds(flight.parts, host_s, flight.started)

    def _record_host(self, flight: Flight, seconds: float) -> None:
        """Where rounds need not wait, those that do wait for rows that come and go, whatever is drafted."""
        costs, overlaps = self.controller.costs, self.limits.overlaps
        if overlaps:
            costs.record_wait(flight.kind, seconds, flight.waited)
        if not (overlaps and flight.waited):
            costs.record_host(flight.kind, seconds, _bare(flight.parts))

    def _count_late(self, prompt_s: float) -> float:
        """What chunks took on a device after their calls had returned, in seconds; they are counted by tokens."""
        chunks, self._chunks = self._chunks, []
        late_s = max(0.0, prompt_s - sum(seconds for _, _, seconds in chunks)) if chunks else 0.0
        for answer, tokens, _ in chunks:
            answer.counts.prefill_s += late_s * tokens / sum(tokens for _, tokens, _ in chunks)
        self.totals.seconds["prefill"] += late_s
        return late_s

    def _fly_on(self, flight: Flight) -> bool:
        """Begin the next round before the one under way is known, where nothing but its tokens depends on it.

        A row that turns out to have ended has one round too many, which nobody looks at.
        """
        if not self._steady(flight):
            return False
        for part in flight.parts:
            part.job.ahead = 1 + part.window.verify
        try:
            parts = self._foresee(flight)
        finally:
            for part in flight.parts:
                part.job.ahead = 0
        following = self._begin_round(parts, flight.kind, flight.started)
        self._land()
        # From here on it has the device for itself.
        self._flight = following and replace(following, started=perf_counter(), waited=False)
        self._write()
        return True

    def _steady(self, flight: Flight) -> bool:
        """Whether the same rows go on, and none of them must end with the round under way."""
        jobs = [part.job for part in flight.parts]
        if self.scheduler.changes or len(jobs) != len(self.scheduler.running):
            return False
        most = 2 * (1 + self.limits.depth) + self.limits.depth  # the windows of two rounds, and what the second leaves
        go_on = self.scheduler.has_room(jobs, most) and all(
            part.job.index in self.answers and part.job.remaining > 1 + part.window.verify for part in flight.parts
        )
        flying = [(part.job, part.window) for part in flight.parts]
        return go_on and bool(self._attempt([], self.windows.foreseeable, flying, flight.kind))

    def _foresee(self, flight: Flight) -> list[Part]:
        offered = [(part.job, self.windows.expected(part.job, part.window)) for part in flight.parts]
        parts = []
        for job, window in self.windows.plan(offered, flight.kind):
            plan = self.scheduler.plan_row(job, window)
            if plan is None:
                raise Fault(f"request {job.index} lacks a page that was counted.")
            answer = self.answers[job.index]
            parts.append(Part(job, answer, window, self._with_safe_masks(answer, plan)))
        return parts

    def _plan_round(self, answers: Sequence[Answer], kind: str) -> list[Part]:
        """The most senior rows first: those who make room for them are not planned yet."""
        offers = [(answer, self._attempt([answer], self.windows.offer, answer.job)) for answer in answers]
        offered = [(answer.job, offer) for answer, offer in offers if offer is not None]
        parts = []
        for job, window in self.windows.plan(offered, kind):
            if job.row is None:
                continue
            plan = self._planned(job, partial(self.scheduler.plan_row, job, window))
            if plan is not None:
                answer = self.answers[job.index]
                parts.append(Part(job, answer, window, self._with_safe_masks(answer, plan)))
        return parts

    def _with_safe_masks(self, answer: Answer, plan: RowPlan) -> RowPlan:
        """Masks that know what a round under way gave, and wait for it if they must. A grammar that breaks must not
        break the round: its row goes on unconstrained and fails afterwards."""
        masks = plan.masks
        if masks is None:
            return plan

        def computed() -> "NDArray[np.int32]":
            self._land()
            found = self._attempt([], masks)
            if found is None:
                self._broken.append(answer)
                import numpy as np

                found = np.full((plan.verify + 1, -(-self.limits.vocab // 32)), -1, np.int32)
            return found

        return plan._replace(masks=computed)

    def _record(self, parts: Sequence[Part], result: RoundResult, kind: str) -> None:
        tokens = self.limits.sizes.tokens([part.window.verify for part in parts])
        steps = result.steps or self.limits.sizes.steps([part.window.draft for part in parts])
        rows = self.limits.sizes.rows(len(parts))
        bare = _bare(parts)
        if not result.cold:
            self.controller.costs.record_late(kind, result.late, result.late_s)
            draft_s = 0.0 if result.cold_drafts else result.draft_s - result.late_s  # which then tells nothing
            self.controller.costs.record(kind, tokens, result.verify_s, steps, draft_s, bare, rows)
        self.controller.record(kind, rows, tokens, steps, bare)
        for answer in self._broken:
            self.end(answer, "fault", "the constraint could not be followed")
        self._broken.clear()
        by_row = {kept.row: kept for kept in result.kept}
        for part in parts:
            if part.job.index in self.answers:
                self._attempt([part.answer], self._keep, part, by_row[part.plan.row], result)

    def _keep(self, part: Part, kept: Kept, result: RoundResult) -> None:
        answer, drafting = part.answer, part.job.drafting
        part.job.length += len(kept.tokens)
        counted = answer.keep(kept, part.window, result)
        drafting.take(kept, part.window, counted)
        if drafting.guide and drafting.guide.complete:
            answer.end_here()
        self._unwritten.append(answer)
        if answer.complete:
            self._leave(answer)

    def _write(self) -> None:
        """The text of the last round's tokens; a stop string in it ends its request."""
        unwritten, self._unwritten = self._unwritten, []
        for answer in unwritten:
            written = self._attempt([answer], answer.write) or []
            self._emitted += written
            self.totals.tokens += sum(one.token is not None for one in written)
            if written and written[-1].finish_reason is not None:
                self.totals.record_end(answer.output(), answer.counts.reason)
            if answer.finish_reason is not None:
                self._leave(answer)
                self.turns.offer(answer.job.prompt + answer.tokens)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _cached(match: Match) -> dict[str, Any]:
    return {"length": match.length, "pages": match.pages, "saved": match.saved}


def _kind(jobs: Sequence[Job]) -> str:
    """Rounds with a sampled row cost more than greedy ones, and more still with one that needs all of the chain."""
    return "sampled" if any(job.sampled for job in jobs) else "plain"


def _bare(parts: Sequence[Part]) -> bool:
    """Whether a round has no drafts to verify."""
    return not any(part.window.verify for part in parts)


def _count_seconds(parts: Sequence[Part], host_s: float, started: float) -> None:
    now = perf_counter()
    for part in parts:
        counts = part.answer.counts
        counts.host_s += host_s
        if not counts.decode_since:
            counts.decode_since = started
        counts.decode_s = now - counts.decode_since
