"""One pass of a model over some tokens: where they stand, what they may see, and how they reach the cache.

A model's layers are written once; the step they are given is a `Window` (rounds) or a `Prefill` (prompt chunks),
and answers the three questions that differ: how to multiply, how to attend, how to recur.
"""

from typing import Protocol

import torch
from torch import Tensor

from headlong.backends.torch.cache import NULL_PAGE, SPARE_PAGE, Cache
from headlong.backends.torch.kernels import gated_delta
from headlong.backends.torch.kernels.attention import chunk_attention, window_attention
from headlong.backends.torch.kernels.conv import causal_conv
from headlong.backends.torch.kernels.linear import Weight, linear
from headlong.backends.torch.kernels.norm import l2_norm


class Step(Protocol):
    """N tokens in flat order; row by row, position by position."""

    positions: Tensor  # [N]

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """x [N, in] -> [N, out]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [N, K, D] and attend with q [N, A, D] -> [N, A, D]."""

    def recur(self, layer: int, qkv: Tensor, conv: Tensor, log_decays: Tensor, strengths: Tensor) -> Tensor:
        """Convolve qkv [N, C] and run the delta rule -> [N, heads, value_dim], float32."""


class Window:
    """Rows [B] with W tokens each from their own starts; row b's tokens past its width are padding."""

    def __init__(self, cache: Cache, rows: list[int], starts: Tensor, width: int, widths: Tensor) -> None:
        self.cache, self.width, self.batch = cache, width, len(rows)
        self.rows = torch.tensor(rows, device=cache.device)
        page = cache.limits.page
        offset = torch.arange(width, device=cache.device)
        positions = starts[:, None] + offset  # [B, W]
        self.positions = positions.flatten()
        table = cache.table[self.rows]  # [B, most pages of any row]
        self.read_pages = table[:, : max(cache.owned[row] for row in rows)]
        inside = offset < widths[:, None]
        page_index = (positions // page).clamp_(max=table.shape[1] - 1)
        self.write_pages = torch.where(inside, table.gather(1, page_index), SPARE_PAGE)
        self.write_slots = positions % page
        key_positions = torch.arange(self.read_pages.shape[1] * page, device=cache.device).view(-1, page)
        self.visible = key_positions <= positions[:, :, None, None]  # [B, W, pages, page]
        self.kept = cache.kept[self.rows]
        self.folds = max(cache.folds[row] for row in rows)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        return linear(x, weight)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.write_pages, :, self.write_slots] = k.unflatten(0, (self.batch, self.width))
        values[self.write_pages, :, self.write_slots] = v.unflatten(0, (self.batch, self.width))
        queries = q.unflatten(0, (self.batch, self.width))
        return window_attention(queries, keys[self.read_pages], values[self.read_pages], self.visible).flatten(0, 1)

    def recur(self, layer: int, qkv: Tensor, conv: Tensor, log_decays: Tensor, strengths: Tensor) -> Tensor:
        cache, shape = self.cache, self.cache.shape
        mixed = self._convolve(layer, qkv.unflatten(0, (self.batch, self.width)), conv)
        qk, v = split_heads(mixed, shape.key_dim, shape.value_dim, shape.heads)  # [B, W, heads, ...]
        state = self.settled(layer)
        cache.states[layer][self.rows] = state
        decays, strengths = (x.unflatten(0, (self.batch, self.width)) for x in (log_decays.exp(), strengths))
        outputs, corrections = gated_delta.window(
            state.flatten(0, 1), _by_head(qk), _by_head(v), _by_head(decays), _by_head(strengths)
        )
        corrections = corrections.unflatten(0, (self.batch, -1)).transpose(1, 2)
        cache.waiting[layer][self.rows, : self.width] = torch.cat([qk[..., 1, :], corrections, decays[..., None]], -1)
        return outputs.unflatten(0, (self.batch, -1)).transpose(1, 2).flatten(0, 1)

    def settled(self, layer: int) -> Tensor:
        """The state [B, heads, Dk, Dv] with the kept tokens of the last window folded in."""
        shape = self.cache.shape
        waiting = self.cache.waiting[layer][self.rows, : self.folds]
        keys, corrections, decays = waiting.split([shape.key_dim, shape.value_dim, 1], -1)
        counts = (torch.arange(self.folds, device=self.cache.device) < self.kept[:, None])[:, :, None, None]
        decays = torch.where(counts, decays, 1.0)[..., 0]
        corrections = torch.where(counts, corrections, 0.0)
        state = self.cache.states[layer][self.rows].flatten(0, 1)
        return gated_delta.fold(state, _by_head(keys), _by_head(corrections), _by_head(decays)).unflatten(
            0, (self.batch, -1)
        )

    def _convolve(self, layer: int, qkv: Tensor, conv: Tensor) -> Tensor:
        inputs = torch.cat([self.conv_past(layer), qkv], 1)
        self.cache.conv_inputs[layer][self.rows, : inputs.shape[1]] = inputs
        return causal_conv(inputs, conv)

    def conv_past(self, layer: int) -> Tensor:
        """The K - 1 inputs before the window: those that end with the last kept token."""
        taps = torch.arange(self.cache.shape.conv_kernel - 1, device=self.cache.device)
        return self.cache.conv_inputs[layer][self.rows[:, None], self.kept[:, None] + taps]

    def done(self, rows: list[int]) -> None:
        """Note on the host that these rows' next window has this one to fold."""
        for row in rows:
            self.cache.folds[row] = self.width


class Prefill:
    """A chunk of one row's prompt, from a position that is a multiple of the chunk length."""

    def __init__(self, cache: Cache, row: int, start: int, count: int) -> None:
        self.cache, self.row, self.start, self.end = cache, row, start, start + count
        page = cache.limits.page
        self.positions = torch.arange(start, self.end, device=cache.device)
        self.pages = cache.table[row, : -(-self.end // page)]
        self.write_pages = cache.table[row][self.positions // page]
        self.write_slots = self.positions % page

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        return weight.multiply(x)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.write_pages, :, self.write_slots] = k
        values[self.write_pages, :, self.write_slots] = v
        return chunk_attention(q, self._past(keys), self._past(values), self.start)

    def _past(self, pages: Tensor) -> Tensor:
        """[K, end, D]: everything the row has written."""
        return pages[self.pages].transpose(0, 1).flatten(1, 2)[:, : self.end]

    def recur(self, layer: int, qkv: Tensor, conv: Tensor, log_decays: Tensor, strengths: Tensor) -> Tensor:
        cache, shape, past = self.cache, self.cache.shape, self.cache.shape.conv_kernel - 1
        inputs = torch.cat([cache.conv_inputs[layer][self.row, :past], qkv])
        cache.conv_inputs[layer][self.row, :past] = inputs[len(inputs) - past :]
        mixed = causal_conv(inputs[None], conv)
        qk, v = split_heads(mixed, shape.key_dim, shape.value_dim, shape.heads)
        outputs, state = gated_delta.chunk(
            cache.states[layer][self.row],
            _by_head(qk),
            _by_head(v),
            _by_head(log_decays[None]),
            _by_head(strengths[None]),
        )
        cache.states[layer][self.row] = state
        return outputs.transpose(0, 1)


def split_heads(mixed: Tensor, key_dim: int, value_dim: int, heads: int) -> tuple[Tensor, Tensor]:
    """[B, W, C] as q, k, v -> unit q (scaled) and k [B, W, heads, 2, Dk], v [B, W, heads, Dv].

    There are fewer key heads than value heads; value head j uses key head j // ratio.
    """
    keys = (mixed.shape[-1] - heads * value_dim) // 2
    qk, v = mixed.split([2 * keys, heads * value_dim], -1)
    qk = l2_norm(qk.unflatten(-1, (2, -1, key_dim))).transpose(2, 3)  # [B, W, key heads, 2, Dk]
    qk = qk * qk.new_tensor([key_dim**-0.5, 1.0])[:, None]
    return qk.repeat_interleave(heads // qk.shape[2], 2), v.unflatten(-1, (heads, value_dim))


def _by_head(x: Tensor) -> Tensor:
    """[B, W, heads, ...] -> [B heads, W, ...]."""
    return x.transpose(1, 2).flatten(0, 1)
