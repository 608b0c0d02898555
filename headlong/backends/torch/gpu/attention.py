"""Attention of windows over paged K/V on NVIDIA GPUs.

A row's keys are cut into splits at fixed positions, and a program takes a tile of queries (the row's tokens, each with
the heads that share a key/value head) through some of the splits:

    positions   0 ........ 255   256 ...... 511   512 ......
    split            0               1                2         largest score, sum of weights, weighted values
    combine                     first to last                   one output a query

Every query goes through the same operations in the same order whoever stands beside it. What it may not see weighs
exactly nothing, and of splits that begin past it nothing is read. Launches depend on shapes alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.backends.torch.cache import MAX_WIDTH
from headlong.backends.torch.gpu.build import Kernel
from headlong.backends.torch.gpu.launch import follow, make_way, options
from headlong.backends.torch.kernels.attention import Pages, Places

WINDOW = triton.next_power_of_2(MAX_WIDTH)
SPLIT = 256  # positions
CHUNK = 32  # splits that are combined at once
QUERIES = 16  # in a tile, however many tokens there are
KEY_BYTES = 128  # of a column of the keys that are read at once
PROGRAMS = 264  # that a GPU runs at once, about


def window_attention(pages: Pages, places: Places, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Write k, v [N, K, D], then attend with q [N, A, D]; a token sees its row up to itself -> [N, A, D].

    A token whose page is not that of its row's table is padding: it sees nothing past the others' positions.
    """
    write(pages, places.write_pages, places.positions, k, v)
    (n, heads, dim), (_, kv_heads, page, _) = q.shape, pages.keys.shape
    batch, width = places.read_pages.shape
    splits, wide = triton.cdiv(width * page, SPLIT), min(n, MAX_WIDTH)
    query_tiles = triton.cdiv(wide * heads // kv_heads, QUERIES)
    programs = max(1, min(splits, PROGRAMS // (batch * kv_heads)))
    parts = torch.empty(n, heads, splits, dim, dtype=torch.float32, device=q.device)
    # Each an allocation of its own: how a pointer is aligned decides how its kernel is compiled.
    tops, sums = (torch.empty(n, heads, splits, dtype=torch.float32, device=q.device) for _ in range(2))
    where = (places.positions, places.write_pages, places.layout.offsets, places.read_pages)
    sizes = (places.read_pages.stride(0), width * page, splits)
    _attend[(query_tiles, programs, batch * kv_heads)](
        parts, tops, sums, pages.keys, pages.values, q, *where, *sizes, q.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, WINDOW=WINDOW, SPLIT=SPLIT,
        QUERIES=QUERIES, KEYS=KEY_BYTES // q.element_size(), COLUMNS=_columns(dim), EXACT=q.dtype == torch.float32,
        num_warps=4, num_stages=2, **options(q.device),
    )  # fmt: skip
    out = q.new_empty(q.shape)
    columns = min(128, _columns(dim))
    _combine[(batch * wide, heads, triton.cdiv(dim, columns))](
        out, parts, tops, sums, *where, *sizes, wide,
        HEADS=heads, DIM=dim, PAGE=page, WINDOW=WINDOW, SPLIT=SPLIT, CHUNK=CHUNK, COLUMNS=columns,
        **options(q.device),
    )  # fmt: skip
    return out


def write(pages: Pages, write_pages: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
    """k, v [N, K, D] to their pages [N] and positions [N]."""
    (n, kv_heads, dim), page = k.shape, pages.keys.shape[2]
    _write[(n, kv_heads)](
        pages.keys, pages.values, k, v, write_pages, positions, k.stride(0), v.stride(0),
        KV_HEADS=kv_heads, DIM=dim, PAGE=page, COLUMNS=_columns(dim), num_warps=1, **options(k.device),
    )  # fmt: skip


def _columns(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


@Kernel
@triton.jit
def _write(keys, values, k, v, write_pages, positions, k_stride, v_stride, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
           PAGE: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    make_way(EARLY)
    follow(EARLY)
    n, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    inside = column < DIM
    slot = (tl.load(write_pages + n) * KV_HEADS + head) * PAGE + tl.load(positions + n) % PAGE
    to, source = slot * DIM + column, head * DIM + column
    tl.store(keys + to, tl.load(k + n * k_stride + source, mask=inside), mask=inside)
    tl.store(values + to, tl.load(v + n * v_stride + source, mask=inside), mask=inside)


@triton.jit
def _last(positions, write_pages, table, first, width, room, PAGE: tl.constexpr, WINDOW: tl.constexpr):
    """The last position that the row's window wrote to the row's own pages: behind it, memory may hold anything."""
    step = tl.arange(0, WINDOW)
    inside = step < width
    position = tl.load(positions + first + step, mask=inside, other=0)
    own = tl.load(table + tl.minimum(position, room - 1) // PAGE, mask=inside, other=0)
    written = tl.load(write_pages + first + step, mask=inside, other=-1) == own
    return tl.max(tl.where(inside & written & (position < room), position, 0), 0)


@triton.jit
def page_of(table, start, end, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """The page of the keys from start on, or of each of them [KEYS, 1] where they may stand in several."""
    if PAGE % KEYS == 0:
        return tl.load(table + tl.minimum(start, end - 1) // PAGE)
    else:  # noqa: RET505, as it is of another type
        return tl.load(table + tl.minimum(start + tl.arange(0, KEYS), end - 1) // PAGE)[:, None]


@triton.jit
def _weigh(queries, keys, values, page, start, end, sees, top, total, mixed, kv, KV_HEADS: tl.constexpr,
           DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
           EXACT: tl.constexpr):  # fmt: skip
    """Keys from start on, before end, into the queries' largest score and sum of weights [QUERIES] and weighted values
    [QUERIES, COLUMNS]. Scores are in powers of two."""
    scale: tl.constexpr = DIM**-0.5 * 1.4426950408889634
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    key, column = start + tl.arange(0, KEYS), tl.arange(0, COLUMNS)
    base, places = (page * KV_HEADS + kv) * (PAGE * DIM), (key % PAGE)[:, None] * DIM + column[None, :]
    # Values too: a weight of zero does not stop a NaN.
    mask = (key < end)[:, None] & (column < DIM)[None, :]
    scores = tl.dot(queries, tl.load(keys + base + places, mask=mask, other=0.0).T, input_precision=precision) * scale
    scores = tl.where(key[None, :] <= sees[:, None], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights, fade = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
    some = tl.load(values + base + places, mask=mask, other=0.0)
    mixed = tl.dot(weights.to(some.dtype), some, mixed * fade[:, None], input_precision=precision)
    return higher, total * fade + tl.sum(weights, 1), mixed


@Kernel
@triton.jit(do_not_specialize=["table_stride", "room", "splits"])
def _attend(parts, tops, sums, keys, values, q, positions, write_pages, offsets, tables, table_stride, room, splits,
            q_stride, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
            WINDOW: tl.constexpr, SPLIT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
            COLUMNS: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Neighbouring splits of one tile: parts [N, A, splits, D], tops and sums [N, A, splits]."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    # Tiles of a row come first: they read the same keys at the same time.
    tile, kv, b = tl.program_id(0), tl.program_id(2) % KV_HEADS, tl.program_id(2) // KV_HEADS
    first = tl.load(offsets + b)
    width = tl.load(offsets + b + 1) - first
    if tile * QUERIES >= width * GROUP:
        return
    table = tables + b.to(tl.int64) * table_stride
    query, column = tile * QUERIES + tl.arange(0, QUERIES), tl.arange(0, COLUMNS)
    token, head, real = first + query // GROUP, kv * GROUP + query % GROUP, query // GROUP < width
    last = _last(positions, write_pages, table, first, width, room, PAGE, WINDOW)
    position = tl.minimum(tl.load(positions + token, mask=real, other=0), last).to(tl.int32)
    mask = real[:, None] & (column < DIM)[None, :]
    follow(EARLY)  # places were there when the pass began
    queries = tl.load(q + (token * q_stride + head * DIM)[:, None] + column[None, :], mask=mask, other=0.0)
    end = tl.max(position, 0) + 1
    share = tl.cdiv(tl.cdiv(end, SPLIT), tl.num_programs(1)) * SPLIT
    begin = tl.program_id(1) * share
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total, mixed = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, COLUMNS), tl.float32)
    page = page_of(table, begin, end, PAGE, KEYS)
    for start in range(begin, tl.minimum(begin + share, end), KEYS):
        split = start // SPLIT
        # A new split: with this, what the one before left weighs nothing.
        top = tl.where(start % SPLIT == 0, float("-inf"), top)
        # Where a split begins past a query, it sees one key, lest it divide by nothing; nobody asks for that.
        top, total, mixed = _weigh(
            queries, keys, values, page, start, end, tl.maximum(position, split * SPLIT), top, total, mixed, kv,
            KV_HEADS, DIM, PAGE, KEYS, COLUMNS, EXACT,
        )  # fmt: skip
        page = page_of(table, start + KEYS, end, PAGE, KEYS)  # ahead of its use
        if ((start + KEYS) % SPLIT == 0) | (start + KEYS >= end):
            place, asked = (token * HEADS + head) * splits + split, real & (split * SPLIT <= position)
            tl.store(tops + place, top, mask=asked)
            tl.store(sums + place, total, mask=asked)
            tl.store(parts + place[:, None] * DIM + column[None, :], mixed, mask=mask & asked[:, None])


@Kernel
@triton.jit(do_not_specialize=["table_stride", "room", "splits", "wide"])
def _combine(out, parts, tops, sums, positions, write_pages, offsets, tables, table_stride, room, splits, wide,
             HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
             CHUNK: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Some columns of one head of one token: out [N, A, D]."""
    make_way(EARLY)
    b, step = tl.program_id(0) // wide, tl.program_id(0) % wide
    first = tl.load(offsets + b)
    width = tl.load(offsets + b + 1) - first
    if step >= width:
        return
    table = tables + b.to(tl.int64) * table_stride
    last = _last(positions, write_pages, table, first, width, room, PAGE, WINDOW)
    count = (tl.minimum(tl.load(positions + first + step), last) // SPLIT + 1).to(tl.int32)
    follow(EARLY)  # places were there when the pass began
    line, column = (first + step) * HEADS + tl.program_id(1), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    top, total, mixed = float("-inf"), 0.0, tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, count, CHUNK):
        split = start + tl.arange(0, CHUNK)
        place, asked = line * splits + split, split < count
        theirs = tl.load(tops + place, mask=asked, other=float("-inf"))
        higher = tl.maximum(top, tl.max(theirs, 0))
        weights, fade = tl.exp2(theirs - higher), tl.exp2(top - higher)
        mask = asked[:, None] & (column < DIM)[None, :]
        some = tl.load(parts + place[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        mixed = mixed * fade + tl.sum(some * weights[:, None], 0)
        total = total * fade + tl.sum(tl.load(sums + place, mask=asked, other=0.0) * weights, 0)
        top = higher
    tl.store(out + line * DIM + column, (mixed / total).to(out.dtype.element_ty), mask=column < DIM)
