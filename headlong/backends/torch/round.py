"""One round for all rows at once: verify, accept, commit, draft. Nothing is read back from a GPU in between."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from headlong.backends.torch.accept import Trial, Verdict, accept_by_logits, accept_scored
from headlong.backends.torch.allowed import Allowed
from headlong.backends.torch.cache import MAX_WIDTH, Cache
from headlong.backends.torch.chain import Chain, Rule
from headlong.backends.torch.drafters import Drafter, Proposal
from headlong.backends.torch.gpu.paths import fused, verdicts
from headlong.backends.torch.models.base import Layers, Model, finish, go_on
from headlong.backends.torch.native.arena import fresh
from headlong.backends.torch.native.library import library
from headlong.backends.torch.native.tape import Taped
from headlong.backends.torch.pairs import Backlog, Feed
from headlong.backends.torch.ragged import Layout
from headlong.backends.torch.step import Prefill, Window
from headlong.backends.torch.told import Told, tell
from headlong.engine.request import Chunk, Kept, RoundResult, RowPlan, Start

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Stopwatch:
    """Seconds between marks, on a device that may run behind the host."""

    def __init__(self, device: torch.device) -> None:
        self.events: list[torch.cuda.Event] | None = [] if device.type == "cuda" else None
        self.times: list[float] = []

    def mark(self) -> None:
        if self.events is None:
            self.times.append(perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)

    def seconds(self) -> list[float]:
        """Between each mark and the next; the device must have passed the last."""
        if self.events is None:
            return [after - before for before, after in pairwise(self.times)]
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(self.events)]


class Flying(Protocol):
    """A round's result, on the device until asked for."""

    @property
    def left(self) -> Mapping[int, int]:
        """By row, how many drafts there are for the next round; where none is named, as many as were asked for."""

    def result(self) -> RoundResult: ...


@dataclass(frozen=True)
class RoundHandle:
    """A round whose passes were called one by one."""

    plan: Sequence[RowPlan]
    verdict: Verdict
    proposed: "Tensor | NDArray[np.int64] | None"  # [B, D], where some row drafted
    left: Mapping[int, int]
    steps: Sequence[int] | None  # rows in each of the head's steps, where it may have made fewer than planned
    told: Mapping[int, Told]
    watch: Stopwatch
    once_s: tuple[float, float]  # what each half took that the next rounds like it will not
    waiting: Sequence[int]  # pairs of each of all rows that the drafter has yet to take in
    caught_up: tuple[int, float]  # those that it took in late, and seconds of it

    def result(self) -> RoundResult:
        tokens, results, first = self.verdict.tokens.tolist(), [], 0
        proposed = [] if self.proposed is None else self.proposed.tolist()
        for place, (row, count) in enumerate(zip(self.plan, self.verdict.kept.tolist(), strict=True)):
            left = tuple(proposed[place][: self.left.get(row.row, row.draft)]) if row.draft else ()
            logprobs = self.told[row.row].logprobs(count) if row.row in self.told else ()
            kept = tuple(tokens[first : first + count])
            results.append(Kept(row.row, kept, row.verify, left, logprobs, self.waiting[row.row]))
            first += 1 + row.verify
        verify_s, draft_s = self.watch.seconds()
        cold, cold_drafts = map(math.isinf, self.once_s)
        verify_s -= 0.0 if cold else self.once_s[0]
        draft_s -= 0.0 if cold_drafts else self.once_s[1]
        late, late_s = self.caught_up
        return RoundResult(results, verify_s, draft_s, cold, cold_drafts, late=late, late_s=late_s, steps=self.steps)


class Rounds:
    """Where each row stands, and how it goes on.

    length   tokens of the row in the cache
    windows  the newest token, at position `length`, then proposals for the positions after it
    follows  whether a row may ever draft; where not, nothing is done for it
    """

    def __init__(self, model: Model, cache: Cache, chain: Chain, drafter: Drafter | None) -> None:
        self.model, self.cache, self.chain, self.drafter = model, cache, chain, drafter
        rows, device = cache.rows, cache.device
        self.length = torch.zeros(rows, dtype=torch.long, device=device)
        self.windows = torch.zeros(rows, MAX_WIDTH, dtype=torch.long, device=device)
        # Where the host can read and write itself, that takes a tenth of the time.
        self._windows = self.windows.numpy() if self.windows.is_cpu else None
        self._zeros = torch.zeros(rows * MAX_WIDTH, dtype=torch.long, device=device)  # as many as a pass has tokens
        self.follows = [True] * rows
        self.logprobs: list[int | None] = [None] * rows  # how many of the likeliest tokens are told
        self.reading: dict[int, Layers] = {}  # chunks of which some layers are still to be run, by row
        self.allowed = Allowed(rows, chain.vocab, device)
        self.verify = Taped(self._verify)
        self.verify_and_rest = Taped(self._verify_and_rest, beside=self.verify)

    def start(self, start: Start) -> None:
        row = start.row
        self.reading.pop(row, None)
        self.length[row] = start.length
        self.windows[row, 0] = start.prompt[-1]
        self.follows[row] = start.follows
        self.logprobs[row] = start.logprobs
        self.allowed.start(row, self.chain.rules[row] is Rule.ALLOWED)
        if self.drafter:
            self.drafter.start(row, start.follows)

    def views(self, row: int) -> dict[str, Tensor]:
        """Everything of a row that its text changes, but its pages."""
        found = {"length": self.length[row], "windows": self.windows[row]}
        late = self.drafter.backlog.views(row) if self.drafter and self.drafter.backlog else {}
        return {**found, **late, **self.chain.views(row), **self.cache.views(row)}

    def prefill(self, chunk: Chunk, pieces: int) -> bool:
        """Run a chunk, or the next of so many pieces of it; whether it is complete."""
        last = self._read(chunk, pieces)
        if last is not None and chunk.draft:
            layout = self.cache.layout((chunk.row,), (1,))
            newest = self.length[layout.index] - 1, last, self.cache.send([chunk.after])
            self._draft(Feed(layout, *newest, layout.sizes), [chunk.draft], [0.0])
        return last is not None

    def _read(self, chunk: Chunk, pieces: int) -> Tensor | None:
        """Some layers of a chunk -> the hidden state of its last token, [1, H], if there are no more."""
        layers = self.reading.pop(chunk.row, None)
        if layers is None:
            step = Prefill(self.cache, chunk.row, chunk.start, len(chunk.tokens))
            layers = self._take_in(self.cache.send([*chunk.tokens, chunk.after]), step)
        hidden = go_on(layers, -(-self.model.layer_count // pieces))
        if hidden is None:
            self.reading[chunk.row] = layers
            return None
        return hidden[-1:]

    def _take_in(self, tokens: Tensor, step: Prefill) -> Layers:
        """A chunk's tokens and the one after them, [T + 1] -> hidden [T, H]."""
        hidden = yield from self.model.by_layer(tokens[:-1], step)
        self.length[step.row] = step.end
        if self.drafter:  # also of a row that will not draft: others may share its pages
            self.drafter.prime(hidden, tokens[1:], step)
        return hidden

    def run(self, plan: Sequence[RowPlan]) -> Flying:
        watch = Stopwatch(self.cache.device)
        watch.mark()
        self._place_given(plan)
        self._place_masks(plan)
        layout = self.cache.layout(tuple(row.row for row in plan), tuple(1 + row.verify for row in plan))
        drafts = [row.draft for row in plan]
        resting = self._resting(layout, drafts)
        verify = self.verify_and_rest if resting else self.verify
        starts, window, hidden, logits, *best = verify(
            layout, layout.index, layout.offsets, self._zeros[: layout.tokens]
        )
        verdict = Verdict(*best)
        if special := not self.chain.from_logits_alone(layout.rows):
            accept_scored(verdict, Trial(layout, starts, window, logits, self.allowed), self.chain)
        feed = Feed(layout, starts, hidden, verdict.tokens, verdict.kept)
        if special:
            self._commit(feed, self.drafter.backlog if self.drafter and resting else None)
        self._count(feed)
        told = tell(layout, logits, verdict.tokens, self.logprobs)
        watch.mark()
        proposal: Proposal | None = None
        left: Mapping[int, int] = {}
        if self.drafter and resting:
            self.drafter.rest(*resting)
        elif self.drafter:
            proposal, left = self._hand_on(feed, plan)
        watch.mark()
        proposed = self._proposed(layout, max(drafts)) if any(drafts) else None
        once_s = verify.once_s, self.drafter.once_s if self.drafter and any(drafts) else 0.0
        backlog = self.drafter.backlog if self.drafter else None
        waiting = backlog.most if backlog else [0] * self.cache.rows
        caught_up = self.drafter.caught_up() if self.drafter else (0, 0.0)
        steps = proposal.steps if proposal else None
        return RoundHandle(plan, verdict, proposed, left, steps, told, watch, once_s, waiting, caught_up)

    def _place_given(self, plan: Sequence[RowPlan]) -> None:
        """Drafts that came from the host take the place of those left here, and were proposed with certainty."""
        for row in plan:
            if not row.drafts:
                continue
            if self.drafter and self.drafter.sureness:
                self.drafter.sureness.forget(row.row)
            places = slice(1, 1 + len(row.drafts))
            if self._windows is not None:
                self._windows[row.row, places] = row.drafts
            else:
                self.windows[row.row, places] = torch.tensor(row.drafts, device=self.cache.device)
            if self.chain.rules[row.row] is Rule.REJECTION:
                probs = self.chain.room_for_probs()[row.row, : len(row.drafts)]
                probs.zero_().scatter_(1, self.windows[row.row, places, None], 1.0)

    def _place_masks(self, plan: Sequence[RowPlan]) -> None:
        for row in plan:
            if row.masks:
                self.allowed.put(row.row, row.masks())

    def _verify(self, layout: Layout, index: Tensor, offsets: Tensor, size: Tensor) -> tuple[Tensor, ...]:
        """A round of rows whose tokens follow from their logits alone; what others keep is found anew.

        Its places [B] and [B + 1], and anything of its size [N] -> starts [B], window [N], hidden [N, H],
        logits [N, V], tokens [N], kept [B].
        """
        layout = layout.at(index, offsets)
        starts, window = self._look_up(layout)
        hidden, logits = self._run_target(layout, starts, window)
        verdict = accept_by_logits(Trial(layout, starts, window, logits, self.allowed), self.chain)
        self._commit(Feed(layout, starts, hidden, verdict.tokens, verdict.kept))
        return starts, window, hidden, logits, verdict.tokens, verdict.kept

    def _verify_and_rest(self, layout: Layout, *places: Tensor) -> tuple[Tensor, ...]:
        """The same where nobody drafts, but some may later."""
        found = self._verify(layout, *places)
        assert self.drafter is not None
        assert self.drafter.backlog is not None
        starts, _, hidden, _, tokens, kept = found
        self.drafter.backlog.put(Feed(layout.at(*places[:2]), starts, hidden, tokens, kept))
        return found

    def _resting(self, layout: Layout, drafts: Sequence[int]) -> tuple[Sequence[int], Sequence[int]] | None:
        """Rows and widths of which pairs are to be set aside, where nobody drafts and it is known how many are kept:
        logits tell, or there is one of each."""
        backlog = self.drafter.backlog if self.drafter and not self.cache.spare else None
        if any(drafts) or backlog is None or backlog.hidden is None:  # the first pairs make room for all
            return None
        if layout.widest > 1 and not self.chain.from_logits_alone(layout.rows):
            return None
        if all(self.follows[row] for row in layout.rows):
            return layout.rows, layout.widths
        following = [pair for pair in zip(layout.rows, layout.widths, strict=True) if self.follows[pair[0]]]
        return ([row for row, _ in following], [width for _, width in following]) if following else None

    def _look_up(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Where the rows' windows start [B], and what they hold [N]."""
        lib = library() if self.length.is_cpu else None
        if fused(self.length):
            sizes = layout.tokens, layout.widest
            starts, window = verdicts().look_up(layout.index, self.length, self.windows, layout.offsets, sizes)
        elif lib is None:
            starts, window = self.length[layout.index], self.windows[layout.token_rows, layout.steps]
        else:
            starts, window = fresh(layout.index, len(layout.rows)), fresh(layout.index, layout.tokens)
            tensors = (starts, window, layout.index, layout.offsets, self.length, self.windows)
            lib.read_windows(*(t.data_ptr() for t in tensors), len(starts), MAX_WIDTH)
        return starts, window

    def _run_target(self, layout: Layout, starts: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
        """Windows [N] -> hidden [N, H] and logits [N, V]."""
        hidden = finish(self.model.by_layer(window, Window(self.cache, layout, starts, layout.counts)))
        return hidden, self.model.logits(hidden)

    def _commit(self, feed: Feed, late: Backlog | None = None) -> None:
        """Rows go on behind what they keep. To do it twice is to do it once; the second time tells the last tokens of
        pairs set aside since the first."""
        layout, state = feed.layout, (self.length, self.windows, self.cache.kept)
        lib = library() if feed.kept.is_cpu else None
        if fused(feed.kept):
            verdicts().commit(layout.index, feed.starts, layout.offsets, feed.tokens, feed.kept, state)
        elif lib is None:
            self.length[layout.index] = feed.lengths
            self.windows[layout.index, 0] = feed.tokens[layout.offsets[:-1] + feed.kept - 1]
            self.cache.kept[layout.index] = feed.kept
        else:
            tensors = (*state, layout.index, feed.starts, layout.offsets, feed.tokens, feed.kept)
            waiting = (late.tokens.data_ptr(), late.counts.data_ptr(), late.room) if late else (None, None, 0)
            lib.commit(*(t.data_ptr() for t in tensors), len(feed.kept), MAX_WIDTH, *waiting)
        if late and lib is None:
            late.amend(feed)

    def _count(self, feed: Feed) -> None:
        """What is known of a round beside where rows stand."""
        self.chain.count(feed.layout, feed.tokens, feed.kept)
        for row, width in zip(feed.layout.rows, feed.layout.widths, strict=True):
            self.cache.widths[row] = width

    def _hand_on(self, feed: Feed, plan: Sequence[RowPlan]) -> tuple[Proposal | None, dict[int, int]]:
        """What became true goes to the drafter, which proposes for the rows that are to draft; how many of these are
        left, by row."""
        assert self.drafter is not None
        others = tuple(b for b, row in enumerate(plan) if not row.draft and self.follows[row.row])
        if others:
            self.drafter.follow(feed.part(others))
        drafting = tuple(sorted((b for b, row in enumerate(plan) if row.draft), key=lambda b: -plan[b].draft))
        if not drafting:
            return None, {}
        depths, least = zip(*((plan[b].draft, plan[b].least) for b in drafting), strict=True)
        proposal = self._draft(feed.part(drafting), depths, least)
        rows = (plan[b].row for b in drafting)
        return proposal, dict(zip(rows, proposal.left or depths, strict=True))

    def _draft(self, feed: Feed, depths: Sequence[int], least: Sequence[float]) -> Proposal:
        """Leave proposals for the next windows."""
        assert self.drafter is not None
        proposal = self.drafter.draft(feed, depths, least)
        self._place_drafts(feed.layout.index, proposal.tokens)
        rejection = self.chain.under(feed.layout.rows, Rule.REJECTION) if proposal.certain else ()
        if rejection:
            part, depth = feed.layout.part(rejection), proposal.tokens.shape[1]
            probs = torch.nn.functional.one_hot(proposal.tokens[part.which], self.chain.vocab).float()
            self.chain.room_for_probs()[part.layout.index, :depth] = probs
        return proposal

    def _proposed(self, layout: Layout, depth: int) -> "Tensor | NDArray[np.int64]":
        """So many drafts of every row."""
        windows = self.windows[layout.index] if self._windows is None else self._windows[list(layout.rows)]
        return windows[:, 1 : 1 + depth]

    def _place_drafts(self, index: Tensor, drafts: Tensor) -> None:
        """Drafts [B, D] for the next windows of rows [B]."""
        lib = library() if drafts.is_cpu else None
        if lib is None:
            self.windows[index, 1 : 1 + drafts.shape[1]] = drafts
        else:
            tensors = (self.windows, index, drafts)
            lib.leave_drafts(*(t.data_ptr() for t in tensors), *drafts.shape, *drafts.stride(), MAX_WIDTH)
