"""Where tokens stand, which token is best, which is the last kept and what time it is, on NVIDIA GPUs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.backends.torch.gpu.build import Kernel
from headlong.backends.torch.gpu.launch import follow, make_way, options

BLOCK = 8192  # scores that one program looks at


def place(index: Tensor, starts: Tensor, offsets: Tensor, counts: Tensor | None, table: Tensor, kept: Tensor,
          sizes: tuple[int, ...]) -> tuple[Tensor, ...]:  # fmt: skip
    """Rows [B] with tables [R, S], and of all rows how many tokens of their last windows are kept [R]; sizes: N, tokens
    in a page, the page that takes padding -> positions [N], pages to write to [N], pages to read [B, S], kept [B]."""
    (tokens, page, spare), (batch, width) = sizes, (len(index), table.shape[1])
    positions, write_pages = index.new_empty(tokens), index.new_empty(tokens)
    read_pages, mine = index.new_empty(batch, width), index.new_empty(batch)
    counted = starts if counts is None else counts
    tensors = positions, write_pages, read_pages, mine, index, starts, offsets, counted, table, kept
    block = triton.next_power_of_2(width)
    _place[(batch,)](
        *tensors, width, page, spare, COUNTS=counts is not None, BLOCK=block, WINDOW=16, **options(index.device)
    )
    return positions, write_pages, read_pages, mine


def best(scores: Tensor, words: Tensor | None = None, to: Tensor | None = None) -> Tensor:
    """[N, V] float32 -> [N]: the token with the highest score, the first of equals; its word [V] where there are some.
    Into memory of its own, or to where it belongs."""
    n, vocab = scores.shape
    blocks = triton.cdiv(vocab, BLOCK)
    tops = torch.empty(n, blocks, dtype=torch.float32, device=scores.device)
    places = torch.empty(n, blocks, dtype=torch.int64, device=scores.device)
    launch = options(scores.device)
    _best[(n, blocks)](tops, places, scores, vocab, scores.stride(0), BLOCK=BLOCK, num_warps=8, **launch)
    return best_of_blocks(tops, places, words, to)


def best_of_blocks(tops: Tensor, places: Tensor, words: Tensor | None = None, to: Tensor | None = None) -> Tensor:
    """The best scores of blocks [N, blocks], and where they stand -> [N]: where the best of all does."""
    n, blocks = tops.shape
    tokens = torch.empty(n, dtype=torch.int64, device=tops.device) if to is None else to
    sizes = {"BLOCK": triton.next_power_of_2(blocks), "WORDS": words is not None, "num_warps": 1}
    _best_of[(n,)](tokens, tops, places, places if words is None else words, blocks, **sizes, **options(tops.device))
    return tokens


def last_kept(x: Tensor, offsets: Tensor, kept: Tensor) -> Tensor:
    """x [N, H] of rows at offsets [B + 1] -> [B, H]: the last of those that each row keeps."""
    size, y = x.shape[1], x.new_empty(len(kept), x.shape[1])
    block = triton.next_power_of_2(size)
    _last_kept[(len(kept),)](y, x, offsets, kept, size, x.stride(0), BLOCK=block, **options(x.device))
    return y


def stamp(to: Tensor) -> None:
    """The device's time in nanoseconds, into an integer [1]."""
    _stamp[(1,)](to, num_warps=1, **options(to.device))


@Kernel
@triton.jit
def _place(positions, write_pages, read_pages, mine, index, starts, offsets, counts, table, kept, width, page, spare,
           COUNTS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    make_way(EARLY)
    follow(EARLY)
    b = tl.program_id(0)
    row, first = tl.load(index + b), tl.load(offsets + b)
    tokens = tl.load(offsets + b + 1) - first
    count = tl.load(counts + b) if COUNTS else tokens
    own, start = table + row * width, tl.load(starts + b)
    at = tl.arange(0, BLOCK)
    tl.store(read_pages + b * width + at, tl.load(own + at, mask=at < width), mask=at < width)
    tl.store(mine + b, tl.load(kept + row))
    for step in range(0, tokens, WINDOW):
        j = step + tl.arange(0, WINDOW)
        inside, position = j < tokens, start + j
        to = tl.load(own + tl.minimum(position // page, width - 1), mask=inside)
        tl.store(positions + first + j, position, mask=inside)
        tl.store(write_pages + first + j, tl.where(j < count, to, spare), mask=inside)


@Kernel
@triton.jit
def _best(tops, places, scores, vocab, stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    make_way(EARLY)
    follow(EARLY)
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(scores + n * stride + at, mask=at < vocab, other=float("-inf"))
    best_in_block(tops, places, values, n, part, at, vocab)


@triton.jit
def best_in_block(tops, places, values, n, part, at, vocab):
    top, blocks = tl.max(values, 0), tl.num_programs(1)
    # Not argmax: where all are NaN it must still name a token.
    tl.store(
        places + n * blocks + part, tl.min(tl.where((values == top) & (at < vocab), at, vocab - 1), 0).to(tl.int64)
    )
    tl.store(tops + n * blocks + part, top)


@Kernel
@triton.jit
def _best_of(tokens, tops, places, words, blocks, BLOCK: tl.constexpr, WORDS: tl.constexpr, EARLY: tl.constexpr):
    make_way(EARLY)
    follow(EARLY)
    n, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    values = tl.load(tops + n * blocks + at, mask=at < blocks, other=float("-inf"))
    where = tl.load(places + n * blocks + at, mask=at < blocks, other=0)
    top, last = tl.max(values, 0), tl.max(where, 0)  # the last one where all are NaN
    found = tl.min(tl.where((values == top) & (at < blocks), where, last), 0)
    tl.store(tokens + n, tl.load(words + found) if WORDS else found)


@Kernel
@triton.jit
def _last_kept(y, x, offsets, kept, size, stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    make_way(EARLY)
    follow(EARLY)
    b, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    last = tl.load(offsets + b) + tl.load(kept + b) - 1
    tl.store(y + b * size + at, tl.load(x + last * stride + at, mask=at < size), mask=at < size)


@Kernel
@triton.jit
def _stamp(to, EARLY: tl.constexpr):
    make_way(EARLY)
    follow(EARLY)
    tl.store(to, tl.extra.cuda.globaltimer())
