"""Linear layers on NVIDIA GPUs: weights stream once, and a token's bits do not depend on the tokens beside it.

A program multiplies a tile of weight rows with a tile of tokens. Each of its sums is one chain over k in steps that
the shape of the matrix alone decides; the tokens are the narrow side of the tile, so their number changes how many
sums there are and never how one is made. Matrices with few rows are split along k, and whoever finishes a tile last
adds the parts, first to last.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.backends.torch.gpu.build import Kernel
from headlong.backends.torch.gpu.launch import follow, make_way, options

TOKENS = (16, 32, 64, 128)  # in a tile
ROWS = 64  # of a matrix in a tile: what one group of warps multiplies
LONG = 1024  # sums from which a matrix of few rows is split
PROGRAMS = 132  # that a GPU runs at once, about; fixed, so that a split is the same on all of them


@dataclass(frozen=True)
class Tiles:
    """How the products with one matrix are cut."""

    rows: int
    depth: int
    split: int
    warps: int
    stages: int


def tiles(out: int, size: int, wide: int, fused: bool = False) -> Tiles:
    """A split by the shape of the matrix alone, since sums depend on it; the rest by what is fastest."""
    depth = 64 if fused or wide >= 64 else 128
    while depth > 16 and size % depth:
        depth //= 2
    if fused:
        return Tiles(ROWS, depth, 1, 4, 5 if wide < 64 else 4 if wide == 64 else 3)
    if -(-out // ROWS) < PROGRAMS and size >= LONG:
        return Tiles(ROWS, min(128, 2 * depth) if size % 128 == 0 else depth, 2, 4, 5 if wide < 64 else 3)
    if wide >= 128:
        return Tiles(2 * ROWS, depth, 1, 8, 5)
    return Tiles(ROWS, depth, 1, 4, 3 if wide < 64 else 4)


def tokens_in_tile(tokens: int) -> int:
    return next((most for most in TOKENS if tokens <= most), TOKENS[-1])


def linear(x: Tensor, weight: Tensor, scales: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x [N, in] (rows may be apart), weight [out, in], of 8 bits where there are scales [out] -> [N, out]."""
    (n, size), out = x.shape, weight.shape[0]
    wide = tokens_in_tile(n)
    cut = tiles(out, size, wide)
    y = x.new_empty(n, out, dtype=dtype)
    row_tiles, token_tiles = triton.cdiv(out, cut.rows), triton.cdiv(n, wide)
    parts, counters = y, y
    if cut.split > 1:
        parts = torch.empty(cut.split, n, out, dtype=torch.float32, device=x.device)
        counters = zeros(row_tiles * token_tiles, x.device)
    _linear[(token_tiles, row_tiles, cut.split)](
        y, x, weight, y if scales is None else scales, parts, counters, n, out, size, x.stride(0),
        ROWS=cut.rows, DEPTH=cut.depth, WIDE=wide, SPLIT=cut.split, SCALED=scales is not None,
        EXACT=x.dtype == torch.float32, num_warps=cut.warps, num_stages=cut.stages, **options(x.device),
    )  # fmt: skip
    return y


def linear_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, in], weight [2 I, in], gate first -> silu(gate) * up, [N, I]."""
    (n, size), inner = x.shape, weight.shape[0] // 2
    wide = tokens_in_tile(n)
    cut = tiles(inner, size, wide, fused=True)
    y = x.new_empty(n, inner)
    _linear_swiglu[(triton.cdiv(n, wide), triton.cdiv(inner, cut.rows))](
        y, x, weight, n, inner, size, x.stride(0),
        ROWS=cut.rows, DEPTH=cut.depth, WIDE=wide, EXACT=x.dtype == torch.float32,
        num_warps=cut.warps, num_stages=cut.stages, **options(x.device),
    )  # fmt: skip
    return y


_zeros: dict[torch.device, Tensor] = {}


def zeros(count: int, device: torch.device) -> Tensor:
    """Zeros; the kernel that counts with them leaves zeros behind."""
    if device not in _zeros or len(_zeros[device]) < count:
        _zeros[device] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
    return _zeros[device]


@triton.jit
def _product(x, weight, rows, tokens, n, out, size, stride, first, last, ROWS: tl.constexpr, DEPTH: tl.constexpr,
             WIDE: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Weight rows [ROWS] by tokens [WIDE] over k from first to last -> [ROWS, WIDE] in float32."""
    k = tl.arange(0, DEPTH)
    sums = tl.zeros((ROWS, WIDE), tl.float32)
    weights = weight + rows[:, None].to(tl.int64) * size + k[None, :]
    inputs = x + tokens[None, :] * stride + k[:, None]
    for step in range(first, last, DEPTH):
        inside = step + k < size
        w = tl.load(weights + step, mask=(rows < out)[:, None] & inside[None, :], other=0.0)
        t = tl.load(inputs + step, mask=(tokens < n)[None, :] & inside[:, None], other=0.0)
        if EXACT:
            sums = tl.dot(w.to(tl.float32), t.to(tl.float32), sums, input_precision="ieee")
        else:
            sums = tl.dot(w.to(t.dtype), t, sums)
    return sums


@Kernel
@triton.jit
def _linear(y, x, weight, scales, parts, counters, n, out, size, stride, ROWS: tl.constexpr, DEPTH: tl.constexpr,
            WIDE: tl.constexpr, SPLIT: tl.constexpr, SCALED: tl.constexpr, EXACT: tl.constexpr,
            EARLY: tl.constexpr):  # fmt: skip
    token_tile, row_tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    tokens = token_tile * WIDE + tl.arange(0, WIDE)
    steps = tl.cdiv(tl.cdiv(size, DEPTH), SPLIT) * DEPTH
    first = part * steps
    follow(EARLY)
    sums = _product(x, weight, rows, tokens, n, out, size, stride, first, min(first + steps, size), ROWS, DEPTH, WIDE,
                    EXACT)  # fmt: skip
    make_way(EARLY)
    if SCALED:
        sums = sums * tl.load(scales + rows, mask=rows < out, other=0.0)[:, None]
    places = tokens[None, :].to(tl.int64) * out + rows[:, None]
    inside = (tokens < n)[None, :] & (rows < out)[:, None]
    if SPLIT > 1:
        tl.store(parts + part * n * out + places, sums, mask=inside)
        tl.debug_barrier()  # the part is there before it is counted
        counter = counters + row_tile * tl.num_programs(0) + token_tile
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1:
            sums = tl.zeros((ROWS, WIDE), tl.float32)
            for other in tl.static_range(SPLIT):
                sums += tl.load(parts + other * n * out + places, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(y + places, sums.to(y.dtype.element_ty), mask=inside)
            tl.store(counter, 0)
    else:
        tl.store(y + places, sums.to(y.dtype.element_ty), mask=inside)


@Kernel
@triton.jit
def _linear_swiglu(y, x, weight, n, inner, size, stride, ROWS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
                   EXACT: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    follow(EARLY)
    k = tl.arange(0, DEPTH)
    gate, up = tl.zeros((ROWS, WIDE), tl.float32), tl.zeros((ROWS, WIDE), tl.float32)
    weights = weight + rows[:, None].to(tl.int64) * size + k[None, :]
    ups = weights + inner.to(tl.int64) * size
    inputs = x + tokens[None, :] * stride + k[:, None]
    for step in range(0, size, DEPTH):
        inside = step + k < size
        mask = (rows < inner)[:, None] & inside[None, :]
        t = tl.load(inputs + step, mask=(tokens < n)[None, :] & inside[:, None], other=0.0)
        w, u = tl.load(weights + step, mask=mask, other=0.0), tl.load(ups + step, mask=mask, other=0.0)
        if EXACT:
            t = t.to(tl.float32)
            gate = tl.dot(w.to(tl.float32), t, gate, input_precision="ieee")
            up = tl.dot(u.to(tl.float32), t, up, input_precision="ieee")
        else:
            gate, up = tl.dot(w, t, gate), tl.dot(u, t, up)
    make_way(EARLY)
    gate = gate.to(y.dtype.element_ty).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(y.dtype.element_ty).to(tl.float32)
    mixed = silu * up.to(y.dtype.element_ty).to(tl.float32)
    places = tokens[None, :].to(tl.int64) * inner + rows[:, None]
    tl.store(y + places, mixed.to(y.dtype.element_ty), mask=(tokens < n)[None, :] & (rows < inner)[:, None])
