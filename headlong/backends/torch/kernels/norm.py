"""RMS norms and gates, computed in float32.

torch's own sigmoid, silu and softplus give an element other bits in the tail of a vector than in its middle, so
the same token would differ between batches. exp, log1p and the four operations do not; everything here is made of
them.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension; weight is the whole factor, float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def sigmoid(x: Tensor) -> Tensor:
    return torch.reciprocal(torch.exp(-x.float()).add_(1.0)).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide / torch.exp(-wide).add_(1.0)).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) in float32, without overflow."""
    wide = x.float()
    return wide.clamp(min=0.0) + torch.log1p(torch.exp(-wide.abs()))


def swiglu(gate_up: Tensor) -> Tensor:
    """[N, 2 I], gate first -> silu(gate) * up, [N, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of x, then silu(gate): the output gate of a Gated DeltaNet layer. x is float32, gate the model's dtype."""
    return (rms_norm(x, weight, eps) * silu(gate.float())).to(gate.dtype)
