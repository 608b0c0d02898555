"""A cheap copy of the LM head for drafting: 8 bits a weight, on CPUs that multiply them fast."""

import torch
from torch import Tensor

from headlong.backends.torch.kernels.linear import Weight

FAST_INT8_CPUS = ("AVX2", "AVX512")


class DraftHead:
    """Logits for drafts. They decide nothing, so a quarter of the memory traffic is worth their last digits."""

    def __init__(self, matrix: Tensor, exact: Weight) -> None:
        self.exact = exact
        self.quantised = matrix.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in FAST_INT8_CPUS
        if self.quantised:
            self.scales = (matrix.abs().amax(1).float() / 127).clamp_(min=1e-12).to(torch.bfloat16)
            self.codes = torch.empty(matrix.shape, dtype=torch.int8)
            for codes, rows, scales in zip(
                self.codes.split(4096), matrix.split(4096), self.scales.split(4096), strict=True
            ):
                codes.copy_((rows.float() / scales.float()[:, None]).round_().clamp_(-127, 127))

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, vocab], float32."""
        if self.quantised:
            return torch._weight_int8pack_mm(hidden.to(torch.bfloat16), self.codes, self.scales).float()
        return self.exact.multiply(hidden).float()
