"""Attention of windows over paged K/V, and of a prompt chunk over its own past."""

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headlong.backends.torch.gpu.paths import fused, paged_attention, prompt_attention
from headlong.backends.torch.native.arena import fresh
from headlong.backends.torch.native.library import library
from headlong.backends.torch.ragged import Layout


class _NativePages(ctypes.Structure):
    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("kv_heads", "heads", "dim", "page")),
    ]


@dataclass(frozen=True)
class Pages:
    """One layer's keys and values, [pages, K, page, D] each."""

    keys: Tensor
    values: Tensor
    _native: dict[int, _NativePages] = field(default_factory=dict)

    def native(self, heads: int) -> int:
        """The address of what the kernels know of it."""
        if heads not in self._native:
            _, kv_heads, page, dim = self.keys.shape
            sizes = (kv_heads, heads, dim, page)
            self._native[heads] = _NativePages(self.keys.data_ptr(), self.values.data_ptr(), *sizes)
        return ctypes.addressof(self._native[heads])


@dataclass(frozen=True)
class Places:
    """Where the N tokens of B windows stand: positions [N], the pages they write to [N], and the pages each row
    reads [B, S]."""

    layout: Layout
    positions: Tensor
    write_pages: Tensor
    read_pages: Tensor


@dataclass(frozen=True)
class Stretch:
    """Where T tokens of one row's prompt stand: positions [T], the pages they write to [T], and the pages the row
    reads [S]. The first `count` [1] of them count, or all; the others are padding, whose outputs mean nothing."""

    positions: Tensor
    write_pages: Tensor
    read_pages: Tensor
    count: Tensor | None = None


def window_attention(pages: Pages, places: Places, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Write k, v [N, K, D], then attend with q [N, A, D]; a token sees its row up to itself -> [N, A, D]."""
    if fused(pages.keys, q):
        return paged_attention().window_attention(pages, places, q, k, v)
    lib = library(pages.keys, q)
    if lib is None:
        return _reference(pages, places, q, k, v)
    out = fresh(q, *q.shape)
    where = _addresses(places.write_pages, places.positions, places.layout.offsets, places.read_pages)
    lib.attend(pages.native(q.shape[1]), *_native(out, q, k, v), *where, places.read_pages.shape[-1], len(q))
    return out


def _native(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return *(t.data_ptr() for t in (out, q, k, v)), *(t.stride(0) for t in (q, k, v))


def _addresses(*tensors: Tensor | None) -> tuple[int | None, ...]:
    return tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)


def _reference(pages: Pages, places: Places, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The split is the page: every query sees the same partition at absolute positions however long its neighbours
    are, each window position is its own product, and pages are added in order, so a page too many adds zeros."""
    write(pages, places.write_pages, places.positions, k, v)
    layout, (b, s) = places.layout, places.read_pages.shape
    w = layout.widest
    _, kv, p, d = pages.keys.shape
    group = q.shape[1] // kv
    keys, values = (x[places.read_pages].float().view(b * s * kv, p, d) for x in (pages.keys, pages.values))
    queries = layout.pad(q.float() * d**-0.5).view(b, w, 1, kv, group, d).expand(b, w, s, kv, group, d)
    scores = torch.stack([torch.bmm(queries[:, j].reshape(-1, group, d), keys.mT) for j in range(w)])
    key_positions = torch.arange(s * p, device=q.device).view(s, p)
    visible = key_positions <= layout.pad(places.positions).T[:, :, None, None]  # [W, B, S, P]
    scores = scores.view(w, b, s, kv, group, p).masked_fill_(~visible[:, :, :, None, None], -torch.inf)
    weights = torch.exp(scores - scores.amax((2, 5), keepdim=True))
    mixed = torch.stack([torch.bmm(weights[j].view(-1, group, p), values) for j in range(w)])
    mixed = _add_in_order(mixed.view(w, b, s, kv, group, d)) / _add_in_order(weights.sum(-1, keepdim=True))
    return layout.unpad(mixed.transpose(0, 1)).reshape(q.shape).to(q.dtype)


def _add_in_order(parts: Tensor) -> Tensor:
    """Sum over pages, dimension 2, first to last."""
    return parts[:, :, 0] if parts.shape[2] == 1 else parts.cumsum(2)[:, :, -1]


def chunk_attention(pages: Pages, stretch: Stretch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Write k, v [T, K, D], then attend with q [T, A, D]; a token sees its row up to itself -> [T, A, D]."""
    if fused(pages.keys, q):
        return prompt_attention().chunk_attention(pages, stretch, q, k, v)
    table, lib = stretch.read_pages, library(pages.keys, q) if stretch.count is None else None
    if lib is not None:
        out = fresh(q, *q.shape)
        where = _addresses(None, stretch.positions, None, table)  # one row, whose table says where to write
        lib.attend(pages.native(q.shape[1]), *_native(out, q, k, v), *where, table.shape[-1], len(q))
        return out
    write(pages, stretch.write_pages, stretch.positions, k, v)
    keys, values = (x[table].transpose(0, 1).flatten(1, 2)[None] for x in (pages.keys, pages.values))
    mask = torch.arange(keys.shape[2], device=q.device) <= stretch.positions[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def write(pages: Pages, write_pages: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
    """k, v [N, K, D] alone, for tokens whose own attention nobody asks for."""
    if fused(pages.keys, k):
        paged_attention().write(pages, write_pages, positions, k, v)
        return
    lib = library(pages.keys, k)
    if lib is not None:
        where = _addresses(write_pages, positions, None, None)
        lib.remember(pages.native(k.shape[1]), *_native(k, k, k, v), *where, 0, len(k))
        return
    slots = positions % pages.keys.shape[2]
    pages.keys[write_pages, :, slots] = k
    pages.values[write_pages, :, slots] = v
