"""Norms of queries and keys, and rotary positions over the first part of each head."""

import torch
from torch import Tensor

from headlong.backends.torch.gpu.paths import fused, norms
from headlong.backends.torch.kernels.norm import rms_norm
from headlong.backends.torch.native.arena import fresh
from headlong.backends.torch.native.library import library


class Rope:
    """cos and sin for every position, [P, rotary / 2] each; dimension j turns with dimension j + rotary / 2."""

    def __init__(self, positions: int, rotary: int, theta: float, device: torch.device) -> None:
        self.rotary = rotary
        inverse = theta ** -(torch.arange(rotary // 2, dtype=torch.float64) * 2 / rotary)
        angle = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
        self.cos, self.sin = angle.cos().float().to(device), angle.sin().float().to(device)

    def normed(self, x: Tensor, weight: Tensor, eps: float, positions: Tensor) -> Tensor:
        """Heads side by side, x [N, heads * D] (columns of a wider tensor), weight [heads, D] -> [N, heads, D]."""
        if fused(x):
            return norms().norm_rope(x, weight, eps, (self.cos, self.sin), positions)
        lib = library(x)
        if lib is None:
            return self._turn(rms_norm(x.unflatten(-1, weight.shape), weight, eps), positions)
        (heads, dim), rows = weight.shape, x.shape[0]
        y = fresh(x, rows, heads, dim)
        pointers = (t.data_ptr() for t in (y, x, weight, self.cos, self.sin, positions))
        lib.norm_rope(*pointers, rows, heads, dim, self.rotary, x.stride(0), eps)
        return y

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        a, b, rest = x.float().split([self.rotary // 2, self.rotary // 2, x.shape[-1] - self.rotary], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)
