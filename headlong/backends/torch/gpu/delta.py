"""Windows of Gated DeltaNet with a late commit on NVIDIA GPUs, in three launches.

_mix     a token's q, k or v of one head: convolution, silu, unit length; its decay and strength
_run     some columns of one head's state: fold what was kept, then the window token by token
_finish  a token's head: gated norm, its key and decay to the waiting ones; the convolution's inputs move on

The columns of a head fold the same waiting keys and decays, so no program may write those before all have read them:
they wait for _finish, and so do the inputs, which several tokens of _mix read. What _run writes it alone reads.

A token's bits are those of one loop's body, compiled once: contraction is off and what is fused says so. Programs may
share out tokens as they like, and what the caller's tensors begin at is kept from the compiler, since sums follow the
layout that it picks for loads.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.backends.torch.gpu.build import Kernel
from headlong.backends.torch.gpu.launch import follow, make_way, options
from headlong.backends.torch.kernels.gated_delta import Delta, Kept, Memory
from headlong.backends.torch.ragged import Layout

COLUMNS = 16  # of a state in one program: one warp keeps them in registers and sums without a barrier
CHANNELS = 128  # of the convolution's inputs in one program


class _Given(NamedTuple):
    """What the caller hands in. Nothing is known of where it begins."""

    projected: Tensor  # [N, C + heads Dv + 2 heads]: qkv, z, b, a
    stride: int  # from a token to the next
    rows: Tensor  # [B]
    counts: Tensor  # [B]
    offsets: Tensor  # [B + 1]


class _Held(NamedTuple):
    """A layer's memory and its parameters."""

    states: Tensor
    waiting: Tensor
    inputs: Tensor
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor


class _Scratch(NamedTuple):
    """What the launches tell each other, float32."""

    mixed: Tensor  # [N, C]: q of unit length and scaled, k of unit length, v
    gates: Tensor  # [N, heads, 2]: decay, strength
    raw: Tensor  # [N, heads, Dv]: the outputs before their norm


@dataclass(frozen=True)
class _Sizes:
    """Known when kernels are compiled; the same for all batches and widths."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    max_width: int
    eps: float
    query_scale: float
    channels: int
    entry: int  # of a waiting token's head
    key_block: int  # and the others: the next powers of two
    value_block: int
    head_block: int
    past_block: int
    width_block: int


def window(delta: Delta, memory: Memory, projected: Tensor, kept: Kept, layout: Layout) -> Tensor:
    """Fold what was kept, then run windows: projected [N, ...] -> [N, heads Dv], gated."""
    tokens, batch, sizes = projected.shape[0], kept.rows.shape[0], _sizes(delta, memory)
    given = _Given(projected, projected.stride(0), kept.rows, kept.counts, layout.offsets)
    parameters = delta.conv, delta.decay, delta.dt_bias, delta.norm
    held = _Held(memory.states, memory.waiting, memory.inputs, *parameters)
    scratch = _scratch(sizes, tokens, projected.device)
    out = projected.new_empty(tokens, sizes.heads * sizes.value_dim)
    lanes = min(sizes.max_width, triton.cdiv(tokens, batch))
    launch = {"num_warps": 1, "enable_fp_fusion": False, **options(projected.device)}
    units, columns = 2 * sizes.key_heads + sizes.heads, triton.cdiv(sizes.value_dim, COLUMNS)
    _mix[(units, lanes, batch)](given, held, scratch, sizes, **launch)
    _run[(columns, sizes.heads, batch)](given, held, scratch, sizes, COLUMNS, **launch)
    units = sizes.heads * lanes + triton.cdiv(sizes.channels, CHANNELS)
    _finish[(units, batch)](out, given, held, scratch, lanes, sizes, CHANNELS, **launch)
    return out


def _sizes(delta: Delta, memory: Memory) -> _Sizes:
    heads, dims, (taps, channels) = delta.heads, (delta.key_dim, delta.value_dim), delta.conv.shape
    width = memory.waiting.shape[1]
    blocks = (triton.next_power_of_2(size) for size in (*dims, max(dims), taps, width))
    scale = delta.key_dim**-0.5
    return _Sizes(heads, delta.key_heads, *dims, taps, width, delta.eps, scale, channels, sum(dims) + 1, *blocks)


def _scratch(sizes: _Sizes, tokens: int, device: torch.device) -> _Scratch:
    shapes = (sizes.channels,), (sizes.heads, 2), (sizes.heads, sizes.value_dim)
    return _Scratch(*(torch.empty(tokens, *shape, dtype=torch.float32, device=device) for shape in shapes))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x), as accurate for large negative x: log(1 + y) = 2 artanh(y / (2 + y)), whose series needs 8 terms
    for a y of at most 1."""
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    series = 1.0 / 15
    for term in tl.static_range(1, 8):
        series = series * (s * s) + 1.0 / (15 - 2 * term)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _advance(state, key, correction, decay):
    """[Dk, columns] after one token, by the fold and by the window alike."""
    return tl.fma(state, decay, key[:, None] * correction[None, :])


@triton.jit
def _window_of(given, b):
    """Row, how many waiting tokens count, first token, number of tokens: there when the pass began."""
    first = tl.load(given.offsets + b)
    return (
        tl.load(given.rows + b).to(tl.int64),
        tl.load(given.counts + b),
        first,
        tl.load(given.offsets + b + 1) - first,
    )


@triton.jit
def _waiting_at(held, row, j, head, sizes):
    return held.waiting + ((row * sizes.max_width + j) * sizes.heads + head) * sizes.entry


@Kernel
@triton.jit(do_not_specialize=["given"], do_not_specialize_on_alignment=["given"])
def _mix(given, held, scratch, sizes: tl.constexpr, EARLY: tl.constexpr):
    """Program (unit, lane, b): every lanes-th token of a row, and of it one key head's q or k or one head's v."""
    make_way(EARLY)
    unit, key_units = tl.program_id(0), 2 * sizes.key_heads
    row, count, first, width = _window_of(given, tl.program_id(2))
    follow(EARLY)
    at, is_key = tl.arange(0, sizes.head_block), unit < key_units
    start = tl.where(is_key, unit * sizes.key_dim, key_units * sizes.key_dim + (unit - key_units) * sizes.value_dim)
    inside, channels = at < tl.where(is_key, sizes.key_dim, sizes.value_dim), start + at
    scale = tl.where(unit < sizes.key_heads, sizes.query_scale, 1.0)
    past = held.inputs + (row * (sizes.taps - 1 + sizes.max_width) + count) * sizes.channels + channels
    new = given.projected + first * given.stride + channels
    for j in range(tl.program_id(1), width, tl.num_programs(1)):
        x = silu(_convolve(past, new, given.stride, held.conv + channels, j, inside, sizes))
        unit_length = tl.rsqrt(tl.sum(x * x, 0) + 1e-6) * scale
        x = x * tl.where(is_key, unit_length, 1.0)
        tl.store(scratch.mixed + (first + j) * sizes.channels + channels, x, mask=inside)
        if unit >= key_units:
            _gate(given, held, scratch, first + j, unit - key_units, sizes)


@triton.jit
def _convolve(past, new, stride, conv, j, inside, sizes):
    """Token j, the oldest tap first: inputs from `past`, which are settled, then the window's from `new`."""
    taps: tl.constexpr = sizes.taps
    total, zero = tl.zeros(inside.shape, tl.float32), tl.zeros(inside.shape, tl.int32)
    for tap in tl.static_range(taps):
        step = j + tap - (taps - 1)
        settled = tl.load(past + (j + tap) * sizes.channels, mask=inside & (step < zero), other=0.0)
        fresh = tl.load(new + step * stride, mask=inside & (step >= zero), other=0.0)
        x = tl.where(step < 0, settled.to(tl.float32), fresh.to(tl.float32))
        total += x * tl.load(conv + tap * sizes.channels, mask=inside, other=0.0)
    return total


@triton.jit
def _gate(given, held, scratch, token, head, sizes):
    strengths = given.projected + token * given.stride + sizes.channels + sizes.heads * sizes.value_dim
    step = tl.load(strengths + sizes.heads + head).to(tl.float32) + tl.load(held.dt_bias + head)
    gates = scratch.gates + (token * sizes.heads + head) * 2
    tl.store(gates, tl.exp(tl.load(held.decay + head) * softplus(step)))
    tl.store(gates + 1, 1.0 / (1.0 + tl.exp(-tl.load(strengths + head).to(tl.float32))))


@Kernel
@triton.jit(do_not_specialize=["given"], do_not_specialize_on_alignment=["given"])
def _run(given, held, scratch, sizes: tl.constexpr, columns: tl.constexpr, EARLY: tl.constexpr):
    """Program (block of columns, head, b). What rows remember is of rounds long past: it is folded before its turn."""
    head = tl.program_id(1)
    row, count, first, width = _window_of(given, tl.program_id(2))
    keys, values = tl.arange(0, sizes.key_block), tl.program_id(0) * columns + tl.arange(0, columns)
    has_key, has_value = keys < sizes.key_dim, values < sizes.value_dim
    states = held.states + (row * sizes.heads + head) * sizes.key_dim * sizes.value_dim
    states += keys[:, None] * sizes.value_dim + values[None, :]
    state = tl.load(states, mask=has_key[:, None] & has_value[None, :], other=0.0)
    for j in tl.range(0, count, num_stages=3):
        entry = _waiting_at(held, row, j, head, sizes)
        key = tl.load(entry + keys, mask=has_key, other=0.0)
        correction = tl.load(entry + sizes.key_dim + values, mask=has_value, other=0.0)
        state = _advance(state, key, correction, tl.load(entry + sizes.key_dim + sizes.value_dim))
    follow(EARLY)
    tl.store(states, state, mask=has_key[:, None] & has_value[None, :])
    tl.debug_barrier()  # all corrections are read before the first is written
    key_size = sizes.key_heads * sizes.key_dim
    for j in tl.range(0, width, num_stages=3):
        token = first + j
        query_at = scratch.mixed + token * sizes.channels + head // (sizes.heads // sizes.key_heads) * sizes.key_dim
        query = tl.load(query_at + keys, mask=has_key, other=0.0)
        key = tl.load(query_at + key_size + keys, mask=has_key, other=0.0)
        value_at = scratch.mixed + token * sizes.channels + 2 * key_size + head * sizes.value_dim
        value = tl.load(value_at + values, mask=has_value, other=0.0)
        gates = scratch.gates + (token * sizes.heads + head) * 2
        decay, strength = tl.load(gates), tl.load(gates + 1)
        seen = decay * tl.sum(state * key[:, None], 0)
        correction = (value - seen) * strength
        output = decay * tl.sum(state * query[:, None], 0) + tl.sum(query * key, 0) * correction
        state = _advance(state, key, correction, decay)
        entry = _waiting_at(held, row, j, head, sizes)
        tl.store(entry + sizes.key_dim + values, correction, mask=has_value)
        tl.store(scratch.raw + (token * sizes.heads + head) * sizes.value_dim + values, output, mask=has_value)


@Kernel
@triton.jit(do_not_specialize=["given", "lanes"], do_not_specialize_on_alignment=["out", "given"])
def _finish(out, given, held, scratch, lanes, sizes: tl.constexpr, block: tl.constexpr, EARLY: tl.constexpr):
    """Program (unit, b): every lanes-th token of a row's head, or one block of its channels."""
    make_way(EARLY)
    unit, heads = tl.program_id(0), sizes.heads
    row, count, first, width = _window_of(given, tl.program_id(1))
    follow(EARLY)
    if unit < heads * lanes:
        for j in range(unit // heads, width, lanes):
            _norm(out, given, held, scratch, first + j, unit % heads, sizes)
            _wait(held, scratch, row, j, first + j, unit % heads, sizes)
    else:
        channels = (unit - heads * lanes) * block + tl.arange(0, block)
        _shift(given, held, row, count, first, width, channels, sizes)


@triton.jit
def _norm(out, given, held, scratch, token, head, sizes):
    at = tl.arange(0, sizes.value_block)
    inside = at < sizes.value_dim
    x = tl.load(scratch.raw + (token * sizes.heads + head) * sizes.value_dim + at, mask=inside, other=0.0)
    z = given.projected + token * given.stride + sizes.channels + head * sizes.value_dim
    gate = silu(tl.load(z + at, mask=inside, other=0.0).to(tl.float32))
    scale = tl.rsqrt(tl.sum(x * x, 0) / sizes.value_dim + sizes.eps)
    y = x * scale * tl.load(held.norm + at, mask=inside, other=0.0) * gate
    tl.store(out + (token * sizes.heads + head) * sizes.value_dim + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _wait(held, scratch, row, j, token, head, sizes):
    """The key and the decay of a token; its correction is there."""
    at, key_head = tl.arange(0, sizes.key_block), head // (sizes.heads // sizes.key_heads)
    inside, entry = at < sizes.key_dim, _waiting_at(held, row, j, head, sizes)
    keys = scratch.mixed + token * sizes.channels + (sizes.key_heads + key_head) * sizes.key_dim
    tl.store(entry + at, tl.load(keys + at, mask=inside, other=0.0), mask=inside)
    tl.store(entry + sizes.key_dim + sizes.value_dim, tl.load(scratch.gates + (token * sizes.heads + head) * 2))


@triton.jit
def _shift(given, held, row, count, first, width, channels, sizes):
    """The inputs that end with the last kept token move to the front, the window's stand behind them."""
    past, new = tl.arange(0, sizes.past_block)[:, None], tl.arange(0, sizes.width_block)[:, None]
    inside, before = (channels < sizes.channels)[None, :], sizes.taps - 1
    inputs = held.inputs + row * (before + sizes.max_width) * sizes.channels + channels[None, :]
    settled = tl.load(inputs + (count + past) * sizes.channels, mask=inside & (past < before))
    tl.debug_barrier()  # they may stand where others will
    tl.store(inputs + past * sizes.channels, settled, mask=inside & (past < before))
    fresh = tl.load(given.projected + (first + new) * given.stride + channels[None, :], mask=inside & (new < width))
    fresh = fresh.to(held.inputs.dtype.element_ty)
    tl.store(inputs + (before + new) * sizes.channels, fresh, mask=inside & (new < width))
