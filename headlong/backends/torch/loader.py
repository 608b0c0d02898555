"""A checkpoint's arrays as tensors of the device and dtype the model runs in."""

import torch
from torch import Tensor

from headlong.backends.torch.kernels.linear import Weight
from headlong.backends.torch.native.library import library
from headlong.checkpoint.weights import Array, Weights


class Loader:
    """Reads the tensors of one module, one at a time, so that few are in memory twice."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device, prefix: str = "") -> None:
        self.weights, self.dtype, self.device, self.prefix = weights, dtype, device, prefix
        self.keep_halves = device.type == "cpu" and library() is not None

    def under(self, prefix: str) -> "Loader":
        return Loader(self.weights, self.dtype, self.device, f"{self.prefix}{prefix}.")

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
        return matrix if self.keep_halves and matrix.dtype == torch.bfloat16 else matrix.to(self.dtype)

    def linear(self, columns: int, **rows: int) -> Weight:
        """Matrices that share their input, stacked into one: name=rows for each, in order."""
        parts = [self.matrix(f"{name}.weight", count, columns) for name, count in rows.items()]
        return Weight(parts[0] if len(parts) == 1 else torch.cat(parts))


def _tensor(array: Array) -> Tensor:
    tensor = torch.from_numpy(array.data)
    return tensor.view(torch.bfloat16) if array.dtype == "bfloat16" else tensor
