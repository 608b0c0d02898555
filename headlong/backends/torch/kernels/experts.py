"""Mixture of experts: choose, multiply, mix; grouped by expert on the host, or in fixed shapes a graph can hold."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headlong.backends.torch.kernels.linear import FIXED_TILE, Weight, linear
from headlong.backends.torch.kernels.norm import swiglu


class Experts:
    """One projection of every expert, [E, out, in]."""

    def __init__(self, matrices: Tensor) -> None:
        self.each = [Weight(matrix) for matrix in matrices]
        # Where a device may capture rounds, an expert is looked up by a tensor, never by a number on the host.
        looked_up = not (self.each[0].native or self.each[0].packed)
        self.stacked = matrices if looked_up else None


def route(scores: Tensor, experts_per_token: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Router scores [N, E] -> shares [N, T] in float32 and expert ids [N, T]."""
    shares, ids = scores.float().softmax(-1).topk(experts_per_token, dim=-1)
    return (shares / shares.sum(-1, keepdim=True) if renormalise else shares), ids


def window_experts(x: Tensor, shares: Tensor, ids: Tensor, gate_up: Experts, down: Experts) -> Tensor:
    """The tokens of windows, x [N, H], through their experts: each row as if it were alone."""
    if gate_up.stacked is None or down.stacked is None:
        return experts(x, shares, ids, gate_up.each, down.each, linear)
    n, t = ids.shape
    parts = []
    for pair in range(n * t):
        expert = ids.flatten()[pair : pair + 1]
        row = torch.nn.functional.pad(x[pair // t : pair // t + 1], (0, 0, 0, FIXED_TILE - 1))
        inner = swiglu(torch.nn.functional.linear(row, gate_up.stacked[expert][0]))
        parts.append(torch.nn.functional.linear(inner, down.stacked[expert][0])[:1])
    return _mix(shares, torch.cat(parts))


def experts(
    x: Tensor,
    shares: Tensor,
    ids: Tensor,
    gate_up: Sequence[Weight],
    down: Sequence[Weight],
    product: Callable[[Tensor, Weight], Tensor],
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
            parts[group] = product(swiglu(product(x[group // t], gate_up[expert])), down[expert])
    return _mix(shares, parts)


def _mix(shares: Tensor, parts: Tensor) -> Tensor:
    """parts [N T, H] added by shares [N, T], in the order of each token's choice."""
    return torch.bmm(shares[:, None].to(parts.dtype), parts.view(*shares.shape, -1))[:, 0]
