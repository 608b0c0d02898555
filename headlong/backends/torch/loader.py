"""A checkpoint's arrays as tensors of the device and dtype the model runs in."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor

from headlong.backends.torch.kernels.linear import Int8Weight, Weight
from headlong.backends.torch.native.library import library
from headlong.checkpoint.weights import Array, Weights


class Loader:
    """Reads the tensors of one module, one at a time, so that few are in memory twice."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self.weights, self.dtype, self.device = weights, dtype, device
        self.prefix, self.drafts = "", False
        self.native = library() if device.type == "cpu" else None

    def under(self, prefix: str) -> "Loader":
        inner = copy.copy(self)
        inner.prefix = f"{self.prefix}{prefix}."
        return inner

    def for_drafts(self) -> "Loader":
        """Drafts decide nothing, so where there is a kernel for it 8 bits a weight are worth their last digits."""
        inner = copy.copy(self)
        inner.drafts = True
        return inner

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """In the model's dtype unless told otherwise."""
        return self.stored(name, *shape).to(dtype or self.dtype)

    def stored(self, name: str, *shape: int) -> Tensor:
        """In the type it has on disk."""
        return _tensor(self.weights.read(self.prefix + name, shape)).to(self.device)

    def norm(self, name: str, size: int) -> Tensor:
        return self.tensor(f"{name}.weight", size, dtype=torch.float32)

    def matrix(self, name: str, *shape: int) -> Tensor:
        """For products: in the model's dtype, or as stored where that is as exact and smaller."""
        return self.ready(self.stored(name, *shape))

    def ready(self, matrix: Tensor) -> Tensor:
        return matrix if self.native and matrix.dtype == torch.bfloat16 else matrix.to(self.dtype)

    def linear(self, columns: int, **rows: int) -> Weight | Int8Weight:
        """Matrices that share their input, stacked into one: name=rows for each, in order."""
        # One at a time: what was read is let go before the next is.
        parts = (self.matrix(f"{name}.weight", count, columns) for name, count in rows.items())
        return self.weight(sum(rows.values()), parts)

    def weight(self, rows: int, parts: Iterable[Tensor]) -> Weight | Int8Weight:
        """Matrices that share their input, stacked: so many rows in all."""
        if self.native and self.drafts:
            return Int8Weight(self.native, rows, parts)
        return Weight(self._stacked(rows, parts))

    def _stacked(self, rows: int, parts: Iterable[Tensor]) -> Tensor:
        if self.native is None:
            read = list(parts)
            return read[0] if len(read) == 1 else torch.cat(read)
        together, done = None, 0
        for part in parts:
            if together is None:
                together = torch.empty((rows, part.shape[1]), dtype=part.dtype)
            together = together.to(torch.promote_types(together.dtype, part.dtype))
            together[done : done + len(part)] = part
            done += len(part)
        assert together is not None
        return together


def _tensor(array: Array) -> Tensor:
    tensor = torch.from_numpy(array.data)
    return tensor.view(torch.bfloat16) if array.dtype == "bfloat16" else tensor
