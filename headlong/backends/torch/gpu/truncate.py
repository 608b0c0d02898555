"""Which tokens may come, on NVIDIA GPUs: what is around a cut is found by counting, and searched for the very token.

    tops      the best score of each block
    count     tokens in bins by how far they are below the best, and the weight of all
    bound     the bins in which the cuts of a row lie
    gather    their tokens: few, as a rule; and how many are above them, and of what weight
    search    the lowest and the highest token that may come, four bits at a time
    cut       -inf for the others

Weights are the whole numbers of kernels/truncate.py, so blocks may add theirs in any order.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.backends.torch.gpu.build import Kernel
from headlong.backends.torch.gpu.launch import follow, make_way, options
from headlong.backends.torch.gpu.noise import uniform_word
from headlong.backends.torch.kernels.noise import XTC as XTC_STREAM

if TYPE_CHECKING:
    from headlong.backends.torch.kernels.truncate import Cuts

ROOM = 1 << 15  # tokens that are gathered; where more matter, the search reads all

FEW, MANY = tl.constexpr(128), tl.constexpr(1024)  # tokens that a search looks at in one go
BINS = tl.constexpr(512)
IN_ONE = tl.constexpr(16)  # bins in which the weight falls by e; all of them reach down to a weight of 0
XTC = tl.constexpr(XTC_STREAM)
WHOLE = tl.constexpr(float(1 << 40))
MARGIN = tl.constexpr(1e-3)  # more than float32 is off when bounds are added up
LOWEST = tl.constexpr(-(1 << 31))  # below the key of any score
HIGHEST = tl.constexpr((1 << 31) - 1)


def truncate(scores: Tensor, rows: Tensor, positions: Tensor, cuts: "Cuts") -> Tensor:
    """scores [B, W, V] of rows [B] for tokens at positions [B, W], contiguous -> -inf where cut off, in place."""
    (width, vocab), n, device = scores.shape[1:], positions.numel(), scores.device
    block = 2048 if n < 8 else 8192  # few positions are spread wider
    blocks, launch = triton.cdiv(vocab, block), options(device)
    tops = torch.empty(n, blocks, dtype=torch.float32, device=device)
    bins = torch.empty(n, BINS.value, dtype=torch.int32, device=device)
    sums = torch.empty(n, 4, dtype=torch.int64, device=device)  # weight; gathered; above those, and their weight
    found = torch.empty(2, n, ROOM, dtype=torch.int32, device=device)  # keys, tokens
    edges = torch.empty(n, 4, dtype=torch.int32, device=device)  # first and last bin; then what may come
    asked = rows, cuts.top_k, cuts.top_p, cuts.min_p, cuts.xtc
    spread = {"BLOCK": block, "BLOCKS": triton.next_power_of_2(blocks), "num_warps": 4 if n < 8 else 8, **launch}
    _tops[(n, blocks)](tops, bins, sums, scores, vocab, BLOCK=block, **launch)
    _count[(n, blocks)](bins, sums, scores, tops, vocab, blocks, **spread)
    _bound[(n,)](edges, bins, sums, *asked, vocab, width, **launch)
    _gather[(n, blocks)](found, sums, scores, tops, edges, vocab, blocks, n, ROOM=ROOM, **spread)
    _search[(n,)](
        edges, found, sums, scores, tops, positions, cuts.seed, *asked, vocab, width, blocks, n, ROOM=ROOM,
        BLOCKS=spread["BLOCKS"], num_warps=8, **launch
    )  # fmt: skip
    _cut[(n, blocks)](scores, edges, tops, rows, cuts.min_p, vocab, width, blocks, **spread)
    return scores


@triton.jit
def _key(score):
    """A whole number in the order of the scores."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0, its equal
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(score, top):
    return tl.where(score > float("-inf"), tl.exp(score - top) * WHOLE, 0.0).to(tl.int64)


@triton.jit
def _weight_of(key, top):
    return _weight((key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True), top)


@triton.jit
def _bin(score, top):
    """The last bin is kept for what is no token."""
    below = (top - score) * IN_ONE
    return tl.where(below < BINS - 2, below, BINS - 2.0).to(tl.int32)


@triton.jit
def _top(tops, n, blocks, BLOCKS: tl.constexpr):
    at = tl.arange(0, BLOCKS)
    return tl.max(tl.load(tops + n * blocks + at, mask=at < blocks, other=float("-inf")), 0)


@triton.jit
def _share(part, total):
    """The least weight that is such a part of a total, and not nothing."""
    return tl.maximum(tl.ceil(part.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _floor(min_p):
    return tl.ceil(min_p.to(tl.float64) * WHOLE).to(tl.int64)


@Kernel
@triton.jit
def _tops(tops, bins, sums, scores, vocab, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    make_way(EARLY)
    follow(EARLY)
    n, part, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + n * vocab + at, mask=at < vocab, other=float("-inf"))
    tl.store(tops + n * blocks + part, tl.max(score, 0))
    if part == 0:
        tl.store(bins + n * BINS + tl.arange(0, BINS), 0)
        tl.store(sums + n * 4 + tl.arange(0, 4), 0)


@Kernel
@triton.jit
def _count(bins, sums, scores, tops, vocab, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr):
    make_way(EARLY)
    follow(EARLY)
    n, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top, inside = _top(tops, n, blocks, BLOCKS), at < vocab
    score = tl.load(scores + n * vocab + at, mask=inside, other=float("-inf"))
    counts = tl.histogram(tl.where(inside, _bin(score, top), BINS - 1), BINS)
    tl.atomic_add(bins + n * BINS + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")
    tl.atomic_add(sums + n * 4, tl.sum(_weight(score, top), 0), sem="relaxed")


@Kernel
@triton.jit
def _bound(edges, bins, sums, rows, top_k, top_p, min_p, xtc, vocab, width, EARLY: tl.constexpr):
    """Tokens of bins before the first are surely kept, those after the last surely not, or nothing depends on them.

    A bin's tokens weigh from `least` to `most` of the best one. Top-p leaves out a tail: what the bins from some on
    weigh at least tells what is surely kept, and what they weigh at most tells what surely is not.
    """
    make_way(EARLY)
    follow(EARLY)
    n, which = tl.program_id(0).to(tl.int64), tl.arange(0, BINS)
    row = tl.load(rows + n // width)
    k, p, m = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    chance, threshold = tl.load(xtc + 2 * row), tl.load(xtc + 2 * row + 1)
    counts = tl.where(which < BINS - 1, tl.load(bins + n * BINS + which), 0)
    most = tl.exp(-which.to(tl.float32) / IN_ONE)
    least = tl.where(which < BINS - 2, tl.maximum(tl.exp(-(which + 1).to(tl.float32) / IN_ONE) - 1 / WHOLE, 0.0), 0.0)
    total = (tl.load(sums + n * 4) / WHOLE).to(tl.float32)
    tail = (1 - p) * total
    first, last = tl.full([], BINS, tl.int32), tl.full([], -1, tl.int32)  # nothing is to be searched for
    if p <= 1:
        surely = tl.sum((tl.cumsum(counts * least, 0, reverse=True) > tail * (1 + MARGIN)).to(tl.int32), 0) - 1
        first = tl.maximum(surely, 0)
        last = tl.sum((tl.cumsum(counts * most, 0, reverse=True) > tail * (1 - MARGIN)).to(tl.int32), 0) - 1
    if k < vocab:
        last = tl.sum((tl.cumsum(counts, 0) < k).to(tl.int32), 0)
        first = tl.where(p <= 1, 0, last)  # top-p is a part of what the first k weigh, so all of them are gathered
    if chance > 0:  # all that may be too good, and all that is kept, since its weight is asked for
        heavy = tl.where(m > 0, m, threshold * total) * (1 - MARGIN)
        last = tl.where(last < 0, tl.sum((most >= heavy).to(tl.int32), 0) - 1, last)
        first = tl.full([], 0, tl.int32)
    tl.store(edges + 4 * n, first)
    tl.store(edges + 4 * n + 1, last)


@Kernel
@triton.jit
def _gather(found, sums, scores, tops, edges, vocab, blocks, many, ROOM: tl.constexpr, BLOCK: tl.constexpr,
            BLOCKS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    make_way(EARLY)
    follow(EARLY)
    n, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top, inside = _top(tops, n, blocks, BLOCKS), at < vocab
    first, last = tl.load(edges + 4 * n), tl.load(edges + 4 * n + 1)
    score = tl.load(scores + n * vocab + at, mask=inside, other=float("-inf"))
    bin = tl.where(inside, _bin(score, top), BINS - 1)
    matters, above = (bin >= first) & (bin <= last), (bin < first) & (last >= 0)
    count, higher = tl.sum(matters.to(tl.int32), 0), tl.sum(above.to(tl.int64), 0)
    if count > 0:
        begin = tl.atomic_add(sums + n * 4 + 1, count.to(tl.int64), sem="relaxed")
        place = begin + tl.cumsum(matters.to(tl.int32), 0) - 1
        fits = matters & (place < ROOM)
        tl.store(found + n * ROOM + place, _key(score), mask=fits)
        tl.store(found + (many + n) * ROOM + place, at, mask=fits)
    if higher > 0:
        tl.atomic_add(sums + n * 4 + 2, higher, sem="relaxed")
        tl.atomic_add(sums + n * 4 + 3, tl.sum(tl.where(above, _weight(score, top), 0), 0), sem="relaxed")


@triton.jit
def _some(found, scores, n, many, start, count, vocab, ROOM: tl.constexpr, STEP: tl.constexpr):
    """Keys and tokens of those gathered, or of all where they are too many; what is not there has the lowest key."""
    at = start + tl.arange(0, STEP)
    few, every = at < tl.where(count <= ROOM, count, 0), at < tl.where(count > ROOM, vocab, 0)
    key = tl.load(found + n * ROOM + at, mask=few, other=LOWEST)
    token = tl.load(found + (many + n) * ROOM + at, mask=few, other=0)
    score = tl.load(scores + n * vocab + at, mask=every, other=0.0)
    return tl.where(every, _key(score), key), tl.where(every, at, token)


@triton.jit
def _within(key, token, level, last):
    """Above a level, or on it and not after the last token there."""
    return (key > level) | ((key == level) & (token <= last))


@triton.jit
def _reach(found, scores, n, many, count, vocab, top, level, last, wanted,
           KIND: tl.constexpr, ROOM: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """The highest place at which tokens, from the best on, reach together what is wanted.

    KIND: "weight" (by key, of those within the level), "count" (by key), "token" (the lowest first, on the level).
    """
    place, unit, digits = tl.full([], LOWEST, tl.int32), tl.full([], 1 << 28, tl.int32), tl.arange(0, 16)
    for _ in range(8):
        reached = tl.zeros([16], tl.int64)
        for start in range(0, tl.where(count > ROOM, vocab, count), STEP):
            key, token = _some(found, scores, n, many, start, count, vocab, ROOM, STEP)
            if KIND == "weight":
                value, weight = key, tl.where(_within(key, token, level, last), _weight_of(key, top), 0)
            elif KIND == "count":
                value, weight = key, (key > LOWEST).to(tl.int32)
            else:
                value, weight = -token, ((key == level) & (token <= last)).to(tl.int32)
            reached += tl.sum(tl.where(value[:, None] >= (place + unit * digits)[None, :], weight[:, None], 0), 0)
        place += unit * tl.maximum(tl.sum((reached >= wanted).to(tl.int32), 0) - 1, 0)
        unit = unit >> 4
    return place


@triton.jit
def _edge(found, scores, n, many, count, vocab, top, level, last, wanted,
          KIND: tl.constexpr, ROOM: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """The lowest of the best tokens that together reach what is wanted: its key, and the token itself."""
    place = _reach(found, scores, n, many, count, vocab, top, level, last, wanted, KIND, ROOM, STEP)
    above, equal = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for start in range(0, tl.where(count > ROOM, vocab, count), STEP):
        key, token = _some(found, scores, n, many, start, count, vocab, ROOM, STEP)
        weight = _weight_of(key, top) if KIND == "weight" else (key > LOWEST).to(tl.int64)
        within = _within(key, token, level, last)
        above += tl.sum(tl.where(within & (key > place), weight, 0), 0)
        equal += tl.sum((within & (key == place)).to(tl.int64), 0)
    each = tl.maximum(_weight_of(place, top), 1) if KIND == "weight" else tl.full([], 1, tl.int64)
    final = tl.where(place == level, last, vocab)
    short = tl.cdiv(wanted - above, each)  # so many of the equal ones
    if short < equal:
        final = -_reach(found, scores, n, many, count, vocab, top, place, final, short, "token", ROOM, STEP)
    return place, final


@triton.jit
def _weight_within(found, scores, n, many, count, vocab, top, level, last, least,
                   ROOM: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Of those within a level with at least such a weight each, the weight of all."""
    total = tl.zeros([], tl.int64)
    for start in range(0, tl.where(count > ROOM, vocab, count), STEP):
        key, token = _some(found, scores, n, many, start, count, vocab, ROOM, STEP)
        weight = _weight_of(key, top)
        total += tl.sum(tl.where(_within(key, token, level, last) & (weight >= least), weight, 0), 0)
    return total


@triton.jit
def _lowest(found, scores, n, many, count, vocab, top, level, last, least, ROOM: tl.constexpr, STEP: tl.constexpr):
    """Of those within a level with at least such a weight: the lowest key, and the last token with it."""
    lowest, final = tl.full([], HIGHEST, tl.int32), tl.full([], -1, tl.int32)
    for start in range(0, tl.where(count > ROOM, vocab, count), STEP):
        key, token = _some(found, scores, n, many, start, count, vocab, ROOM, STEP)
        heavy = _within(key, token, level, last) & (_weight_of(key, top) >= least)
        here = tl.min(tl.where(heavy, key, HIGHEST), 0)
        there = tl.max(tl.where(heavy & (key == here), token, -1), 0)
        final = tl.where(here < lowest, there, tl.where(here == lowest, tl.maximum(final, there), final))
        lowest = tl.minimum(lowest, here)
    return lowest, final


@triton.jit
def _find(found, sums, scores, n, many, vocab, top, k, p, floor, coin, threshold,
          ROOM: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """The lowest token that may come, and the highest: their keys, and the tokens themselves."""
    total, count = tl.load(sums + n * 4), tl.load(sums + n * 4 + 1).to(tl.int32)
    # What is above those gathered; where all are read, nothing is.
    higher = tl.where(count > ROOM, 0, tl.load(sums + n * 4 + 2))
    heavier = tl.where(count > ROOM, 0, tl.load(sums + n * 4 + 3))
    level, last = tl.full([], LOWEST, tl.int32), vocab
    if k < vocab:
        level, last = _edge(found, scores, n, many, count, vocab, top, level, last, k - higher, "count", ROOM, STEP)
    if p <= 1:
        if k < vocab:
            total = _weight_within(found, scores, n, many, count, vocab, top, level, last, 0, ROOM, STEP)
        wanted = _share(p, total) - heavier
        level, last = _edge(found, scores, n, many, count, vocab, top, level, last, wanted, "weight", ROOM, STEP)
    high, first = tl.full([], HIGHEST, tl.int32), tl.full([], -1, tl.int32)
    if coin:
        if (level > LOWEST) | (floor > 0):
            total = _weight_within(found, scores, n, many, count, vocab, top, level, last, floor, ROOM, STEP)
        least = tl.maximum(_share(threshold, total), floor)
        high, first = _lowest(found, scores, n, many, count, vocab, top, level, last, least, ROOM, STEP)
    return level, last, high, first


@Kernel
@triton.jit
def _search(edges, found, sums, scores, tops, positions, seed, rows, top_k, top_p, min_p, xtc, vocab, width, blocks,
            many, ROOM: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    make_way(EARLY)
    follow(EARLY)
    n = tl.program_id(0).to(tl.int64)
    row, top = tl.load(rows + n // width), _top(tops, n, blocks, BLOCKS)
    k, p, floor = tl.load(top_k + row), tl.load(top_p + row), _floor(tl.load(min_p + row))
    chance = (uniform_word(tl.load(seed + row), XTC, tl.load(positions + n)).to(tl.float64) + 0.5) * 2.0**-32
    coin, threshold = chance < tl.load(xtc + 2 * row).to(tl.float64), tl.load(xtc + 2 * row + 1)
    if tl.load(sums + n * 4 + 1) <= FEW:
        level, last, high, first = _find(
            found, sums, scores, n, many, vocab, top, k, p, floor, coin, threshold, ROOM, FEW
        )
    else:
        level, last, high, first = _find(
            found, sums, scores, n, many, vocab, top, k, p, floor, coin, threshold, ROOM, MANY
        )
    tl.store(edges + 4 * n, level)
    tl.store(edges + 4 * n + 1, last)
    tl.store(edges + 4 * n + 2, high)
    tl.store(edges + 4 * n + 3, first)


@Kernel
@triton.jit
def _cut(scores, edges, tops, rows, min_p, vocab, width, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
         EARLY: tl.constexpr):  # fmt: skip
    make_way(EARLY)
    follow(EARLY)
    n, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    level, last = tl.load(edges + 4 * n), tl.load(edges + 4 * n + 1)
    high, first = tl.load(edges + 4 * n + 2), tl.load(edges + 4 * n + 3)
    top, floor = _top(tops, n, blocks, BLOCKS), _floor(tl.load(min_p + tl.load(rows + n // width)))
    mine, inside = scores + n * vocab + at, at < vocab
    score = tl.load(mine, mask=inside, other=0.0)
    key = _key(score)
    keep = _within(key, at, level, last) & ~((key > high) | ((key == high) & (at < first)))
    keep &= _weight(score, top) >= floor
    tl.store(mine, float("-inf"), mask=inside & ~keep)
