"""A cheap copy of the LM head for drafting."""

from torch import Tensor

from headlong.backends.torch.kernels.linear import Int8Weight, Weight
from headlong.backends.torch.native.library import library


class DraftHead:
    """Logits for drafts. They decide nothing, so on a CPU 8 bits a weight are worth their last digits."""

    def __init__(self, matrix: Tensor, exact: Weight) -> None:
        lib = library() if matrix.device.type == "cpu" else None
        self.weight = Int8Weight(lib, len(matrix), [matrix]) if lib else exact

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, vocab], float32."""
        return self.weight.multiply(hidden).float()
