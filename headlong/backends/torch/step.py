"""One pass of a model over some tokens: where they stand, what they may see, and how they reach the cache.

A model's layers are written once; the step they are given is a `Window` (rounds) or a `Prefill` (prompt chunks),
and answers the questions that differ: how to multiply, how to mix experts, how to attend, how to recur.
"""

from typing import Protocol

import torch
from torch import Tensor

from headlong.backends.torch.cache import SPARE_PAGE, Cache
from headlong.backends.torch.kernels import gated_delta
from headlong.backends.torch.kernels.attention import Places, chunk_attention, window_attention
from headlong.backends.torch.kernels.experts import Experts, experts, window_experts
from headlong.backends.torch.kernels.gated_delta import Delta, Kept
from headlong.backends.torch.kernels.linear import Weight, linear


class Step(Protocol):
    """N tokens in flat order; row by row, position by position."""

    positions: Tensor  # [N]

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """x [N, in] -> [N, out]."""

    def mix_experts(self, x: Tensor, shares: Tensor, ids: Tensor, gate_up: Experts, down: Experts) -> Tensor:
        """x [N, H] through the experts ids [N, T], added by shares [N, T] -> [N, H]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [N, K, D] and attend with q [N, A, D] -> [N, A, D]."""

    def recur(self, layer: int, projected: Tensor, delta: Delta) -> Tensor:
        """A Gated DeltaNet layer between its projections: [N, ...] -> [N, heads Dv]."""


class Window:
    """Rows [B] with W tokens each from their own starts; row b's tokens past its width are padding."""

    def __init__(self, cache: Cache, rows: list[int], starts: Tensor, width: int, widths: Tensor) -> None:
        self.cache, self.width = cache, width
        index = torch.tensor(rows, device=cache.device)
        offset = cache.counting[:width]
        positions = starts[:, None] + offset  # [B, W]
        table = cache.table[index]
        page_index = (positions // cache.limits.page).clamp_(max=table.shape[1] - 1)
        write_pages = torch.where(offset < widths[:, None], table.gather(1, page_index), SPARE_PAGE)
        read_pages = table[:, : max(cache.owned[row] for row in rows)].contiguous()
        self.positions = positions.flatten()
        self.places = Places(self.positions, write_pages.flatten(), read_pages, width)
        self.kept = Kept(index, cache.kept[index], max(cache.widths[row] for row in rows))

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
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

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        return weight.multiply(x)

    def mix_experts(self, x: Tensor, shares: Tensor, ids: Tensor, gate_up: Experts, down: Experts) -> Tensor:
        return experts(x, shares, ids, gate_up.each, down.each, self.linear)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chunk_attention(self.cache.pages[layer], self.table, self.positions, q, k, v)

    def recur(self, layer: int, projected: Tensor, delta: Delta) -> Tensor:
        return gated_delta.chunk(delta, self.cache.memories[layer], projected, self.row)
