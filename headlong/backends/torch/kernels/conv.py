"""The short causal convolution before a Gated DeltaNet layer."""

from torch import Tensor

from headlong.backends.torch.kernels.norm import silu


def causal_conv(inputs: Tensor, weight: Tensor) -> Tensor:
    """inputs [B, K - 1 + W, C], the past first, weight [C, K] -> silu of the convolution, [B, W, C] in float32."""
    taps = inputs.float().unfold(1, weight.shape[1], 1) * weight  # [B, W, C, K]
    total = taps[..., 0]
    for tap in range(1, weight.shape[1]):
        total = total + taps[..., tap]
    return silu(total)
