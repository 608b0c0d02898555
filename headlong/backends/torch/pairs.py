"""Pairs for a drafter: a true hidden state and the true token after it, as a pass gives them or set aside for later."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.backends.torch.cache import MAX_WIDTH, Cache
from headlong.backends.torch.native.library import library
from headlong.backends.torch.ragged import Layout

BACKLOG = 512  # most pairs of a row that wait: those of a row that never drafts again are never needed


@dataclass(frozen=True)
class Feed:
    """What became true in a pass: hidden [N, H] at starts + j, tokens [N] at starts + j + 1; the first `kept` [B] of
    each row's, the others are padding."""

    layout: Layout
    starts: Tensor  # [B]
    hidden: Tensor
    tokens: Tensor
    kept: Tensor

    @property
    def lengths(self) -> Tensor:
        """[B]: the position after the last pair."""
        return self.starts + self.kept

    def part(self, places: tuple[int, ...]) -> "Feed":
        """The rows at these places of the batch, in this order."""
        if places == tuple(range(len(self.layout.rows))):
            return self
        part = self.layout.part(places)
        which, flat = part.which, part.flat
        return Feed(part.layout, self.starts[which], self.hidden[flat], self.tokens[flat], self.kept[which])


class Backlog:
    """Pairs of each row that wait, oldest first. How many do is known on the device; the host knows at most how many.

    A wide window leaves more than one pair unsure, so the host may be off by as many as were rejected.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        rows, device = cache.rows, cache.device
        self.room = BACKLOG + MAX_WIDTH
        self.most = [0] * rows
        self.counts = torch.zeros(rows, dtype=torch.long, device=device)
        self.ends = torch.zeros(rows, dtype=torch.long, device=device)  # the position after each row's last pair
        self.tokens = torch.zeros(rows, self.room, dtype=torch.long, device=device)
        self.wanted = torch.ones(rows, dtype=torch.long, device=device)  # whether pairs of a row are set aside at all
        self.hidden: Tensor | None = None  # [rows, room, H], made when the first pair comes

    def start(self, row: int, wanted: bool) -> None:
        """Empty a row for a new sequence."""
        self.most[row] = 0
        self.counts[row] = 0
        self.wanted[row] = wanted

    def views(self, row: int) -> dict[str, Tensor]:
        """Everything that waits of a row."""
        found = {"late": self.counts[row], "late ends": self.ends[row], "late tokens": self.tokens[row]}
        return found if self.hidden is None else {**found, "late hidden": self.hidden[row]}

    def count(self, rows: Sequence[int], widths: Sequence[int]) -> bool:
        """The host's part of `put`, of the rows whose pairs are wanted; whether some row can have no more."""
        most = self.most
        for row, width in zip(rows, widths, strict=True):
            most[row] += width
        return max(most) >= BACKLOG

    def put(self, feed: Feed) -> None:
        """Set aside what is wanted of a round."""
        if self.hidden is None:
            self.hidden = feed.hidden.new_zeros(*self.tokens.shape, feed.hidden.shape[1])
        lib, layout = library(feed.hidden), feed.layout
        if lib is None:
            self._add_reference(self.hidden, feed)
        else:
            mine = (self.hidden, self.tokens, self.counts, self.ends, self.wanted)
            new = (feed.hidden, feed.tokens, layout.index, feed.starts, layout.offsets, feed.kept)
            pointers = (t.data_ptr() for t in (*mine, *new))
            lib.set_aside(*pointers, len(layout.rows), feed.hidden.shape[1], self.room)

    def _add_reference(self, hidden: Tensor, feed: Feed) -> None:
        """Padding is added too; it is not counted, so the next pairs overwrite it."""
        layout, rows = feed.layout, feed.layout.index
        places = (layout.token_rows, self.counts[layout.token_rows] + layout.steps)
        hidden[places] = feed.hidden
        self.tokens[places] = feed.tokens
        self.counts[rows] += feed.kept * self.wanted[rows]
        self.ends[rows] = feed.lengths

    def amend(self, feed: Feed) -> None:
        """Tell the last token of every row, which was not known when its pair was set aside."""
        layout, rows = feed.layout, feed.layout.index
        places = rows, (self.counts[rows] - 1).clamp(min=0)
        newest = feed.tokens[layout.offsets[:-1] + feed.kept - 1]
        self.tokens[places] = torch.where(self.wanted[rows] > 0, newest, self.tokens[places])

    def take(self, rows: tuple[int, ...]) -> Feed:
        """All that waits of these rows, each of which has some."""
        assert self.hidden is not None
        layout = self.cache.layout(rows, tuple(self.most[row] for row in rows))
        index, counts = layout.index, self.counts[layout.index]
        places = (layout.token_rows, layout.steps)
        late = Feed(layout, self.ends[index] - counts, self.hidden[places], self.tokens[places], counts)
        self.counts[index] = 0
        for row in rows:
            self.most[row] = 0
        return late
