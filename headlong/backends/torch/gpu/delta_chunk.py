"""Prompt chunks of Gated DeltaNet on NVIDIA GPUs, in blocks of tokens: most of the work is done for all blocks at once.

_mix      a block's q, k or v of one head: convolution, silu, unit length
_solve    a block's head: decays, strengths, and the inverse of I + L, which turns what tokens meet into corrections
_carry    some columns of one head's state, block after block: what it was before each, and each one's corrections
_output   a block's head: what the state and the block's own tokens give, normed and gated
_hand_on  the convolution's last inputs, for the chunk after this one

With the names of `gated_delta._blockwise`, X = (I + L)^-1 and X of a block depends on its keys and gates alone:

    D = X B (V - A K S)        O = A Q S + lower (Q K') (A_i / A_j) D        S = a S + (K a / A)' D

States, corrections and values stand transposed, [Dv, ...], so that each product's result is the next one's left side as
it lies in the registers. Sums are float32, and so is the state from block to block; what is multiplied has the model's
type. No block is shared between chunks, and no sum depends on which row or how many blocks there are.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.backends.torch.gpu.build import Kernel
from headlong.backends.torch.gpu.delta import silu, softplus
from headlong.backends.torch.gpu.launch import follow, options
from headlong.backends.torch.kernels.gated_delta import BLOCK, Delta, Memory

COLUMNS = 64  # of a state in one program: as many as a group of warps multiplies at once
SMALL = 16  # tokens whose X is found by one warp
CHANNELS = 256  # of the convolution's inputs in one program


class _Given(NamedTuple):
    """A chunk and its row."""

    projected: Tensor  # [T, C + heads Dv + 2 heads]: qkv, z, b, a
    stride: int  # from a token to the next
    row: Tensor  # [1]
    real: Tensor  # [1]: tokens that are no padding, where they are counted


class _Held(NamedTuple):
    """A layer's memory and its parameters."""

    states: Tensor
    inputs: Tensor
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor


class _Scratch(NamedTuple):
    """What the launches tell each other; heads and blocks are padded, with zeros."""

    keys: Tensor  # [N BLOCK, 2 key heads, Dk]: q of unit length and scaled, k of unit length
    value_blocks: Tensor  # [heads, N, Dv, BLOCK]
    gates: Tensor  # [heads, N, 4, BLOCK] float32: log A, B, A B, a / A
    inverse: Tensor  # [heads, N, BLOCK, BLOCK]: X
    starts: Tensor  # [heads, N, Dv, Dk]: the state before each block
    corrections: Tensor  # [heads, N, Dv, BLOCK]


@dataclass(frozen=True)
class _Sizes:
    """Known when kernels are compiled; the same for all chunks."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    slots: int  # of a row's inputs
    eps: float
    query_scale: float
    channels: int
    key_block: int  # and the others: the next powers of two
    value_block: int
    head_block: int
    past_block: int
    exact: bool
    counted: bool


def chunk(delta: Delta, memory: Memory, projected: Tensor, row: Tensor, count: Tensor | None = None) -> Tensor:
    """A prompt chunk of one settled row [1]: projected [T, ...] -> [T, heads Dv], gated; the memory moves on by the
    first count [1] tokens, or by all."""
    tokens, sizes = projected.shape[0], _sizes(delta, memory, projected.dtype, count is not None)
    blocks = triton.cdiv(tokens, BLOCK)
    given = _Given(projected, projected.stride(0), row, row if count is None else count)
    held = _Held(memory.states, memory.inputs, delta.conv, delta.decay, delta.dt_bias, delta.norm)
    scratch = _scratch(sizes, blocks, projected)
    out = projected.new_empty(tokens, sizes.heads * sizes.value_dim)
    columns, launch = min(COLUMNS, sizes.value_block), options(projected.device)
    stages = {"num_warps": 4, "num_stages": 2 if sizes.exact else 3, **launch}
    units = 2 * sizes.key_heads + sizes.heads
    _mix[(units, blocks)](given, held, scratch, tokens, sizes, BLOCK, num_warps=8, **launch)
    _solve[(blocks, sizes.heads)](given, held, scratch, tokens, sizes, BLOCK, SMALL, num_warps=4, **launch)
    _carry[(sizes.value_block // columns, sizes.heads)](given, held, scratch, blocks, sizes, BLOCK, columns, **stages)
    _output[(blocks, sizes.heads)](out, given, held, scratch, tokens, sizes, BLOCK, num_warps=4, **launch)
    programs = triton.cdiv(sizes.channels, CHANNELS)
    _hand_on[(programs,)](given, held, tokens, sizes, CHANNELS, num_warps=1, **launch)
    return out


def _sizes(delta: Delta, memory: Memory, dtype: torch.dtype, counted: bool) -> _Sizes:
    (taps, channels), dims = delta.conv.shape, (delta.key_dim, delta.value_dim)
    keys, values = (max(16, triton.next_power_of_2(size)) for size in dims)
    known = (delta.heads, delta.key_heads, *dims, taps, memory.inputs.shape[1], delta.eps, delta.key_dim**-0.5)
    blocks = (keys, values, max(keys, values), triton.next_power_of_2(taps))
    return _Sizes(*known, channels, *blocks, dtype == torch.float32, counted)


def _scratch(sizes: _Sizes, blocks: int, like: Tensor) -> _Scratch:
    heads, keys, values = sizes.heads, sizes.key_block, sizes.value_block
    return _Scratch(
        like.new_empty(blocks * BLOCK, 2 * sizes.key_heads, keys),
        like.new_empty(heads, blocks, values, BLOCK),
        like.new_empty(heads, blocks, 4, BLOCK, dtype=torch.float32),
        like.new_empty(heads, blocks, BLOCK, BLOCK),
        like.new_empty(heads, blocks, values, keys),
        like.new_empty(heads, blocks, values, BLOCK),
    )


# --- before the state ------------------------------------------------------------------------------------------------


@Kernel
@triton.jit(do_not_specialize=["tokens"])
def _mix(given, held, scratch, tokens, sizes: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Program (unit, block): q or k of one key head, or v of one head, which is left transposed."""
    follow(EARLY)
    kind: tl.constexpr = scratch.keys.dtype.element_ty
    unit, block, key_units = tl.program_id(0), tl.program_id(1), 2 * sizes.key_heads
    token, at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, sizes.head_block)
    is_key, head, tokens = unit < key_units, unit - key_units, _counted(given, tokens, sizes)
    inside = at < tl.where(is_key, sizes.key_dim, sizes.value_dim)
    channels = tl.where(is_key, unit * sizes.key_dim, key_units * sizes.key_dim + head * sizes.value_dim) + at
    x = silu(_convolve(given, held, token, tokens, channels, inside, sizes))
    x = tl.where((token < tokens)[:, None], x, 0.0)
    if is_key:
        scale = tl.where(unit < sizes.key_heads, sizes.query_scale, 1.0)
        x = x * (tl.rsqrt(tl.sum(x * x, 1) + 1e-6) * scale)[:, None]
        line = (token * key_units + unit)[:, None] * sizes.key_block
        tl.store(scratch.keys + line + at[None, :], x.to(kind), mask=(at < sizes.key_block)[None, :])
    else:
        column = (_place(block, head, tl.num_programs(1)) * sizes.value_block + at)[:, None] * BLOCK
        column += tl.arange(0, BLOCK)[None, :]
        tl.store(scratch.value_blocks + column, x.T.to(kind), mask=(at < sizes.value_block)[:, None])


@triton.jit
def _counted(given, tokens, sizes):
    """Of so many tokens, those that are no padding."""
    return tl.load(given.real).to(tl.int32) if sizes.counted else tokens


@triton.jit
def _convolve(given, held, token, tokens, channels, inside, sizes):
    """Tokens [N] by channels [D], the oldest tap first: inputs from the memory, then the chunk's."""
    taps: tl.constexpr = sizes.taps
    past = held.inputs + tl.load(given.row).to(tl.int64) * (sizes.slots * sizes.channels) + channels[None, :]
    new, has = given.projected + channels[None, :], inside[None, :]
    total = tl.zeros((token.shape[0], inside.shape[0]), tl.float32)
    for tap in tl.static_range(taps):
        step = (token + tap - (taps - 1))[:, None]
        settled = tl.load(past + (step + taps - 1) * sizes.channels, mask=has & (step < 0), other=0.0)
        fresh = tl.load(new + step * given.stride, mask=has & (step >= 0) & (step < tokens), other=0.0)
        x = tl.where(step < 0, settled.to(tl.float32), fresh.to(tl.float32))
        total += x * tl.load(held.conv + tap * sizes.channels + channels, mask=inside, other=0.0)[None, :]
    return total


@Kernel
@triton.jit(do_not_specialize=["tokens"])
def _solve(given, held, scratch, tokens, sizes: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """Program (block, head)."""
    follow(EARLY)
    parts: tl.constexpr = BLOCK // SMALL
    block, head = tl.program_id(0), tl.program_id(1)
    place = _place(block, head, tl.num_programs(0))
    log_decays, strengths = _gate(given, held, scratch, place, tokens, sizes, BLOCK)
    keys = _keys(scratch, block, head, sizes.key_heads, sizes, BLOCK)
    lower = _product(keys, keys.T, sizes) * _ratio(log_decays, BLOCK) * strengths[:, None]
    # X of one token is 1; of neighbours a and b with c below, [[a, 0], [c, b]], it has -b^-1 c a^-1 in the corner.
    own = tl.arange(0, parts)[:, None, None, None] == tl.arange(0, parts)[None, None, :, None]
    small = tl.sum(tl.where(own, tl.reshape(lower, (parts, SMALL, parts, SMALL)), 0.0), 2)
    inverse = tl.where(_corner(SMALL, 0)[None, :, :], -small, _one(SMALL)[None, :, :])
    for level in tl.static_range(1, 4):
        corner = tl.where(_corner(SMALL, level)[None, :, :], small, 0.0)
        inverse -= _product(_product(inverse, corner, sizes), inverse, sizes)
    inverse = tl.reshape(tl.where(own, inverse[:, :, None, :], 0.0), (BLOCK, BLOCK))
    for level in tl.static_range(4, 6):
        corner = tl.where(_corner(BLOCK, level), lower, 0.0)
        inverse -= _product(_product(inverse, corner, sizes), inverse, sizes)
    tl.store(scratch.inverse + place * (BLOCK * BLOCK) + _square(BLOCK, BLOCK), inverse.to(keys.dtype))


@triton.jit
def _corner(SIZE: tl.constexpr, level: tl.constexpr):
    """Where a half of a block of 2^(level + 1) tokens meets the half before it."""
    i, j = tl.arange(0, SIZE)[:, None] >> level, tl.arange(0, SIZE)[None, :] >> level
    return (i > j) & (i >> 1 == j >> 1)


@triton.jit
def _one(SIZE: tl.constexpr):
    return tl.where(tl.arange(0, SIZE)[:, None] == tl.arange(0, SIZE)[None, :], 1.0, 0.0)


@triton.jit
def _gate(given, held, scratch, place, tokens, sizes, BLOCK: tl.constexpr):
    """A block's log A, decays summed from its beginning on, and B; tokens past the chunk change nothing."""
    head, at, tokens = tl.program_id(1), tl.arange(0, BLOCK), _counted(given, tokens, sizes)
    token = tl.program_id(0) * BLOCK + at
    given_at = given.projected + token.to(tl.int64) * given.stride + sizes.channels + sizes.heads * sizes.value_dim
    step = tl.load(given_at + sizes.heads + head, mask=token < tokens, other=0.0).to(tl.float32)
    step = tl.load(held.decay + head) * softplus(step + tl.load(held.dt_bias + head))
    step = tl.where(token < tokens, step, 0.0)
    log_decays, whole = tl.cumsum(step, 0), tl.sum(step, 0)
    strengths = tl.load(given_at + head, mask=token < tokens, other=float("-inf")).to(tl.float32)
    strengths = 1.0 / (1.0 + tl.exp(-strengths))
    gates = scratch.gates + place * (4 * BLOCK) + at
    tl.store(gates, log_decays)
    tl.store(gates + BLOCK, strengths)
    tl.store(gates + 2 * BLOCK, strengths * tl.exp(log_decays))
    tl.store(gates + 3 * BLOCK, tl.exp(whole - log_decays))
    return log_decays, strengths


@triton.jit
def _product(a, b, sizes):
    """Float32 sums; float32 factors are cut to what a tensor core takes, unless the model's own type is float32."""
    return tl.dot(a, b, input_precision="tf32x3" if sizes.exact else "tf32")


@triton.jit
def _ratio(log_decays, BLOCK: tl.constexpr):
    """What is left of token j's write when token i reads it, [BLOCK, BLOCK]; nothing before it was written."""
    sees = tl.arange(0, BLOCK)[:, None] >= tl.arange(0, BLOCK)[None, :]
    return tl.where(sees, tl.exp(tl.where(sees, log_decays[:, None] - log_decays[None, :], 0.0)), 0.0)


@triton.jit
def _place(block, head, blocks):
    """Of a block's head among all of them: a head's blocks stand one after the other."""
    return head.to(tl.int64) * blocks + block


@triton.jit
def _keys(scratch, block, head, first, sizes, BLOCK: tl.constexpr):
    """A block's keys of one head, [BLOCK, Dk], or its queries, which are the units from 0 on."""
    token, at = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, sizes.key_block)
    unit = token.to(tl.int64) * (2 * sizes.key_heads) + first + head // (sizes.heads // sizes.key_heads)
    return tl.load(scratch.keys + unit[:, None] * sizes.key_block + at[None, :])


@triton.jit
def _square(rows: tl.constexpr, columns: tl.constexpr):
    return tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]


# --- the state and after it ------------------------------------------------------------------------------------------


@Kernel
@triton.jit(do_not_specialize=["blocks"])
def _carry(given, held, scratch, blocks, sizes: tl.constexpr, BLOCK: tl.constexpr, columns: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """Program (columns, head)."""
    follow(EARLY)
    head, row, at = tl.program_id(1), tl.load(given.row).to(tl.int64), tl.arange(0, BLOCK)
    keys, values = tl.arange(0, sizes.key_block), tl.program_id(0) * columns + tl.arange(0, columns)
    states = held.states + (row * sizes.heads + head) * (sizes.key_dim * sizes.value_dim)
    states += keys[None, :] * sizes.value_dim + values[:, None]
    held_here = (keys < sizes.key_dim)[None, :] & (values < sizes.value_dim)[:, None]
    state = tl.load(states, mask=held_here, other=0.0)
    whole = _whole(scratch, 0, head, blocks, BLOCK)
    for block in range(blocks):
        place = _place(block, head, blocks)
        key = _keys(scratch, block, head, sizes.key_heads, sizes, BLOCK)
        line = (place * sizes.value_block + values)[:, None]
        value = tl.load(scratch.value_blocks + line * BLOCK + at[None, :])
        inverse = tl.load(scratch.inverse + place * (BLOCK * BLOCK) + _square(BLOCK, BLOCK))
        gates = scratch.gates + place * (4 * BLOCK) + at[None, :]
        strengths, fading, left = tl.load(gates + BLOCK), tl.load(gates + 2 * BLOCK), tl.load(gates + 3 * BLOCK)
        ahead = _whole(scratch, tl.minimum(block + 1, blocks - 1), head, blocks, BLOCK)
        before = state.to(key.dtype)
        met = value.to(tl.float32) * strengths - _product(before, key.T, sizes) * fading
        tl.store(scratch.starts + line * sizes.key_block + keys[None, :], before)
        corrections = _product(met.to(key.dtype), inverse.T, sizes)
        state = state * tl.exp(whole) + _product((corrections * left).to(key.dtype), key, sizes)
        whole = ahead
        tl.store(scratch.corrections + line * BLOCK + at[None, :], corrections.to(key.dtype))
    tl.store(states, state, mask=held_here)


@triton.jit
def _whole(scratch, block, head, blocks, BLOCK: tl.constexpr):
    """The logarithm of what is left of a state after a block, which is loaded a block ahead."""
    return tl.load(scratch.gates + _place(block, head, blocks) * (4 * BLOCK) + BLOCK - 1)


@Kernel
@triton.jit(do_not_specialize=["tokens"])
def _output(out, given, held, scratch, tokens, sizes: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Program (block, head)."""
    follow(EARLY)
    block, head, values = tl.program_id(0), tl.program_id(1), tl.arange(0, sizes.value_block)
    token = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    inside, at = (token < tokens) & (values < sizes.value_dim)[None, :], (head * sizes.value_dim + values)[None, :]
    gate = tl.load(given.projected + token * given.stride + sizes.channels + at, mask=inside, other=0.0)
    queries = _keys(scratch, block, head, 0, sizes, BLOCK)
    keys = _keys(scratch, block, head, sizes.key_heads, sizes, BLOCK)
    place = _place(block, head, tl.num_programs(0))
    log_decays = tl.load(scratch.gates + place * (4 * BLOCK) + tl.arange(0, BLOCK))
    first = place * sizes.value_block
    start = tl.load(scratch.starts + first * sizes.key_block + _square(sizes.value_block, sizes.key_block))
    corrections = tl.load(scratch.corrections + first * BLOCK + _square(sizes.value_block, BLOCK))
    within = (_product(queries, keys.T, sizes) * _ratio(log_decays, BLOCK)).to(keys.dtype)
    x = _product(queries, start.T, sizes) * tl.exp(log_decays)[:, None] + _product(within, corrections.T, sizes)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / sizes.value_dim + sizes.eps)[:, None]
    norm = tl.load(held.norm + values, mask=values < sizes.value_dim, other=0.0)
    y = x * norm[None, :] * silu(gate.to(tl.float32))
    tl.store(out + token * (sizes.heads * sizes.value_dim) + at, y.to(keys.dtype), mask=inside)


@Kernel
@triton.jit(do_not_specialize=["tokens"])
def _hand_on(given, held, tokens, sizes: tl.constexpr, block: tl.constexpr, EARLY: tl.constexpr):
    """Program (block of channels): the inputs that end with the chunk's last token; in a short one some are older."""
    follow(EARLY)
    channels = (tl.program_id(0) * block + tl.arange(0, block))[None, :]
    past, at, tokens = sizes.taps - 1, tl.arange(0, sizes.past_block)[:, None], _counted(given, tokens, sizes)
    inside = (channels < sizes.channels) & (at < past)
    inputs = held.inputs + tl.load(given.row).to(tl.int64) * (sizes.slots * sizes.channels) + channels
    step = (at + tokens - past).to(tl.int64)
    older = tl.load(inputs + (step + past) * sizes.channels, mask=inside & (step < 0), other=0.0)
    newer = tl.load(given.projected + step * given.stride + channels, mask=inside & (step >= 0), other=0.0)
    tl.debug_barrier()  # the older ones stand where others will
    tl.store(inputs + at * sizes.channels, tl.where(step < 0, older, newer.to(older.dtype)), mask=inside)
