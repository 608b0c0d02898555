"""A scripted backend: plain ints, no arrays, and a Fault for every plan that a real one could not run."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headlong.engine.request import Chunk, Kept, Limits, Logprob, RoundResult, RowPlan, Saved, Start
from headlong.errors import Fault

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Script = Callable[[tuple[int, ...]], int]  # all tokens so far to the next one


def fake_limits(*, head: bool = True, **changes: Any) -> Limits:
    """Limits small enough to run into; unless they say how many, pages enough for every row to fill its context."""
    reason = "" if head else "the fake model has no head"
    drafter = "mtp" if head else "none"
    small = Limits(4, 64, 4, 8, pages=0, vocab=128, depth=8, drafter=drafter, no_draft_reason=reason)
    limits = replace(small, **changes)
    pages = limits.pages or limits.rows * -(-limits.context // limits.page)
    return replace(limits, pages=pages, page_bytes=8 * limits.page)


@dataclass
class Row:
    """What the fake keeps of a row."""

    start: Start
    history: tuple[int, ...]  # the prompt and every kept token
    right: Iterable[bool]
    length: int = 0  # committed positions
    drafts: tuple[int, ...] = ()
    pages: list[int] = field(default_factory=list)
    reading: Chunk | None = None  # of which some layers are run
    layers: int = 0  # how many

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.start.prompt)


@dataclass(frozen=True)
class State:
    """A row kept aside: as it was, or a prompt's beginning."""

    row: Row
    contents: tuple[int | None, ...]  # of its pages, position by position
    nbytes: int = 100


@dataclass(frozen=True)
class Done:
    """A round that is over."""

    kept: list[Kept]

    def result(self) -> RoundResult:
        return RoundResult(self.kept)


class FakeBackend:
    """The model is `script`; the drafter proposes the script's token where `right` says so, and another elsewhere.

    `right` is repeated for as long as a row drafts: (True,) is always right, (True, False) every other time. If it
    `knows` when it is not, it leaves no such draft where likely ones alone are wanted. Every position of every page
    holds the token that was written there, so a row that reads what is not its own is seen.
    """

    def __init__(
        self, script: Script, *, right: Sequence[bool] = (True,), knows: bool = False, limits: Limits | None = None
    ) -> None:
        self._script = script
        self._right, self._knows = tuple(right), knows
        self._limits = limits or fake_limits()
        self.rows: dict[int, Row] = {}
        self.cells: dict[int, int] = {}  # page * size + offset: the token there
        self.chunks: list[Chunk] = []
        self.rounds: list[tuple[RowPlan, ...]] = []

    @property
    def limits(self) -> Limits:
        return self._limits

    def start(self, start: Start) -> None:
        row, prompt, seed = start.row, tuple(start.prompt), start.seed
        _demand(0 <= row < self.limits.rows, f"row {row} does not exist")
        _demand(row not in self.rows, f"row {row} was started twice")
        _demand(0 < len(prompt) <= self.limits.context, f"row {row} was started with {len(prompt)} tokens")
        _demand(0 <= seed < 2**63, f"row {row} was started with seed {seed}")
        _demand(start.length < len(prompt), f"row {row} starts past its prompt")
        _demand(start.length % self.limits.chunk == 0, f"row {row} starts at {start.length}, off the chunk grid")
        _demand(start.length == len(start.pages) * self.limits.page, f"row {row} starts with pages that are not full")
        mine = Row(start, prompt, itertools.cycle(self._right), start.length)
        _demand(start.length == 0 or start.saved is not None, f"row {row} starts at {start.length} without a state")
        if start.saved is not None:
            assert isinstance(start.saved, State)
            before = start.saved.row
            _demand(
                before.length == start.length > 0, f"row {row} starts at {start.length} with another length's state"
            )
            agree = before.prompt[: start.length + 1] == prompt[: start.length + 1]  # the head has seen the one after
            _demand(agree, f"row {row} starts with another prompt's state")
        self.rows[row] = mine
        mine.pages.extend(start.pages)
        self._check_cells(mine)

    def fork(self, row: int, start: Start, pages: Sequence[int]) -> None:
        source = self._row(row)
        _demand(tuple(start.prompt) == source.prompt, f"row {start.row} is forked from another prompt")
        _demand(source.length == start.length == len(source.prompt) - 1, f"row {row} is forked amidst its text")
        _demand(len(source.history) == len(source.prompt), f"row {row} is forked after its first round")
        _demand(not source.drafts, f"row {row} is forked when it has drafts")
        shared = start.length // self.limits.page
        _demand(tuple(start.pages) == tuple(source.pages[:shared]), f"row {start.row} shares other pages")
        _demand(start.row not in self.rows, f"row {start.row} was started twice")
        mine = self.rows[start.row] = Row(start, source.prompt, itertools.cycle(self._right), start.length)
        mine.pages.extend(start.pages)
        self._grow(mine, pages, mine.length)
        self._write(mine, shared * self.limits.page, mine.prompt[shared * self.limits.page : mine.length])
        self._check_cells(mine)

    def prefill(self, chunk: Chunk, pieces: int = 1) -> bool:
        """A model of as many layers as a chunk can have pieces."""
        row = self._row(chunk.row)
        _demand(0 < pieces <= self.limits.pieces, f"a chunk is to be run in {pieces} pieces")
        if row.reading is None:
            self._check_chunk(row, chunk)
            self._grow(row, chunk.pages, chunk.start + len(chunk.tokens) + chunk.draft)
            self._write(row, chunk.start, chunk.tokens)
        _demand(row.reading in (None, chunk), "a chunk is begun amidst another")
        row.reading = chunk
        row.layers += -(-self.limits.pieces // pieces)
        if row.layers < self.limits.pieces:
            return False
        row.reading, row.layers = None, 0
        row.length += len(chunk.tokens)
        row.drafts = self._draft(row, chunk.draft)
        self.chunks.append(chunk)
        return True

    def _check_chunk(self, row: Row, chunk: Chunk) -> None:
        end = chunk.start + len(chunk.tokens)
        last = len(row.prompt) - 1
        _demand(chunk.start == row.length, f"a chunk starts at {chunk.start} and the row stands at {row.length}")
        _demand(chunk.start % self.limits.chunk == 0, f"a chunk starts at {chunk.start}, off the chunk grid")
        _demand(end == min(chunk.start + self.limits.chunk, last), f"a chunk ends at {end}")
        _demand(tuple(chunk.tokens) == row.prompt[chunk.start : end], "a chunk's tokens are not the prompt's")
        _demand(chunk.after == row.prompt[end], "the token after a chunk is not the prompt's")
        _demand(chunk.draft == 0 or end == last, "a chunk before the last one drafts")
        whole = end % self.limits.chunk == 0  # its pages may be shared, and drafting writes the newest pair again
        _demand(chunk.draft == 0 or not whole, "a whole chunk drafts")

    def round(self, plan: Sequence[RowPlan]) -> Done:
        _demand(len({part.row for part in plan}) == len(plan) > 0, "a round is empty or has a row twice")
        self.rounds.append(tuple(plan))
        return Done([self._run(part) for part in plan])

    def save(self, row: int) -> State:
        mine = self._row(row)
        _demand(mine.length <= len(mine.prompt) - 1, f"row {row} is saved after its prompt")
        _demand(mine.length % self.limits.chunk == 0, f"row {row} is saved off the chunk grid")
        _demand(mine.reading is None, f"row {row} is saved amidst a chunk")
        return State(replace(mine, pages=[]), ())

    def set_aside(self, row: int) -> State:
        mine = self._row(row)
        contents = tuple(self.cells.get(self._cell(mine, position)) for position in range(mine.length))
        self.release(row)
        return State(mine, contents)

    def bring_back(self, row: int, saved: Saved, pages: Sequence[int]) -> None:
        _demand(0 <= row < self.limits.rows, f"row {row} does not exist")
        _demand(row not in self.rows, f"row {row} was started twice")
        assert isinstance(saved, State)
        mine = self.rows[row] = replace(saved.row, start=replace(saved.row.start, row=row), pages=[])
        self._grow(mine, pages, mine.length)
        for position, token in enumerate(saved.contents):
            assert token is not None
            self.cells[self._cell(mine, position)] = token

    def release(self, row: int) -> None:
        self.rows.pop(row, None)

    def _run(self, part: RowPlan) -> Kept:
        row = self._row(part.row)
        given = part.drafts
        _demand(row.length == len(row.history) - 1, f"row {part.row} has a round before its prompt is in")
        _demand(0 <= part.verify <= self.limits.depth, f"{part.verify} drafts stand in a window")
        _demand(given is not None or part.verify <= len(row.drafts), f"{part.verify} of {len(row.drafts)} are verified")
        _demand(given is None or len(given) == part.verify, f"{part.verify} drafts stand in a window of {given}")
        _demand(row.length + part.verify < self.limits.context, f"row {part.row} leaves the context")
        self._grow(row, part.pages, row.length + part.verify + part.draft + 1)
        self._check_cells(row)
        _demand((part.masks is not None) == row.start.masked, f"row {part.row} has masks in some rounds alone")
        masks = None if part.masks is None else part.masks()
        _demand(masks is None or len(masks) == part.verify + 1, "a window has another number of masks")
        tokens = self._accept(row, (row.drafts if given is None else given)[: part.verify], masks)
        self._write(row, row.length, (row.history[-1], *tokens[:-1]))
        row.history += tokens
        row.length += len(tokens)
        row.drafts = self._draft(row, part.draft, part.least)
        told = () if row.start.logprobs is None else tuple(Logprob(token, -1.0) for token in tokens)
        return Kept(part.row, tokens, part.verify, row.drafts, told)

    def _accept(self, row: Row, drafts: tuple[int, ...], masks: "NDArray[np.int32] | None") -> tuple[int, ...]:
        kept: tuple[int, ...] = ()
        for draft in drafts:
            token = self._next(row, kept, masks)
            kept += (token,)
            if token != draft:
                return kept
        return (*kept, self._next(row, kept, masks))

    def _next(self, row: Row, kept: tuple[int, ...], masks: "NDArray[np.int32] | None") -> int:
        """The script's token, or the next one above it that is allowed."""
        token = self._script(row.history + kept)
        written = len(row.history) + len(kept) - len(row.prompt)
        for candidate in (*range(token, self.limits.vocab), *range(token)):
            quiet = written < row.start.min_tokens and candidate in row.start.quiet
            if not quiet and (masks is None or int(masks[len(kept)][candidate // 32]) >> (candidate % 32) & 1):
                return int(candidate)
        raise Fault("no token is allowed")

    def _draft(self, row: Row, count: int, least: float = 0.0) -> tuple[int, ...]:
        _demand(0 <= count <= self.limits.depth, f"{count} drafts were asked, the limit is {self.limits.depth}")
        _demand(count == 0 or self.limits.drafter == "mtp", "drafts were asked of a model without a head")
        _demand(count == 0 or row.start.follows, "drafts were asked for a row that the head does not follow")
        _demand(0.0 <= least < 1.0, f"drafts were asked with a chance of {least}")
        drafts: tuple[int, ...] = ()
        for _, right in zip(range(count), row.right, strict=False):
            if self._knows and least and not right:
                break
            token = self._script(row.history + drafts)
            drafts += (token if right else (token + 1) % self.limits.vocab,)
        return drafts

    def _grow(self, row: Row, pages: Sequence[int], positions: int) -> None:
        """Add pages to a row; it must then cover so many positions, and none that it writes may have two owners."""
        number = row.start.row
        row.pages.extend(pages)
        held = [page for each in self.rows.values() for page in each.pages]
        _demand(all(held.count(page) == 1 for page in pages), f"row {number} was given a page that is taken")
        _demand(all(0 <= page < self.limits.pages for page in pages), f"row {number} was given an unknown page")
        size = self.limits.page
        _demand(len(row.pages) * size >= positions, f"{len(row.pages)} pages do not cover {positions} positions")
        _demand((len(row.pages) - 1) * size < self.limits.context, f"row {number} has more pages than the context")

    def _write(self, row: Row, first: int, tokens: Sequence[int]) -> None:
        held = [page for each in self.rows.values() for page in each.pages]
        for offset, token in enumerate(tokens):
            _demand(held.count(row.pages[(first + offset) // self.limits.page]) == 1, "a shared page is written")
            self.cells[self._cell(row, first + offset)] = token

    def _check_cells(self, row: Row) -> None:
        found = tuple(self.cells.get(self._cell(row, position)) for position in range(row.length))
        _demand(found == row.history[: row.length], f"row {row.start.row} reads what it did not write")

    def _cell(self, row: Row, position: int) -> int:
        return row.pages[position // self.limits.page] * self.limits.page + position % self.limits.page

    def _row(self, number: int) -> Row:
        _demand(number in self.rows, f"row {number} was used before it was started")
        return self.rows[number]


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Fault(f"{otherwise}; the engine must not plan that.")
