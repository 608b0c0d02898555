"""Attention of a prompt chunk over its row's past on NVIDIA GPUs.

A program takes a tile of one head's queries through the keys, a tile of them at a time at fixed positions, first to
last. What a query may not see weighs exactly nothing, so its bits depend on its own past alone. Only the tiles at the
queries' own positions are masked; behind the chunk's last token nothing is read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.backends.torch.gpu.attention import page_of, write
from headlong.backends.torch.gpu.build import Kernel
from headlong.backends.torch.gpu.launch import follow, options
from headlong.backends.torch.kernels.attention import Pages, Stretch

# Queries and keys in a tile, warps and stages: of many queries, of so few that multiprocessors would be idle, and in
# float32, which takes twice the room and is not made for speed.
TILES, FEW_TILES, EXACT_TILES = (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 1)
PROGRAMS = 132  # that a GPU runs at once, about


def chunk_attention(pages: Pages, stretch: Stretch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Write k, v [T, K, D], then attend with q [T, A, D]; a token sees its row up to itself -> [T, A, D]."""
    (tokens, heads, dim), (_, kv_heads, page, _) = q.shape, pages.keys.shape
    write(pages, stretch.write_pages, stretch.positions, k, v)
    exact, few = q.dtype == torch.float32, 2 * heads * triton.cdiv(tokens, TILES[0]) <= PROGRAMS
    queries, keys, warps, stages = EXACT_TILES if exact else FEW_TILES if few else TILES
    out = q.new_empty(q.shape)
    _attend[(heads, triton.cdiv(tokens, queries))](
        out, q, pages.keys, pages.values, stretch.read_pages, stretch.positions,
        stretch.positions if stretch.count is None else stretch.count, tokens, q.stride(0),
        COUNTED=stretch.count is not None, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page,
        QUERIES=queries, KEYS=keys, COLUMNS=max(16, triton.next_power_of_2(dim)), EXACT=exact,
        num_warps=warps, num_stages=stages, **options(q.device),
    )  # fmt: skip
    return out


@Kernel
@triton.jit(do_not_specialize=["tokens"])
def _attend(out, q, keys, values, table, positions, count, tokens, q_stride, COUNTED: tl.constexpr,
            HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr,
            KEYS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Program (head, tile of queries), the last tiles first: they see most."""
    follow(EARLY)
    head, tile, first = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.load(positions).to(tl.int32)
    query, column = tile * QUERIES + tl.arange(0, QUERIES), tl.arange(0, COLUMNS)
    inside = (query < tokens)[:, None] & (column < DIM)[None, :]
    lines = query.to(tl.int64)[:, None]
    queries = tl.load(q + lines * q_stride + head * DIM + column[None, :], mask=inside, other=0.0)
    real = tl.load(count).to(tl.int32) if COUNTED else tokens
    sees, end = first + query, first + tl.minimum(real, (tile + 1) * QUERIES)
    end = tl.where(tile * QUERIES < real, end, 0)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total, mixed = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, COLUMNS), tl.float32)
    seen_by_all = tl.minimum((first + tile * QUERIES) // KEYS * KEYS, end)
    page = page_of(table, 0, tl.maximum(end, 1), PAGE, KEYS)
    for masked in tl.static_range(2):
        for start in range(seen_by_all if masked else 0, end if masked else seen_by_all, KEYS):
            ahead = page_of(table, start + KEYS, end, PAGE, KEYS)
            top, total, mixed = _weigh(queries, keys, values, page, start, end, sees, top, total, mixed, head,
                                       masked, HEADS, KV_HEADS, DIM, PAGE, KEYS, COLUMNS, EXACT)  # fmt: skip
            page = ahead
    to = out + lines * (HEADS * DIM) + head * DIM + column[None, :]
    # Where a whole tile is padding it has seen nothing.
    tl.store(to, (mixed / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weigh(queries, keys, values, page, start, end, sees, top, total, mixed, head, MASKED: tl.constexpr,
           HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
           COLUMNS: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Keys from start on into the queries' largest score and sum of weights [QUERIES] and weighted values
    [QUERIES, COLUMNS]. Scores are in powers of two."""
    scale: tl.constexpr = DIM**-0.5 * 1.4426950408889634
    precision: tl.constexpr = "tf32x3" if EXACT else "tf32"
    key, column = start + tl.arange(0, KEYS), tl.arange(0, COLUMNS)
    base = (page * KV_HEADS + head // (HEADS // KV_HEADS)) * (PAGE * DIM)
    places = base + (key % PAGE)[:, None] * DIM + column[None, :]
    # Values too: a weight of zero does not stop a NaN.
    mask = (key < end)[:, None] & (column < DIM)[None, :] if MASKED else (column < DIM)[None, :]
    scores = tl.dot(queries, tl.load(keys + places, mask=mask, other=0.0).T, input_precision=precision)
    if MASKED:
        scores = tl.where(key[None, :] <= sees[:, None], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    weights, fade = tl.exp2(scores * scale - higher[:, None]), tl.exp2(top - higher)
    some = tl.load(values + places, mask=mask, other=0.0)
    mixed = tl.dot(weights.to(some.dtype), some, mixed * fade[:, None], input_precision=precision)
    return higher, total * fade + tl.sum(weights, 1), mixed
