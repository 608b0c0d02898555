"""Affine quantisation in the layout of MLX: weight = scale · q + bias, with one scale and one bias for each group."""

from functools import cache
from typing import Any

import numpy as np

from headlong.checkpoint.floats import Data, Float32, narrow, widen
from headlong.errors import UserError

BITS = (2, 4, 8)  # those that fill a byte
WORD_BITS = 32

Words = np.ndarray[Any, np.dtype[np.uint32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def expand(packed: Words, scales: Data, biases: Data, bits: int, out: Float32 | None = None) -> Float32:
    """The weights [..., in] of words [..., in · bits / 32] and scales and biases [..., groups].

    `out`, if given, must be contiguous.
    """
    values = _unpack(packed, bits)
    if out is None:
        out = np.empty(values.shape, np.float32)
    np.copyto(out, values)
    groups = out.reshape(*scales.shape, -1)
    groups *= widen(scales)[..., None]
    groups += widen(biases)[..., None]
    return out


def quantize(array: Float32, bits: int, group_size: int, dtype: str = "float32") -> tuple[Words, Data, Data]:
    """Words, scales and biases of weights [..., in]; scales and biases are of the type named.

    The bias is rounded down and the scale up before q is chosen, so that a group's own range covers it and no weight
    is further off than half a step.
    """
    _check(array.shape[-1], bits, group_size)
    groups = array.reshape(*array.shape[:-1], -1, group_size)
    top = 2**bits - 1
    with np.errstate(invalid="ignore", over="ignore"):  # refused below
        biases = _rounded(groups.min(-1), dtype, up=False)
        scales = _rounded((groups.max(-1) - widen(biases)) / np.float32(top), dtype, up=True)
    step, low = widen(scales), widen(biases)
    if not (np.isfinite(step).all() and np.isfinite(low).all()):
        raise UserError(f"the weights are not all finite, or too large for scales of {dtype}: use another type.")
    steps = (groups - low[..., None]) / np.where(step > 0, step, 1)[..., None]  # 0: all of the group is the bias
    values = np.rint(steps, out=steps).clip(0, top).astype(np.uint8)
    return _pack(values.reshape(array.shape), bits), scales, biases


def _check(width: int, bits: int, group_size: int) -> None:
    if bits not in BITS:
        raise UserError(f"{bits} bits were asked for; 2, 4 or 8 are wanted.")
    if group_size < 1 or width % group_size or width * bits % WORD_BITS:
        raise UserError(
            f"rows of {width} weights do not fit groups of {group_size} and words of {WORD_BITS // bits}: "
            f"choose sizes that divide them, or leave the tensor unquantised."
        )


def _rounded(values: Float32, dtype: str, up: bool) -> Data:
    """The nearest numbers of the type that are not below the values, or not above them."""
    stored = narrow(values, dtype)
    beyond = widen(stored) < values if up else widen(stored) > values
    if beyond.any():  # never in float32
        outward = np.signbit(values) != up  # one step in the bits of a half type is one in its magnitude
        bits = stored.view(np.uint16)
        bits[beyond & outward] += 1
        bits[beyond & ~outward] -= 1
    return stored


def _pack(values: Bytes, bits: int) -> Words:
    """Little-endian: the first value of a row is in the lowest bits."""
    fill = 8 // bits
    packed = np.zeros((*values.shape[:-1], values.shape[-1] // fill), np.uint8)
    for place in range(fill):
        packed |= values[..., place::fill] << np.uint8(place * bits)
    return packed.view(np.uint32)


def _unpack(packed: Words, bits: int) -> Bytes:
    values = packed.view(np.uint8)
    return values if bits == 8 else _table(bits)[values].view(np.uint8)


@cache
def _table(bits: int) -> Data:
    """The values of every byte, side by side in one number, which makes unpacking a single look-up."""
    values = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(0, 8, bits, dtype=np.uint8)
    return (values & np.uint8(2**bits - 1)).view(f"u{8 // bits}")[:, 0]
