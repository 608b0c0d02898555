"""One pass of a model over some tokens: where they stand, what they may see, and how they reach the cache.

A model's layers are written once; the step they are given is a `Window` (rounds) or a `Prefill` (prompt chunks),
and answers the questions that differ: how to multiply, how to mix experts, how to attend, how to recur.
"""

from typing import Protocol

import torch
from torch import Tensor

from headlong.backends.torch.cache import MAX_WIDTH, SPARE_PAGE, Cache
from headlong.backends.torch.gpu.paths import fused, places
from headlong.backends.torch.kernels import gated_delta
from headlong.backends.torch.kernels.attention import Places, Stretch, chunk_attention, window_attention, write
from headlong.backends.torch.kernels.experts import Mixture, chunk_experts, window_experts
from headlong.backends.torch.kernels.gated_delta import Delta, Kept
from headlong.backends.torch.kernels.linear import Int8Weight, Weight, linear, linear_swiglu
from headlong.backends.torch.kernels.norm import swiglu
from headlong.backends.torch.native.arena import fresh
from headlong.backends.torch.native.library import Kernels, library
from headlong.backends.torch.ragged import Layout


class Step(Protocol):
    """N tokens in flat order; row by row, position by position."""

    positions: Tensor  # [N]

    def linear(self, x: Tensor, weight: Weight | Int8Weight) -> Tensor:
        """x [N, in] -> [N, out]."""

    def swiglu(self, x: Tensor, gate_up: Weight | Int8Weight) -> Tensor:
        """x [N, in], gate_up [2 I, in] with the gate first -> silu(gate) * up, [N, I]."""

    def mix_experts(self, x: Tensor, mixture: Mixture) -> Tensor:
        """x [N, H] through the experts that each token chooses -> [N, H]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [N, K, D] and attend with q [N, A, D] -> [N, A, D]."""

    def remember(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k, v [N, K, D] alone."""

    def recur(self, layer: int, projected: Tensor, delta: Delta) -> Tensor:
        """A Gated DeltaNet layer between its projections: [N, ...] -> [N, heads Dv]."""


class Window:
    """The tokens of a layout, each row's from its own start on. Of row b the first counts[b] count, or all of them
    where no counts are given; the others are padding, which leaves nothing behind."""

    def __init__(self, cache: Cache, layout: Layout, starts: Tensor, counts: Tensor | None = None) -> None:
        self.cache, self.layout = cache, layout
        lib = library() if cache.device.type == "cpu" else None
        self.places, self.kept = self._place_native(lib, starts, counts) if lib else self._place(starts, counts)
        self.positions = self.places.positions

    def _place(self, starts: Tensor, counts: Tensor | None) -> tuple[Places, Kept]:
        cache, layout = self.cache, self.layout
        if fused(starts):
            sizes = layout.tokens, cache.limits.page, SPARE_PAGE
            tables = cache.table, cache.kept
            *found, kept = places().place(layout.index, starts, layout.offsets, counts, *tables, sizes)
            return Places(layout, *found), Kept(layout.index, kept, MAX_WIDTH)
        positions = starts[layout.owners] + layout.steps
        table = cache.table[layout.index]
        page_index = (positions // cache.limits.page).clamp_(max=table.shape[1] - 1)
        write_pages = table[layout.owners, page_index]
        if counts is not None:
            write_pages = torch.where(layout.steps < counts[layout.owners], write_pages, SPARE_PAGE)
        if cache.spare:  # a captured round must not depend on what the host knows of its rows
            return Places(layout, positions, write_pages, table), Kept(
                layout.index, cache.kept[layout.index], MAX_WIDTH
            )
        read_pages = table[:, : max(cache.owned[row] for row in layout.rows)].contiguous()
        kept = Kept(layout.index, cache.kept[layout.index], max(cache.widths[row] for row in layout.rows))
        return Places(layout, positions, write_pages, read_pages), kept

    def _place_native(self, lib: Kernels, starts: Tensor, counts: Tensor | None) -> tuple[Places, Kept]:
        """Of a row the whole table is read, so that nothing depends on the host's knowledge of it."""
        cache, layout, index = self.cache, self.layout, self.layout.index
        batch, pages = len(index), cache.table.shape[1]
        positions, write_pages = fresh(index, layout.tokens), fresh(index, layout.tokens)
        read_pages, kept = fresh(index, batch, pages), fresh(index, batch)
        tensors = (positions, write_pages, read_pages, kept, index, starts, layout.offsets)
        counted = None if counts is None else counts.data_ptr()
        cached = (cache.table.data_ptr(), cache.kept.data_ptr())
        lib.place(*(t.data_ptr() for t in tensors), counted, *cached, batch, cache.limits.page, pages, SPARE_PAGE)
        return Places(layout, positions, write_pages, read_pages), Kept(index, kept, MAX_WIDTH)

    def linear(self, x: Tensor, weight: Weight | Int8Weight) -> Tensor:
        return linear(x, weight)

    def swiglu(self, x: Tensor, gate_up: Weight | Int8Weight) -> Tensor:
        return linear_swiglu(x, gate_up)

    def mix_experts(self, x: Tensor, mixture: Mixture) -> Tensor:
        return window_experts(x, mixture)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return window_attention(self.cache.pages[layer], self.places, q, k, v)

    def remember(self, layer: int, k: Tensor, v: Tensor) -> None:
        write(self.cache.pages[layer], self.places.write_pages, self.positions, k, v)

    def recur(self, layer: int, projected: Tensor, delta: Delta) -> Tensor:
        return gated_delta.window(delta, self.cache.memories[layer], projected, self.kept, self.layout)


class Prefill:
    """A chunk of one row's prompt, from a position that is a multiple of the chunk length."""

    def __init__(self, cache: Cache, row: int, start: int, count: int) -> None:
        self.cache, self.row, page = cache, cache.send([row]), cache.limits.page
        self.positions = torch.arange(start, start + count, device=cache.device)
        self.end = self.positions[-1:] + 1
        table = cache.table[row, : -(-(start + count) // page)]
        self.stretch = Stretch(self.positions, table[self.positions // page], table)

    def linear(self, x: Tensor, weight: Weight | Int8Weight) -> Tensor:
        return weight.multiply(x)

    def swiglu(self, x: Tensor, gate_up: Weight | Int8Weight) -> Tensor:
        return swiglu(gate_up.multiply(x))

    def mix_experts(self, x: Tensor, mixture: Mixture) -> Tensor:
        return chunk_experts(x, mixture)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chunk_attention(self.cache.pages[layer], self.stretch, q, k, v)

    def remember(self, layer: int, k: Tensor, v: Tensor) -> None:
        write(self.cache.pages[layer], self.stretch.write_pages, self.positions, k, v)

    def recur(self, layer: int, projected: Tensor, delta: Delta) -> Tensor:
        return gated_delta.chunk(delta, self.cache.memories[layer], projected, self.row, self.stretch.count)


class PaddedPrefill(Prefill):
    """A chunk of which the first `count` [1] tokens count, of a row [1] from a start [1] on: a captured graph knows
    nothing of them but where they are."""

    def __init__(self, cache: Cache, row: Tensor, start: Tensor, count: Tensor, tokens: int) -> None:
        self.cache, self.row, self.end = cache, row, start + count
        steps, table = torch.arange(tokens, device=cache.device), cache.table[row][0]
        # Padding stands where the last token does, or past the context it would have no position at all.
        self.positions = start + torch.minimum(steps, count - 1).clamp_(min=0)
        own = table[self.positions // cache.limits.page]
        self.stretch = Stretch(self.positions, torch.where(steps < count, own, SPARE_PAGE), table, count)
