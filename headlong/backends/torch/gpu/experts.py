"""Mixtures of experts on NVIDIA GPUs: tokens choose their experts, are grouped by them, and mixed, in four launches.

_score   some experts by a tile of tokens, over a part of k
_choose  a token's experts and their shares; whoever is last lists the groups
_up      some rows of an expert by a group of its pairs: silu(gate) * up
_down    some rows of an expert by a group of its pairs; whoever brings a token's last part mixes them

A pair is a token with one of its experts; the shared expert is the last of every token. Pairs of an expert are
multiplied together, so that its weights stream once. They are columns of a product, which do not see each other: a sum
is one chain over k in steps that the shape of the matrix decides, and a token's parts are added in the order of its own
choice. So its bits do not depend on who else came, nor on the order of a group.

Scores and what is between gate, up and down are rounded to the dtype of x, as the reference does; shares, parts and
their sum are not, up to the end.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.backends.torch.gpu.build import Kernel
from headlong.backends.torch.gpu.launch import follow, make_way, options
from headlong.backends.torch.gpu.linear import zeros
from headlong.backends.torch.kernels.experts import Mixture
from headlong.backends.torch.kernels.linear import Int8Weight, Weight

TOKENS = 16  # in a tile whose scores are made
PAIRS = (16, 32, 64, 128)  # in a group
ROWS = 64  # of a matrix in a tile: what one group of warps multiplies
SPLIT = 8  # parts of k that scores are made of, or fewer
STEP = 256  # bytes of each row in one step over k
STAGES = 3
LEAST = tl.constexpr(-3e38)  # a score below all others
TAKEN = tl.constexpr(-(1 << 63))


@dataclass(frozen=True)
class _Sizes:
    """Known when kernels are compiled; the same for all batches."""

    hidden: int
    experts: int
    inner: int
    shared: int  # as inner, of the shared expert
    pairs: int  # of a token
    renormalise: bool
    tokens: int  # in a tile whose scores are made
    rows: int  # of a matrix in a tile
    tiles: int  # of rows of the result
    split: int
    scores: int  # of a token, with room for whole tiles
    expert_block: int  # and the others: the next powers of two
    pair_block: int
    tile_block: int

    @property
    def widest(self) -> int:
        return max(self.inner, self.shared)


class _Table(NamedTuple):
    """Who goes where."""

    shares: Tensor  # [N, pairs] float32
    pairs: Tensor  # [E, N] int32: an expert's, as many as chose it, in any order
    groups: Tensor  # [G, 3] int32: expert, where its pairs begin, how many they are
    total: Tensor  # [1] int32: groups there are
    arrived: Tensor  # [N, tiles] int32: parts of a token's tile of rows that are there


def mix(x: Tensor, mixture: Mixture) -> Tensor:
    """x [N, H] through each token's experts -> [N, H]."""
    n, sizes = x.shape[0], _sizes(mixture)
    wide, given = _pairs_in_group(n, sizes), (n, x.stride(0))
    table = _table(n, wide, sizes, x.device)
    launch = {"num_warps": 4, "num_stages": STAGES, **options(x.device)}
    scores = x.new_empty(n, sizes.split, sizes.scores, dtype=torch.float32)
    _score[(sizes.scores // ROWS, sizes.split, triton.cdiv(n, TOKENS))](
        scores, x, _matrix(mixture.routers), *given, sizes, DEPTH=_depth(sizes.hidden, x, TOKENS), **launch
    )
    counters = zeros(sizes.experts + 1, x.device)
    _choose[(n,)](table, counters, scores, x, sizes, WIDE=wide, **launch | {"num_warps": 1})
    groups = triton.cdiv(n, wide) + table.groups.shape[0]
    inner = x.new_empty(n * sizes.pairs, sizes.widest)
    _up[(triton.cdiv(sizes.widest, ROWS // 2), groups)](
        inner, table, x, mixture.gate_up.stacked, _matrix(mixture.shared_gate_up), *given, sizes,
        DEPTH=_depth(sizes.hidden, x, wide), WIDE=wide, **launch,
    )  # fmt: skip
    y, parts = torch.empty_like(x), x.new_empty(n * sizes.pairs, sizes.hidden, dtype=torch.float32)
    _down[(sizes.tiles, groups)](
        y, parts, table, inner, mixture.down.stacked, _matrix(mixture.shared_down), n, sizes,
        DEPTH=_depth(sizes.widest, x, wide), WIDE=wide, **launch,
    )  # fmt: skip
    return y


def _matrix(weight: Weight | Int8Weight) -> Tensor:
    assert isinstance(weight, Weight)
    return weight.matrix


def _sizes(mixture: Mixture) -> _Sizes:
    count, hidden, inner = mixture.down.shape
    pairs, tiles = mixture.chosen + 1, triton.cdiv(hidden, ROWS)
    return _Sizes(
        hidden, count, inner, mixture.shared_down.in_features, pairs, mixture.renormalise, TOKENS, ROWS, tiles,
        split=max(1, min(SPLIT, hidden // 128)),
        scores=triton.cdiv(count + 1, ROWS) * ROWS,
        expert_block=triton.next_power_of_2(count),
        pair_block=triton.next_power_of_2(pairs),
        tile_block=triton.next_power_of_2(tiles),
    )  # fmt: skip


def _pairs_in_group(n: int, sizes: _Sizes) -> int:
    """Twice as many as an expert has on average: most then have one group."""
    routed = n * (sizes.pairs - 1)
    return next((most for most in PAIRS if 2 * routed <= most * sizes.experts), PAIRS[-1])


def _depth(size: int, x: Tensor, wide: int) -> int:
    """Of one step over k."""
    depth = STEP // x.element_size() // (2 if wide >= 64 else 1)
    while depth > 16 and size % depth:
        depth //= 2
    return depth


def _table(n: int, wide: int, sizes: _Sizes, device: torch.device) -> _Table:
    routed = n * (sizes.pairs - 1)
    groups = min(routed, sizes.experts + routed // wide)

    def whole(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return _Table(
        torch.empty(n, sizes.pairs, dtype=torch.float32, device=device),
        whole(sizes.experts, n),
        whole(groups, 3),
        whole(1),
        whole(n, sizes.tiles),
    )


@triton.jit
def _product(weights, inputs, has_row, has_column, size, first, last, ROWS: tl.constexpr, DEPTH: tl.constexpr,
             WIDE: tl.constexpr):  # fmt: skip
    """Rows that begin at weights [ROWS] by columns that begin at inputs [WIDE], over k from first to last ->
    [ROWS, WIDE] in float32."""
    k = tl.arange(0, DEPTH)
    sums = tl.zeros((ROWS, WIDE), tl.float32)
    weights, inputs = weights[:, None] + k[None, :], inputs[None, :] + k[:, None]
    for step in range(first, last, DEPTH):
        inside = step + k < size
        w = tl.load(weights + step, mask=has_row[:, None] & inside[None, :], other=0.0)
        t = tl.load(inputs + step, mask=has_column[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(w, t, sums, input_precision="ieee")
    return sums


@Kernel
@triton.jit(do_not_specialize=["n"])
def _score(scores, x, routers, n, stride, sizes: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr):
    """Program (tile of experts, part of k, tile of tokens)."""
    follow(EARLY)
    rows = tl.program_id(0) * sizes.rows + tl.arange(0, sizes.rows)
    tokens = tl.program_id(2) * sizes.tokens + tl.arange(0, sizes.tokens)
    steps = tl.cdiv(tl.cdiv(sizes.hidden, DEPTH), sizes.split) * DEPTH
    first = tl.program_id(1) * steps
    last, has_token = tl.minimum(first + steps, sizes.hidden), tokens < n
    sums = _product(routers + rows * sizes.hidden, x + tokens.to(tl.int64) * stride, rows <= sizes.experts, has_token,
                    sizes.hidden, first, last, sizes.rows, DEPTH, sizes.tokens)  # fmt: skip
    make_way(EARLY)
    at = (tokens * sizes.split + tl.program_id(1))[None, :] * sizes.scores + rows[:, None]
    tl.store(scores + at, sums, mask=has_token[None, :] & (rows >= 0)[:, None])


@triton.jit
def _turned(bits):
    """Bits of floats as numbers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best(scores, expert, place, sizes):
    """The best first, of equals the lower: their ids and scores, each at its place."""
    keys = _turned(scores.to(tl.int32, bitcast=True)).to(tl.int64) << 32
    keys += sizes.expert_block - 1 - expert
    tops = tl.zeros(place.shape, tl.int64)
    for choice in range(sizes.pairs - 1):
        top = tl.max(keys, 0)
        tops = tl.where(place == choice, top, tops)
        keys = tl.where(keys == top, TAKEN, keys)
    ids = sizes.expert_block - 1 - (tops & (sizes.expert_block - 1)).to(tl.int32)
    return ids, _turned((tops >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@Kernel
@triton.jit
def _choose(table, counters, scores, x, sizes: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr):
    """Program (token). Each of its pairs is put beside the others of its expert."""
    make_way(EARLY)
    follow(EARLY)
    token, expert, place = tl.program_id(0), tl.arange(0, sizes.expert_block), tl.arange(0, sizes.pair_block)
    is_expert, is_choice = expert < sizes.experts, place < sizes.pairs - 1
    split: tl.constexpr = sizes.split
    mine = scores + token * split * sizes.scores
    found, gate = tl.load(mine + expert, mask=is_expert, other=0.0), tl.load(mine + sizes.experts)
    for part in tl.static_range(1, split):
        found += tl.load(mine + part * sizes.scores + expert, mask=is_expert, other=0.0)
        gate += tl.load(mine + part * sizes.scores + sizes.experts)
    found, gate = found.to(x.dtype.element_ty).to(tl.float32), gate.to(x.dtype.element_ty).to(tl.float32)
    found = tl.where(is_expert & (found > LEAST), found + 0.0, LEAST)  # for NaN too; 0 and -0 are equals
    ids, chosen = _best(found, expert, place, sizes)
    top = tl.max(found, 0)
    odds = tl.where(is_choice, tl.exp(tl.where(is_choice, chosen - top, 0.0)), 0.0)
    total = tl.sum(odds, 0) if sizes.renormalise else tl.sum(tl.exp(found - top), 0)
    pairs = token * sizes.pairs + place
    shares = tl.where(is_choice, odds / total, 1.0 / (1.0 + tl.exp(-gate)))
    tl.store(table.shares + pairs, shares, mask=place < sizes.pairs)
    before = tl.atomic_add(counters + ids, 1, mask=is_choice, sem="relaxed")
    tl.store(table.pairs + ids * tl.num_programs(0) + before, pairs, mask=is_choice)
    tile = tl.arange(0, sizes.tile_block)
    tl.store(table.arrived + token * sizes.tiles + tile, tl.zeros(tile.shape, tl.int32), mask=tile < sizes.tiles)
    tl.debug_barrier()  # all threads have counted before one of them may be the last
    through = counters + sizes.experts
    if tl.atomic_add(through, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(through, 0)
        _list(table, counters, sizes, WIDE)


@triton.jit
def _list(table, counts, sizes, WIDE: tl.constexpr):
    """Each expert's pairs in groups that are as wide as a product."""
    expert, room = tl.arange(0, sizes.expert_block), tl.num_programs(0)
    inside = expert < sizes.experts
    count = tl.load(counts + expert, mask=inside, other=0, cache_modifier=".cg")
    tl.store(counts + expert, tl.zeros(expert.shape, tl.int32), mask=inside)
    groups = (count + WIDE - 1) // WIDE
    first = tl.cumsum(groups, 0) - groups
    for group in range(tl.max(groups, 0)):
        record, mask = table.groups + (first + group) * 3, groups > group
        tl.store(record, expert, mask=mask)
        tl.store(record + 1, expert * room + group * WIDE, mask=mask)
        tl.store(record + 2, tl.minimum(count - group * WIDE, WIDE), mask=mask)
    tl.store(table.total, tl.sum(groups, 0))


@triton.jit
def _group(table, n, sizes, WIDE: tl.constexpr):
    """The program's group: its expert, where its pairs begin, how many they are, and whether there is such a group.
    Those of the shared expert, which is numbered after the others, come first."""
    group = tl.program_id(1) - tl.cdiv(n, WIDE)
    record, is_routed = table.groups + group * 3, group >= 0
    expert = tl.load(record, mask=is_routed, other=sizes.experts)
    start = tl.load(record + 1, mask=is_routed, other=0)
    count = tl.load(record + 2, mask=is_routed, other=n - tl.program_id(1) * WIDE)
    return expert, start, count, group < tl.load(table.total)


@triton.jit
def _pairs(table, expert, start, count, sizes, WIDE: tl.constexpr):
    """The pairs of a group [WIDE], and which of them are there."""
    column, is_shared = tl.arange(0, WIDE), expert == sizes.experts
    routed = tl.load(table.pairs + start + column, mask=column < tl.where(is_shared, 0, count), other=0)
    tokens = tl.program_id(1) * WIDE + column
    return tl.where(is_shared, tokens * sizes.pairs + sizes.pairs - 1, routed), column < count


@Kernel
@triton.jit(do_not_specialize=["n"])
def _up(inner, table, x, experts, shared, n, stride, sizes: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
        EARLY: tl.constexpr):  # fmt: skip
    """Program (tile of rows, group): a tile has half its rows from the gate and half from up."""
    follow(EARLY)
    expert, start, count, exists = _group(table, n, sizes, WIDE)
    if exists == 0:
        return
    pairs, there = _pairs(table, expert, start, count, sizes, WIDE)
    half: tl.constexpr = sizes.rows // 2
    width = tl.where(expert == sizes.experts, sizes.shared, sizes.inner)
    matrix = experts + expert.to(tl.int64) * (2 * sizes.inner * sizes.hidden)
    matrix = tl.where(expert == sizes.experts, shared, matrix)
    at = tl.arange(0, sizes.rows)
    row = tl.program_id(0) * half + at % half
    rows = row + at // half * width
    tokens = (pairs // sizes.pairs).to(tl.int64)
    sums = _product(matrix + rows * sizes.hidden, x + tokens * stride, row < width, there, sizes.hidden, 0,
                    sizes.hidden, sizes.rows, DEPTH, WIDE)  # fmt: skip
    make_way(EARLY)
    kind = inner.dtype.element_ty
    sums = sums.to(kind).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(sums, (2, half, WIDE)), (1, 2, 0)))
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    row = tl.program_id(0) * half + tl.arange(0, half)
    places = pairs[None, :].to(tl.int64) * sizes.widest + row[:, None]
    tl.store(inner + places, (silu * up).to(kind), mask=there[None, :] & (row < width)[:, None])


@Kernel
@triton.jit(do_not_specialize=["n"])
def _down(y, parts, table, inner, experts, shared, n, sizes: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
          EARLY: tl.constexpr):  # fmt: skip
    """Program (tile of rows, group)."""
    follow(EARLY)
    expert, start, count, exists = _group(table, n, sizes, WIDE)
    if exists == 0:
        return
    pairs, there = _pairs(table, expert, start, count, sizes, WIDE)
    width = tl.where(expert == sizes.experts, sizes.shared, sizes.inner)
    matrix = experts + expert.to(tl.int64) * (sizes.hidden * sizes.inner)
    matrix = tl.where(expert == sizes.experts, shared, matrix)
    rows = tl.program_id(0) * sizes.rows + tl.arange(0, sizes.rows)
    has_row = rows < sizes.hidden
    sums = _product(matrix + rows * width, inner + pairs.to(tl.int64) * sizes.widest, has_row, there, width, 0, width,
                    sizes.rows, DEPTH, WIDE)  # fmt: skip
    make_way(EARLY)
    mask = has_row[:, None] & there[None, :]
    tl.store(parts + pairs[None, :].to(tl.int64) * sizes.hidden + rows[:, None], sums, mask=mask)
    tl.debug_barrier()  # all threads' parts are there before they are counted
    tokens = pairs // sizes.pairs
    counted = table.arrived + tokens * sizes.tiles + tl.program_id(0)
    before = tl.atomic_add(counted, 1, mask=there, sem="acq_rel")
    complete = there & (before == sizes.pairs - 1)
    if tl.max(complete.to(tl.int32), 0) > 0:
        _add(y, parts, table, tokens, rows, complete, has_row, sizes)


@triton.jit
def _add(y, parts, table, tokens, rows, complete, has_row, sizes):
    """Rows of tokens whose parts are all there, added in the order of their choice, the shared expert's last."""
    pairs: tl.constexpr = sizes.pairs
    mask = has_row[:, None] & complete[None, :]
    mixed = tl.zeros(mask.shape, tl.float32)
    for place in tl.static_range(pairs):
        pair = tokens * pairs + place
        share = tl.load(table.shares + pair, mask=complete, other=0.0)
        at = parts + pair[None, :].to(tl.int64) * sizes.hidden + rows[:, None]
        mixed += share[None, :] * tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    places = tokens[None, :].to(tl.int64) * sizes.hidden + rows[:, None]
    tl.store(y + places, mixed.to(y.dtype.element_ty), mask=mask)
