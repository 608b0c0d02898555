"""Norms, gates and rotary positions on NVIDIA GPUs: one program a token, or a token's head, so none sees another."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.backends.torch.gpu.build import Kernel
from headlong.backends.torch.gpu.launch import follow, make_way, options


def add_norm(x: Tensor, add: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [N, H] + add, and its RMS norm by weight [H] float32; x is overwritten where there is something to add."""
    (n, size), y = x.shape, torch.empty_like(x)
    block = triton.next_power_of_2(size)
    added = x if add is None else add
    _add_norm[(n,)](y, x, added, weight, size, eps, ADDS=add is not None, BLOCK=block, **_launch(x, block))
    return x, y


def pair_norm(first: Tensor, second: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norms of two [N, size] side by side, [N, 2 size]; weight [2, size]."""
    n, size = first.shape
    y = first.new_empty(n, 2 * size)
    block = triton.next_power_of_2(size)
    strides = first.stride(0), second.stride(0)
    _pair_norm[(n, 2)](y, first, second, weight, size, *strides, eps, BLOCK=block, **_launch(first, block))
    return y


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both [N, size]; the gate may be columns of a wider tensor."""
    (n, size), y = x.shape, torch.empty_like(x)
    block = min(1024, triton.next_power_of_2(size))
    _gated[(n, triton.cdiv(size, block))](y, x, gate, size, gate.stride(0), BLOCK=block, **_launch(x, block))
    return y


def swiglu(gate_up: Tensor) -> Tensor:
    """[N, 2 I], gate first -> silu(gate) * up, [N, I]."""
    n, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(n, size)
    block = min(1024, triton.next_power_of_2(size))
    launch = _launch(gate_up, block)
    _swiglu[(n, triton.cdiv(size, block))](y, gate_up, size, gate_up.stride(0), BLOCK=block, **launch)
    return y


def norm_rope(x: Tensor, weight: Tensor, eps: float, turn: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    """Heads side by side, x [N, heads * D] (columns of a wider tensor), weight [heads, D], cos and sin
    [P, rotary / 2] -> [N, heads, D], normed and turned."""
    n, (heads, dim), (cos, sin) = x.shape[0], weight.shape, turn
    y = x.new_empty(n, heads, dim)
    block = triton.next_power_of_2(dim)
    sizes = dim, cos.shape[1], x.stride(0), eps
    _norm_rope[(n, heads)](y, x, weight, cos, sin, positions, *sizes, BLOCK=block, **_launch(x, block))
    return y


def _launch(x: Tensor, block: int) -> dict[str, int]:
    return {"num_warps": min(8, max(1, block // 256)), **options(x.device)}


@triton.jit
def _rms(x, weight, size, eps):
    return x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * weight


@Kernel
@triton.jit
def _add_norm(y, x, add, weight, size, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    make_way(EARLY)
    at = tl.arange(0, BLOCK)
    inside, first = at < size, tl.program_id(0).to(tl.int64) * size
    factor = tl.load(weight + at, mask=inside, other=0.0)
    if ADDS:  # then the stream was there before what is added was begun
        value = tl.load(x + first + at, mask=inside, other=0.0)
        follow(EARLY)
        added = tl.load(add + first + at, mask=inside, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + added).to(value.dtype)
        tl.store(x + first + at, value, mask=inside)
    else:
        follow(EARLY)
        value = tl.load(x + first + at, mask=inside, other=0.0)
    normed = _rms(value.to(tl.float32), factor, size, eps)
    tl.store(y + first + at, normed.to(y.dtype.element_ty), mask=inside)


@Kernel
@triton.jit
def _pair_norm(
    y, first, second, weight, size, first_stride, second_stride, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    make_way(EARLY)
    follow(EARLY)
    at = tl.arange(0, BLOCK)
    row, which, inside = tl.program_id(0).to(tl.int64), tl.program_id(1), at < size
    ones, others = tl.where(which == 0, size, 0), tl.where(which == 0, 0, size)
    one = tl.load(first + row * first_stride + at, mask=at < ones, other=0.0).to(tl.float32)
    other = tl.load(second + row * second_stride + at, mask=at < others, other=0.0).to(tl.float32)
    factor = tl.load(weight + which * size + at, mask=inside, other=0.0)
    normed = _rms(tl.where(which == 0, one, other), factor, size, eps)
    tl.store(y + (row * 2 + which) * size + at, normed.to(y.dtype.element_ty), mask=inside)


@Kernel
@triton.jit
def _gated(y, x, gate, size, stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    make_way(EARLY)
    follow(EARLY)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, inside = tl.program_id(0).to(tl.int64), at < size
    value = tl.load(x + row * size + at, mask=inside, other=0.0)
    opened = 1.0 / (1.0 + tl.exp(-tl.load(gate + row * stride + at, mask=inside, other=0.0).to(tl.float32)))
    opened = opened.to(value.dtype).to(tl.float32)
    tl.store(y + row * size + at, (value.to(tl.float32) * opened).to(value.dtype), mask=inside)


@Kernel
@triton.jit
def _swiglu(y, gate_up, size, stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    make_way(EARLY)
    follow(EARLY)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, inside = tl.program_id(0).to(tl.int64), at < size
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * size + at, (silu * up).to(gate.dtype), mask=inside)


@Kernel
@triton.jit
def _norm_rope(y, x, weight, cos, sin, positions, dim, half, stride, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    make_way(EARLY)
    at = tl.arange(0, BLOCK)
    row, head, inside = tl.program_id(0).to(tl.int64), tl.program_id(1), at < dim
    source = x + row * stride + head * dim
    # Dimension j turns with j + half, its partner.
    turning = at < 2 * half
    with_at = tl.where(at < half, at + half, at - half)
    factor = tl.load(weight + head * dim + at, mask=inside, other=0.0)
    their_factor = tl.load(weight + head * dim + with_at, mask=turning, other=0.0)
    angle = tl.load(positions + row) * half + tl.where(at < half, at, at - half)
    c = tl.load(cos + angle, mask=turning, other=1.0)
    s = tl.load(sin + angle, mask=turning, other=0.0)
    follow(EARLY)  # all before it was there when the pass began
    value = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / dim + eps)
    mine = value * scale * factor
    partner = tl.load(source + with_at, mask=turning, other=0.0).to(tl.float32) * scale * their_factor
    kind = y.dtype.element_ty
    mine, partner = mine.to(kind).to(tl.float32), partner.to(kind).to(tl.float32)
    turned = tl.where(at < half, mine * c - partner * s, mine * c + partner * s)
    out = tl.where(turning, turned, mine)
    tl.store(y + (row * tl.num_programs(1) + head) * dim + at, out.to(kind), mask=inside)
