"""What rounds cost: by width, and with drafts after them, in plain steps, timed at the backend's seam."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from headlong.engine.backend import Backend
from headlong.engine.request import Chunk, RowPlan, Sampling, Start

VERIFY_EVERY = 4  # whole rounds to one without drafts


@dataclass(frozen=True)
class Sample:
    """Mean seconds of three kinds of rounds over one prompt, each kind on its own, as many as a text of it takes.

    A text's first rounds may be the slower ones, until the weights they read have driven those of the prompt's pass
    out of a cache; so costs are taken over stretches as long as those whose speed they are to explain.
    """

    depth: int
    plain: float  # a window of one token, no drafts after it
    whole: float  # a window with `depth` drafts, then as many again: a round as it is at this depth
    verify: float  # a window with `depth` drafts, none after it


@dataclass(frozen=True)
class Costs:
    """All but `plain_s` in plain steps. Mappings are by depth; a window is one token wider than its depth."""

    plain_s: float
    verify: Mapping[int, float]  # beta: the target over such a window
    draft: Mapping[int, float]  # the head over such a window's pairs, and so many drafts
    first_draft: float | None
    next_draft: float | None  # delta: each further draft, with the pair that its wider window adds

    def predict(self, depth: int, tokens_a_round: float) -> float | None:
        """The speed-up over plain decoding that such rounds would give; None for a depth that was not timed."""
        if depth not in self.verify:
            return None
        return tokens_a_round / (self.verify[depth] + self.draft[depth])


def costs_from(samples: Sequence[Sample]) -> Costs | None:
    """Medians of ratios within a sample, so that a machine that slows down midway shifts none of them."""
    if not samples:
        return None
    by_depth: dict[int, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.depth):
        by_depth.setdefault(sample.depth, []).append(sample)
    draft = {depth: _median((one.whole - one.verify) / one.plain for one in group) for depth, group in by_depth.items()}
    first, further = _line_at_one(draft)
    return Costs(
        plain_s=_median(one.plain for one in samples),
        verify={depth: _median(one.verify / one.plain for one in group) for depth, group in by_depth.items()},
        draft=draft,
        first_draft=first,
        next_draft=further,
    )


def _line_at_one(values: Mapping[int, float]) -> tuple[float | None, float | None]:
    """Value at 1 and slope of the straight line through the values; a single value has no slope."""
    if len(values) < 2:
        return values.get(1), None
    slope, intercept = statistics.linear_regression(list(values), list(values.values()))
    return intercept + slope, slope


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def time_rounds(
    backend: Backend, prompt: Sequence[int], sampling: Sampling, seed: int, depth: int, rounds: int
) -> tuple[float, float] | None:
    """Mean seconds of so many whole rounds, and of rounds without drafts between them; None if the context is too full.

    Nothing else may run on the backend.
    """
    row = Row(backend)
    whole: list[float] = []
    verify: list[float] = []
    try:
        row.start(prompt, sampling, seed)
        if row.has_room(depth):
            row.time(0, depth)
        while len(whole) < rounds and row.has_room(depth):
            whole.append(row.time(depth, depth))
            if len(whole) % VERIFY_EVERY == 1:
                verify.append(row.time(depth, 0))
                row.time(0, depth)
    finally:
        backend.release(row.number)
    return (statistics.fmean(whole), statistics.fmean(verify)) if whole else None


class Row:
    """One row of a backend that is otherwise idle, told round by round what to do."""

    number = 0

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._limits = backend.limits
        self._pages = 0
        self._length = 0

    def start(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
        self._backend.start(Start(self.number, prompt, sampling, seed))
        last = len(prompt) - 1
        for start in range(0, last, self._limits.chunk):
            end = min(start + self._limits.chunk, last)
            self._backend.prefill(Chunk(self.number, start, prompt[start:end], prompt[end], self._grow(end)))
        self._length = last

    def has_room(self, depth: int) -> bool:
        """Whether two windows, a plain one and drafts after it fit, if all drafts are kept."""
        return self._length + 2 * (depth + 1) + 1 + depth <= self._limits.context

    def round(self, verify: int, draft: int) -> tuple[int, ...]:
        """The tokens it gave."""
        plan = [RowPlan(self.number, verify, draft, self._grow(self._length + verify + 1 + draft))]
        (kept,) = self._backend.round(plan).result().kept
        self._length += len(kept.tokens)
        return kept.tokens

    def time(self, verify: int, draft: int) -> float:
        started = perf_counter()
        self.round(verify, draft)
        return perf_counter() - started

    def _grow(self, positions: int) -> range:
        """Pages the row gains so that it covers so many positions."""
        first, self._pages = self._pages, max(self._pages, -(-positions // self._limits.page))
        return range(first, self._pages)
