"""One pass of a model over some tokens: where they stand, what they may see, and how they reach the cache.

A model's layers are written once; the step they are given is a `Window` (rounds) or a `Prefill` (prompt chunks),
and answers the questions that differ: how to multiply, how to mix experts, how to attend, how to recur.
"""

from typing import Protocol

import torch
from torch import Tensor

from headlong.backends.torch.cache import MAX_WIDTH, SPARE_PAGE, Cache
from headlong.backends.torch.kernels import gated_delta
from headlong.backends.torch.kernels.attention import Places, chunk_attention, window_attention
from headlong.backends.torch.kernels.experts import Experts, experts, window_experts
from headlong.backends.torch.kernels.gated_delta import Delta, Kept
from headlong.backends.torch.kernels.linear import Int8Weight, Weight, linear
from headlong.backends.torch.native.library import Kernels, library


class Step(Protocol):
    """N tokens in flat order; row by row, position by position."""

    positions: Tensor  # [N]

    def linear(self, x: Tensor, weight: Weight | Int8Weight) -> Tensor:
        """x [N, in] -> [N, out]."""

    def mix_experts(self, x: Tensor, shares: Tensor, ids: Tensor, gate_up: Experts, down: Experts) -> Tensor:
        """x [N, H] through the experts ids [N, T], added by shares [N, T] -> [N, H]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [N, K, D] and attend with q [N, A, D] -> [N, A, D]."""

    def recur(self, layer: int, projected: Tensor, delta: Delta) -> Tensor:
        """A Gated DeltaNet layer between its projections: [N, ...] -> [N, heads Dv]."""


class Window:
    """Rows [B] with W tokens each from their own starts; row b's tokens past its width are padding."""

    def __init__(
        self, cache: Cache, rows: list[int], index: Tensor, starts: Tensor, widths: Tensor, width: int
    ) -> None:
        """The rows' numbers are given to the host and, as a tensor, to the device."""
        self.cache, self.width = cache, width
        lib = library() if cache.device.type == "cpu" else None
        self.places, self.kept = (
            self._place_native(lib, index, starts, widths) if lib else self._place(rows, index, starts, widths)
        )
        self.positions = self.places.positions

    def _place(self, rows: list[int], index: Tensor, starts: Tensor, widths: Tensor) -> tuple[Places, Kept]:
        cache = self.cache
        offset = cache.counting[: self.width]
        positions = starts[:, None] + offset  # [B, W]
        table = cache.table[index]
        page_index = (positions // cache.limits.page).clamp_(max=table.shape[1] - 1)
        write_pages = torch.where(offset < widths[:, None], table.gather(1, page_index), SPARE_PAGE)
        read_pages = table[:, : max(cache.owned[row] for row in rows)].contiguous()
        places = Places(positions.flatten(), write_pages.flatten(), read_pages, self.width)
        return places, Kept(index, cache.kept[index], max(cache.widths[row] for row in rows))

    def _place_native(self, lib: Kernels, index: Tensor, starts: Tensor, widths: Tensor) -> tuple[Places, Kept]:
        """Of a row the whole table is read, so that nothing depends on the host's knowledge of it."""
        cache, batch, pages = self.cache, len(index), self.cache.table.shape[1]
        positions, write_pages = index.new_empty(batch * self.width), index.new_empty(batch * self.width)
        read_pages, counts = index.new_empty(batch, pages), index.new_empty(batch)
        tensors = (positions, write_pages, read_pages, counts, index, starts, widths, cache.table, cache.kept)
        sizes = (batch, self.width, cache.limits.page, pages, SPARE_PAGE)
        lib.place(*(t.data_ptr() for t in tensors), *sizes)
        return Places(positions, write_pages, read_pages, self.width), Kept(index, counts, MAX_WIDTH)

    def linear(self, x: Tensor, weight: Weight | Int8Weight) -> Tensor:
        return linear(x, weight)

    def mix_experts(self, x: Tensor, shares: Tensor, ids: Tensor, gate_up: Experts, down: Experts) -> Tensor:
        return window_experts(x, shares, ids, gate_up, down)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return window_attention(self.cache.pages[layer], self.places, q, k, v)

    def recur(self, layer: int, projected: Tensor, delta: Delta) -> Tensor:
        return gated_delta.window(delta, self.cache.memories[layer], projected, self.kept, self.width)


class Prefill:
    """A chunk of one row's prompt, from a position that is a multiple of the chunk length."""

    def __init__(self, cache: Cache, row: int, start: int, count: int) -> None:
        self.cache, self.row, self.end = cache, row, start + count
        self.positions = torch.arange(start, self.end, device=cache.device)
        self.table = cache.table[row, : -(-self.end // cache.limits.page)]

    def linear(self, x: Tensor, weight: Weight | Int8Weight) -> Tensor:
        return weight.multiply(x)

    def mix_experts(self, x: Tensor, shares: Tensor, ids: Tensor, gate_up: Experts, down: Experts) -> Tensor:
        return experts(x, shares, ids, gate_up.each, down.each, self.linear)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chunk_attention(self.cache.pages[layer], self.table, self.positions, q, k, v)

    def recur(self, layer: int, projected: Tensor, delta: Delta) -> Tensor:
        return gated_delta.chunk(delta, self.cache.memories[layer], projected, self.row)
