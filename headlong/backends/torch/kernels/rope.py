"""Rotary positions over the first part of each head."""

import torch
from torch import Tensor


class Rope:
    """Tables for every position. Dimensions past `rotary` pass through: their cosine is 1 and their sine 0."""

    def __init__(self, positions: int, head_dim: int, rotary: int, theta: float, device: torch.device) -> None:
        half = rotary // 2
        inverse = theta ** -(torch.arange(half, dtype=torch.float64) * 2 / rotary)
        angle = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
        cos, sin = angle.cos(), angle.sin()
        rest = torch.ones(positions, head_dim - rotary, dtype=torch.float64)
        self.cos = torch.cat([cos, cos, rest], 1).float().to(device)  # [P, D]
        self.sin = torch.cat([-sin, sin, rest * 0], 1).float().to(device)
        swapped = [*range(half, rotary), *range(half), *range(rotary, head_dim)]
        self.swap = torch.tensor(swapped, device=device)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [N, heads, D] at positions [N]; dimension j turns with dimension j + rotary / 2."""
        wide = x.float()
        turned = wide * self.cos[positions, None] + wide.index_select(-1, self.swap) * self.sin[positions, None]
        return turned.to(x.dtype)
