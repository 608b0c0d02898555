"""A cheap copy of the LM head for drafting."""

import torch
from torch import Tensor

from headlong.backends.torch.gpu.paths import fused, products
from headlong.backends.torch.kernels.linear import Int8Weight, Weight
from headlong.backends.torch.native.library import library


class DraftHead:
    """Logits for drafts. They decide nothing, so 8 bits a weight are worth their last digits."""

    def __init__(self, matrix: Tensor, exact: Weight) -> None:
        lib = library() if matrix.device.type == "cpu" else None
        self.weight = Int8Weight(lib, len(matrix), [matrix]) if lib else exact
        self.codes = self.scales = None
        if fused(matrix):
            self.codes, self.scales = _rounded(matrix)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, vocab], float32."""
        if self.codes is not None:
            found: Tensor = products().linear(hidden, self.codes, self.scales, torch.float32)
            return found
        return self.weight.multiply(hidden).float()


def _rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[V, H] in 8 bits with one scale a row, [V]; a part at a time, or the largest matrix would be there twice more."""
    codes = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    scales = torch.empty(len(matrix), dtype=torch.float32, device=matrix.device)
    for first in range(0, len(matrix), 1 << 14):
        part = matrix[first : first + (1 << 14)].float()
        scale = (part.abs().amax(1) / 127).clamp_(min=1e-30)
        scales[first : first + len(part)] = scale
        codes[first : first + len(part)] = (part / scale[:, None]).round_()
    return codes, scales
