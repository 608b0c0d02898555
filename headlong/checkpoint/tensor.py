"""A canonical tensor: its shape, and the pieces of stored tensors that make it when it is read."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from headlong.checkpoint.floats import NUMPY_DTYPES, Data, Float32, widen
from headlong.checkpoint.safetensors import Files, Stored


@dataclass(frozen=True)
class Array:
    """What is read: bfloat16 data are uint16, the others numpy's own type."""

    dtype: str  # "bfloat16", "float16" or "float32"
    data: Data


@dataclass(frozen=True)
class Piece:
    """A run of a stored tensor's elements."""

    stored: Stored
    start: int
    count: int


@dataclass(frozen=True)
class Tensor:
    """Pieces laid end to end. Every layout there is comes down to that, so reading needs no second copy."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    shift: float | None = None  # added in float32; None: the data as they are stored
    fault: str = ""  # why it cannot be read, in one sentence

    def read(self) -> Array:
        dtype = self.pieces[0].stored.reads_as
        data = np.empty(math.prod(self.shape), NUMPY_DTYPES[dtype])
        done = 0
        with Files() as files:
            for piece in self.pieces:
                piece.stored.fill(files, piece.start, data[done : done + piece.count])
                done += piece.count
        if self.shift is None:
            return Array(dtype, data.reshape(self.shape))
        shifted = as_float32(Array(dtype, data)) + np.float32(self.shift)
        return Array("float32", shifted.reshape(self.shape))


def whole(stored: Stored, shape: tuple[int, ...] | None = None, shift: float | None = None) -> Tensor:
    """A stored tensor as it is, or under a shape with as many elements."""
    piece = Piece(stored, 0, math.prod(stored.shape))
    return Tensor(stored.shape if shape is None else shape, (piece,), shift, stored.fault)


Part = tuple[str, Stored | None, tuple[int, ...]]  # the name, what is stored under it, the shape it must have
Cut = Callable[[list[Stored]], Iterable[Piece]]


def joined(shape: tuple[int, ...], parts: list[Part], cut: Cut) -> Tensor:
    """A tensor made of several, cut into pieces as told; or one that says which part is at fault."""
    found = [stored for _, stored, _ in parts if stored is not None]
    fault = next(filter(None, (_part_fault(part, found) for part in parts)), "")
    pieces = (Piece(stored, 0, 0) for stored in found) if fault else cut(found)
    return Tensor(shape, tuple(pieces), None, fault)


def _part_fault(part: Part, found: list[Stored]) -> str:
    name, stored, wanted = part
    if stored is None:
        return f"the model has no {name}, and config.json asks for it in shape {list(wanted)}: fetch the model again."
    if stored.fault:
        return stored.fault
    if stored.shape != wanted:
        return wrong_shape(stored.name, stored.shape, wanted)
    if stored.reads_as != found[0].reads_as:
        return (
            f"{stored.name} is {stored.kind} and {found[0].name} is {found[0].kind}, where one type is wanted: "
            f"use a copy of the model saved in one type."
        )
    return ""


def wrong_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    return (
        f"{name} has shape {list(found)} and config.json asks for {list(wanted)}: "
        f"check that the config and the weights are of the same model."
    )


def as_float32(array: Array) -> Float32:
    return widen(array.data)
