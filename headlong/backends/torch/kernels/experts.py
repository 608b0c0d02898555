"""Mixture of experts: choose, group tokens by expert, mix."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headlong.backends.torch.kernels.linear import Weight
from headlong.backends.torch.kernels.norm import swiglu


def route(scores: Tensor, experts_per_token: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Router scores [N, E] -> shares [N, T] in float32 and expert ids [N, T]."""
    shares, ids = scores.float().softmax(-1).topk(experts_per_token, dim=-1)
    return (shares / shares.sum(-1, keepdim=True) if renormalise else shares), ids


def experts(
    x: Tensor,
    shares: Tensor,
    ids: Tensor,
    gate_up: Sequence[Weight],
    down: Sequence[Weight],
    linear: Callable[[Tensor, Weight], Tensor],
) -> Tensor:
    """x [N, H] through each token's experts, mixed by shares [N, T] -> [N, H].

    Tokens are grouped by expert, but a token's parts are added in the order of its own choice, so its sum does not
    depend on who else came to the same expert.
    """
    n, t = ids.shape
    parts = x.new_empty(n * t, x.shape[1])
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=len(gate_up)).tolist()
    for expert, group in enumerate(order.split(counts)):
        if len(group):
            parts[group] = linear(swiglu(linear(x[group // t], gate_up[expert])), down[expert])
    return torch.bmm(shares[:, None].to(x.dtype), parts.view(n, t, -1))[:, 0]
