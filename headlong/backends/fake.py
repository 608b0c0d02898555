"""A scripted backend: plain ints, no arrays, and a Fault for every plan that a real one could not run."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headlong.engine.request import Chunk, Kept, Limits, RowPlan, Sampling
from headlong.errors import Fault

Script = Callable[[tuple[int, ...]], int]  # all tokens so far to the next one


def fake_limits(
    *, rows: int = 4, context: int = 64, page: int = 4, chunk: int = 8, pages: int = 0, vocab: int = 128, depth: int = 8
) -> Limits:
    """Limits small enough to run into. `pages` 0: enough for every row to fill its context."""
    pages = pages or rows * -(-context // page)
    reason = "" if depth else "the fake model has no head"
    return Limits(rows, context, page, chunk, pages, vocab, depth, "mtp" if depth else "none", reason)


@dataclass
class Row:
    """What the fake keeps of a row."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    history: tuple[int, ...]  # the prompt and every kept token
    right: Iterable[bool]
    length: int = 0  # committed positions
    drafts: tuple[int, ...] = ()
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Done:
    """A round that is over."""

    kept: list[Kept]

    def result(self) -> list[Kept]:
        return self.kept


class FakeBackend:
    """The model is `script`; the drafter proposes the script's token where `right` says so, and another elsewhere.

    `right` is repeated for as long as a row drafts: (True,) is always right, (True, False) every other time.
    """

    def __init__(self, script: Script, *, right: Sequence[bool] = (True,), limits: Limits | None = None) -> None:
        self._script = script
        self._right = tuple(right)
        self._limits = limits or fake_limits()
        self.rows: dict[int, Row] = {}
        self.chunks: list[Chunk] = []
        self.rounds: list[tuple[RowPlan, ...]] = []

    @property
    def limits(self) -> Limits:
        return self._limits

    def start(self, row: int, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
        _demand(0 <= row < self.limits.rows, f"row {row} does not exist")
        _demand(row not in self.rows, f"row {row} was started twice")
        _demand(0 < len(prompt) <= self.limits.context, f"row {row} was started with {len(prompt)} tokens")
        _demand(0 <= seed < 2**63, f"row {row} was started with seed {seed}")
        whole = tuple(prompt)
        self.rows[row] = Row(whole, sampling, seed, history=whole, right=itertools.cycle(self._right))

    def prefill(self, chunk: Chunk) -> None:
        row = self._row(chunk.row)
        end = chunk.start + len(chunk.tokens)
        last = len(row.prompt) - 1
        _demand(chunk.start == row.length, f"a chunk starts at {chunk.start} and the row stands at {row.length}")
        _demand(chunk.start % self.limits.chunk == 0, f"a chunk starts at {chunk.start}, off the chunk grid")
        _demand(end == min(chunk.start + self.limits.chunk, last), f"a chunk ends at {end}")
        _demand(tuple(chunk.tokens) == row.prompt[chunk.start : end], "a chunk's tokens are not the prompt's")
        _demand(chunk.after == row.prompt[end], "the token after a chunk is not the prompt's")
        _demand(chunk.draft == 0 or end == last, "a chunk before the last one drafts")
        self._grow(chunk.row, chunk.pages, end + chunk.draft)
        row.length = end
        row.drafts = self._draft(row, chunk.draft)
        self.chunks.append(chunk)

    def round(self, plan: Sequence[RowPlan]) -> Done:
        _demand(len({part.row for part in plan}) == len(plan) > 0, "a round is empty or has a row twice")
        self.rounds.append(tuple(plan))
        return Done([self._run(part) for part in plan])

    def release(self, row: int) -> None:
        self.rows.pop(row, None)

    def _run(self, part: RowPlan) -> Kept:
        row = self._row(part.row)
        _demand(row.length == len(row.history) - 1, f"row {part.row} has a round before its prompt is in")
        _demand(0 <= part.verify <= len(row.drafts), f"{part.verify} of {len(row.drafts)} drafts are verified")
        _demand(row.length + part.verify < self.limits.context, f"row {part.row} leaves the context")
        self._grow(part.row, part.pages, row.length + part.verify + part.draft + 1)
        tokens = self._accept(row, row.drafts[: part.verify])
        row.history += tokens
        row.length += len(tokens)
        row.drafts = self._draft(row, part.draft)
        return Kept(part.row, tokens, part.verify)

    def _accept(self, row: Row, drafts: tuple[int, ...]) -> tuple[int, ...]:
        kept: tuple[int, ...] = ()
        for draft in drafts:
            token = self._script(row.history + kept)
            kept += (token,)
            if token != draft:
                return kept
        return (*kept, self._script(row.history + kept))

    def _draft(self, row: Row, count: int) -> tuple[int, ...]:
        _demand(0 <= count <= self.limits.depth, f"{count} drafts were asked, the limit is {self.limits.depth}")
        drafts: tuple[int, ...] = ()
        for _, right in zip(range(count), row.right, strict=False):
            token = self._script(row.history + drafts)
            drafts += (token if right else (token + 1) % self.limits.vocab,)
        return drafts

    def _grow(self, number: int, pages: Sequence[int], positions: int) -> None:
        """Add pages to a row; it must then cover so many positions, and no page may have two owners."""
        row = self._row(number)
        row.pages.extend(pages)
        held = [page for each in self.rows.values() for page in each.pages]
        _demand(len(set(held)) == len(held), f"row {number} was given a page that is taken")
        _demand(all(0 <= page < self.limits.pages for page in pages), f"row {number} was given an unknown page")
        size = self.limits.page
        _demand(len(row.pages) * size >= positions, f"{len(row.pages)} pages do not cover {positions} positions")
        _demand((len(row.pages) - 1) * size < self.limits.context, f"row {number} has more pages than the context")

    def _row(self, number: int) -> Row:
        _demand(number in self.rows, f"row {number} was used before it was started")
        return self.rows[number]


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Fault(f"{otherwise}; the engine must not plan that.")
