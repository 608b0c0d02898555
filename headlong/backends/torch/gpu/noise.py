"""Noise that belongs to a position, on NVIDIA GPUs: the very words of kernels/noise.py.

What is made of a word may differ from a CPU's in the last bits of a logarithm, as between any two devices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.backends.torch.gpu.build import Kernel
from headlong.backends.torch.gpu.launch import follow, make_way, options


def uniform(seed: Tensor, stream: int, position: Tensor) -> Tensor:
    """seed [B], position [B, W] -> float64 in (0, 1), [B, W]."""
    found = torch.empty(position.shape, dtype=torch.float64, device=position.device)
    sizes = position.numel(), position.shape[1]
    launch = options(position.device)
    _uniform[(triton.cdiv(sizes[0], 128),)](
        found, seed, position.contiguous(), *sizes, STREAM=stream, BLOCK=128, **launch
    )
    return found


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def keys(seed, STREAM: tl.constexpr, position):
    """Two words for a seed and a position."""
    low = _mix(seed.to(tl.uint32) ^ ((STREAM * 0x9E3779B9) & 0xFFFFFFFF))
    high = _mix(((seed >> 32).to(tl.uint32) ^ ((STREAM * 0x85EBCA6B) & 0xFFFFFFFF)) + low)
    low = _mix(low ^ high)
    place = position.to(tl.uint32)
    return _mix(low ^ _mix(place)), _mix(high + _mix(place ^ 0x5BD1E995))


@triton.jit
def uniform_word(seed, STREAM: tl.constexpr, position):
    low, high = keys(seed, STREAM, position)
    return _mix(low ^ high)


@triton.jit
def token_word(token, low, high):
    return _mix(_mix(token.to(tl.uint32) ^ low) ^ high)


@triton.jit
def _log(x):
    """Of normal positive floats, to about two units in the last place, near 1 too: x = 2^n m with m from 1/sqrt(2) to
    sqrt(2), and log m = 2 atanh((m - 1) / (m + 1))."""
    bits = x.to(tl.int32, bitcast=True)
    n = (bits - 0x3F3504F3) >> 23
    m = (bits - (n << 23)).to(tl.float32, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    series = (((t * (1.0 / 11) + 1.0 / 9) * t + 1.0 / 7) * t + 1.0 / 5) * t + 1.0 / 3
    whole = n.to(tl.float32)
    return whole * 0.693145752 + (2.0 * s + (whole * 1.42860677e-6 + 2.0 * s * t * series))


@triton.jit
def gumbel(word):
    """-log(-log(1 - u)) with u = (word + 1/2) / 2^32, rounded once; what 1 - u loses of a small u is added back."""
    u = tl.minimum(((word.to(tl.float64) + 0.5) * 2.0**-32).to(tl.float32), 1.0 - 2.0**-24)
    rest = 1.0 - u
    lost = (1.0 - rest) - u
    return -_log(-(_log(rest) + lost / rest))


@Kernel
@triton.jit
def _uniform(found, seed, position, n, width, STREAM: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    make_way(EARLY)
    follow(EARLY)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    seeds = tl.load(seed + at // width, mask=inside, other=0)
    word = uniform_word(seeds, STREAM, tl.load(position + at, mask=inside, other=0))
    tl.store(found + at, (word.to(tl.float64) + 0.5) * 2.0**-32, mask=inside)
