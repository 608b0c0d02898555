"""A canonical tensor: its shape, and the pieces of stored tensors that make it when it is read."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import FileIO
from typing import Any

import numpy as np

from headlong.checkpoint.safetensors import NUMPY_DTYPES, PLAIN_DTYPES, Stored, read_into, unreadable


@dataclass(frozen=True)
class Array:
    """What is read: bfloat16 data are uint16, the others numpy's own type."""

    dtype: str  # "bfloat16", "float16" or "float32"
    data: "np.ndarray[Any, Any]"


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
        dtype = PLAIN_DTYPES[self.pieces[0].stored.dtype]
        data = np.empty(math.prod(self.shape), NUMPY_DTYPES[dtype])
        _fill(data.view(np.uint8).data, data.itemsize, self.pieces)
        if self.shift is None:
            return Array(dtype, data.reshape(self.shape))
        shifted = as_float32(Array(dtype, data)) + np.float32(self.shift)
        return Array("float32", shifted.reshape(self.shape))


def whole(stored: Stored, shape: tuple[int, ...] | None = None, shift: float | None = None) -> Tensor:
    """A stored tensor as it is, or under a shape with as many elements."""
    piece = Piece(stored, 0, math.prod(stored.shape))
    return Tensor(stored.shape if shape is None else shape, (piece,), shift, "" if stored.plain else unreadable(stored))


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
    if not stored.plain:
        return unreadable(stored)
    if stored.shape != wanted:
        return wrong_shape(stored.name, stored.shape, wanted)
    if stored.dtype != found[0].dtype:
        return (
            f"{stored.name} is {stored.dtype} and {found[0].name} is {found[0].dtype}, where one type is wanted: "
            f"use a copy of the model saved in one type."
        )
    return ""


def wrong_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    return (
        f"{name} has shape {list(found)} and config.json asks for {list(wanted)}: "
        f"check that the config and the weights are of the same model."
    )


def as_float32(array: Array) -> "np.ndarray[Any, np.dtype[np.float32]]":
    if array.dtype == "bfloat16":  # the upper half of a float32
        return (array.data.astype(np.uint32) << 16).view(np.float32)
    return array.data.astype(np.float32, copy=False)


def _fill(buffer: memoryview, itemsize: int, pieces: tuple[Piece, ...]) -> None:
    file: FileIO | None = None
    done = 0
    try:
        for number, piece in enumerate(pieces):
            path = piece.stored.path
            if file is None or path != pieces[number - 1].stored.path:
                if file is not None:
                    file.close()
                file = path.open("rb", buffering=0)
            end = done + piece.count * itemsize
            read_into(file, path, piece.stored.offset + piece.start * itemsize, buffer[done:end])
            done = end
    finally:
        if file is not None:
            file.close()
