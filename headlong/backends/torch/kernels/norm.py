"""RMS norms and gates, in float32.

torch's own sigmoid, silu and softplus give an element other bits in the tail of a vector than in its middle, so
the same token would differ between batches. exp, log1p and the four operations do not; the references are made of
them.
"""

import torch
from torch import Tensor

from headlong.backends.torch.gpu.paths import fused, norms
from headlong.backends.torch.native.arena import fresh
from headlong.backends.torch.native.library import library


def add_norm(x: Tensor, add: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + add, and its norm over the last dimension; weight is the whole factor, float32. x may be overwritten."""
    if fused(x):
        return norms().add_norm(x.contiguous(), add, weight, eps)
    lib = library(x)
    if lib is None:
        x = x if add is None else x + add
        return x, rms_norm(x, weight, eps)
    x, y = x.contiguous(), fresh(x, *x.shape)
    added = None if add is None else add.data_ptr()
    lib.add_norm(y.data_ptr(), x.data_ptr(), added, weight.data_ptr(), x.shape[0], x.shape[1], eps)
    return x, y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def pair_norm(first: Tensor, second: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norms of two [N, size] side by side, [N, 2 size]; weight [2, size]."""
    if fused(first, second):
        return norms().pair_norm(first, second, weight, eps)
    lib = library(first, second)
    if lib is None:
        return rms_norm(torch.stack([first, second], 1), weight, eps).flatten(1)
    first, second, (rows, size) = first.contiguous(), second.contiguous(), first.shape
    y = fresh(first, rows, 2 * size)
    lib.pair_norm(*(t.data_ptr() for t in (y, first, second, weight)), rows, size, eps)
    return y


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
    if fused(gate_up):
        return norms().swiglu(gate_up)
    lib = library(gate_up)
    if lib is None:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = fresh(gate_up, rows, size)
    lib.swiglu(y.data_ptr(), gate_up.data_ptr(), rows, size)
    return y


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both [N, size]; the gate may be columns of a wider tensor."""
    if fused(x):
        return norms().gated(x.contiguous(), gate)
    lib = library(x)
    if lib is None:
        return x * sigmoid(gate)
    y = fresh(x, *x.shape)
    lib.gate(y.data_ptr(), x.data_ptr(), gate.data_ptr(), x.shape[0], x.shape[1], gate.stride(0))
    return y


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of x, then silu(gate): the output gate of a Gated DeltaNet layer. x is float32, gate the model's dtype."""
    return (rms_norm(x, weight, eps) * silu(gate.float())).to(gate.dtype)
