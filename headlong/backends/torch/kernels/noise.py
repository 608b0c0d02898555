"""Noise that belongs to a position: a function of seed, stream, absolute position and token id, and nothing else.

32-bit integer arithmetic written in int64, so that every backend can give the same numbers.
"""

import torch
from torch import Tensor

from headlong.backends.torch.gpu.paths import fused, noises
from headlong.backends.torch.native.arena import fresh
from headlong.backends.torch.native.library import Kernels, library

WORD = 0xFFFFFFFF

# Streams never share a number: shared noise with a ratio test would bias the result.
TARGET = 1  # Gumbel noise of the token at a position; the drafter borrows it for coupled rows
DRAFT = 2  # a rejection row's own draft
ACCEPT = 3  # its test of that draft
RESIDUAL = 4  # the token drawn when the test fails, or after the last draft
XTC = 5  # the coin of the XTC step


def uniform(seed: Tensor, stream: int | Tensor, position: Tensor) -> Tensor:
    """seed [B], stream (one, or [B, 1]), position [B, W] -> float64 in (0, 1), [B, W]."""
    if fused(seed) and isinstance(stream, int):
        found: Tensor = noises().uniform(seed, stream, position)
        return found
    low, high = _keys(seed, stream, position)
    return (_mix(low ^ high).double() + 0.5) / 2**32


def gumbel(seed: Tensor, stream: int | Tensor, position: Tensor, vocab: int) -> Tensor:
    """seed [B], position [B, W] -> standard Gumbel noise per token, [B, W, vocab], float32."""
    lib = library() if seed.is_cpu else None
    if lib is not None:
        return _gumbel_native(lib, seed, stream, position, vocab)
    low, high = _keys(seed, stream, position)
    token = torch.arange(vocab, device=seed.device)
    word = _mix(_mix(token ^ low[..., None]) ^ high[..., None])
    # Small u keeps its relative precision in float32, so the upper tail reaches -log(2^-33), about 23.
    u = ((word.double() + 0.5) / 2**32).float().clamp_(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-u))


def _gumbel_native(lib: Kernels, seed: Tensor, stream: int | Tensor, position: Tensor, vocab: int) -> Tensor:
    """The same words; their logarithms may differ in the last bits, as between any two devices."""
    streams = stream.flatten() if isinstance(stream, Tensor) else torch.full_like(seed, stream)
    y = fresh(position, *position.shape, vocab, dtype=torch.float32)
    tensors = (y, seed.contiguous(), streams.contiguous(), position.contiguous())
    lib.gumbel(*(t.data_ptr() for t in tensors), *position.shape, vocab)
    return y


def _keys(seed: Tensor, stream: int | Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Two words [B, W] for each row and position; both depend on all 64 bits of the seed."""
    low = _mix((seed & WORD)[:, None] ^ (stream * 0x9E3779B9 & WORD))
    high = _mix((((seed >> 32) & WORD)[:, None] ^ (stream * 0x85EBCA6B & WORD)) + low & WORD)
    low = _mix(low ^ high)
    return _mix(low ^ _mix(position & WORD)), _mix(high + _mix((position ^ 0x5BD1E995) & WORD) & WORD)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words whose output bits all depend on all input bits (the constants are lowbias32's)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & WORD
    return x ^ (x >> 16)
