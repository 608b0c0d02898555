"""A checkpoint's arrays as tensors of the device and dtype the model runs in."""

import torch
from torch import Tensor

from headlong.backends.torch.kernels.linear import Weight
from headlong.checkpoint.weights import Array, Weights


class Loader:
    """Reads the tensors of one module, one at a time, so that few are in memory twice."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device, prefix: str = "") -> None:
        self.weights, self.dtype, self.device, self.prefix = weights, dtype, device, prefix

    def under(self, prefix: str) -> "Loader":
        return Loader(self.weights, self.dtype, self.device, f"{self.prefix}{prefix}.")

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """In the model's dtype unless told otherwise."""
        return self.stored(name, *shape).to(self.device, dtype or self.dtype)

    def stored(self, name: str, *shape: int) -> Tensor:
        """As it is on disk."""
        return _tensor(self.weights.read(self.prefix + name, shape))

    def norm(self, name: str, size: int) -> Tensor:
        return self.tensor(f"{name}.weight", size, dtype=torch.float32)

    def linear(self, columns: int, **rows: int) -> Weight:
        """Matrices that share their input, stacked into one: name=rows for each, in order."""
        total = torch.empty(sum(rows.values()), columns, dtype=self.dtype, device=self.device)
        for part, (name, count) in zip(total.split(list(rows.values())), rows.items(), strict=True):
            part.copy_(self.stored(f"{name}.weight", count, columns))
        return Weight(total)


def _tensor(array: Array) -> Tensor:
    tensor = torch.from_numpy(array.data)
    return tensor.view(torch.bfloat16) if array.dtype == "bfloat16" else tensor
