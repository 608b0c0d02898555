"""Windows of different widths side by side: whose they are, and where their tokens stand in one flat order.

rows       3     0              5
widths     1     4              2
tokens     x     x  x  x  x     x  x
offsets    0     1              5      7
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

MOST_PARTS = 64  # of a grid, kept for the next round like it


class Grid:
    """Everything that widths alone decide, on the device and kept: rows may change under it."""

    def __init__(self, widths: tuple[int, ...], device: torch.device, offsets: Tensor | None = None) -> None:
        self.widths, self.device = widths, device
        self.tokens, self.widest = sum(widths), max(widths)
        self.even = self.tokens == self.widest * len(widths)
        self.offsets = self.tensor(_offsets(widths)) if offsets is None else offsets
        self._parts: dict[tuple[int, ...], tuple[Grid, Tensor, Tensor]] = {}
        self._ones: dict[int, Grid] = {}

    def part(self, places: tuple[int, ...]) -> "tuple[Grid, Tensor, Tensor]":
        """The grid of some places, those places [b], and their tokens' places in the flat order [n]."""
        if places not in self._parts:
            if len(self._parts) >= MOST_PARTS:
                self._parts.clear()
            first = _offsets(self.widths)
            flat = [first[b] + step for b in places for step in range(self.widths[b])]
            mine = Grid(tuple(self.widths[b] for b in places), self.device)
            self._parts[places] = mine, self.tensor(places), self.tensor(flat)
        return self._parts[places]

    def ones(self, count: int) -> "Grid":
        """So many windows of one token."""
        if count not in self._ones:
            self._ones[count] = Grid((1,) * count, self.device)
        return self._ones[count]

    @cached_property
    def sizes(self) -> Tensor:
        return self.tensor(self.widths)

    @cached_property
    def owners(self) -> Tensor:
        return self.tensor([b for b, width in enumerate(self.widths) for _ in range(width)])

    @cached_property
    def steps(self) -> Tensor:
        return self.tensor([step for width in self.widths for step in range(width)])

    @cached_property
    def unpadded(self) -> Tensor:
        """[N]: the place of each token among the padded ones."""
        return self.owners * self.widest + self.steps

    @cached_property
    def padded(self) -> Tensor:
        """[B, W]: the flat place of the token that stands there."""
        lines = zip(_offsets(self.widths)[:-1], self.widths, strict=True)
        return self.tensor([[first + min(j, width - 1) for j in range(self.widest)] for first, width in lines])

    def tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


class Layout:
    """B rows and their N tokens, row after row. The host knows rows and widths; kernels read index and offsets."""

    def __init__(self, rows: tuple[int, ...], grid: Grid, index: Tensor, sizes: Tensor | None = None) -> None:
        """sizes [B]: how many of each row's tokens count, where the others are padding; None: all of them."""
        self.rows, self.grid = rows, grid
        self.index = index  # [B]: the rows
        self.widths, self.tokens, self.widest = grid.widths, grid.tokens, grid.widest
        self.offsets = grid.offsets  # [B + 1]: row b's tokens are offsets[b] .. offsets[b + 1] - 1
        self._sizes = sizes
        self._parts: dict[tuple[int, ...], Part] = {}

    @staticmethod
    def of(
        rows: tuple[int, ...], widths: tuple[int, ...], device: torch.device, index: Tensor | None = None
    ) -> "Layout":
        """`index`: the rows, if they are on the device already."""
        return Layout(rows, Grid(widths, device), torch.tensor(rows, device=device) if index is None else index)

    def at(self, index: Tensor, offsets: Tensor) -> "Layout":
        """The same with index and offsets that stand elsewhere."""
        if index is self.index and offsets is self.offsets:
            return self
        return Layout(self.rows, Grid(self.widths, self.grid.device, offsets), index, self._sizes)

    def part(self, places: tuple[int, ...]) -> "Part":
        """The rows at these places of the batch, in this order."""
        if places not in self._parts:
            if len(self._parts) >= MOST_PARTS:
                self._parts.clear()
            grid, which, flat = self.grid.part(places)
            sizes = None if self._sizes is None else self._sizes[which]
            rows = tuple(self.rows[b] for b in places)
            whole = places == tuple(range(len(self.rows)))
            self._parts[places] = Part(Layout(rows, grid, self.index[which], sizes), which, flat, whole)
        return self._parts[places]

    def ones(self, count: int) -> "Layout":
        """One token of each of the first rows."""
        return Layout(self.rows[:count], self.grid.ones(count), self.index[:count])

    @property
    def sizes(self) -> Tensor:
        """[B]: how many of each row's tokens count."""
        return self.grid.sizes if self._sizes is None else self._sizes

    @property
    def counts(self) -> Tensor | None:
        """The same, where some are padding."""
        return self._sizes

    @property
    def owners(self) -> Tensor:
        """[N]: the place in the batch of each token's row."""
        return self.grid.owners

    @cached_property
    def token_rows(self) -> Tensor:
        """[N]: the row of each token."""
        return self.index[self.owners]

    @property
    def steps(self) -> Tensor:
        """[N]: how many tokens of its own row stand before each token."""
        return self.grid.steps

    def pad(self, x: Tensor) -> Tensor:
        """[N, ...] -> [B, W, ...] with W the widest; past its width a row repeats its last token."""
        return x.unflatten(0, (len(self.rows), self.widest)) if self.grid.even else x[self.grid.padded]

    def unpad(self, x: Tensor) -> Tensor:
        """[B, W, ...] -> [N, ...]."""
        return x.flatten(0, 1) if self.grid.even else x.flatten(0, 1)[self.grid.unpadded]


@dataclass(frozen=True)
class Part:
    """Some rows of a layout, with a layout of their own."""

    layout: Layout
    which: Tensor  # [b]: their places in the whole batch
    flat: Tensor  # [n]: their tokens' places in the whole flat order
    whole: bool  # it is the whole batch

    def of_tokens(self, x: Tensor) -> Tensor:
        """[N, ...] -> [n, ...]."""
        return x if self.whole else x[self.flat]

    def of_rows(self, x: Tensor) -> Tensor:
        """[B, ...] -> [b, ...]."""
        return x if self.whole else x[self.which]


def _offsets(widths: tuple[int, ...]) -> list[int]:
    return list(accumulate(widths, initial=0))
