"""Memory for what passes make on their way: while one is recorded it comes from an arena, so that a tape finds it."""

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

MOST_BYTES = 1 << 27  # of one pass; one with more is long, and its Python a small part of it
ALIGNED = 64  # bytes

_local = threading.local()


class Arena:
    """Memory that all tapes of a function share, since one plays at a time; a pass takes it from the front.

    Lines of a tensor take whole blocks, so that where the next one stands follows from the sizes in a straight line.
    What was never used takes none of the machine's memory.
    """

    def __init__(self) -> None:
        self.slab = torch.empty(MOST_BYTES, dtype=torch.uint8)
        self.first, self.used = self.slab.data_ptr(), 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        first, nbytes, lines = self.used, math.prod(shape) * dtype.itemsize, shape[0] if shape else 1
        self.used += -(-nbytes // max(1, lines * ALIGNED)) * ALIGNED * lines
        if self.used > MOST_BYTES:
            return torch.empty(shape, dtype=dtype)
        return self.slab[first : first + nbytes].view(dtype).view(shape)


def fresh(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor to be written, on another's device and in its type if no other is named."""
    arena: Arena | None = getattr(_local, "arena", None)
    if arena is None:
        return like.new_empty(shape, dtype=dtype)
    return arena.empty(shape, dtype or like.dtype)


@contextlib.contextmanager
def filling(arena: Arena) -> Iterator[None]:
    """Within it this thread's new tensors stand in the arena."""
    _local.arena = arena
    try:
        yield
    finally:
        _local.arena = None
