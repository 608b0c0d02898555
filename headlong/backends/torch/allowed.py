"""Which tokens rows under a constraint may take: the masks of a round, where a recorded pass finds them."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headlong.backends.torch.cache import MAX_WIDTH
from headlong.backends.torch.kernels.pick import best, bits
from headlong.backends.torch.native.library import library
from headlong.backends.torch.ragged import Layout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Allowed:
    """Masks of every row, at each place of its window.

    masks  [rows, MAX_WIDTH, ceil(V / 32)], a bit a token; all of them where a row has no constraint
    bound  [rows], here and on the host: whether a row takes the best of what its masks allow
    """

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.masks = torch.full((rows, MAX_WIDTH, -(-vocab // 32)), -1, dtype=torch.int32, device=device)
        self.bound = torch.zeros(rows, dtype=torch.long, device=device)
        self.known_bound = [False] * rows
        self._array = self.masks.numpy() if self.masks.is_cpu else None  # writing to it takes a tenth of the time

    def start(self, row: int, bound: bool) -> None:
        self.masks[row] = -1
        self.bound[row] = self.known_bound[row] = bound

    def put(self, row: int, masks: "NDArray[np.int32]") -> None:
        """Masks for a row's next window."""
        if self._array is None:
            self.masks[row, : len(masks)].copy_(torch.from_numpy(masks).pin_memory(), non_blocking=True)
        else:
            self._array[row, : len(masks)] = masks

    def at(self, layout: Layout) -> Tensor:
        """Of the rows of a layout, [B, W, ceil(V / 32)]; past a row's own width they mean nothing."""
        return self.masks[layout.index, : layout.widest]

    def choose(self, layout: Layout, logits: Tensor) -> Tensor:
        """Logits [N, V] -> the best of each, [N], among those that a bound row is allowed."""
        chosen, lib = best(logits), library(logits)
        if lib is None:
            self._choose_reference(layout, logits, chosen)
        else:
            tensors = (chosen, logits, layout.index, layout.offsets, self.bound, self.masks)
            sizes = len(layout.rows), logits.shape[1], *self.masks.shape[1:]
            lib.best_allowed(*(t.data_ptr() for t in tensors), *sizes)
        return chosen

    def _choose_reference(self, layout: Layout, logits: Tensor, chosen: Tensor) -> None:
        first = 0
        for row, width in zip(layout.rows, layout.widths, strict=True):
            if self.known_bound[row]:
                mine, allowed = slice(first, first + width), bits(self.masks[row, :width], logits.shape[1])
                chosen[mine] = best(logits[mine].masked_fill(~allowed, -torch.inf))
            first += width
