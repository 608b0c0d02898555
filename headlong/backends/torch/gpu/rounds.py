"""Rounds as captured graphs: one for each shape of a batch, replayed with the rows that are in it now.

    verify   place, target, logits
    accept   which drafts stand, commit           the same graph, unless masks come in between
    draft    the head's steps, and what the host is told

A batch is padded to a bucket of rows with the row that is nobody's, and all its windows to the widest. What differs
between two batches of one shape (which rows, how much of each window counts, how many drafts each wants) is read from
tensors, so a graph knows nothing of it.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from time import perf_counter
from typing import ClassVar

import torch
from torch import Tensor

from headlong.backends.torch.accept import Trial, Verdict, accept
from headlong.backends.torch.cache import Cache
from headlong.backends.torch.chain import Chain, Needs
from headlong.backends.torch.drafters import Drafter
from headlong.backends.torch.gpu.prompts import Prompts
from headlong.backends.torch.gpu.stream import Fetched, Replay, Stream
from headlong.backends.torch.models.base import Model, finish
from headlong.backends.torch.pairs import Feed
from headlong.backends.torch.ragged import Grid, Layout
from headlong.backends.torch.round import Flying, Rounds, Stopwatch
from headlong.backends.torch.told import Told, tell
from headlong.engine.request import Chunk, Kept, RoundResult, RowPlan, Sizes

MOST_SHAPES = 128  # whose graphs are kept
# Few of each: a new shape takes a tenth of a second, and seconds where kernels must be built.
SIZES = Sizes((1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256))  # rows
DEPTHS = (1, 2, 3, 5, 8)  # to choose from
OFTEN = 8  # rounds that are run in a larger shape before they get one of their own
ROOMY = 4  # times its tokens, the largest shape that a round is run in


@dataclass(frozen=True)
class Shape:
    """What a graph is captured for."""

    width: int  # tokens in every window
    depth: int  # drafts for every row
    follows: bool  # the head takes in the round though nobody drafts
    told: bool  # logprobs are wanted
    needs: tuple[Needs, ...]  # of every row, those that need most first and the padding last

    @property
    def tokens(self) -> int:
        return self.width * len(self.needs)

    def holds(self, other: "Shape") -> bool:
        """Whether a batch of the other shape can be run in this one."""
        count = len(other.needs)
        return (
            (self.follows, self.told) == (other.follows, other.told)
            and self.width >= other.width
            and self.depth >= other.depth
            and self.needs[:count] == other.needs
            and all(needs == Needs() for needs in self.needs[count:])
        )


@dataclass
class Captured:
    """The graphs of one shape and all they read and write."""

    shape: Shape
    rows: tuple[int, ...]  # that were in the batch when it was captured: the host asks by them what each place needs
    grid: Grid
    inputs: Tensor  # [2, B]: rows, and how many tokens of each one's window count
    masked: bool  # masks come in between
    out: Tensor  # [B + 1, 1 + W + D or 3]: kept, the round's tokens, the drafts; last when it began, accepted and ended
    graphs: Sequence[Replay] = ()
    sent: tuple[list[int], list[int]] | None = None  # what inputs hold
    # Between parts
    trial: Trial | None = None
    hidden: Tensor | None = None
    verdict: Verdict | None = None

    def layout(self) -> Layout:
        """Anew for each part, so that whatever depends on the rows is computed in it."""
        return Layout(self.rows, self.grid, self.inputs[0], self.inputs[1])


@dataclass(frozen=True)
class GraphHandle:
    """A round under way."""

    left: ClassVar[Mapping[int, int]] = {}

    plan: Sequence[RowPlan]
    width: int
    out: Fetched  # [B + 1, 1 + W + D or 3]
    told: Mapping[int, Told]
    chunks: Sequence[Stopwatch]  # that ran since the round before
    cold: bool

    def result(self) -> RoundResult:
        width, results = self.width, []
        *rows, (began, accepted, ended, *_) = self.out.values()
        for row, (count, *values) in zip(self.plan, rows, strict=False):
            left = tuple(values[width : width + row.draft])
            logprobs = self.told[row.row].logprobs(count) if row.row in self.told else ()
            results.append(Kept(row.row, tuple(values[:count]), row.verify, left, logprobs))
        prompt_s = sum(sum(watch.seconds()) for watch in self.chunks)
        verify_s, draft_s = (accepted - began) / 1e9, (ended - accepted) / 1e9
        return RoundResult(results, verify_s, draft_s, self.cold, self.cold, prompt_s)


class GraphRounds(Rounds):
    """Rounds on a GPU."""

    def __init__(
        self, model: Model, cache: Cache, chain: Chain, drafter: Drafter | None, stream: Stream | None = None
    ) -> None:
        super().__init__(model, cache, chain, drafter)
        self.stream = stream or Stream()
        self.captured: dict[Shape, Captured] = {}
        self.wanted: Counter[Shape] = Counter()  # rounds of shapes that had no graphs of their own
        self.prompts = Prompts(cache, self.stream, lambda tokens, step: finish(self._take_in(tokens, step)))
        self.chunks: list[Stopwatch] = []

    def run(self, plan: Sequence[RowPlan]) -> Flying:
        plan = sorted(plan, key=lambda row: astuple(self.chain.needs[row.row]), reverse=True)
        wanted = self._shape(plan)
        shape = self._known(wanted)
        cold = shape != wanted or shape not in self.captured
        captured = self.captured.pop(shape, None) or self._capture(shape, plan)
        self.captured[shape] = captured  # the newest last
        self._fill(captured, plan)
        self._place_given(plan)
        first, *rest = captured.graphs
        first.replay()
        if rest:
            self._place_masks(plan)
            rest[0].replay()
        out, told = self.stream.fetch(captured.out), self._tell(captured, plan) if shape.told else {}
        chunks, self.chunks = self.chunks, []
        return GraphHandle(plan, captured.grid.widest, out, told, chunks, cold)

    def prefill(self, chunk: Chunk, pieces: int) -> bool:
        watch = Stopwatch(self.cache.device)
        watch.mark()
        complete = super().prefill(chunk, pieces)
        watch.mark()
        self.chunks.append(watch)
        return complete

    def _read(self, chunk: Chunk, pieces: int) -> Tensor:
        """All of it: one graph."""
        return self.prompts.run(chunk)

    @property
    def _spare(self) -> int:
        return self.cache.rows - 1

    def _shape(self, plan: Sequence[RowPlan]) -> Shape:
        padding = SIZES.rows(len(plan)) - len(plan)
        depth = max(row.draft for row in plan) if self.drafter else 0
        follows = self.drafter is not None and any(self.follows[row.row] for row in plan)
        needs = tuple(self.chain.needs[row.row] for row in plan) + (Needs(),) * padding
        told = any(self.logprobs[row.row] is not None for row in plan)
        return Shape(1 + max(row.verify for row in plan), depth, follows, told, needs)

    def _known(self, wanted: Shape) -> Shape:
        """The shape to run a batch in: its own if that is captured or wanted often, else one that was captured and
        holds it, else one of the usual depths. Rows near their ends come in many shapes, none of which lasts."""
        if wanted in self.captured:
            return wanted
        if self.wanted.total() > OFTEN * MOST_SHAPES:
            self.wanted.clear()
        self.wanted[wanted] += 1
        if self.wanted[wanted] > OFTEN:
            del self.wanted[wanted]
            return wanted
        most = ROOMY * wanted.tokens
        held = [shape for shape in self.captured if shape.tokens <= most and shape.holds(wanted)]
        if held:
            return min(held, key=lambda shape: (shape.tokens, shape.depth))
        depth = max(wanted.width - 1, wanted.depth)
        depth = next((usual for usual in (0, *DEPTHS) if usual >= depth), depth)
        return replace(wanted, width=1 + depth, depth=depth if wanted.depth else 0)

    def _fill(self, captured: Captured, plan: Sequence[RowPlan]) -> None:
        padding = captured.inputs.shape[1] - len(plan)
        rows = [row.row for row in plan] + [self._spare] * padding
        counts = [1 + row.verify for row in plan] + [1] * padding
        if captured.sent != (rows, counts):
            captured.sent = rows, counts
            self.stream.send(captured.inputs, captured.sent)

    def _tell(self, captured: Captured, plan: Sequence[RowPlan]) -> dict[int, Told]:
        assert captured.trial is not None
        assert captured.verdict is not None
        rows = tuple(row.row for row in plan) + (self._spare,) * (captured.inputs.shape[1] - len(plan))
        layout = Layout(rows, captured.grid, captured.inputs[0])
        return tell(layout, captured.trial.logits, captured.verdict.tokens, self.logprobs)

    # --- capture -------------------------------------------------------------------------------------------------

    def _capture(self, shape: Shape, plan: Sequence[RowPlan]) -> Captured:
        """On the row that is nobody's, since what is captured runs once beforehand."""
        started = perf_counter()
        while len(self.captured) >= MOST_SHAPES:
            del self.captured[next(iter(self.captured))]  # used longest ago
        captured = self._empty(shape, plan)
        if any(needs.rejection for needs in shape.needs):
            self.chain.room_for_probs()
        captured.graphs = self.stream.record(self._parts(captured))
        if not captured.masked and not shape.told:  # then nobody asks for it, and other graphs may use its memory
            captured.trial = captured.hidden = captured.verdict = None
        sizes = len(shape.needs), shape.width, shape.depth
        log = logging.getLogger("headlong")
        log.info("captured rounds of %d rows, %d tokens and %d drafts each: %.1f s", *sizes, perf_counter() - started)
        return captured

    def _empty(self, shape: Shape, plan: Sequence[RowPlan]) -> Captured:
        count, device = len(shape.needs), self.cache.device
        return Captured(
            shape,
            rows=tuple(row.row for row in plan) + (self._spare,) * (count - len(plan)),
            grid=Grid((shape.width,) * count, device),
            inputs=torch.tensor([[self._spare] * count, [1] * count], device=device),
            masked=any(needs.masked for needs in shape.needs),
            out=torch.zeros(count + 1, max(3, 1 + shape.width + shape.depth), dtype=torch.long, device=device),
        )

    def _parts(self, captured: Captured) -> list[Callable[[], None]]:
        def before_masks() -> None:
            self.stream.stamp(captured.out[-1, :1])
            self._look(captured)

        def after_masks() -> None:
            self._judge(captured)
            self.stream.stamp(captured.out[-1, 1:2])
            self._leave(captured)
            self.stream.stamp(captured.out[-1, 2:3])

        def whole() -> None:
            before_masks()
            after_masks()

        return [before_masks, after_masks] if captured.masked else [whole]

    def _look(self, captured: Captured) -> None:
        layout = captured.layout()
        self.length[self._spare].zero_()
        starts, window = self._look_up(layout)
        captured.hidden, logits = self._run_target(layout, starts, window)
        captured.trial = Trial(layout, starts, window, logits, self.allowed)

    def _judge(self, captured: Captured) -> None:
        assert captured.trial is not None
        captured.trial = replace(captured.trial, layout=captured.layout())
        captured.verdict = accept(captured.trial, self.chain)
        feed = self._feed(captured)
        self._commit(feed)
        self._count(feed)

    def _leave(self, captured: Captured) -> None:
        feed, shape = self._feed(captured), captured.shape
        parts = [feed.kept[:, None], feed.tokens.view(-1, shape.width)]
        if shape.depth:
            rows = len(feed.layout.rows)
            parts.append(self._draft(feed, [shape.depth] * rows, [0.0] * rows).tokens)
        elif shape.follows:
            assert self.drafter is not None
            self.drafter.follow(feed)
        told = torch.cat(parts, 1)
        captured.out[:-1, : told.shape[1]] = told

    def _feed(self, captured: Captured) -> Feed:
        trial, hidden, verdict = captured.trial, captured.hidden, captured.verdict
        assert trial is not None
        assert hidden is not None
        assert verdict is not None
        return Feed(captured.layout(), trial.starts, hidden, verdict.tokens, verdict.kept)
