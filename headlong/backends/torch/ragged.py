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

MOST_PARTS = 64  # of a layout, kept for the next round like it


class Layout:
    """B rows and their N tokens, row after row. The host knows rows and widths; kernels read index and offsets."""

    def __init__(self, rows: tuple[int, ...], widths: tuple[int, ...], index: Tensor, offsets: Tensor) -> None:
        self.rows, self.widths = rows, widths
        self.index = index  # [B]: the rows
        self.offsets = offsets  # [B + 1]: row b's tokens are offsets[b] .. offsets[b + 1] - 1
        self.tokens, self.widest = sum(widths), max(widths)
        self._even = self.tokens == self.widest * len(rows)
        self._parts: dict[tuple[int, ...], Part] = {}

    @staticmethod
    def of(rows: tuple[int, ...], widths: tuple[int, ...], device: torch.device) -> "Layout":
        index, offsets = torch.tensor(rows, device=device), torch.tensor(_offsets(widths), device=device)
        return Layout(rows, widths, index, offsets)

    def at(self, index: Tensor, offsets: Tensor) -> "Layout":
        """The same with index and offsets that stand elsewhere."""
        same = index is self.index and offsets is self.offsets
        return self if same else Layout(self.rows, self.widths, index, offsets)

    def part(self, places: tuple[int, ...]) -> "Part":
        """The rows at these places of the batch, in this order."""
        if places not in self._parts:
            if len(self._parts) >= MOST_PARTS:
                self._parts.clear()
            self._parts[places] = self._make_part(places)
        return self._parts[places]

    def _make_part(self, places: tuple[int, ...]) -> "Part":
        device, first = self.index.device, _offsets(self.widths)
        mine = Layout.of(tuple(self.rows[b] for b in places), tuple(self.widths[b] for b in places), device)
        flat = [first[b] + step for b in places for step in range(self.widths[b])]
        return Part(mine, self._tensor(places), self._tensor(flat))

    @cached_property
    def sizes(self) -> Tensor:
        """[B]: the widths."""
        return self._tensor(self.widths)

    @cached_property
    def owners(self) -> Tensor:
        """[N]: the place in the batch of each token's row."""
        return self._tensor([b for b, width in enumerate(self.widths) for _ in range(width)])

    @cached_property
    def token_rows(self) -> Tensor:
        """[N]: the row of each token."""
        return self._tensor([row for row, width in zip(self.rows, self.widths, strict=True) for _ in range(width)])

    @cached_property
    def steps(self) -> Tensor:
        """[N]: how many tokens of its own row stand before each token."""
        return self._tensor([step for width in self.widths for step in range(width)])

    def pad(self, x: Tensor) -> Tensor:
        """[N, ...] -> [B, W, ...] with W the widest; past its width a row repeats its last token."""
        return x.unflatten(0, (len(self.rows), self.widest)) if self._even else x[self._padded]

    def unpad(self, x: Tensor) -> Tensor:
        """[B, W, ...] -> [N, ...]."""
        return x.flatten(0, 1) if self._even else x.flatten(0, 1)[self._unpadded]

    @cached_property
    def _unpadded(self) -> Tensor:
        """[N]: the place of each token among the padded ones."""
        return self.owners * self.widest + self.steps

    @cached_property
    def _padded(self) -> Tensor:
        """[B, W]: the flat place of the token that stands there."""
        lines = zip(_offsets(self.widths)[:-1], self.widths, strict=True)
        return self._tensor([[first + min(j, width - 1) for j in range(self.widest)] for first, width in lines])

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.index.device)


@dataclass(frozen=True)
class Part:
    """Some rows of a layout, with a layout of their own."""

    layout: Layout
    which: Tensor  # [b]: their places in the whole batch
    flat: Tensor  # [n]: their tokens' places in the whole flat order


def _offsets(widths: tuple[int, ...]) -> list[int]:
    return list(accumulate(widths, initial=0))
